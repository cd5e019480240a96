"""The trainer's loop over a broker in memory, with a backend that writes down what it was asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import WorkerError
from pipeline_parts import NOWHERE, Recorder, Rows, config, in_order, row
from pipeline_world import World
from training_groups import text_folder
from workers import registry, stage
from workers.advantage.stage import AdvantageStage
from workers.reference.stage import ReferenceStage
from workers.rollout.engines.fake import FakeEngine
from workers.trainer.backends.torch import TorchBackend

pytestmark = pytest.mark.unit


def never() -> bool:
    return False


def staggered(world: World, count: int) -> None:
    """Employ everybody; one token a step, and of four prompts that follow each other each is a token longer."""
    rows = [row(f"{i}", max_tokens=1 + i % 4) for i in range(count)]
    engine = FakeEngine(FakeEngine.Options(vocabulary=18, tokens_per_step=1), NOWHERE, False)
    world.staff(in_order(world.config, rows), engine=engine)


def names(*numbers: int) -> list[str]:
    return [f"train-{number}" for number in numbers]


def test_a_step_is_update_acknowledge_advance_publish_and_only_then_commit() -> None:
    world = World(config(steps=2, micro_steps=1))
    world.staff(Rows(20))
    backend = Recorder(world.events)
    trainer, report = world.trainer(backend)
    assert trainer.run(never) == "finished"
    told = {"accumulate", "update", "ack", "advance", "publish", "chunk", "commit"}
    step = ["accumulate", "update", "ack", "advance", "publish", "chunk", "commit"]
    assert [event for event in world.events if event in told] == step * 2
    assert world.counts["trained"] == 8
    assert world.weight_service.latest == 2
    assert [(row["step"], row["groups"], row["samples"], row["loss"]) for row in report.of("step")] == [
        (1, 4, 8, 0.5),
        (2, 4, 8, 0.5),
    ]


@pytest.mark.parametrize(
    ("micro_steps", "pieces"),
    [
        (1, [names(0, 1, 2, 3)]),
        (2, [names(0, 1), names(2, 3)]),
        (3, [names(0), names(1), names(2), names(3)]),  # 4 // 3 = 1 group at least
        (4, [names(0), names(1), names(2), names(3)]),
        (9, [names(0), names(1), names(2), names(3)]),
    ],
)
def test_groups_are_accumulated_in_pieces_as_they_arrive(micro_steps: int, pieces: list[list[str]]) -> None:
    world = World(config(steps=1, micro_steps=micro_steps))
    staggered(world, 8)
    backend = Recorder(world.events)
    trainer, _ = world.trainer(backend)
    assert trainer.run(never) == "finished"
    assert backend.pieces == pieces
    assert world.events.count("update") == 1


def test_every_piece_that_is_added_and_every_update_is_progress() -> None:
    world = World(config(steps=2, micro_steps=4))
    staggered(world, 16)
    trainer, _ = world.trainer(Recorder(world.events))
    pulse, told = trainer._client.channel.pulse, list[dict[str, Any]]()  # pyright: ignore[reportPrivateUsage]

    def over() -> bool:
        told.append(dict(pulse.progress))
        return False

    assert trainer.run(over) == "finished"
    counts = [progress.get("groups", 0) for progress in told]
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3, 4, 5, 6, 7, 8}  # 2 steps of 4 groups, one at a time
    assert (told[-1]["updates"], told[-1]["waits_for"]) == (2, "")


def test_in_a_deterministic_run_groups_are_added_one_by_one_in_the_order_of_prompts() -> None:
    world = World(config(steps=2, micro_steps=1, deterministic=True))
    world.staff(Rows(20))
    backend = Recorder(world.events)
    trainer, _ = world.trainer(backend)
    trainer.run(never)
    assert backend.pieces == [names(i) for i in range(8)]


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
@pytest.mark.parametrize("bad", [(0,), (1,), (3,), (0, 3), (1, 5)])
def test_only_a_malformed_group_is_given_back_and_another_fills_the_batch(
    bad: tuple[int, ...], micro_steps: int
) -> None:
    world = World(config(steps=2, micro_steps=micro_steps))
    world.staff(Rows(20))
    backend = Recorder(world.events, *names(*bad))
    trainer, report = world.trainer(backend)
    assert trainer.run(never) == "finished"
    trained = [name for piece in backend.pieces for name in piece]
    assert sorted(trained, key=lambda name: int(name[6:])) == names(*(i for i in range(8 + len(bad)) if i not in bad))
    assert [row["groups"] for row in report.of("step")] == [4, 4]
    assert world.counts["dead"] == {f"trainer: {name} is malformed": 1 for name in names(*bad)}
    assert (world.counts["trained"], world.counts["started"]) == (8, 8 + len(bad))


@pytest.mark.parametrize("micro_steps", [1, 2, 4])
@pytest.mark.parametrize(("rows", "steps"), [(7, [4, 3]), (8, [4, 4]), (5, [4, 1]), (3, [3])])
def test_d7_the_last_step_may_be_short_and_the_end_of_the_data_is_the_end(
    rows: int, steps: list[int], micro_steps: int
) -> None:
    world = World(config(steps=None, micro_steps=micro_steps))
    world.staff(Rows(rows))
    trainer, report = world.trainer(Recorder(world.events))
    assert trainer.run(never) == "finished"
    assert [row["groups"] for row in report.of("step")] == steps
    assert world.counts["trained"] == rows
    assert world.service.ledger.window.outstanding == 0


def test_i6_a_run_of_n_steps_makes_n_updates_and_starts_no_group_for_another() -> None:
    world = World(config(steps=3, max_staleness=2))
    world.staff(Rows(100))
    backend = Recorder(world.events)
    trainer, _ = world.trainer(backend)
    assert trainer.run(never) == "finished"
    assert backend.updates == 3
    assert world.counts["started"] == 12


@pytest.mark.parametrize(
    ("every", "versions"), [(0, [0, 3]), (1, [0, 1, 2, 3]), (2, [0, 2, 3]), (3, [0, 3]), (7, [0, 3])]
)
def test_held_out_prompts_are_answered_before_the_first_step_and_after_the_last(
    every: int, versions: list[int]
) -> None:
    world = World(config(steps=3, evaluation={"prompts": 3, "every": every}))
    world.staff(Rows(20, heldout=5))
    trainer, report = world.trainer(Recorder(world.events))
    assert trainer.run(never) == "finished"
    assert [(row["version"], row["prompts"]) for row in report.of("evaluation")] == [(v, 3) for v in versions]
    assert (report.rows[0]["kind"], report.rows[-1]["kind"]) == ("evaluation", "evaluation")
    assert world.events.index("evaluate") < world.events.index("accumulate")
    assert world.counts["evaluated"] == 3 * len(versions)


def test_an_evaluation_that_nobody_answers_is_an_error_that_says_so() -> None:
    world = World(config(evaluation={"prompts": 3, "deadline_seconds": 0.02}))
    trainer, _ = world.trainer(Recorder(world.events))
    with pytest.raises(WorkerError, match=r"1 evaluations incomplete after evaluation.deadline_seconds = 0.02"):
        trainer.run(never)


@pytest.mark.parametrize("looks", range(1, 14, 3))
def test_a_trainer_that_is_told_to_stop_makes_no_half_update(looks: int) -> None:
    world = World(config(steps=5, micro_steps=4))
    staggered(world, 40)
    left = iter([False] * looks)
    trainer, report = world.trainer(Recorder(world.events))
    assert trainer.run(lambda: next(left, True)) == "stopped"
    assert world.events.count("update") == world.events.count("publish") == len(report.of("step")) < 5
    assert world.counts["trained"] == 4 * len(report.of("step"))


def test_in_hybrid_mode_reference_and_advantage_are_served_between_leases() -> None:
    world = World(config(mode="hybrid", steps=3, algorithm={"name": "grpo", "kl": 0.1}))
    world.staff(Rows(20), served=("reward",))
    inline: list[tuple[str, stage.Stage]] = [
        ("reference", ReferenceStage(world.config, NOWHERE)),
        ("advantage", AdvantageStage(world.config)),
    ]
    backend = registry.create("backend", world.config.backend, NOWHERE, False)
    trainer, report = world.trainer(backend, inline)
    assert trainer.run(never) == "finished"
    assert [row["groups"] for row in report.of("step")] == [4, 4, 4]
    assert world.counts["dead"] == {}


class Weighed(TorchBackend):
    """Keeps the gradient of the mean loss of every update."""

    gradients: list[torch.Tensor]

    def update(self) -> Mapping[str, float]:
        training = self._training
        parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in training.model.parameters()]
        total = torch.cat([p.flatten() for p in parameters])
        metrics = super().update()
        self.gradients.append(total / metrics["tokens"])
        return metrics


def trained(folder: Path, micro_steps: int) -> tuple[list[torch.Tensor], list[float], dict[str, np.ndarray[Any, Any]]]:
    """Gradients, losses and last weights of two steps of ragged groups that arrive one after the other."""
    settings = config(steps=2, groups_per_step=4, group_size=3, micro_steps=micro_steps, backend={"name": "torch"})
    world = World(settings)
    staggered(world, 8)
    backend = Weighed(TorchBackend.Options(lr=1e-4), folder, False)
    backend.gradients = []
    backend.prepare_training(registry.create("algorithm", settings.algorithm), 2)
    trainer, report = world.trainer(backend)
    assert trainer.run(never) == "finished"
    weights = {tensor.name: tensor.numpy() for tensor in backend.weights()}
    return backend.gradients, [row["loss"] for row in report.of("step")], weights


def test_a_step_in_pieces_has_the_loss_and_the_gradient_of_the_closed_batch(tmp_path: Path) -> None:
    folder = text_folder(tmp_path)
    gradients, losses, weights = trained(folder, 1)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    for micro_steps in (2, 4):
        others, other_losses, other_weights = trained(folder, micro_steps)
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6)
        assert other_losses == pytest.approx(losses, abs=1e-6)
        for name, value in weights.items():
            np.testing.assert_allclose(other_weights[name], value, rtol=0, atol=1e-6)

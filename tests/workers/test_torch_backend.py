import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import ConfigError, Reject
from common.group import Group
from common.tensor import BFLOAT16, NamedTensor
from training_groups import image_group, make_group, random_groups, text_folder, vision_folder
from workers import registry
from workers.algorithms.grpo import Grpo
from workers.models.load import load_model, to_torch
from workers.trainer.algorithm import TokenBatch, TokenLoss
from workers.trainer.backends.torch import TorchBackend
from workers.trainer.torch_backend import Training, learning_rate

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("vision"))


class Weighted:
    """Loss = -advantage * current: its sums and gradients can be written down."""

    loss_requires: frozenset[str] = frozenset()

    def loss(self, batch: TokenBatch) -> TokenLoss:
        loss = torch.where(batch.mask_RT, -batch.advantage_RT * batch.current_RT, 0.0)
        return TokenLoss(loss, {"twice": 2 * loss.detach()})


class Constant(Weighted):
    """Loss = advantage, whatever the policy: shows how token losses are averaged."""

    def loss(self, batch: TokenBatch) -> TokenLoss:
        return TokenLoss(torch.where(batch.mask_RT, batch.advantage_RT + 0 * batch.current_RT, 0.0), {})


def backend(folder: Path, algorithm: Any = None, deterministic: bool = False, **options: Any) -> TorchBackend:
    made = TorchBackend(TorchBackend.Options(**{"lr": 1e-3, **options}), folder, deterministic)
    made.prepare_training(algorithm or Grpo(Grpo.Options(entropy=0.01, kl=0.1)), None)
    return made


def state(of: TorchBackend) -> dict[str, torch.Tensor]:
    return {tensor.name: to_torch(tensor) for tensor in of.weights()}


def gradient_and_metrics(
    folder: Path, batches: Sequence[Sequence[Group]], algorithm: Any = None, **options: Any
) -> tuple[torch.Tensor, Mapping[str, float]]:
    """Gradient of the mean over the tokens of the step: that of the sum, over the number of tokens."""
    training = Training(TorchBackend.Options(**options), folder, False)
    training.prepare_training(algorithm or Grpo(Grpo.Options(entropy=0.01, kl=0.1)), None)
    for groups in batches:
        training.accumulate(groups)
    parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in training.model.parameters()]
    gradient = torch.cat([p.flatten() for p in parameters])
    metrics = training.update()
    return gradient / metrics["tokens"], metrics


def test_token_losses_are_averaged_over_the_step_not_over_micro_batches(text: Path) -> None:
    # losses [1] and [0, 0, 0]: 1 / 4 = 0.25; the mean of the means would be 0.5
    groups = [
        make_group([7], [[8]], name="a", advantages=[[1.0]]),
        make_group([7], [[8, 9, 10]], name="b", advantages=[[0.0] * 3]),
    ]
    for batches in ([groups], [[groups[0]], [groups[1]]]):
        for max_tokens in (1, 1000):
            made = backend(text, Constant(), max_tokens_per_micro=max_tokens)
            for batch in batches:
                made.accumulate(batch)
            metrics = made.update()
            assert metrics["loss"] == pytest.approx(0.25, abs=1e-7)
            assert metrics["tokens"] == 4


@pytest.mark.parametrize("algorithm", [None, Weighted()])
def test_any_split_of_a_step_gives_one_loss_and_one_gradient(text: Path, algorithm: Any) -> None:
    groups = random_groups(seed=3, count=5)
    whole, metrics = gradient_and_metrics(text, [groups], algorithm)
    for batches, max_tokens in (([[g] for g in groups], 16384), ([groups], 7), ([groups[:2], groups[2:]], 20)):
        split, others = gradient_and_metrics(text, batches, algorithm, max_tokens_per_micro=max_tokens)
        assert (whole - split).abs().max() < 1e-6
        assert dict(others) == pytest.approx(dict(metrics), abs=1e-6)


@pytest.mark.parametrize(("samples", "longest"), [(4, 6), (12, 3)])
def test_the_gradient_is_that_of_the_mean_over_tokens(text: Path, samples: int, longest: int) -> None:
    """Against one plain forward pass per row, with torch's own log-softmax; with prompts fed per row and once."""
    groups = random_groups(seed=4, count=3, samples=samples, longest=longest)
    ours, metrics = gradient_and_metrics(text, [groups], Weighted())
    model = load_model(text)
    total, tokens = torch.zeros(()), 0
    for group in groups:
        prompt = group.values("prompt_ids")[0]
        columns = (group.values(name) for name in ("response_ids", "advantages", "temperature"))
        for response, advantages, temperature in zip(*columns, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / (temperature or 1.0)).log_softmax(-1)[range(len(response)), response]
            total = total - (torch.tensor(advantages) * logprobs).sum()
            tokens += len(response)
    (total / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (ours - expected).abs().max() < 1e-6
    assert metrics["loss"] == pytest.approx(total.item() / tokens, abs=1e-6)
    assert metrics["twice"] == pytest.approx(2 * total.item() / tokens, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-5)


def test_rows_without_weight_are_in_no_sum_and_no_denominator(text: Path) -> None:
    kept = make_group([7, 8], [[9, 10], [11]], advantages=[[1.0, 1.0], [-1.0]])
    more = make_group(
        [7, 8],
        [[9, 10], [12, 13, 14], [], [11]],
        advantages=[[1.0, 1.0], [math.nan] * 3, [], [-1.0]],
        weights=[1.0, 0.0, 1.0, 1.0],
    )
    algorithm = Grpo(Grpo.Options(entropy=0.1))
    alone, metrics = gradient_and_metrics(text, [[kept]], algorithm)
    among, others = gradient_and_metrics(text, [[more]], algorithm)
    assert metrics["tokens"] == others["tokens"] == 3
    assert (alone - among).abs().max() < 1e-7
    assert dict(others) == pytest.approx(dict(metrics), abs=1e-7)


def test_tokens_without_a_finite_behaviour_log_prob_do_not_count(text: Path) -> None:
    group = make_group([7], [[8, 9, 10]], logprobs=[[-1.0, -math.inf, math.nan]], advantages=[[1.0, math.nan, 1.0]])
    gradient, metrics = gradient_and_metrics(text, [[group]], Grpo(Grpo.Options()))
    assert metrics["tokens"] == 1
    assert gradient.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_weight_between_zero_and_one_scales_the_loss_but_not_the_count(text: Path) -> None:
    # losses 4 (weight 0.5) and 1: (0.5 * 4 + 1) / 2 = 1.5
    made = backend(text, Constant())
    made.accumulate([make_group([7], [[8], [9]], advantages=[[4.0], [1.0]], weights=[0.5, 1.0])])
    metrics = made.update()
    assert (metrics["loss"], metrics["tokens"]) == (pytest.approx(1.5), 2)


def test_a_group_that_came_late_counts_for_less_in_the_loss_and_in_full_in_the_count(text: Path) -> None:
    # group weight 0.5; losses 4 (sample weight 0.5) and 1: (0.5 * 0.5 * 4 + 0.5 * 1) / 2 = 0.75
    made = backend(text, Constant())
    late = make_group([7], [[8], [9]], advantages=[[4.0], [1.0]], weights=[0.5, 1.0])
    made.accumulate([replace(late, weight=0.5)])
    metrics = made.update()
    assert (metrics["loss"], metrics["tokens"]) == (pytest.approx(0.75), 2)


def test_a_step_without_a_token_is_skipped_and_counted(text: Path) -> None:
    made = backend(text)
    before = state(made)
    for groups in ([], [make_group([7], [[8], []], weights=[0.0, 1.0], reference=[[-1.0], []])]):
        made.accumulate(groups)
        metrics = made.update()
        assert (metrics["skipped"], metrics["tokens"], metrics["loss"], metrics["grad_norm"]) == (1, 0, 0, 0)
        assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(value, before[name]) for name, value in state(made).items())


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(text: Path) -> None:
    made = backend(text, Weighted())
    before = state(made)
    made.accumulate([make_group([7], [[8]], advantages=[[3e38]]), make_group([7], [[9]], advantages=[[3e38]])])
    assert made.update()["skipped"] == 1
    assert all(torch.equal(value, before[name]) for name, value in state(made).items())
    made.accumulate([make_group([7], [[8]])])
    assert made.update()["skipped"] == 0


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ({"responses": [[8], [99]]}, "sample 1: response token 0 is 99"),
        ({"weights": [1.0, -1.0]}, "sample 1: loss_weight is negative or not finite"),
        ({"weights": [math.nan, 1.0]}, "sample 0: loss_weight is negative or not finite"),
        ({"advantages": [[0.0], [math.nan]]}, "sample 1: advantages are not finite"),
        ({"reference": [[0.0], [math.inf]]}, "sample 1: ref_logprobs are not finite"),
        ({"advantages": [[0.0], [0.0, 1.0]]}, "sample 1: 2 values of 'advantages' for 1 response tokens"),
        ({"logprobs": [[], [0.0]]}, "sample 0: 0 values of 'logprobs' for 1 response tokens"),
        ({"reference": [[0.0]]}, "1 rows of 'ref_logprobs' for 2 samples"),
        ({"reference": None}, "column 'ref_logprobs' needs section 'reference', which is missing"),
    ],
)
def test_a_malformed_group_is_refused_with_nothing_added(text: Path, flaw: dict[str, Any], words: str) -> None:
    good = random_groups(seed=5, count=1)
    bad = make_group([7], **{"responses": [[8], [9]], "reference": [[-1.0], [-1.0]], "name": "x", **flaw})
    expected = state(after_update(backend(text), good))
    made = backend(text)
    with pytest.raises(Reject, match="group x.*" + words):
        made.accumulate([*good, bad])
    assert all(torch.equal(value, expected[name]) for name, value in state(after_update(made, good)).items())


def after_update(made: TorchBackend, groups: Sequence[Group]) -> TorchBackend:
    made.accumulate(groups)
    made.update()
    return made


@pytest.mark.parametrize("repeats", [1, 6])
def test_text_and_picture_rows_train_in_one_step_whatever_their_order(vision: Path, repeats: int) -> None:
    words = [make_group([7, 8], [[9, 10], [11]] * repeats, name=f"t{i}") for i in range(2)]
    picture = image_group([[9], [10, 11, 12]] * repeats, name="i")
    algorithm = Grpo(Grpo.Options(entropy=0.01))
    first, metrics = gradient_and_metrics(vision, [[words[0], picture, words[1]]], algorithm)
    second, others = gradient_and_metrics(vision, [[picture, words[0], words[1]]], algorithm)
    streamed, _ = gradient_and_metrics(vision, [[words[0]], [picture], [words[1]]], algorithm)
    row_by_row, _ = gradient_and_metrics(vision, [[words[0], picture, words[1]]], algorithm, max_tokens_per_micro=1)
    assert metrics["tokens"] == 10 * repeats
    assert dict(others) == pytest.approx(dict(metrics), abs=1e-6)
    assert (first - second).abs().max() < 1e-6
    assert (first - streamed).abs().max() < 1e-6
    assert (first - row_by_row).abs().max() < 1e-6


def test_log_probs_come_back_per_token_in_the_order_of_groups_and_samples(vision: Path) -> None:
    groups = [make_group([7], [[8, 9], []]), image_group([[10, 11, 12]]), make_group([8, 8], [[9]])]
    made = backend(vision)
    together = made.logprobs(groups)
    assert [[len(row) for row in rows] for rows in together] == [[2, 0], [3], [1]]
    for group, rows in zip(groups, together, strict=True):
        assert all(row.dtype == np.float32 for row in rows)
        for row, alone in zip(rows, made.logprobs([group])[0], strict=True):
            assert row == pytest.approx(alone, abs=1e-5)
    assert made.logprobs([]) == []


def test_on_policy_at_temperature_one_half_the_ratio_is_one(text: Path) -> None:
    groups = [make_group([7, 8], [[9, 10, 11], [12]], temperature=0.5)]
    made = backend(text, Grpo(Grpo.Options()))
    (behaviour,) = made.logprobs(groups)
    made.accumulate(
        [make_group([7, 8], [[9, 10, 11], [12]], temperature=0.5, logprobs=[b.tolist() for b in behaviour])]
    )
    metrics = made.update()
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["mismatch"] == pytest.approx(0, abs=1e-6)


def test_training_raises_the_log_prob_of_what_was_rewarded(text: Path) -> None:
    made = backend(text, Grpo(Grpo.Options()), lr=3e-3)
    responses, advantages = [[9, 10], [11, 12]], [[1.0, 1.0], [-1.0, -1.0]]
    before = made.logprobs([make_group([7], responses)])[0]
    for _ in range(5):
        current = made.logprobs([make_group([7], responses)])[0]
        made.accumulate([make_group([7], responses, advantages=advantages, logprobs=[c.tolist() for c in current])])
        made.update()
    after = made.logprobs([make_group([7], responses)])[0]
    assert after[0].sum() > before[0].sum() + 0.1
    assert after[1].sum() < before[1].sum() - 0.1


def test_gradients_are_clipped_to_the_norm_of_the_mean_loss(text: Path) -> None:
    # AdamW's first step is lr g / (|g| + 1e-8): it hides the scale of g, unless g is clipped to the size of that 1e-8.
    groups = random_groups(seed=6, count=2)
    gradient, metrics = gradient_and_metrics(text, [groups], Weighted())
    made = Training(TorchBackend.Options(lr=1e-3, grad_clip=1e-7), text, False)
    made.prepare_training(Weighted(), None)  # pyright: ignore[reportArgumentType]
    before = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    made.accumulate(groups)
    assert made.update()["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
    clipped = gradient * (1e-7 / metrics["grad_norm"])
    moved = before - torch.cat([p.detach().flatten() for p in made.model.parameters()])
    assert (moved - 1e-3 * clipped / (clipped.abs() + 1e-8)).abs().max() < 2e-6
    assert moved.abs().max() < 0.9e-3


def test_two_deterministic_runs_are_equal_bit_for_bit(vision: Path) -> None:
    def run() -> tuple[dict[str, torch.Tensor], list[Mapping[str, float]]]:
        made = backend(vision, Grpo(Grpo.Options(entropy=0.01)), deterministic=True, max_tokens_per_micro=40)
        history = []
        for step in range(3):
            made.accumulate([image_group([[7, 8], [9]], seed=step), *random_groups(seed=step, count=2)])
            history.append(made.update())
        return state(made), history

    try:
        (first, metrics), (second, others) = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert metrics == others
    assert all(torch.equal(value, second[name]) for name, value in first.items())


# Schedule


def test_the_learning_rate_warms_up_and_falls_as_written() -> None:
    # warm-up 2 of 6: 0.5, 1; then 4 steps with x = 0, 1/4, 1/2, 3/4. cosine: (1 + cos(pi x)) / 2
    def rates(schedule: str) -> list[float]:
        options = TorchBackend.Options(lr=1.0, warmup_steps=2, schedule=schedule)  # pyright: ignore[reportArgumentType]
        return [learning_rate(options, updates, 6) for updates in range(7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    high = (1 + math.sqrt(0.5)) / 2
    assert rates("cosine") == pytest.approx([0.5, 1, 1, high, 0.5, 1 - high, 0], abs=1e-12)


def test_each_update_uses_and_reports_its_learning_rate(text: Path) -> None:
    made = TorchBackend(TorchBackend.Options(lr=1.0, schedule="linear"), text, False)
    made.prepare_training(Weighted(), 4)  # pyright: ignore[reportArgumentType]
    # An update that is skipped is an update: 1, 3/4, 1/2
    assert [made.update()["lr"] for _ in range(3)] == [1.0, 0.75, 0.5]


def test_a_schedule_with_an_end_needs_a_run_with_an_end(text: Path) -> None:
    made = TorchBackend(TorchBackend.Options(schedule="cosine"), text, False)
    with pytest.raises(ConfigError, match=r"backend\.schedule.*'steps'"):
        made.prepare_training(Grpo(Grpo.Options()), None)


@pytest.mark.parametrize("device", ["tpu9", "cuda:0"])
def test_a_device_that_is_not_here_is_named(text: Path, device: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ConfigError, match=r"backend\.device.*" + device):
        TorchBackend(TorchBackend.Options(device=device), text, False)


# Weights and checkpoints


def test_weights_are_a_snapshot_under_the_names_of_the_state_without_tied_repeats(text: Path) -> None:
    made = backend(text)
    names = set(load_model(text).state_dict())
    taken = made.weights()
    before = state(made)
    made.accumulate(random_groups(seed=7, count=2))
    made.update()
    late = {tensor.name: to_torch(tensor) for tensor in taken}
    assert set(late) == names - {"lm_head.weight"}
    assert all(torch.equal(value, before[name]) for name, value in late.items())
    assert any(not torch.equal(value, before[name]) for name, value in state(made).items())


def test_weights_are_served_in_the_dtype_that_was_asked_for(text: Path) -> None:
    served: list[NamedTensor] = list(backend(text, serve_dtype="bfloat16").weights())
    assert {tensor.dtype for tensor in served} == {BFLOAT16}
    trained = state(backend(text))
    assert all(torch.equal(to_torch(tensor), trained[tensor.name].bfloat16()) for tensor in served)


def test_a_checkpoint_loads_with_the_trained_weights_and_the_tokenizer_files(text: Path, tmp_path: Path) -> None:
    made = backend(text)
    made.accumulate(random_groups(seed=8, count=2))
    made.update()
    made.save(tmp_path / "step")
    trained = state(made)
    loaded = load_model(tmp_path / "step").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    assert (tmp_path / "step" / "tokenizer_config.json").read_bytes() == (text / "tokenizer_config.json").read_bytes()


def test_offload_between_steps_changes_nothing(text: Path) -> None:
    groups = random_groups(seed=9, count=2)

    def run(with_offload: bool) -> dict[str, torch.Tensor]:
        made = backend(text)
        for _ in range(2):
            made.accumulate(groups[:1])
            if with_offload:
                made.offload()
                made.reload()
            made.accumulate(groups[1:])
            made.update()
        return state(made)

    kept, moved = run(False), run(True)
    assert all(torch.equal(value, moved[name]) for name, value in kept.items())


def test_the_components_are_found_by_name_and_ask_for_declared_columns() -> None:
    assert registry.find("backend", "torch") is TorchBackend
    assert registry.find("algorithm", "grpo") is Grpo
    assert TorchBackend.requires >= {"prompt_ids", "response_ids", "logprobs", "temperature", "advantages"}


def test_configurations_of_both_are_checked_without_torch() -> None:
    code = (
        "import sys, workers.algorithms.grpo, workers.trainer.backends.torch\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

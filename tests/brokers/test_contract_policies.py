"""What brokers promise about stragglers, trainers that come back, and lanes: over every transport, journal or not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from brokers.channel import wait
from brokers.client import Leased
from common.errors import WireError
from common.group import GroupKey
from contract import SECONDS, Build, Worker, World, answer, prompt

pytestmark = pytest.mark.contract


def one_slow_group(world: World) -> tuple[Worker, Worker, Leased, Leased]:
    """Two groups a step, s = 0: the first is slow, the second is in the trainer's hands; return their leases."""
    worker, trainer = world.join("worker-0"), world.join("trainer-0", "trainer")
    wait(worker.offer(0, 1, 2), SECONDS)
    slow, fast = worker.get("rollout", 2, 0)
    worker.finish("rollout", [fast])
    worker.serve("reward")
    (in_hand,) = trainer.get("trainer", 2, 0)
    assert in_hand.group.key.id == "train-1"
    return worker, trainer, slow, in_hand


def generate(worker: Worker, leases: Sequence[Leased], version: int) -> None:
    results = [replace(answer("rollout", leased), version_min=version, version_max=version) for leased in leases]
    assert worker.confirm(worker.put(results), results) == []


def test_a_trainer_that_waits_for_a_straggler_is_served_without_it(build: Build) -> None:
    world = build(2, 0, stragglers="drop", straggler_seconds=5.0)
    worker, trainer, slow, _in_hand = one_slow_group(world)
    asked = trainer.request_lease("trainer", 1, 1000.0, 0)
    trainer.status(SECONDS)  # the request is there
    world.let_pass(5.0)
    (replacement,) = worker.lease("rollout", 1, SECONDS, 0).leases
    assert replacement.group.key.id == "train-2"
    assert worker.finish("rollout", [slow]) == ["train-0"]
    worker.finish("rollout", [replacement])
    worker.serve("reward")
    (leased,) = trainer.take(wait(asked, SECONDS)).leases
    assert (leased.group.key.id, leased.weight) == ("train-2", 1.0)
    assert trainer.status(SECONDS)["counts"]["dropped"] == {"straggler": 1}


def test_a_late_group_is_told_its_weight(build: Build) -> None:
    world = build(2, 0, stragglers="down_weight", straggler_seconds=5.0, late_factor=0.25)
    worker, trainer, slow, in_hand = one_slow_group(world)
    assert trainer.get("trainer", 1, 0) == []
    world.let_pass(5.0)
    (replacement,) = worker.lease("rollout", 1, SECONDS, 0).leases
    assert trainer.status(SECONDS)["late"] == 1
    worker.finish("rollout", [replacement])
    worker.serve("reward")
    batch = [in_hand, *trainer.get("trainer", 1, 0)]
    assert [leased.weight for leased in batch] == [1.0, 1.0]
    trainer.ack(batch, 0)
    trainer.advance(1)
    assert worker.finish("rollout", [slow]) == []
    worker.serve("reward")
    (late,) = trainer.get("trainer", 1, 1)
    assert (late.group.key.id, late.weight, late.group.weight) == ("train-0", 0.25, 0.25)
    trainer.ack([late], 1)
    assert trainer.status(SECONDS)["counts"]["down_weighted"] == 1


def test_a_trainer_that_comes_back_gets_what_it_trained_since_its_checkpoint(build: Build) -> None:
    world = build(2, 0)
    worker, trainer = world.join("worker-0"), world.join("trainer-0", "trainer")
    wait(worker.offer(*range(8)), SECONDS)
    steps = list[list[str]]()
    for version in range(3):
        generate(worker, worker.get("rollout", 2, version), version)
        worker.serve("reward")
        batch = trainer.get("trainer", 2, version)
        steps.append([leased.group.key.id for leased in batch])
        trainer.ack(batch, version)
        trainer.advance(version + 1)
    trainer.commit(1)
    world.kill(trainer)
    again = world.join("trainer-0", "trainer", "2")
    with pytest.raises(WireError, match="resumes at version 0: it can at the last commit, 1, or later"):
        again.resume(0)
    again.resume(1)
    assert again.version == 1
    assert again.status(SECONDS)["counts"]["trained"] == 2
    ahead = worker.get("rollout", 5, 3)  # it has loaded version 3, and may start the step that comes then
    assert [leased.group.key.id for leased in ahead] == ["train-6", "train-7"]
    for version in (1, 2):
        batch = again.get("trainer", 2, version)
        assert [leased.group.key.id for leased in batch] == steps[version]
        assert batch[0].group.values("reward") == [1.0]
        again.ack(batch, version)
        again.advance(version + 1)
    assert again.get("trainer", 2, 3) == []
    generate(worker, ahead, 3)
    worker.serve("reward")
    assert [leased.group.key.id for leased in again.get("trainer", 2, 3)] == ["train-6", "train-7"]
    again.commit(3)
    assert again.status(SECONDS)["counts"]["trained"] == 6


def test_a_rollout_worker_may_ask_for_a_lane(build: Build) -> None:
    world = build(lanes=(10,))
    worker = world.join("worker-0")
    keys = [GroupKey("long", 0, length=500), GroupKey("short", 1, length=5), GroupKey("unknown", 2)]
    wait(worker.add([(key, prompt(key.seq)) for key in keys], 0.0), SECONDS)

    def lease(lane: int) -> Leased:
        return worker.take(wait(worker.request_lease("rollout", 1, 0.0, 0, lane=lane), SECONDS)).leases[0]

    assert [lease(lane).group.key.id for lane in (0, 0, 1)] == ["short", "long", "unknown"]
    with pytest.raises(WireError, match="lane 7"):
        lease(7)
    with pytest.raises(WireError, match="predicted length is -1"):
        wait(worker.add([(GroupKey("x", 3, length=-1), prompt(3))], 0.0), SECONDS)

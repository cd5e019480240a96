"""Time jumps by an hour: what was due runs out in order, whoever lives goes on, and the books balance."""

import pytest

from brokers.channel import wait
from common.errors import QueueFull
from common.header import Header
from contract import SECONDS, Build, Worker, World

pytestmark = pytest.mark.contract

HOUR = 3600.0


def jump(world: World, worker: Worker) -> None:
    """Let an hour pass, and this worker be heard as soon as the broker has noticed."""
    world.let_pass(HOUR)
    for _ in range(2):  # the first may be answered by a broker that is about to look at its clock
        worker.status(SECONDS)
    world.beat(worker)


def test_an_hour_that_passes_at_once_ends_leases_and_waits_in_order_and_the_run_goes_on(build: Build) -> None:
    """2 groups a step, 2 leased and 1 waiting as a prompt, a second prompt that finds no room."""
    world = build(2, max_queue_groups=3)
    worker, other, trainer = (
        world.join("rollout-0"),
        world.join("reward-0", "reward"),
        world.join("trainer-0", "trainer"),
    )
    wait(worker.offer(0, 1, 2), SECONDS)
    full = worker.offer(3, seconds=60.0)
    leases = worker.get("rollout", 2, 0)
    assert len(leases) == 2
    question = other.ask("reward", 1, 60.0)
    turn = trainer.channel.request(Header("turn", run="run-a", stage="trainer", deadline_s=60.0))
    for each in (worker, other, trainer):
        each.status(SECONDS)  # what it asked before has arrived
    jump(world, worker)
    with pytest.raises(QueueFull, match="group train-3 waited 60 s"):
        wait(full, SECONDS)
    assert other.take(wait(question, SECONDS)).starved == "waiting for groups in queue 'reward'"
    assert wait(turn, SECONDS).header.body["fence"] == 0
    status = worker.status(SECONDS)
    assert (status["counts"]["expired"], status["counts"]["started"], status["outstanding"]) == (2, 0, 0)
    assert {each["name"]: each["lost"] for each in status["workers"]} == {
        "rollout-0": "",  # it was heard since
        "reward-0": "silent",
        "trainer-0": "silent",
    }
    assert worker.finish("rollout", leases) == ["train-0", "train-1"]
    again = worker.get("rollout", 2, 0)
    assert [leased.group.attempt for leased in again] == [2, 2]
    assert worker.finish("rollout", again) == []
    assert other.finish("reward", other.get("reward", 2)) == []
    batch = trainer.get("trainer", 2, 0)
    trainer.ack(batch, 0)
    trainer.advance(1)
    trainer.commit(1)
    trainer.end("finished")
    status = worker.status(SECONDS)
    counts = status["counts"]
    assert (counts["started"], counts["trained"], counts["dropped"], counts["dead"]) == (2, 2, {}, {})
    assert (status["bytes"], status["outstanding"], status["stuck"]) == (0, 0, [])


def test_a_worker_that_loses_its_lease_to_a_jump_every_time_ends_in_a_dead_group_with_its_history(build: Build) -> None:
    world = build(1, max_attempts=3)
    worker = world.join("rollout-0")
    wait(worker.offer(0), SECONDS)
    for _ in range(3):
        assert len(worker.get("rollout", 1, 0)) == 1
        jump(world, worker)
    status = worker.status(SECONDS)
    assert (status["counts"]["dead"], status["counts"]["expired"]) == ({"rollout: silent for 30 s": 1}, 3)
    (letter,) = status["dead_letters"]
    assert [line.partition(":")[0] for line in letter["history"]] == [
        f"rollout, attempt {attempt}, rollout-0#1" for attempt in (1, 2, 3)
    ]
    assert (status["outstanding"], status["bytes"]) == (0, 0)

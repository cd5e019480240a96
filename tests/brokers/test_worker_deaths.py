"""Real worker processes of every role are killed at every verb, or suspended for longer than a lease; others go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers.channel import wait
from brokers.record import Limits
from contract import SECONDS, TcpWorld, Worker
from lifecycle import assert_trained

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
POINTS = [
    *[("prompt", point) for point in ("before", "added")],
    *[(stage, point) for stage in ("rollout", "reward") for point in ("before", "leased", "put", "acknowledged")],
    *[("trainer", point) for point in ("before", "leased", "acknowledged", "advanced", "committed")],
    *[("evaluate", point) for point in ("before", "leased", "acknowledged")],
]


class Mortals:
    """The process that makes dying workers, and what it tells."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "dying_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def send(self, *words: str) -> int:
        """Start a worker and return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return int(self.hear(words[1], "pid"))

    def hear(self, name: str, what: str) -> str:
        """Return what is told next; it must be of this kind."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line.startswith(f"{name} {what}"), line
        return line.removeprefix(f"{name} {what}").strip()

    def close(self) -> None:
        self._process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    process = Mortals()
    yield process
    process.close()


@pytest.fixture
def world() -> Iterator[TcpWorld]:
    made = TcpWorld(Limits(2, 1, lease_seconds=30.0))
    yield made
    made.close()


def address(worker: Worker) -> str:
    return worker.channel.endpoint  # pyright: ignore[reportAttributeAccessIssue]


def prepared(worker: Worker, stage: str) -> None:
    """Bring two train groups, and two held-out ones, to the stage that is to die."""
    wait(worker.offer(0, 1), SECONDS)
    if stage == "evaluate":
        wait(worker.offer(0, 1, purpose="eval"), SECONDS)
    before = {"prompt": (), "rollout": (), "reward": ("rollout",)}.get(stage, ("rollout", "reward"))
    for name in before:
        leases = worker.get(name, 4, 0)
        assert worker.finish(name, leases) == []


@pytest.mark.parametrize(("stage", "point"), POINTS)
def test_a_worker_that_is_killed_at_a_verb_is_followed_by_one_that_goes_on(
    world: TcpWorld, mortals: Mortals, stage: str, point: str
) -> None:
    worker = world.join("worker-0")
    prepared(worker, stage)
    mortals.send(address(worker), f"{stage}-0", stage, point)
    assert int(mortals.hear(f"{stage}-0", "ended")) == signal.SIGKILL
    successor = world.join(f"{stage}-0", stage, "2")  # no time has passed
    if stage == "prompt":
        wait(successor.offer(2, 3), SECONDS)  # again, where it was taken in
    successor.serve("rollout", "reward")
    if stage == "evaluate":
        done = successor.get("evaluate", 2)
        successor.ack(done)
        assert len(done) == (0 if point == "acknowledged" else 2)
        assert world.samples.ledger.counts.evaluated == 2
        return
    version = world.samples.ledger.window.version
    if version == 0:
        batch = successor.get("trainer", 2, 0)
        assert len(batch) == (0 if (stage, point) == ("trainer", "acknowledged") else 2)
        successor.ack(batch, 0)
        successor.advance(1)
    successor.commit(1)
    assert_trained(world.samples, "train-0", "train-1")
    counts = world.samples.ledger.counts
    assert (counts.trained, counts.started - counts.trained) == (2, len(world.samples.ledger.books.records))


def test_a_worker_that_was_suspended_for_longer_than_its_lease_is_refused_and_goes_on_with_fresh_groups(
    world: TcpWorld, mortals: Mortals
) -> None:
    worker = world.join("worker-0")
    wait(worker.offer(*range(2)), SECONDS)
    pid = mortals.send(address(worker), "rollout-0", "rollout", "suspended")
    mortals.hear("rollout-0", "stopped")
    worker.status(SECONDS)
    world.let_pass(31.0)
    taken = worker.get("rollout", 2, 0)
    assert [leased.group.attempt for leased in taken] == [2, 2]
    assert worker.finish("rollout", taken) == []
    wait(worker.offer(2), SECONDS)
    os.kill(pid, signal.SIGCONT)
    assert mortals.hear("rollout-0", "lost").split() == ["train-0", "train-1"]
    assert mortals.hear("rollout-0", "lost").split() == ["of", "train-2"]
    assert int(mortals.hear("rollout-0", "ended")) == 0
    counts = worker.status(SECONDS)["counts"]
    assert (counts["started"], counts["expired"], counts["refused"]) == (3, 2, {"LeaseLost": 2})


def test_no_time_but_the_brokers_own_decides_anything(world: TcpWorld) -> None:
    """With leases of a millisecond and a clock that stands still, real time changes nothing, whoever shows it."""
    brief = TcpWorld(Limits(2, lease_seconds=0.001))
    try:
        worker = brief.join("worker-0")
        wait(worker.offer(0), SECONDS)
        leases, began = worker.get("rollout"), time.monotonic()
        while time.monotonic() < began + 0.1:
            worker.status(SECONDS)
        assert worker.finish("rollout", leases) == []
    finally:
        brief.close()

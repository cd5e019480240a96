"""A broker with a journal dies in the middle of each verb and comes back: nothing is lost, nothing is done twice."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contract import SECONDS, Mangling, Worker
from lifecycle import VERBS, assert_balance, live
from mortal import Reviving

pytestmark = pytest.mark.contract

Build = Callable[[str, str], Reviving]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Build]:
    """Makes a broker that dies at a verb."""
    made: list[Reviving] = []

    def make(verb: str, moment: str) -> Reviving:
        made.append(Reviving(tmp_path, (verb, moment)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_broker_that_dies_at_a_verb_is_followed_by_one_that_goes_on(broker: Build, verb: str, moment: str) -> None:
    mortal = broker(verb, moment)
    channel = Mangling(mortal.open("worker-0"))
    worker = Worker(channel, "worker-0")
    worker.hello("rollout", "h", 1, seconds=SECONDS)
    assert sorted(live(worker, channel)) == ["train-0", "train-1"]
    assert mortal.deaths == 1
    assert_balance(mortal.service)


def test_the_leases_of_a_worker_that_died_with_the_broker_run_out_and_another_worker_goes_on(broker: Build) -> None:
    mortal = broker("lease", "after")
    dying, other = (Worker(mortal.open(name), name) for name in ("worker-0", "worker-1"))
    dying.hello("rollout", "h", 1, seconds=SECONDS)
    dying.offer(0).result(SECONDS)
    other.hello("rollout", "h", 1, seconds=SECONDS)
    dying.ask("rollout")
    other.status(SECONDS)  # asked again until there is a broker
    dying.channel.close(0.0)
    pending = other.ask("rollout")
    other.status(SECONDS)
    for _ in range(2):  # what the dead worker had sent may arrive late, and be granted once more
        if not pending.done():
            mortal.clock.advance(31.0)
            other.status(SECONDS)
    (leased,) = other.take(pending.result(SECONDS)).leases
    assert leased.group.key.id == "train-0"
    assert other.finish("rollout", [leased]) == []
    assert mortal.service.ledger.counts.started == 1

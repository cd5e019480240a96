"""Requests that wait: who is tried, in which order, and at what cost."""

import pytest

from brokers.service import Message
from brokers.waiting import Waiting, WaitingRoom
from common.header import Header
from contract import SECONDS, Build, Worker


def room(*requests: tuple[str, float]) -> WaitingRoom:
    """A room with requests of (peer, deadline), in order of arrival."""
    made = WaitingRoom()
    for peer, until in requests:
        made.add(Waiting(Message(peer, Header("lease"), (), 0.0), until))
    return made


def peers(waiting: list[Waiting]) -> list[str]:
    return [one.message.peer for one in waiting]


@pytest.mark.unit
def test_requests_are_tried_in_order_of_arrival_and_the_answered_ones_leave() -> None:
    waiting, tried = room(("a", 1.0), ("b", 1.0), ("c", 1.0)), list[str]()

    def answered(one: Waiting) -> bool:
        tried.append(one.message.peer)
        return one.message.peer != "b"

    waiting.serve(answered)
    assert tried == ["a", "b", "c"]
    assert peers(waiting.overdue(2.0)) == ["b"]


@pytest.mark.unit
def test_nobody_is_tried_behind_the_last_hope() -> None:
    waiting, tried = room(*((f"w{number}", 1.0) for number in range(1000))), list[str]()

    def answered(one: Waiting) -> bool:
        tried.append(one.message.peer)
        return len(tried) == 1

    waiting.serve(answered, last_hope=lambda _: True)
    assert tried == ["w0", "w1"]
    assert len(waiting) == 999


@pytest.mark.unit
def test_only_what_is_overdue_leaves_and_a_later_request_may_be_due_first() -> None:
    waiting = room(("a", 9.0), ("b", 3.0), ("c", 5.0))
    assert waiting.overdue(2.9) == []
    assert peers(waiting.overdue(3.0)) == ["b"]
    waiting.add(Waiting(Message("d", Header("lease"), (), 3.0), 4.0))
    assert peers(waiting.overdue(5.0)) == ["c", "d"]
    assert peers(waiting.overdue(9.0)) == ["a"]
    assert len(waiting) == 0


@pytest.mark.unit
def test_a_peer_takes_all_its_requests_with_it_and_nobody_elses() -> None:
    waiting = room(("a", 1.0), ("b", 1.0), ("a", 2.0))
    assert [one.until for one in waiting.withdraw("a")] == [1.0, 2.0]
    assert waiting.withdraw("a") == []
    assert peers(waiting.overdue(1.0)) == ["b"]


@pytest.mark.contract
def test_a_worker_with_newer_weights_is_served_from_behind_one_that_must_wait(build: Build) -> None:
    # One group a step and no staleness: at version 1 nobody may start a group with version 0.
    world = build(groups_per_step=1, max_staleness=0)
    prompts, old, new, trainer = (world.join(name) for name in ("prompts", "old", "new", "trainer"))
    prompts.offer(0).result(SECONDS)
    old.serve("rollout", "reward")
    trainer.ack(trainer.get("trainer", 1, 0), step=0)
    trainer.advance(1)
    behind: list[Worker] = [old, new]
    asked = [worker.request_lease("rollout", 1, 1000.0, version) for version, worker in enumerate(behind)]
    assert all(worker.status()["version"] == 1 for worker in behind)  # answered behind the requests: both wait
    prompts.offer(1).result(SECONDS)
    assert [item.group for item in asked[1].result(SECONDS).header.items] == ["train-1"]
    assert not asked[0].done()

"""Workers behind sockets outlive their broker: they join its successor by themselves and repeat what has no answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers.service import Message
from common.errors import Stranger
from common.header import Header
from contract import SECONDS
from mortal import Mortal

pytestmark = pytest.mark.contract


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Mortal]:
    broker = Mortal(tmp_path)
    yield broker
    broker.close()


def test_work_in_hand_is_handed_in_to_the_next_broker_and_a_question_is_asked_again(mortal: Mortal) -> None:
    generating, rewarding = mortal.join("a"), mortal.join("b")
    generating.offer(0, 1).result(SECONDS)
    in_hand = generating.get("rollout", 2, 0)
    question = rewarding.ask("reward", 2)
    mortal.kill()
    mortal.start()
    assert generating.finish("rollout", in_hand) == []
    assert len(rewarding.take(question.result(SECONDS)).leases) >= 1
    assert mortal.service.ledger.counts.started == 2
    assert mortal.service.ledger.counts.restarted == 0


def test_what_was_sent_while_there_was_no_broker_arrives_once_and_in_order(mortal: Mortal) -> None:
    worker = mortal.join("a")
    pending = [worker.offer(seq, seconds=1000.0) for seq in range(5)]
    for start in (5, 10, 15):
        mortal.kill()
        pending += [worker.offer(seq, seconds=1000.0) for seq in range(start, start + 5)]
        mortal.start()
        pending[-1].result(SECONDS)
    assert [one.result(SECONDS).header.verb for one in pending] == ["ok"] * 20
    assert mortal.service.ledger.next_seq["train"] == 20
    assert list(mortal.service.ledger.books.records) == [f"train-{seq}" for seq in range(20)]


def test_a_grant_that_died_with_the_broker_is_granted_anew(mortal: Mortal) -> None:
    worker = mortal.join("a")
    worker.offer(0, 1).result(SECONDS)
    (known,) = worker.get("rollout", 1, 0)
    mortal.kill()
    # The broker hands out a group, and nobody is told any more.
    header = Header("lease", "run-a", "a", "1", 99, "rollout", body={"want": 1, "version": 0})
    (lost,) = mortal.service.handle(Message("a#1", header, (), 0.0))
    assert lost.header.items[0].group == "train-1"
    mortal.start()
    assert worker.finish("rollout", [known]) == []
    (again,) = worker.get("rollout", 1, 0)
    assert (again.group.key.id, again.group.attempt) == ("train-1", 1)


def test_a_confirmation_that_died_with_the_broker_is_given_again(mortal: Mortal) -> None:
    worker = mortal.join("a")
    worker.offer(0).result(SECONDS)
    in_hand = worker.get("rollout", 1, 0)
    assert worker.finish("rollout", in_hand) == []
    mortal.kill()
    mortal.start()
    assert worker.finish("rollout", in_hand) == []  # as if the first reply had been lost
    assert mortal.service.ledger.counts.repeated == 1


def test_a_worker_that_said_goodbye_stays_a_stranger(mortal: Mortal) -> None:
    worker = mortal.join("a")
    worker.leave(SECONDS)
    with pytest.raises(Stranger, match="say hello first"):
        worker.offer(0).result(SECONDS)

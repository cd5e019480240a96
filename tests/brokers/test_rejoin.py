"""Workers behind sockets outlive their broker: they join its successor by themselves and repeat what has no answer."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers.conduct import Facts
from brokers.dealer import DealerChannel
from brokers.durable import DurableService
from brokers.journal import Journal
from brokers.record import Limits
from brokers.router import Router
from brokers.service import Message
from common.clock import ManualClock
from common.config import to_json
from common.errors import Stranger
from common.header import Header
from contract import CONFIG, SECONDS, STAGES, Worker

pytestmark = pytest.mark.contract


class Mortal:
    """A broker that can be killed, and comes back at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.address = "tcp://127.0.0.1:0"
        self.channels: list[DealerChannel] = []
        self.start()

    def start(self) -> None:
        journal = Journal(self.folder, 10_000, fsync=False)
        facts, limits = Facts("run-a", to_json(CONFIG), "/runs/a"), Limits(100, 0)
        self.service = DurableService(facts, STAGES, limits, journal, self.clock.now())
        self.router = Router(self.service, self.address, self.clock)
        self.address = self.router.address
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.router.run, args=(self.stop.is_set,))
        self.thread.start()

    def kill(self) -> None:
        self.stop.set()
        self.thread.join()
        self.router.close()

    def join(self, name: str) -> Worker:
        channel = DealerChannel(self.address, name, "1", heartbeat_seconds=0.05)
        self.channels.append(channel)
        worker = Worker(channel, name)
        worker.hello("rollout", "h", 1)
        channel.start_heartbeats()
        return worker

    def close(self) -> None:
        for channel in self.channels:
            channel.close(0.0)
        self.kill()


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

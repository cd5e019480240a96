"""The broker is killed after any event: what its journal holds is what it was."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from brokers.channel import MemoryBroker
from brokers.conduct import Facts
from brokers.durable import DurableService
from brokers.journal import Journal, segments
from brokers.record import Limits, Stragglers
from brokers.recovery import clear_other_runs
from brokers.service import Message
from common.clock import ManualClock
from common.config import to_json
from common.errors import LeaseLost, RelaxError
from common.group import GroupKey
from common.header import Header, Item
from contract import CONFIG, STAGES, Worker, answer, prompt

pytestmark = pytest.mark.unit
FACTS = Facts("run-a", to_json(CONFIG), "/runs/a")


def open_service(
    folder: Path, clock: ManualClock, limits: Limits, segment_bytes: int = 1 << 20, *, kind: type[Journal] = Journal
) -> DurableService:
    return DurableService(FACTS, STAGES, limits, kind(folder, segment_bytes, fsync=False), clock.now())


def portrait(service: DurableService) -> dict[str, Any]:
    """All that must survive: every group with what it holds, every lease, every count, every credit."""
    ledger = service.ledger
    groups = {
        name: (
            record.key,
            sorted(record.pending),
            {info.name: bytes(service.store.read(name, info)) for info in record.sections.values()},
            (record.deadline, record.version_min, record.version_max, record.tokens),
            (record.due, record.place, record.weight),
            (record.handed, record.trained_step, dict(+record.attempts), record.history),
        )
        for name, record in ledger.books.records.items()
    }
    leases = {
        lease.id: (lease.group, lease.stage, lease.worker, lease.attempt, sorted(lease.staged))
        for lease in ledger.books.leases.values()
    }
    queues = {
        name: (queue.groups, queue.ready, queue.bytes, queue.first()) for name, queue in ledger.books.queues.items()
    }
    counts = {name: value for name, value in ledger.counts.to_wire().items() if name not in ("repeated", "expired")}
    window = {**vars(ledger.window), "_due": dict(ledger.window._due)}  # pyright: ignore[reportPrivateUsage]
    committed = (
        ledger.committed,
        {step: [r.key.id for r in made] for step, made in ledger.uncommitted.items() if made},
    )
    return {
        "groups": groups,
        "leases": leases,
        "queues": queues,
        "counts": counts,
        "window": window,
        "committed": committed,
        "credits": ledger.window.credits(ledger.window.version),
        "next_seq": ledger.next_seq,
        "ended": (ledger.ended, ledger.data_ended),
        "service": (service.evaluation, service.turn.side, service.turn.fence, service.turn.holders),
        "bytes": (service.store.bytes, len(service.store)),
    }


class Life:
    """Workers that do anything, in any order, with a broker that may be another one from one moment to the next."""

    def __init__(self, folder: Path, seed: int, segment_bytes: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.segment_bytes = folder, segment_bytes
        self.clock = ManualClock()
        policy: Stragglers = ("wait", "drop", "regenerate", "down_weight")[seed % 4]
        self.limits = Limits(
            2, 1, lease_seconds=10.0, max_queue_groups=50, stragglers=policy, straggler_seconds=1.0, lanes=(10,)
        )
        self.service = open_service(folder, self.clock, self.limits, segment_bytes)
        self.held: dict[str, list[Any]] = {stage.name: [] for stage in STAGES}
        self.last_version = 0
        self.join()

    def join(self) -> None:
        self.broker = MemoryBroker(self.service, self.clock)
        self.worker = Worker(self.broker.connect("w", "1"), "w")
        self.worker.hello("rollout", "h", 1)

    def crash(self) -> None:
        """The process is gone with all that it had in memory."""
        before = portrait(self.service)
        self.service = open_service(self.folder, self.clock, self.limits, self.segment_bytes)
        after = portrait(self.service)
        assert after == before
        self.join()

    def act(self) -> None:
        acts: list[Callable[[], object]] = [
            self.add, self.add, self.lease, self.lease, self.lease, self.finish, self.finish, self.finish, self.finish,
            self.put_only, self.nack, self.train, self.train, self.drop, self.commit, self.beat, self.turn, self.resume,
        ]  # fmt: skip
        try:
            self.random.choice(acts)()
        except RelaxError as error:
            if not isinstance(error, LeaseLost) and "expected" not in str(error):
                raise

    def add(self) -> None:
        purpose = self.random.choice(["train", "train", "train", "eval"])
        seq = self.service.ledger.next_seq[purpose]
        media = self.random.randbytes(self.random.choice([0, 10, 3000]))
        self.worker.offer(seq, purpose=purpose, media=media)  # pyright: ignore[reportArgumentType]

    def lease(self) -> None:
        stage = self.random.choice(["rollout", "rollout", "reward", "evaluate", "trainer"])
        version = self.service.ledger.window.version if stage in ("rollout", "trainer") else None
        self.held[stage] += self.worker.get(stage, self.random.randint(1, 3), version)

    def pick(self, *stages: str) -> tuple[str, Any] | None:
        stages = tuple(stage for stage in stages if self.held[stage])
        if not stages:
            return None
        stage = self.random.choice(stages)
        return stage, self.held[stage].pop(self.random.randrange(len(self.held[stage])))

    def finish(self) -> None:
        picked = self.pick("rollout", "reward", "evaluate")
        if picked and picked[0] == "evaluate":
            self.worker.ack([picked[1]])
        elif picked:
            self.worker.finish(picked[0], [picked[1]])

    def put_only(self) -> None:
        picked = self.pick("rollout", "reward")
        if picked:
            result = [answer(*picked)]
            self.worker.confirm(self.worker.put(result, ack=False), result, ack=False)
            self.held[picked[0]].append(picked[1])

    def nack(self) -> None:
        picked = self.pick("rollout", "reward", "trainer")
        if picked:
            self.worker.nack([picked[1]], "broken", fault=self.random.random() < 0.7)

    def train(self) -> None:
        version = self.service.ledger.window.version
        for leased in self.worker.get("trainer", 2, version) + self.held["trainer"]:
            self.worker.ack([leased], version)
        self.held["trainer"] = []
        if self.service.ledger.window.slots == 0:
            self.worker.advance(version + 1)

    def drop(self) -> None:
        if self.random.random() < 0.2 and self.service.ledger.books.records:
            self.worker.drop([self.random.choice(list(self.service.ledger.books.records))], "filtered")

    def commit(self) -> None:
        self.worker.commit(max(0, self.service.ledger.window.version - self.random.randint(0, 1)))

    def resume(self) -> None:
        """The trainer comes back from the checkpoint that it told of last, or from a later one."""
        ledger = self.service.ledger
        self.worker.resume(self.random.randint(ledger.committed, ledger.window.version))
        self.held["trainer"] = []

    def beat(self) -> None:
        self.clock.advance(self.random.choice([0.5, 6.0]))
        self.broker.tick()
        self.worker.channel.request(Header("beat"))

    def turn(self) -> None:
        turn = self.service.turn
        if not self.worker.take_turn(turn.side, 0.0):
            return
        if self.random.random() < 0.5:
            self.worker.give_turn(turn.side, turn.fence)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("segment_bytes", [2_000, 1 << 20])
def test_a_broker_killed_after_any_event_is_what_it_was(tmp_path: Path, seed: int, segment_bytes: int) -> None:
    life = Life(tmp_path / "journal", seed, segment_bytes)
    for number in range(150):
        life.act()
        if number % (1 + seed) == 0 or number % 17 == 0:
            life.crash()
    counts = life.service.ledger.counts
    assert counts.started >= 4
    ends = counts.trained + counts.dropped.total() + counts.dead.total()
    window = life.service.ledger.window
    assert counts.started == ends + window.outstanding + window.late


def test_credits_are_exact_after_ten_restarts(tmp_path: Path) -> None:
    """With s = 1, B = 2: (1 + 1) * 2 = 4 groups may be under way; 3 are started, so 1 credit is left."""
    life = Life(tmp_path, 0, 1 << 20)
    life.worker.offer(0, 1, 2, 3, 4)
    held = life.worker.get("rollout", 3, 0)
    life.worker.finish("rollout", held[:1])
    for _ in range(10):
        life.crash()
        assert life.service.ledger.window.credits(0) == 1
    assert life.worker.finish("rollout", held[1:]) == []
    assert life.service.ledger.counts.started == 3


def test_segments_without_a_live_group_are_deleted(tmp_path: Path) -> None:
    life = Life(tmp_path, 0, 2_000)
    for seq in range(0, 60, 2):
        version = seq // 2
        life.worker.offer(seq, seq + 1)
        leases = life.worker.get("rollout", 2, version)
        results = [replace(answer("rollout", each), version_min=version, version_max=version) for each in leases]
        life.worker.confirm(life.worker.put(results), results)
        life.worker.finish("reward", life.worker.get("reward", 2))
        life.worker.ack(life.worker.get("trainer", 2, version), version)
        life.worker.advance(version + 1)
        life.worker.commit(version + 1)
    assert len(segments(tmp_path)) <= 3
    life.crash()
    assert life.service.ledger.counts.trained == 60


def test_what_was_acknowledged_before_the_restart_may_be_acknowledged_again(tmp_path: Path) -> None:
    """The reply was lost with the broker, so the worker says it once more; within one life it is refused."""
    life = Life(tmp_path, 0, 1 << 20)
    life.worker.offer(0, 1)
    generated = life.worker.get("rollout", 2, 0)
    assert life.worker.finish("rollout", generated) == []
    assert life.worker.finish("rollout", generated) == ["train-0", "train-1"]
    life.worker.finish("reward", life.worker.get("reward", 2))
    batch = life.worker.get("trainer", 2, 0)
    life.worker.ack(batch, 0)
    life.worker.advance(1)
    life.crash()
    assert life.worker.finish("rollout", generated) == []
    life.worker.ack(batch, 0)
    life.worker.advance(1)
    assert life.service.ledger.counts.trained == 2


def test_a_worker_that_comes_back_keeps_the_leases_that_it_knows_of_and_no_other(tmp_path: Path) -> None:
    life = Life(tmp_path, 0, 1 << 20)
    life.worker.offer(0, 1)
    known, _unknown = life.worker.get("rollout", 2, 0)
    life.crash()
    body = {"role": "rollout", "host": "h", "pid": 1, "holding": [known.id]}
    life.worker.channel.request(Header("hello", body=body)).result(0.0)
    assert [lease.id for lease in life.service.ledger.books.leases.values()] == [known.id]
    again = life.worker.get("rollout", 2, 0)
    assert [leased.group.key.id for leased in again] == ["train-1"]
    assert again[0].group.attempt == 1


def test_a_successor_of_a_worker_that_died_with_the_broker_gets_its_groups_at_once(tmp_path: Path) -> None:
    life = Life(tmp_path, 0, 1 << 20)
    life.worker.offer(0)
    old = life.worker.get("rollout", 1, 0)
    life.service = open_service(tmp_path, life.clock, life.limits)
    broker = MemoryBroker(life.service, life.clock)
    successor = Worker(broker.connect("w", "2"), "w")
    successor.hello("rollout", "h", 2)
    assert [leased.group.attempt for leased in successor.get("rollout", 1, 0)] == [2]
    late = Worker(broker.connect("w", "1"), "w")
    with pytest.raises(LeaseLost, match="replaced by w#2"):
        late.finish("rollout", old)


class Full(Journal):
    """A journal on a disk that is full when a test says so."""

    full = False

    def _write(self, data: pa.Buffer) -> None:
        if Full.full:
            raise OSError(28, "No space left on device")
        super()._write(data)


def test_on_a_full_disk_producers_wait_and_signs_of_life_are_answered(tmp_path: Path) -> None:
    clock, limits = ManualClock(), Limits(2, 1)
    service = open_service(tmp_path, clock, limits, kind=Full)
    broker = MemoryBroker(service, clock)
    worker = Worker(broker.connect("w", "1"), "w")
    worker.hello("prompt", "h", 1)
    Full.full = True
    try:
        offered = worker.add([(GroupKey("train-0", 0, "train", 0), prompt(0))], 0.0)
        assert not offered.done()
        beat = worker.channel.request(Header("beat")).result(0.0)
        assert beat.header.body["next_seq"] == {"train": 0, "eval": 0}
        assert worker.status()["queues"]["rollout"]["groups"] == 1
        assert portrait(open_service(tmp_path, clock, limits))["groups"] == {}
    finally:
        Full.full = False
    clock.advance(1.0)
    broker.tick()
    assert offered.result(0.0).header.body["next_seq"] == {"train": 1, "eval": 0}


def test_a_commit_waits_for_more_messages_but_not_for_more_than_two_mib_of_sections(tmp_path: Path) -> None:
    service = open_service(tmp_path, ManualClock(), Limits(2, 1))
    service.handle(Message("w#1", Header("hello", worker="w", body={"role": "prompt"}), (), 0.0))

    def add(seq: int, media: bytes) -> bool:
        sections = prompt(seq, media)
        item = Item(f"train-{seq}", seq, sections=tuple(section.info for section in sections))
        service.take(Message("w#1", Header("add", items=(item,)), [section.data for section in sections], 0.0))
        return service.holding

    assert add(0, b"")
    assert add(1, bytes(1 << 20))
    assert not add(2, bytes(1 << 20))
    assert len(service.release(0.0)) == 3
    assert not service.holding
    assert add(3, b"")


def test_the_journal_of_another_run_in_the_same_folder_is_deleted(tmp_path: Path) -> None:
    Life(tmp_path, 0, 1 << 20).worker.offer(0)
    clear_other_runs(tmp_path, "run-a")
    assert len(segments(tmp_path)) == 1
    clear_other_runs(tmp_path, "run-b")
    assert segments(tmp_path) == []

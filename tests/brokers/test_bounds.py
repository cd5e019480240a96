"""The bound on all bytes: who waits, for whom, who is told, and that no bound can bring a run to rest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brokers import bounds
from brokers.conduct import Facts
from brokers.record import Limits
from brokers.samples import SampleService
from brokers.spill import SpillStore
from brokers.store import MemoryStore
from common.errors import QueueFull
from contract import STAGES, MemoryWorld, Worker, answer, prompt
from ledger_cases import Bench, section

pytestmark = pytest.mark.unit


def size_of(media: bytes) -> int:
    return sum(section.info.length for section in prompt(0, media))


def test_above_the_bound_a_producer_waits_and_is_refused_naming_the_stage_that_holds_most() -> None:
    """Two groups for the next update come in anyway, and there is room for a third."""
    size = size_of(bytes(1000))
    world = MemoryWorld(Limits(2, max_bytes=3 * size))
    worker, feeder = world.join("w"), world.join("prompt-0", "prompt")
    for seq in range(3):
        feeder.offer(seq, media=bytes(1000)).result(0.0)
    fourth = feeder.offer(3, media=bytes(1000), seconds=30.0)
    assert not fourth.done()
    world.let_pass(30.0)
    total = 3 * size
    text = f"waiting for stage 'rollout', which holds {total} of {total} bytes; at most {total} may be held"
    with pytest.raises(QueueFull, match=f"group train-3 waited 30 s: {text}"):
        fourth.result(0.0)
    again = feeder.offer(3, media=bytes(1000), seconds=30.0)
    assert not again.done()
    worker.finish("rollout", worker.get("rollout", 2, 0))  # prompts and media are freed, and a response is smaller
    assert again.done()
    assert feeder.next_seq["train"] == 4


def test_the_checkpoint_is_named_when_trained_groups_hold_most() -> None:
    """With s = 0 and B = 1 the group of step 0 is trained and kept; the next ones are half of its bytes each."""
    bench = Bench(1, max_bytes=10)
    bench.add(0)
    bench.generate()
    for grant in bench.lease("trainer"):
        bench.ack(grant)
    bench.ledger.advance(1)
    bench.add(1)
    held = bench.store.bytes
    assert held == (7 + 13 + 19 + 23) + (5 + 7)  # inputs, tokens, reference, advantage; prompt and inputs
    text = bounds.holder(bench.ledger, held)
    assert text.startswith("waiting for the trainer's next checkpoint: 1 trained groups hold 62 of 74 bytes")
    sections = [section(name).info for name in ("prompt", "inputs", "media")]
    key = bench.ledger.books.records["train-1"].key
    assert not bounds.fits(bench.ledger, held, replace(key, id="train-2", seq=2), sections)
    assert bounds.fits(bench.ledger, held, key, sections)  # it is here already
    assert bounds.fits(bench.ledger, held, replace(key, id="eval-0", seq=0, purpose="eval"), sections)
    bench.ledger.drop("train-1", "filtered")  # now the next update has nothing to train on
    assert bounds.fits(bench.ledger, held, replace(key, id="train-2", seq=2), sections)


def test_who_waits_longer_than_a_second_is_told_why_and_both_sides_log_it_once() -> None:
    world = MemoryWorld(Limits(1, max_queue_groups=1))
    feeder, worker = world.join("prompt-0", "prompt"), world.join("w")
    feeder.offer(0).result(0.0)
    with structlog.testing.capture_logs() as logged:
        pending = feeder.offer(1, seconds=100.0)
        world.let_pass(0.5)
        world.beat(feeder)
        assert feeder.held_up == ""
        for _ in range(5):
            world.let_pass(1.0)
        world.beat(feeder)
        assert feeder.held_up == "queue 'rollout' holds 1 of at most 1 groups"
        (waiting,) = feeder.status()["waiting_producers"]
        assert waiting == {"worker": "prompt-0#1", "seconds": 5.5, "why": feeder.held_up}
        worker.serve("rollout")
        assert pending.done()
    assert feeder.held_up == ""
    assert feeder.status()["waiting_producers"] == []
    told = [(each["event"], each["worker"], each.get("why"), each.get("waited_s")) for each in logged]
    assert told == [
        ("producer waits", "prompt-0#1", "queue 'rollout' holds 1 of at most 1 groups", None),
        ("producer goes on", "prompt-0#1", None, 5.5),
    ]


class Run:
    """Workers that do what they can in any order, a trainer that saves now and then, a broker without room."""

    def __init__(self, folder: Path, limits: Limits, memory_bytes: int, commit_every: int) -> None:
        def make(facts: Facts, limits: Limits) -> SampleService:
            return SampleService(facts, STAGES, limits, SpillStore(MemoryStore(), folder, memory_bytes, 1))

        self.world, self.limits, self.commit_every = MemoryWorld(limits, make), limits, commit_every
        self.feeder, self.worker = self.world.join("prompt-0", "prompt"), self.world.join("w")
        self.pending: Any = None

    @property
    def version(self) -> int:
        return self.world.samples.ledger.window.version

    def feed(self, media: int) -> None:
        """Offer the next prompt unless one waits; what comes in above the bound is for the next update."""
        ledger, store = self.world.samples.ledger, self.world.samples.store
        if self.pending is None or self.pending.done():
            self.pending = self.feeder.offer(ledger.next_seq["train"], media=bytes(media), seconds=1e9)
            over = self.pending.done() and store.bytes > (self.limits.max_bytes or 0)
            under_way = ledger.window.outstanding + ledger.books.queues["rollout"].ready
            assert not over or under_way <= self.limits.groups_per_step

    def work(self, stage: str, lost: bool) -> None:
        leases = self.worker.get(stage, 2, self.version if stage == "rollout" else None)
        if lost:
            self.worker.drop([leased.group.key.id for leased in leases], "filtered")
            return
        results = [answer(stage, leased) for leased in leases]
        if stage == "rollout":
            results = [replace(result, version_min=self.version, version_max=self.version) for result in results]
        assert self.worker.confirm(self.worker.put(results), results) == []

    def train(self) -> None:
        version, size = self.version, self.limits.groups_per_step
        batch = self.worker.lease("trainer", size, 0.0, version, at_least=size).leases
        if batch:
            self.worker.ack(batch, version)
            self.worker.advance(version + 1)
            if (version + 1) % self.commit_every == 0:
                self.worker.commit(version + 1)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(0, 300)),
        st.tuples(st.sampled_from(["rollout", "reward"]), st.booleans()),
        st.tuples(st.just("train"), st.none()),
    ),
    max_size=40,
)


@given(
    size=st.integers(1, 3),
    s=st.integers(0, 2),
    max_bytes=st.integers(1, 4000),
    memory_bytes=st.integers(0, 2000),
    commit_every=st.integers(1, 5),
    acts=ACTS,
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_however_little_room_there_is_a_run_always_comes_to_its_next_updates(
    tmp_path: Path, size: int, s: int, max_bytes: int, memory_bytes: int, commit_every: int, acts: list[Any]
) -> None:
    run = Run(tmp_path, Limits(size, s, max_bytes=max_bytes), memory_bytes, commit_every)
    for act, detail in acts:
        if act == "feed":
            run.feed(detail)
        elif act == "train":
            run.train()
        else:
            run.work(act, detail)
    goal = run.version + 2 * commit_every
    for _ in range(3 * size * (goal - run.version) + 3 * size):  # a prompt a time at worst
        run.feed(100)
        run.work("rollout", lost=False)
        run.work("reward", lost=False)
        run.train()
    assert run.version >= goal
    status = run.worker.status()
    assert (
        status["bytes"]
        == run.world.samples.store.bytes
        == sum(record.bytes_for(record.sections) for record in run.world.samples.ledger.books.records.values())
    )
    run.worker.end("finished")
    assert run.worker.status()["bytes"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_workers_result_is_taken_however_full_it_is() -> None:
    world = MemoryWorld(Limits(1, max_bytes=1))
    worker: Worker = world.join("w")
    worker.offer(0).result(0.0)
    worker.serve("rollout", "reward")
    (batch,) = worker.get("trainer", 1, 0)
    assert worker.status()["bytes"] > 1
    worker.ack([batch], 0)

"""Everything that can happen to a ledger, and a model that knows only what it did itself.

That is: which sections it put, who acknowledged what, and how groups ended.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from brokers.record import Grant
from common.errors import LeaseLost, WireError
from ledger_cases import BY_NAME, PROMPT, STAGES, Bench

WORKERS = ("a", "b")
MIDDLE = ("reward", "reference", "advantage", "evaluate")


@dataclass(slots=True)
class Known:
    """What the model knows of a live group."""

    seq: int
    purpose: str
    acked: set[str] = field(default_factory=set)
    sections: set[str] = field(default_factory=lambda: set(PROMPT))
    oldest: int | None = None  # version of the rollout start that counts
    trained_at: int | None = None

    def pending(self) -> set[str]:
        return {s.name for s in STAGES if self.purpose in s.purposes} - self.acked

    def in_work_or_ready(self, stage: str) -> bool:
        return stage in self.pending() and BY_NAME[stage].requires <= self.sections and self.trained_at is None


class Happenings(RuleBasedStateMachine):
    """Everything that can happen, and what the model makes of it."""

    @initialize(
        s=st.integers(0, 4),
        size=st.integers(1, 3),
        in_order=st.booleans(),
        steps=st.one_of(st.none(), st.integers(1, 6)),
    )
    def begin(self, s: int, size: int, in_order: bool, steps: int | None) -> None:
        self.s, self.size, self.in_order = s, size, in_order
        self.total = None if steps is None else steps * size
        self.bench = Bench(size, s, in_order=in_order, total_groups=self.total, lease_seconds=10.0)
        self.ledger = self.bench.ledger
        self.live: dict[str, Known] = {}
        self.ended: dict[str, str] = {}
        self.held: dict[int, Grant] = {}
        self.over: list[Grant] = []
        self.repeats = 0

    # what the model does when something happens

    def forget(self, group: str, end: str) -> None:
        self.ended[group] = end
        known = self.live.pop(group)
        if known.purpose == "train" and known.oldest is None:
            self.ended[group] = "never started"
        for lease_id in [i for i, grant in self.held.items() if grant.lease.group == group]:
            self.over.append(self.held.pop(lease_id))

    def took(self, grants: list[Grant], stage: str, worker: str, version: int) -> None:
        for grant in grants:
            known, lease = self.live[grant.lease.group], grant.lease
            assert (lease.stage, lease.worker) == (stage, worker)
            assert stage not in known.acked
            assert known.trained_at is None
            same = [g for g in self.held.values() if g.lease.group == lease.group and g.lease.stage == stage]
            assert same == [], "a group is leased twice for one stage"
            assert {info.name for info in grant.sections} == BY_NAME[stage].requires
            if stage == "rollout":
                known.oldest = version
            self.held[lease.id] = grant

    def gave_back(self, grant: Grant, *, fault: bool) -> None:
        lease = grant.lease
        if self.held.pop(lease.id, None) is None:
            return
        self.over.append(grant)
        if fault and lease.attempt >= 3:
            history = dict(self.ledger.dead_letters)[lease.group]
            assert sum(line.startswith(f"{lease.stage}, attempt") for line in history) == 3
            self.forget(lease.group, "dead")
        elif lease.stage == "rollout":
            self.live[lease.group].oldest = None

    def put_and_ack(self, grant: Grant) -> None:
        place = list(self.held.values()).index(grant)
        self.put(place, repeat=False)
        self.ack(list(self.held.values()).index(grant))

    # what can happen

    @rule(count=st.integers(1, 4), purpose=st.sampled_from(["train", "train", "eval"]))
    def add(self, count: int, purpose: str) -> None:
        for _ in range(count):
            seq = self.ledger.next_seq[purpose]
            assert self.bench.add(seq, purpose, min_version=0)  # pyright: ignore[reportArgumentType]
            self.live[f"{purpose}-{seq}"] = Known(seq, purpose)

    @rule(back=st.integers(1, 5))
    def add_again(self, back: int) -> None:
        seq = self.ledger.next_seq["train"] - back
        if seq >= 0:
            assert not self.bench.add(seq)
            self.repeats += 1

    @rule(worker=st.sampled_from(WORKERS), want=st.integers(0, 5), lag=st.sampled_from([0, 0, 0, 1, 2, 5]))
    def lease_rollout(self, worker: str, want: int, lag: int) -> None:
        version = max(0, self.ledger.window.version - lag)
        grants = self.bench.lease("rollout", want, version, worker=worker)
        assert len(grants) <= want
        self.took(grants, "rollout", worker, version)

    @rule(worker=st.sampled_from(WORKERS), want=st.integers(0, 5), stage=st.sampled_from(MIDDLE))
    def lease_middle(self, worker: str, want: int, stage: str) -> None:
        self.took(self.bench.lease(stage, want, worker=worker), stage, worker, 0)

    @rule(want=st.integers(0, 4), at_least=st.integers(1, 4))
    def lease_trainer(self, want: int, at_least: int) -> None:
        version = self.ledger.window.version
        grants = self.bench.lease("trainer", want, at_least=at_least, worker="a")
        assert len(grants) <= want
        assert not grants or len(grants) >= min(want, at_least) or self.ledger.exhausted
        for grant in grants:
            known = self.live[grant.lease.group]
            assert known.oldest is not None
            assert 0 <= version - known.oldest <= self.s
            if self.in_order:
                mine = {g.lease.group for g in self.held.values() if g.lease.stage == "trainer"}
                left = [k.seq for name, k in self.live.items()
                        if k.purpose == "train" and name not in mine and k.trained_at is None]  # fmt: skip
                assert known.seq == min(left)
            self.took([grant], "trainer", "a", version)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), repeat=st.booleans())
    def put(self, pick: int, repeat: bool) -> None:
        grant = list(self.held.values())[pick % len(self.held)]
        already = set(grant.lease.staged)
        oldest = self.live[grant.lease.group].oldest or 0
        fresh = self.bench.put(grant, (oldest, self.ledger.window.version) if grant.lease.stage == "rollout" else None)
        assert set(fresh) == BY_NAME[grant.lease.stage].adds - already
        self.repeats += len(already)
        if repeat and fresh:
            assert self.bench.put(grant, (oldest, oldest) if grant.lease.stage == "rollout" else None) == []
            self.repeats += len(fresh)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def ack(self, pick: int) -> None:
        grant = list(self.held.values())[pick % len(self.held)]
        known, stage = self.live[grant.lease.group], grant.lease.stage
        if set(grant.lease.staged) != BY_NAME[stage].adds:
            with pytest.raises(WireError):
                self.bench.ack(grant)
            return
        self.bench.ack(grant)
        self.over.append(self.held.pop(grant.lease.id))
        if stage == "trainer":
            known.trained_at = self.ledger.window.version
            return
        known.acked.add(stage)
        known.sections |= BY_NAME[stage].adds
        if known.purpose == "eval" and not known.pending():
            self.forget(grant.lease.group, "evaluated")

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), fault=st.booleans())
    def nack(self, pick: int, fault: bool) -> None:
        grant = list(self.held.values())[pick % len(self.held)]
        self.bench.nack(grant, fault=fault)
        self.gave_back(grant, fault=fault)

    @precondition(lambda self: self.over)
    @rule(pick=st.integers(0, 99))
    def come_too_late(self, pick: int) -> None:
        grant = self.over[pick % len(self.over)]
        for late in (self.bench.put, self.bench.ack, self.bench.nack):
            with pytest.raises(LeaseLost):
                late(grant)

    @rule(seconds=st.sampled_from([1.0, 6.0]), beating=st.sampled_from([(), ("a",), ("b",), WORKERS]))
    def let_time_pass(self, seconds: float, beating: tuple[str, ...]) -> None:
        now = self.bench.clock.advance(seconds)
        for worker in beating:
            self.ledger.extend(worker, now)
        due = [grant for grant in self.held.values() if grant.lease.expires <= now]
        assert {lease.id for lease in self.ledger.expire(now)} == {grant.lease.id for grant in due}
        for grant in due:
            self.gave_back(grant, fault=True)

    @rule(worker=st.sampled_from(WORKERS))
    def lose_a_worker(self, worker: str) -> None:
        theirs = [grant for grant in self.held.values() if grant.lease.worker == worker]
        self.ledger.lost(worker, "gone", self.bench.clock.now())
        for grant in theirs:
            self.gave_back(grant, fault=True)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        group = list(self.live)[pick % len(self.live)]
        self.ledger.drop(group, "filtered")
        if self.live[group].trained_at is None:
            self.forget(group, "dropped" if self.live[group].purpose == "train" else "evaluation lost")

    @rule()
    def update(self) -> None:
        version = self.ledger.window.version
        batch = [known for known in self.live.values() if known.trained_at == version]
        if any(grant.lease.stage == "trainer" for grant in self.held.values()) or not batch:
            return
        if len(batch) == self.size or self.ledger.exhausted:
            self.ledger.advance(version + 1)

    @rule(behind=st.integers(0, 2))
    def commit(self, behind: int) -> None:
        version = self.ledger.window.version - behind
        self.ledger.commit(version)
        for group in [g for g, k in self.live.items() if k.trained_at is not None and k.trained_at < version]:
            self.forget(group, "trained")

    # the same things in an order that gets on: by chance alone a group would hardly ever reach the trainer

    @rule(worker=st.sampled_from(WORKERS), stages=st.integers(1, 5), want=st.integers(1, 6))
    def work(self, worker: str, stages: int, want: int) -> None:
        if self.ledger.books.queues["rollout"].groups == 0:
            self.add(want, "train")
        for stage in ("rollout", "reward", "reference", "advantage", "evaluate")[:stages]:
            before = set(self.held)
            if stage == "rollout":
                self.lease_rollout(worker, want, 0)
            else:
                self.lease_middle(worker, want, stage)
            for lease_id in self.held.keys() - before:
                self.put_and_ack(self.held[lease_id])

    @rule(want=st.integers(1, 4), commit=st.booleans())
    def train(self, want: int, commit: bool) -> None:
        self.work("b", 4, 6)
        self.lease_trainer(want, 1)
        for grant in [grant for grant in self.held.values() if grant.lease.stage == "trainer"]:
            self.put_and_ack(grant)
        self.update()
        if commit:
            self.commit(0)

"""Everything that can happen to a ledger, and a model that knows only what it did itself.

That is: which sections it put, who acknowledged what, and how groups ended. What the ledger decides by itself, about
stragglers and stale groups, the model reads in what is noted, and checks that it was right.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from brokers.noted import NotedLedger
from brokers.record import Grant
from brokers.window import LATE
from common.errors import LeaseLost, WireError
from ledger_cases import BY_NAME, PROMPT, STAGES, Bench

WORKERS = ("a", "b")
MIDDLE = ("reward", "reference", "advantage", "evaluate")
PATIENCE = 4.0
"""seconds after which a group that the trainer waits for is a straggler"""
ORIGINAL = frozenset({"prompt", "inputs"})
"""sections of a new group that stages require"""


@dataclass(slots=True)
class Known:
    """What the model knows of a live group."""

    seq: int
    purpose: str
    acked: set[str] = field(default_factory=set)
    sections: set[str] = field(default_factory=lambda: set(PROMPT))
    oldest: int | None = None  # version of the rollout start that counts, or of an older span
    trained_at: int | None = None
    excused: bool = False

    def pending(self) -> set[str]:
        return {s.name for s in STAGES if self.purpose in s.purposes} - self.acked

    def in_work_or_ready(self, stage: str) -> bool:
        return stage in self.pending() and BY_NAME[stage].requires <= self.sections and self.trained_at is None


class Happenings(RuleBasedStateMachine):
    """Everything that can happen, and what the model makes of it."""

    @initialize(
        s=st.integers(0, 4),
        size=st.integers(1, 3),
        policy=st.sampled_from(["in order", "wait", "drop", "regenerate", "down_weight"]),
        order=st.sampled_from(["fifo", "oldest_version", "short_first"]),
        steps=st.one_of(st.none(), st.integers(1, 6)),
    )
    def begin(self, s: int, size: int, policy: str, order: str, steps: int | None) -> None:
        self.s, self.size, self.in_order = s, size, policy == "in order"
        self.policy = "wait" if self.in_order else policy
        self.total = None if steps is None else steps * size
        limits = {"in_order": True} if self.in_order else {"order": order, "lanes": (10, 20), "fairness_seconds": 7.0}
        self.bench = Bench(
            size, s, total_groups=self.total, lease_seconds=10.0, stragglers=policy if not self.in_order else "wait",
            straggler_seconds=PATIENCE, **limits,
        )  # fmt: skip
        self.served = self.bench.clock.now()  # when the trainer last got something
        self.committed = 0
        self.again: dict[int, list[str]] = {}  # groups of steps that are made again, in their order
        self.batches: dict[int, list[str]] = {}  # groups of the steps that were made, as acknowledged
        self.down_weighted: set[str] = set()
        self.regenerated = 0
        self.live: dict[str, Known] = {}
        self.ended: dict[str, str] = {}
        self.held: dict[int, Grant] = {}
        self.over: list[Grant] = []
        self.repeats = 0

    @property
    def ledger(self) -> NotedLedger:
        return self.bench.ledger

    # what the model does when something happens

    def check_decisions(self, since: int) -> None:
        """The ledger may do by itself what the policy says, to who is too slow or too old, and nothing else."""
        version = self.ledger.window.version
        for event in self.bench.decisions(since):
            known = self.live[event.group]
            assert known.oldest is not None
            assert known.trained_at is None
            ready = BY_NAME["trainer"].requires <= known.sections
            stale = known.oldest + self.s < version
            if event.kind == "postpone" and event.body["due"] != LATE:
                # of a step that was made again without it, or late and readmitted
                assert ready
                assert not stale or self.policy == "down_weight"
                known.excused = False
                continue
            if ready:
                assert stale, "a group that could leave is no straggler"
            else:
                assert self.policy != "wait"
                assert self.bench.clock.now() - self.served >= PATIENCE
            if event.kind == "postpone":
                assert self.policy == "down_weight"
                known.excused = True
            elif event.kind == "regenerate":
                assert self.policy == "regenerate"
                self.regenerated += 1
                self.let_go(event.group)
                self.live[event.group] = Known(known.seq, known.purpose, sections=set(ORIGINAL))
            else:
                assert event.body["end"] == ("dead" if self.policy == "regenerate" else "dropped")
                self.forget(event.group, event.body["end"])

    def let_go(self, group: str) -> None:
        for lease_id in [i for i, grant in self.held.items() if grant.lease.group == group]:
            self.over.append(self.held.pop(lease_id))

    def forget(self, group: str, end: str) -> None:
        self.ended[group] = end
        known = self.live.pop(group)
        if known.purpose == "train" and known.oldest is None:
            self.ended[group] = "never started"
        self.let_go(group)

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
            assert sum(line.startswith(f"{lease.stage}, attempt") for line in history) >= 3
            self.forget(lease.group, "dead")
        elif lease.stage == "rollout":
            self.live[lease.group].oldest, self.live[lease.group].excused = None, False
        elif lease.stage == "trainer":
            self.live[lease.group].excused = grant.record.due == LATE

    def put_and_ack(self, grant: Grant) -> None:
        place = list(self.held.values()).index(grant)
        self.put(place, repeat=False)
        self.ack(list(self.held.values()).index(grant))

    # what can happen

    @rule(count=st.integers(1, 4), purpose=st.sampled_from(["train", "train", "eval"]))
    def add(self, count: int, purpose: str) -> None:
        for _ in range(count):
            seq = self.ledger.next_seq[purpose]
            length = seq * 7 % 30  # also unknown ones
            assert self.bench.add(seq, purpose, min_version=0, length=length)  # pyright: ignore[reportArgumentType]
            self.live[f"{purpose}-{seq}"] = Known(seq, purpose)

    @rule(back=st.integers(1, 5))
    def add_again(self, back: int) -> None:
        seq = self.ledger.next_seq["train"] - back
        if seq >= 0:
            assert not self.bench.add(seq)
            self.repeats += 1

    @rule(
        worker=st.sampled_from(WORKERS),
        want=st.integers(0, 5),
        lag=st.sampled_from([0, 0, 0, 1, 2, 5]),
        lane=st.sampled_from([None, None, 0, 1, 2]),
    )
    def lease_rollout(self, worker: str, want: int, lag: int, lane: int | None = None) -> None:
        version = max(0, self.ledger.window.reached - lag)
        lane = None if self.in_order else lane
        since = len(self.bench.events)
        grants = self.bench.lease("rollout", want, version, worker=worker, lane=lane)
        self.check_decisions(since)
        assert len(grants) <= want
        self.took(grants, "rollout", worker, version)

    @rule(worker=st.sampled_from(WORKERS), want=st.integers(0, 5), stage=st.sampled_from(MIDDLE))
    def lease_middle(self, worker: str, want: int, stage: str) -> None:
        self.took(self.bench.lease(stage, want, worker=worker), stage, worker, 0)

    @rule(want=st.integers(0, 4), at_least=st.integers(1, 4))
    def lease_trainer(self, want: int, at_least: int) -> None:
        version, since = self.ledger.window.version, len(self.bench.events)
        grants = self.bench.lease("trainer", want, at_least=at_least, worker="a")
        self.check_decisions(since)
        if grants:
            self.served = self.bench.clock.now()
        assert len(grants) <= want
        assert not grants or len(grants) >= min(want, at_least) or self.ledger.exhausted
        for grant in grants:
            known = self.live[grant.lease.group]
            assert known.oldest is not None
            late_by = version - (known.oldest + self.s)
            assert late_by <= 0 or self.policy == "down_weight"
            assert grant.record.weight == (0.5**late_by if late_by > 0 else 1.0)
            known.excused = False
            mine = {g.lease.group for g in self.held.values() if g.lease.stage == "trainer"}
            before = [group for group in self.again.get(version, [])
                      if group in self.live and self.live[group].trained_at is None and group not in mine]  # fmt: skip
            assert not before or self.in_order or grant.lease.group == before[0], "another order when made again"
            if self.in_order:
                mine = {g.lease.group for g in self.held.values() if g.lease.stage == "trainer"}
                left = [k.seq for name, k in self.live.items()
                        if k.purpose == "train" and name not in mine and k.trained_at is None]  # fmt: skip
                assert known.seq == min(left)
            self.took([grant], "trainer", "a", version)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99), repeat=st.booleans(), older=st.sampled_from([0, 0, 0, 1, 3]))
    def put(self, pick: int, repeat: bool, older: int = 0) -> None:
        grant = list(self.held.values())[pick % len(self.held)]
        already, known = set(grant.lease.staged), self.live[grant.lease.group]
        oldest = max(0, (known.oldest or 0) - (0 if self.in_order else older))
        if grant.lease.stage == "rollout":
            known.oldest = oldest
        spans = (oldest, self.ledger.window.reached) if grant.lease.stage == "rollout" else None
        fresh = self.bench.put(grant, spans, tokens=known.seq % 5)
        assert set(fresh) == BY_NAME[grant.lease.stage].adds - already
        self.repeats += len(already)
        if repeat and fresh:
            assert self.bench.put(grant, spans, tokens=known.seq % 5) == []
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
            version = known.trained_at = self.ledger.window.version
            assert not any(grant.lease.group in batch for batch in self.batches.values()), "trained twice"
            self.batches.setdefault(version, []).append(grant.lease.group)
            if grant.record.weight < 1:
                self.down_weighted.add(grant.lease.group)
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
        since = len(self.bench.events)
        assert {lease.id for lease in self.ledger.expire(now)} == {grant.lease.id for grant in due}
        for grant in due:
            self.gave_back(grant, fault=True)
        self.check_decisions(since)

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

    @rule(back=st.integers(0, 3))
    def resume_the_trainer(self, back: int) -> None:
        """It comes back from a checkpoint that is not older than the last one it told of."""
        version = self.ledger.window.version - back
        if version < self.committed:
            with pytest.raises(WireError):
                self.ledger.resume(version, self.bench.clock.now())
            return
        self.ledger.resume(version, self.bench.clock.now())
        for grant in [grant for grant in self.held.values() if grant.lease.stage == "trainer"]:
            self.gave_back(grant, fault=False)
        for step in [step for step in self.batches if step >= version]:
            batch = self.batches.pop(step)
            self.again[step] = batch
            for group in batch:
                self.live[group].trained_at = None
                self.down_weighted.discard(group)

    @rule()
    def restart_the_broker(self) -> None:
        """Nothing but times is lost: those of leases, and how long the trainer waits."""
        before = self.bench.portrait()
        self.bench.restart()
        assert self.bench.portrait() == before
        self.repeats = self.ledger.counts.repeated
        for lease_id, grant in self.held.items():
            books = self.ledger.books
            self.held[lease_id] = Grant(books.leases[lease_id], books.records[grant.lease.group], grant.sections)

    @rule(behind=st.integers(0, 2))
    def commit(self, behind: int) -> None:
        version = self.ledger.window.version - behind
        self.ledger.commit(version)
        self.committed = max(self.committed, version)
        for step in [step for step in self.batches if step < version]:
            del self.batches[step]
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

    @rule(want=st.integers(1, 4), times=st.integers(1, 4), commit=st.booleans())
    def train(self, want: int, times: int, commit: bool) -> None:
        for _ in range(times):
            self.work("b", 4, 6)
            self.lease_trainer(want, 1)
            for grant in [grant for grant in self.held.values() if grant.lease.stage == "trainer"]:
                self.put_and_ack(grant)
            self.update()
        if commit:
            self.commit(0)

    @rule(
        slow=st.integers(1, 3),
        want=st.integers(1, 4),
        stages=st.integers(0, 3),
        older=st.sampled_from([0, 0, 1, 3]),
        restart=st.booleans(),
    )
    def keep_the_trainer_waiting(self, slow: int, want: int, stages: int, older: int, restart: bool) -> None:
        """Some groups get stuck at a stage; the others go on, and the trainer asks in vain."""
        self.add(2, "train")
        before = set(self.held)
        self.lease_rollout("b", 6, 0)
        mine = [lease_id for lease_id in self.held if lease_id not in before]
        if stages == 0:
            mine = mine[slow:]
        for lease_id in mine:
            self.put(list(self.held).index(lease_id), repeat=False, older=older)
            self.ack(list(self.held).index(lease_id))
        for stage in ("reward", "reference", "advantage"):
            before = set(self.held)
            self.lease_middle("b", 100, stage)
            mine = [lease_id for lease_id in self.held if lease_id not in before]
            for lease_id in mine[slow if stage == MIDDLE[stages - 1] and stages else 0 :]:
                self.put_and_ack(self.held[lease_id])
        self.lease_trainer(want, 1)
        self.lease_trainer(want, 1)
        self.let_time_pass(6.0, WORKERS)
        self.lease_trainer(want, 1)
        if restart:
            self.restart_the_broker()

    @rule(times=st.integers(1, 3))
    def catch_up(self, times: int) -> None:
        """Whoever is slow gets done at last, and the trainer goes on."""
        for lease_id in list(self.held):
            if lease_id in self.held and self.held[lease_id].lease.stage != "trainer":
                self.put_and_ack(self.held[lease_id])
        self.train(4, times, commit=False)

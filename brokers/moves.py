"""What can happen to groups, once it is decided. A move does not ask whether it may happen: the same moves in the same
order make the same ledger, and that is how one comes back from a journal.

                grant                 put + ack by every stage             ack(step), advance         commit
    waiting ──────────────▶ started ───────────────────────────▶ ready ─────────────────────▶ trained ──────▶ gone
       ▲                       │                                  │  ▲                           │
       └───────────────────────┴──────────────────────────────────┘  └───────────────────────────┘
         give_back of the rollout lease; regenerate               rewind
    any state before trained ──▶ dropped(reason) | dead(reason)
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable

from brokers.books import Books
from brokers.record import DEAD_LETTERS, ROLLOUT, TRAINER, Counts, End, Grant, Lease, Limits, Record, StageSpec
from brokers.window import Window
from common.group import PolicyVersion


class Moves:
    """The state of a ledger and its moves. Window, books and counts agree after each."""

    def __init__(self, stages: Iterable[StageSpec], limits: Limits, on_free: Callable[[str, str], None]) -> None:
        self.limits = limits
        self.books = Books(stages, limits, on_free)
        self.window = Window(limits.groups_per_step, limits.max_staleness, limits.total_groups)
        self.counts = Counts()
        self.dead_letters: deque[tuple[str, list[str]]] = deque(maxlen=DEAD_LETTERS)
        self.committed: PolicyVersion = 0
        self.uncommitted: defaultdict[PolicyVersion, list[Record]] = defaultdict(list)
        """by the step that trained them, in the order in which the trainer acknowledged them"""

    def grant(self, stage: str, worker: str, group: str, now: float, deadline: PolicyVersion | None = None) -> Grant:
        """Lease a group. `deadline`: that a train group gets with its start, from rollout's lease."""
        grant = self.books.grant(stage, worker, group, now, self.limits.lease_seconds)
        record = grant.record
        if stage == ROLLOUT and deadline is not None:
            record.deadline = record.due = deadline
            self.window.start(deadline)
            self.books.started[group] = record
            self.counts.started += 1
        if stage == TRAINER and record.deadline is not None:
            self.window.hand_out(record.due)
            self.books.order.remove(group)
            del self.books.started[group]
            record.handed = True
            late_by = self.window.version - record.deadline
            record.weight = self.limits.late_factor**late_by if late_by > 0 else 1.0
        return grant

    def begin(self, record: Record, deadline: PolicyVersion, now: float) -> None:
        """Count a group as started that somebody else has generated, as in a replay for the trainer."""
        record.deadline = record.due = deadline
        self.window.start(deadline)
        self.books.started[record.key.id] = record
        self.counts.started += 1
        self.books.refresh(record, now)

    def give_back(self, lease: Lease, reason: str, now: float, *, fault: bool = True) -> None:
        """End a lease without a result. With `fault` it is an attempt, and after `max_attempts` the group is dead."""
        if lease.id not in self.books.leases:
            return  # the group ended with another of its leases
        record, stage = self.books.records[lease.group], lease.stage
        self.books.end_lease(lease, keep=False)
        if fault:
            record.history.append(f"{stage}, attempt {lease.attempt}, {lease.worker}: {reason}")
        else:
            record.attempts[stage] -= 1
        if stage == TRAINER and record.deadline is not None:
            self.window.take_back(record.due)
            self._wait_for_trainer(record)
        if fault and record.attempts[stage] >= self.limits.max_attempts:
            self.finish(record, "dead", f"{stage}: {reason}")
            return
        if stage == ROLLOUT and record.deadline is not None:
            self._unstart(record)
            self.counts.restarted += 1
        self.books.refresh(record, now)

    def finish(self, record: Record, end: End, reason: str) -> None:
        """End a group as dropped or dead. Train groups are counted if they were started."""
        if record.deadline is not None:
            self.window.give_up(record.due, handed=record.handed)
            self.counts.count_end(end, reason)
        elif not record.is_train:
            self.counts.evaluation_lost += 1
        if end == "dead":
            self.dead_letters.append((record.key.id, record.history))
        self.books.forget(record)
        self.books.changed |= {ROLLOUT, TRAINER}

    def regenerate(self, record: Record, reason: str, now: float) -> None:
        """Let a started group begin anew: what stages added is freed, its credit returns, its leases end."""
        record.history.append(f"{ROLLOUT}, attempt {record.attempts[ROLLOUT]}: {reason}, generated again")
        self._unstart(record)
        self.books.reset(record)
        record.attempts = Counter({ROLLOUT: record.attempts[ROLLOUT]})
        record.version_min = record.version_max = -1
        record.tokens, record.generated = 0, 0.0
        self.counts.regenerated += 1
        self.books.refresh(record, now)

    def postpone(self, record: Record, due: PolicyVersion, now: float) -> None:
        """Let a started group be due by another step. `LATE`: the trainer goes on without it, it may come late."""
        self.window.postpone(record.due, due)
        record.due, record.place = due, -1
        self.books.refresh(record, now)
        self.books.changed |= {ROLLOUT, TRAINER}

    def advance(self, version: PolicyVersion) -> None:
        """The trainer made the update to `version`: what it acknowledged for the step before is trained."""
        done = self.uncommitted[version - 1]
        self.window.advance(version, len(done))
        self.counts.trained += len(done)
        self.books.changed |= {ROLLOUT, TRAINER}

    def commit(self, version: PolicyVersion) -> None:
        """The checkpoint of `version` is on disk: what was trained before it can go."""
        self.committed = max(self.committed, version)
        for step in [step for step in self.uncommitted if step < version]:
            for record in self.uncommitted.pop(step):
                self.books.forget(record)

    def rewind(self, version: PolicyVersion, now: float) -> None:
        """The trainer is at `version` again: it will get what it has trained since, as it got it before."""
        for lease in [lease for lease in self.books.leases.values() if lease.stage == TRAINER]:
            self.give_back(lease, f"the trainer went back to version {version}", now, fault=False)
        again = {step: self.uncommitted.pop(step) for step in sorted(self.uncommitted) if step >= version}
        self.counts.trained -= sum(len(records) for step, records in again.items() if step < self.window.version)
        self.window.rewind(version, {step: len(records) for step, records in again.items()})
        for step, records in again.items():
            for place, record in enumerate(records):
                record.trained_step = None
                record.due, record.place = step, place
                record.attempts[TRAINER] -= 1
                self.counts.down_weighted -= record.weight < 1
                self._wait_for_trainer(record)
                self.books.refresh(record, now)
        self.books.changed |= {ROLLOUT, TRAINER}

    def _wait_for_trainer(self, record: Record) -> None:
        record.handed = False
        self.books.started[record.key.id] = record
        self.books.wait_in_order(record)

    def _unstart(self, record: Record) -> None:
        self.window.give_up(record.due, handed=False)
        self.books.started.pop(record.key.id)
        record.deadline, record.due, record.place = None, 0, -1
        self.counts.started -= 1
        self.books.changed |= {ROLLOUT, TRAINER}  # a credit is free, and its due step kept others back

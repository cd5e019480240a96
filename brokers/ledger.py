"""The ledger of groups: what is where, who holds it, and how it ended. A pure state machine; time is passed in.

A group enters with its prompt sections. It is ready for a stage when every section that the stage requires is here. A
stage leases it, puts the sections it adds, and acknowledges; a section is freed when no pending stage requires it. For
the trainer that moment is `commit`: until the checkpoint of its step is on disk, a trained group can come back.

                lease                 put + ack by every stage             ack(step), advance         commit
    waiting ──────────────▶ started ───────────────────────────▶ ready ─────────────────────▶ trained ──────▶ gone
       ▲   admission gate      │                                    hand-out gate
       └───────────────────────┘ expiry or return of the rollout lease; its credit returns with it
    any state before trained ──▶ dropped(reason) | dead(reason)
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from brokers import refusals
from brokers.books import Books
from brokers.record import DEAD_LETTERS, ROLLOUT, TRAINER, Counts, End, Grant, Lease, Limits, Record, StageSpec
from brokers.window import Window
from common.group import GroupKey, PolicyVersion
from common.section import SectionInfo


def _ignore(_group: str, _section: str) -> None:
    """Nobody keeps bytes."""


class Ledger:
    """See the module. `on_free(group, section)` is called when a section's bytes are no longer needed."""

    def __init__(
        self, stages: Iterable[StageSpec], limits: Limits, on_free: Callable[[str, str], None] = _ignore
    ) -> None:
        self.limits = limits
        self.books = Books(stages, on_free)
        self.window = Window(limits.groups_per_step, limits.max_staleness, limits.total_groups)
        self.counts = Counts()
        self.next_seq = {"train": 0, "eval": 0}
        self.data_ended = False
        self.ended: tuple[str, str] | None = None
        self.dead_letters: deque[tuple[str, list[str]]] = deque(maxlen=DEAD_LETTERS)
        self._acked: defaultdict[PolicyVersion, list[Record]] = defaultdict(list)  # by the step that trained them

    def room_for(self, key: GroupKey, sections: Sequence[SectionInfo]) -> str | None:
        """Return None if a new group fits into the rollout queue, else the queue and the bound that it would exceed."""
        queue = self.books.queues[ROLLOUT]
        size = sum(info.length for info in sections if info.name in self.books.stages[ROLLOUT].requires)
        if key.purpose == "eval" or queue.groups == 0 or key.seq < self.next_seq["train"]:
            return None
        reached = queue.bound_reached(size, self.limits.max_queue_groups, self.limits.max_queue_bytes)
        return reached and f"queue {ROLLOUT!r} holds {reached}"

    def add(self, key: GroupKey, sections: Sequence[SectionInfo], now: float) -> bool:
        """Take in a new group; False if this prompt was taken in before (a repeat, ignored) or the run is over."""
        refusals.new_group(self.books, key, sections)
        if key.seq < self.next_seq[key.purpose] or self.ended:
            self.counts.repeated += 1
            return False
        self.next_seq[key.purpose] = key.seq + 1
        pending = {name for name, stage in self.books.stages.items() if key.purpose in stage.purposes}
        self.books.insert(Record(key, pending, now, {info.name: info for info in sections}), now)
        return True

    def lease(
        self, stage: str, worker: str, want: int, now: float, *, version: PolicyVersion = 0, at_least: int = 1
    ) -> list[Grant]:
        """Hand out up to `want` groups. `version`: rollout, the version loaded; trainer, the step it works on.

        `at_least`: fewer are not handed to the trainer, unless no more will come; `want` asks for a closed batch.
        """
        if self.ended:
            return []
        if stage == ROLLOUT:
            return self._lease_rollout(worker, want, now, version)
        if stage == TRAINER:
            return self._lease_trainer(worker, want, now, version, at_least)
        queue, granted = self.books.queues[stage], list[Grant]()
        while len(granted) < want and queue.first() is not None:
            granted.append(self._grant(stage, worker, queue.pop(), now))
        return granted

    def put(
        self,
        lease_id: int,
        worker: str,
        sections: Sequence[SectionInfo],
        versions: tuple[PolicyVersion, PolicyVersion] = (-1, -1),
        tokens: int = 0,
    ) -> list[str]:
        """Stage the sections of a leased group until its ack; return the names that are new.

        `versions`: oldest and newest policy version in the group's spans; -1 from other stages than rollout.
        Raises `LeaseLost`, or `WireError` for a section that the stage does not add or a version that cannot be.
        """
        lease, record = self.books.held(lease_id, worker)
        refusals.foreign_sections(self.books.stages[lease.stage], sections)
        if lease.stage == ROLLOUT:
            refusals.spans(record, versions, self.window.version)
        fresh = [info for info in sections if info.name not in lease.staged]
        self.counts.repeated += len(sections) - len(fresh)
        lease.staged.update({info.name: info for info in fresh})
        if lease.stage == ROLLOUT:
            record.version_min, record.version_max, record.tokens = *versions, tokens
            if record.deadline is not None:
                deadline = min(record.deadline, versions[0] + self.limits.max_staleness)
                self.window.postpone(record.deadline, deadline)
                record.deadline = deadline
        return [info.name for info in fresh]

    def ack(self, lease_id: int, worker: str, now: float, step: PolicyVersion = -1) -> None:
        """The stage is done with the group. `step`: the version that the trainer updated with it.

        Raises `LeaseLost`, or `WireError` when a section that the stage adds was not put.
        """
        lease, record = self.books.held(lease_id, worker)
        refusals.unfinished(self.books.stages[lease.stage], record, list(lease.staged))
        if lease.stage == TRAINER:
            refusals.other_step(f"group {record.key.id} is acknowledged for step", step, self.window.version)
        self.books.end_lease(lease, keep=True)
        self.books.queues[lease.stage].leave(record.key.id)
        if lease.stage == TRAINER:
            record.trained_step = step
            self._acked[step].append(record)
            return
        if lease.stage == ROLLOUT:
            record.generated = now
        record.pending.discard(lease.stage)
        self.books.free_unneeded(record)
        self.books.refresh(record, now, in_order=self.limits.in_order)
        if not record.pending:
            self.counts.evaluated += 1
            self.books.forget(record)

    def advance(self, version: PolicyVersion) -> None:
        """The trainer made an update: what it acknowledged for the version before is trained. Repeats are ignored.

        Raises `WireError` for any version but the next.
        """
        if version == self.window.version:
            return
        refusals.other_step("trainer says that it reached version", version, self.window.version + 1)
        done = self._acked[version - 1]
        self.window.advance(version, len(done))
        self.counts.trained += len(done)
        self.books.changed |= {ROLLOUT, TRAINER}

    def commit(self, version: PolicyVersion) -> None:
        """The checkpoint of `version` is on disk: what was trained before it can go."""
        refusals.future_version("checkpoint", version, self.window.version)
        for step in [step for step in self._acked if step < version]:
            for record in self._acked.pop(step):
                self.books.forget(record)

    def nack(self, lease_id: int, worker: str, reason: str, now: float, *, fault: bool = True) -> None:
        """Give a group back. With `fault` it counts as an attempt; after `max_attempts` the group is dead."""
        lease, _ = self.books.held(lease_id, worker)
        self._give_back(lease, reason, now, fault=fault)

    def extend(self, worker: str, now: float) -> None:
        """A sign of life: all leases of this worker run anew."""
        for lease in self.books.held_by(worker):
            lease.expires = now + self.limits.lease_seconds

    def expire(self, now: float) -> list[Lease]:
        """End the leases that ran out and return them."""
        over = [lease for lease in self.books.leases.values() if lease.expires <= now]
        for lease in over:
            self.counts.expired += 1
            self._give_back(lease, f"silent for {self.limits.lease_seconds:g} s", now)
        return over

    def lost(self, worker: str, reason: str, now: float) -> list[Lease]:
        """End all leases of a worker that is known to be gone and return them."""
        held = self.books.held_by(worker)
        for lease in held:
            self._give_back(lease, reason, now)
        return held

    def drop(self, group: str, reason: str) -> None:
        """End a group without training it; its credit returns. An unknown or trained group is left alone."""
        record = self.books.records.get(group)
        if record is not None and record.trained_step is None:
            self._finish(record, "dropped", reason)

    def end_of_data(self) -> None:
        """No further train group will be added."""
        self.data_ended = True
        self.books.changed |= {ROLLOUT, TRAINER}

    def end(self, state: str, reason: str) -> None:
        """The run is over: what is started and in no update is dropped, nothing is handed out any more."""
        if self.ended:
            return
        for record in list(self.books.records.values()):
            if record.trained_step is not None and record.trained_step < self.window.version:
                self.books.forget(record)
            else:
                self._finish(record, "dropped", "run ended")
        self._acked.clear()
        self.ended = (state, reason)
        self.books.changed |= set(self.books.stages)

    @property
    def exhausted(self) -> bool:
        """No train group is left that could still reach the trainer."""
        total = self.limits.total_groups
        used = self.window.trained + self.window.outstanding
        all_started = self.data_ended and self.books.queues[ROLLOUT].groups == 0
        return (all_started or (total is not None and used >= total)) and self.window.waiting == 0

    def starved(self, stage: str, version: PolicyVersion) -> str:
        """Say why a lease of this stage returned nothing."""
        if self.ended:
            return "run ended"
        if stage == ROLLOUT and self.window.credits(version) == 0:
            return f"waiting for credit at version {version}"
        if stage == ROLLOUT:
            return "no more prompts" if self.data_ended else "waiting for prompts"
        if stage == TRAINER and self.exhausted:
            return "no more groups"
        return f"waiting for groups in queue {stage!r}"

    def _lease_rollout(self, worker: str, want: int, now: float, version: PolicyVersion) -> list[Grant]:
        refusals.future_version(f"rollout worker {worker}", version, self.window.version)
        granted, evaluation, queue = list[Grant](), self.books.evaluation, self.books.queues[ROLLOUT]
        while len(granted) < want and (group := evaluation.first()) is not None:
            if self.books.records[group].key.min_version > version:
                break
            granted.append(self._grant(ROLLOUT, worker, evaluation.pop(), now))
        while len(granted) < want and queue.first() is not None and self.window.credits(version) > 0:
            grant = self._grant(ROLLOUT, worker, queue.pop(), now)
            grant.record.deadline = self.window.start(version)
            self.counts.started += 1
            granted.append(grant)
        return granted

    def _lease_trainer(self, worker: str, want: int, now: float, version: PolicyVersion, at_least: int) -> list[Grant]:
        refusals.other_step("trainer asks for groups of step", version, self.window.version)
        queue, granted = self.books.queues[TRAINER], list[Grant]()
        while len(granted) < want and (group := queue.first()) is not None:
            record = self.books.records[group]
            assert record.deadline is not None, "a train group has a deadline from its start"
            if record.deadline < version:
                self._finish(record, "dropped", "stale")
                continue
            next_in_order = not self.limits.in_order or self.books.order.first() == group
            if not (next_in_order and self.window.may_leave(record.deadline)):
                break
            queue.pop()
            self.books.order.remove(group)
            self.window.hand_out(record.deadline)
            record.handed = True
            granted.append(self._grant(TRAINER, worker, group, now))
        if len(granted) < min(at_least, want) and not self.exhausted:
            for grant in granted:
                self._give_back(grant.lease, "too few", now, fault=False)
            self.books.changed.discard(TRAINER)  # nothing has changed for whoever waits
            return []
        return granted

    def _grant(self, stage: str, worker: str, group: str, now: float) -> Grant:
        return self.books.grant(stage, worker, group, now, self.limits.lease_seconds)

    def _give_back(self, lease: Lease, reason: str, now: float, *, fault: bool = True) -> None:
        if lease.id not in self.books.leases:
            return  # the group ended with another of its leases
        record, stage = self.books.records[lease.group], lease.stage
        self.books.end_lease(lease, keep=False)
        if fault:
            record.history.append(f"{stage}, attempt {lease.attempt}, {lease.worker}: {reason}")
        else:
            record.attempts[stage] -= 1
        if stage == TRAINER and record.deadline is not None:
            self.window.take_back(record.deadline)
            self.books.order.push(record.key.id, (0, record.key.seq))
            record.handed = False
        if fault and record.attempts[stage] >= self.limits.max_attempts:
            self._finish(record, "dead", f"{stage}: {reason}")
            return
        if stage == ROLLOUT and record.deadline is not None:
            self.window.give_up(record.deadline, handed=False)
            record.deadline = None
            self.counts.started -= 1
            self.counts.restarted += 1
            self.books.changed.add(TRAINER)  # its deadline kept others back
        self.books.refresh(record, now, in_order=self.limits.in_order)

    def _finish(self, record: Record, end: End, reason: str) -> None:
        """End a group as dropped or dead. Train groups are counted if they were started."""
        if record.deadline is not None:
            self.window.give_up(record.deadline, handed=record.handed)
            self.counts.count_end(end, reason)
        elif not record.is_train:
            self.counts.evaluation_lost += 1
        if end == "dead":
            self.dead_letters.append((record.key.id, record.history))
        self.books.forget(record)
        self.books.changed |= {ROLLOUT, TRAINER}

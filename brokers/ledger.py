"""The ledger of groups: what is where, who holds it, and how it ended. A pure state machine; time is passed in.

A group enters with its prompt sections. It is ready for a stage when every section that the stage requires is here. A
stage leases it, puts the sections it adds, and acknowledges; a section is freed when no pending stage requires it. For
the trainer that moment is `commit`: until the checkpoint of its step is on disk, a trained group can come back, and
does when the trainer says that it resumes from an earlier one.

Three layers: `brokers.moves` is what can happen to a group, `brokers.gates` decides who starts and who leaves, and here
are the verbs: what workers say, checked, and turned into moves.
"""

from collections.abc import Callable, Iterable, Sequence

from brokers import refusals
from brokers.gates import Gates
from brokers.record import ROLLOUT, TRAINER, End, Grant, Lease, Limits, Record, StageSpec
from common.group import GroupKey, PolicyVersion
from common.section import SectionInfo


def _ignore(_group: str, _section: str) -> None:
    """Nobody keeps bytes."""


class Ledger(Gates):
    """See the module. `on_free(group, section)` is called when a section's bytes are no longer needed."""

    def __init__(
        self, stages: Iterable[StageSpec], limits: Limits, on_free: Callable[[str, str], None] = _ignore
    ) -> None:
        super().__init__(stages, limits, on_free)
        self.next_seq = {"train": 0, "eval": 0}

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
        record = Record(key, set(), now, {info.name: info for info in sections})
        record.pending = self.books.pending(record)
        self.books.insert(record, now)
        return True

    def lease(
        self,
        stage: str,
        worker: str,
        want: int,
        now: float,
        *,
        version: PolicyVersion = 0,
        at_least: int = 1,
        lane: int | None = None,
    ) -> list[Grant]:
        """Hand out up to `want` groups. `version`: rollout, the version loaded; trainer, the step it works on.

        `at_least`: fewer are not handed to the trainer, unless no more will come; `want` asks for a closed batch.
        `lane`: rollout, the lane of predicted lengths that it wants first. Raises `WireError` for a version that is
        not, or a lane that is not.
        """
        if self.ended:
            return []
        if stage == ROLLOUT:
            return self.lease_rollout(worker, want, now, version, lane)
        if stage == TRAINER:
            return self.lease_trainer(worker, want, now, version, at_least)
        queue, granted = self.books.queues[stage], list[Grant]()
        while len(granted) < want and (group := queue.first(now)) is not None:
            granted.append(self.grant(stage, worker, group, now))
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
            refusals.spans(record, versions, self.window.reached)
        fresh = [info for info in sections if info.name not in lease.staged]
        self.counts.repeated += len(sections) - len(fresh)
        lease.staged.update({info.name: info for info in fresh})
        if lease.stage == ROLLOUT:
            record.version_min, record.version_max, record.tokens = *versions, tokens
            if record.deadline is not None:
                deadline = min(record.deadline, versions[0] + self.limits.max_staleness)
                if record.due == record.deadline:
                    self.window.postpone(record.deadline, deadline)
                    record.due = deadline
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
            self.counts.down_weighted += record.weight < 1
            self.uncommitted[step].append(record)
            return
        if lease.stage == ROLLOUT:
            record.generated = now
        record.pending.discard(lease.stage)
        self.books.free_unneeded(record)
        self.books.refresh(record, now)
        if not record.pending:
            self.counts.evaluated += 1
            self.books.forget(record)

    def advance(self, version: PolicyVersion) -> None:
        """The trainer made an update: what it acknowledged for the version before is trained. Repeats are ignored.

        Raises `WireError` for any version but the next.
        """
        if version != self.window.version:
            refusals.other_step("trainer says that it reached version", version, self.window.version + 1)
            super().advance(version)

    def commit(self, version: PolicyVersion) -> None:
        """The checkpoint of `version` is on disk: what was trained before it can go."""
        refusals.future_version("checkpoint", version, self.window.version)
        super().commit(version)

    def resume(self, version: PolicyVersion, now: float) -> None:
        """The trainer came back from the checkpoint of `version`; what it trained since will be handed to it again.

        In the same order and in the same steps. Groups that were started since stay, with the deadlines that the
        versions of their workers gave them, and these workers may start what they could have started before: staleness
        is the trainer's version at the update minus the oldest span, so a trainer that is behind makes no group older.
        A version that is made again counts as what it was before: it is made of the same groups.
        Raises `WireError` for a version before the last commit, or one that was not reached.
        """
        refusals.resumed(version, self.committed, self.window.version)
        if not self.ended:
            self.rewind(version, now)

    def nack(self, lease_id: int, worker: str, reason: str, now: float, *, fault: bool = True) -> None:
        """Give a group back. With `fault` it counts as an attempt; after `max_attempts` the group is dead."""
        lease, _ = self.books.held(lease_id, worker)
        self.give_back(lease, reason, now, fault=fault)

    def extend(self, worker: str, now: float) -> None:
        """A sign of life: all leases of this worker run anew."""
        for lease in self.books.held_by(worker):
            lease.expires = now + self.limits.lease_seconds

    def expire(self, now: float) -> list[Lease]:
        """End the leases that ran out and return them; deal with stragglers that the trainer waits for."""
        over = self.books.run_out(now)
        for lease in over:
            self.counts.expired += 1
            self.end_vigil(lease.worker)
            self.give_back(lease, f"silent for {self.limits.lease_seconds:g} s", now)
        if not self.ended:
            self.keep_vigil(now)
        return over

    def lost(self, worker: str, reason: str, now: float) -> list[Lease]:
        """End all leases of a worker that is known to be gone and return them."""
        held = self.books.held_by(worker)
        self.end_vigil(worker)
        for lease in held:
            self.give_back(lease, reason, now)
        return held

    def drop(self, group: str, reason: str, end: End = "dropped") -> None:
        """End a group without training it; its credit returns. An unknown or trained group is left alone."""
        record = self.books.records.get(group)
        if record is not None and record.trained_step is None:
            self.finish(record, end, reason)

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
                self.finish(record, "dropped", "run ended")
        self.uncommitted.clear()
        self.ended = (state, reason)
        self.books.changed |= set(self.books.stages)

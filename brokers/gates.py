"""Who may start a group, which groups leave for the trainer, and what becomes of those that it is kept waiting for.

A group is a straggler when it keeps the trainer from its next batch for `straggler_seconds`: the trainer has asked and
got nothing, others are ready or in its hands, and the slots that are left belong to groups that are not ready (see
`Window.tight`). Whenever something gets ready or leaves, the time begins anew. Of the groups in question as many as
could be replaced are taken, the earliest due and longest under way first, and by the setting

* `wait`: nothing happens. The bound holds, nothing is lost, and responses are not biased towards short ones.
* `drop`: they end as dropped.
* `regenerate`: they return to the rollout queue, and get version and deadline of their new start; this is bounded by
  rollout's attempts.
* `down_weight`: the trainer goes on without them; their credits return, and at most one batch of groups is excused at
  any time. One that comes late is trained all the same, with a weight below 1, as soon as that makes no other miss its
  deadline. When all slots are spoken for it takes the next free credit, before any new start, and is due like one.

A group that is found too old when it could leave is dropped as stale, under `regenerate` and `down_weight` treated as
those do. With a trainer that went back to a checkpoint, a group may be newer than the trainer: its age counts as 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from brokers import refusals
from brokers.books import EXCUSED_LANE, ON_TIME_LANE, READMITTED_LANE
from brokers.moves import Moves
from brokers.record import ROLLOUT, TRAINER, Grant, Limits, Record, StageSpec
from brokers.window import LATE
from common.group import PolicyVersion


@dataclass(slots=True)
class Vigil:
    """How long the trainer has waited with nothing moving. `worker`: the trainer that got nothing, empty: none waits.

    `seen`: what was there when its wait began, None: no group keeps it.
    """

    worker: str = ""
    since: float = 0.0
    seen: tuple[int, ...] | None = None


class Gates(Moves):
    """Decides by the window and the settings what `Moves` then does."""

    def __init__(self, stages: Iterable[StageSpec], limits: Limits, on_free: Callable[[str, str], None]) -> None:
        super().__init__(stages, limits, on_free)
        self.data_ended = False
        self.ended: tuple[str, str] | None = None
        self._vigil = Vigil()

    @property
    def exhausted(self) -> bool:
        """No train group is left that could still reach the trainer, or that it has a step for."""
        window, total = self.window, self.limits.total_groups
        if total is not None and window.trained + window.handed >= total:
            return True
        return self.data_ended and self.books.queues[ROLLOUT].groups == 0 and window.waiting + window.late == 0

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

    def lease_rollout(
        self, worker: str, want: int, now: float, version: PolicyVersion, lane: int | None
    ) -> list[Grant]:
        """Let a worker start what it may: eval groups by their version, train groups by credit."""
        refusals.future_version(f"rollout worker {worker}", version, self.window.reached)
        refusals.unknown_lane(lane, self.limits)
        granted, evaluation, queue = list[Grant](), self.books.evaluation, self.books.queues[ROLLOUT]
        while len(granted) < want and (group := evaluation.first()) is not None:
            if self.books.records[group].key.min_version > version:
                break
            granted.append(self.grant(ROLLOUT, worker, group, now))
        self._readmit(now)
        while len(granted) < want and self.window.credits(version) > 0:
            group = queue.first(now, lane)
            if group is None:
                break
            granted.append(self.grant(ROLLOUT, worker, group, now, self.window.admit(version)))
        return granted

    def lease_trainer(self, worker: str, want: int, now: float, version: PolicyVersion, at_least: int) -> list[Grant]:
        """Hand out what may leave, all or nothing: not less than `at_least`, unless no more will come."""
        refusals.other_step("trainer asks for groups of step", version, self.window.version)
        leaving = self._leaving(want, min(at_least, want), now)
        if not leaving and want > 0 and not self.exhausted:
            self._vigil.worker = worker
            if self.keep_vigil(now):
                leaving = self._leaving(want, min(at_least, want), now)
        if leaving:
            self._vigil = Vigil()
        return [self.grant(TRAINER, worker, record.key.id, now) for record in leaving]

    def keep_vigil(self, now: float) -> bool:
        """Deal with stragglers if the trainer waits for them too long; return whether something was done."""
        vigil, window, ready = self._vigil, self.window, self.books.queues[TRAINER].ready
        tight = window.tight()
        if not vigil.worker or self.limits.stragglers == "wait" or tight is None or not window.handed + ready:
            vigil.seen = None
            return False
        seen = (window.version, window.handed, ready)
        if vigil.seen != seen:
            vigil.seen, vigil.since = seen, now
        if now - vigil.since < self.limits.straggler_seconds:
            return False
        vigil.seen = None
        return any([self._act_on(record, "straggler", now) for record in self._stragglers(*tight)])

    def end_vigil(self, worker: str) -> None:
        """Nobody is kept waiting any more, if it was this worker."""
        if self._vigil.worker == worker:
            self._vigil = Vigil()

    def _leaving(self, want: int, at_least: int, now: float) -> list[Record]:
        """Return the groups that may leave together, in their order; none if they are too few and more may come."""
        queue, leaving = self.books.queues[TRAINER], list[Record]()
        if queue.ready < min(at_least, len(self.books.started)) and not self.exhausted:
            return []
        while len(leaving) < want and (record := self._next(now)) is not None:
            queue.remove(record.key.id)
            self.books.order.remove(record.key.id)
            self.window.hand_out(record.due)
            leaving.append(record)
        enough = len(leaving) >= at_least or self.exhausted
        for record in leaving:
            self.window.take_back(record.due)
            if not enough:
                self.books.wait_in_order(record)
                self.books.enqueue(TRAINER, record, now)
        return leaving if enough else []

    def _next(self, now: float) -> Record | None:
        """Return the group that the trainer gets next, if one may leave. What turns out to be too old is dealt with."""
        queue, window, records = self.books.queues[TRAINER], self.window, self.books.records
        while (group := queue.head(ON_TIME_LANE)) is not None and records[group].due < window.version:
            record = records[group]
            assert record.deadline is not None, "a train group has a deadline from its start"
            if record.deadline >= window.version:
                self.postpone(record, record.deadline, now)  # its step was made again without it
            else:
                self._act_on(record, "stale", now)
        while (group := queue.head(READMITTED_LANE)) is not None and records[group].due < window.version:
            self.postpone(records[group], window.version, now)
        for lane in (READMITTED_LANE, EXCUSED_LANE, ON_TIME_LANE):
            group = queue.head(lane)
            if group is not None and window.may_leave(records[group].due):
                in_turn = not self.limits.in_order or self.books.order.first() == group
                return records[group] if in_turn else None
        return None

    def _readmit(self, now: float) -> None:
        """Let late groups that are ready have the credits that are free, as if they started now."""
        queue, newest = self.books.queues[TRAINER], self.window.reached
        while (group := queue.head(EXCUSED_LANE)) is not None and self.window.credits(newest) > 0:
            self.postpone(self.books.records[group], self.window.admit(newest), now)

    def _stragglers(self, tight: PolicyVersion, due_by_then: int) -> list[Record]:
        queue, window = self.books.queues[TRAINER], self.window
        slow = [
            record
            for record in self.books.started.values()
            if window.version <= record.due <= tight and record.key.id not in queue
        ]
        may_leave = due_by_then - len(slow)
        behind = queue.ready - may_leave  # ready, and could take the place of a straggler
        missing = window.slots - may_leave
        slow.sort(key=lambda record: (record.due, record.started, record.key.seq))
        return slow[: max(0, min(missing, behind or missing))]

    def _act_on(self, record: Record, reason: str, now: float) -> bool:
        """Apply the setting to a group that is too slow or too old; return whether anything was done."""
        policy = self.limits.stragglers
        if policy == "down_weight":
            if reason == "straggler" and self.window.late >= self.limits.groups_per_step:
                return False
            self.postpone(record, LATE, now)
        elif policy != "regenerate":
            self.finish(record, "dropped", reason)
        elif record.attempts[ROLLOUT] < self.limits.max_attempts:
            self.regenerate(record, reason, now)
        else:
            record.history.append(f"{ROLLOUT}, attempt {record.attempts[ROLLOUT]}: {reason}")
            self.finish(record, "dead", f"{ROLLOUT}: {reason}")
        return True

"""Where everything is: records, leases and the queues they stand in. Keeps them consistent; decides nothing.

The order of a stage's queue is a setting: `fifo`, as groups came; `oldest_version`, by deadline and then by prompt;
`short_first`, by response tokens, before rollout by the predicted length (unknown ones last). Where it says nothing,
prompts leave in their order. The trainer's queue is always by due step; the setting decides among equals.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable

from brokers.queues import SWEEP, Order, StageQueue
from brokers.record import ROLLOUT, TRAINER, Grant, Lease, Limits, Record, StageSpec
from brokers.window import LATE
from common.errors import LeaseLost

ON_TIME_LANE, EXCUSED_LANE, READMITTED_LANE = 0, 1, 2
"""of the trainer's queue: groups beyond their deadline leave by other rules, see `brokers.gates`"""


class Books:
    """Records and leases by id, and one queue per stage. `on_free(group, section)`: its bytes are no longer needed."""

    def __init__(self, stages: Iterable[StageSpec], limits: Limits, on_free: Callable[[str, str], None]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.records: dict[str, Record] = {}
        self.leases: dict[int, Lease] = {}
        self.queues = {name: self._queue(name, limits) for name in self.stages}
        self.evaluation = StageQueue()  # eval groups that wait for rollout: they need a version, not a credit
        self.order = StageQueue()  # train groups that were not handed out yet, in the order of their prompts
        self.started: dict[str, Record] = {}  # train groups that were started and are not in the trainer's hands
        self.changed: set[str] = set()  # stages for which something may have become leasable
        self.last_lease = 0
        self._limits = limits
        self._by_worker: dict[str, set[int]] = {}
        self._expiries: list[tuple[float, int]] = []  # a heap; an entry may be too early, its lease was extended
        self._on_free = on_free
        added = {name for stage in self.stages.values() for name in stage.adds}
        required = {name for stage in self.stages.values() for name in stage.requires}
        self._original = required - added if limits.stragglers == "regenerate" else set[str]()

    def pending(self, record: Record) -> set[str]:
        """Return all stages that a new group of this purpose goes through."""
        return {name for name, stage in self.stages.items() if record.key.purpose in stage.purposes}

    def insert(self, record: Record, now: float) -> None:
        """Take in a new record and put it where it is ready."""
        self.records[record.key.id] = record
        self.wait_in_order(record)
        self.free_unneeded(record)
        self.refresh(record, now)

    def wait_in_order(self, record: Record) -> None:
        """Let a train group that is not in the trainer's hands have its place among the prompts."""
        if self._limits.in_order and record.is_train:
            self.order.push(record.key.id, (record.key.seq,))

    def refresh(self, record: Record, now: float) -> None:
        """Put the group into the queue of every stage that could handle it now."""
        for name in record.pending:
            stage = self.stages[name]
            if name in record.leases or record.trained_step is not None or not stage.requires <= record.sections.keys():
                continue
            if name == ROLLOUT and not record.is_train:
                self.evaluation.push(record.key.id, (record.key.min_version, record.key.seq))
            else:
                self.enqueue(name, record, now)
            self.changed.add(name)

    def enqueue(self, stage: str, record: Record, now: float) -> None:
        """Make a group ready for a stage, or change its order there."""
        queue = self.queues[stage]
        entry = queue.enter(record.key.id, record.bytes_for(self.stages[stage].requires), now)
        queue.push(record.key.id, self._order_of(stage, record, entry), self._lane_of(stage, record))

    def grant(self, stage: str, worker: str, group: str, now: float, seconds: float) -> Grant:
        """Lease a group to a worker for `seconds`."""
        record = self.records[group]
        (self.evaluation if stage == ROLLOUT and not record.is_train else self.queues[stage]).remove(group)
        self.last_lease += 1
        record.attempts[stage] += 1
        lease = Lease(self.last_lease, group, stage, worker, record.attempts[stage], now + seconds)
        record.leases[stage] = lease.id
        if stage == ROLLOUT:
            record.started = now
        self.leases[lease.id] = lease
        self._by_worker.setdefault(worker, set()).add(lease.id)
        if len(self._expiries) > 2 * len(self.leases) + SWEEP:
            self._expiries = [(lease.expires, lease.id) for lease in self.leases.values()]
            heapq.heapify(self._expiries)
        else:
            heapq.heappush(self._expiries, (lease.expires, lease.id))
        needed = self.stages[stage].requires
        return Grant(lease, record, tuple(info for name, info in record.sections.items() if name in needed))

    def held(self, lease_id: int, worker: str) -> tuple[Lease, Record]:
        """Return a lease and its record; raises `LeaseLost` if it ended or belongs to somebody else."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.worker != worker:
            raise LeaseLost(f"lease {lease_id} of {worker} has ended: the group went to another worker or is over")
        return lease, self.records[lease.group]

    def held_by(self, worker: str) -> list[Lease]:
        """Return the leases of a worker, oldest first."""
        return [self.leases[lease_id] for lease_id in sorted(self._by_worker.get(worker, ()))]

    def run_out(self, now: float) -> list[Lease]:
        """Return the leases whose time is over, oldest first; the caller ends them."""
        over: list[Lease] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heapq.heappop(self._expiries)
            lease = self.leases.get(lease_id)
            if lease is None:
                continue
            if lease.expires <= now:
                over.append(lease)
            else:
                heapq.heappush(self._expiries, (lease.expires, lease_id))
        return sorted(over, key=lambda lease: lease.id)

    def oldest_held_by(self, worker: str) -> Lease | None:
        """Return the lease that a worker has had for longest, or None."""
        mine = self._by_worker.get(worker)
        return self.leases[min(mine)] if mine else None

    def end_lease(self, lease: Lease, *, keep: bool) -> None:
        """Close a lease. `keep`: what was put under it becomes part of the group, else it is freed."""
        del self.leases[lease.id]
        mine = self._by_worker[lease.worker]
        mine.discard(lease.id)
        if not mine:
            del self._by_worker[lease.worker]
        record = self.records[lease.group]
        record.leases.pop(lease.stage, None)
        if keep:
            record.sections.update(lease.staged)
        else:
            for name in lease.staged:
                self._on_free(record.key.id, name)

    def free_unneeded(self, record: Record) -> None:
        """Free the sections that no pending stage requires, nor a stage that may have to do its work again."""
        needed = {name for stage in record.pending for name in self.stages[stage].requires}
        if self._original and record.is_train:
            needed |= self._original
        for name in [name for name in record.sections if name not in needed]:
            del record.sections[name]
            self._on_free(record.key.id, name)

    def reset(self, record: Record) -> None:
        """Undo all that stages did to a group: it is as it came, and in no queue."""
        self._withdraw(record)
        record.pending = self.pending(record)
        for name in [name for name in record.sections if name not in self._original]:
            del record.sections[name]
            self._on_free(record.key.id, name)

    def forget(self, record: Record) -> None:
        """Remove a group with its leases, places in queues and sections."""
        self._withdraw(record)
        self.order.leave(record.key.id)
        for name in record.sections:
            self._on_free(record.key.id, name)
        record.sections.clear()
        del self.records[record.key.id]

    def _withdraw(self, record: Record) -> None:
        for lease_id in list(record.leases.values()):
            self.end_lease(self.leases[lease_id], keep=False)
        for queue in (*self.queues.values(), self.evaluation):
            queue.leave(record.key.id)
        self.started.pop(record.key.id, None)

    def _order_of(self, stage: str, record: Record, entry: int) -> Order:
        key, order = record.key, self._limits.order
        if self._limits.in_order:
            return (key.seq,)
        if stage == TRAINER:
            if record.place >= 0:
                return (record.due, 0, record.place)
            tie = 0 if order == "oldest_version" else entry if order == "fifo" else record.tokens
            return (record.deadline or 0, 1, tie, key.seq)
        if stage == ROLLOUT:
            return (key.length or 1 << 62, key.seq) if order == "short_first" else (key.seq,)
        if order == "oldest_version":
            return (record.deadline or 0, key.seq)
        return (entry if order == "fifo" else record.tokens, key.seq)

    def _lane_of(self, stage: str, record: Record) -> int:
        if stage == TRAINER and record.due == LATE:
            return EXCUSED_LANE
        if stage == TRAINER:
            is_late = record.place < 0 and record.due != record.deadline
            return READMITTED_LANE if is_late else ON_TIME_LANE
        if stage == ROLLOUT:
            lanes = self._limits.lanes
            return bisect_left(lanes, record.key.length) if record.key.length else len(lanes)
        return 0

    @staticmethod
    def _queue(stage: str, limits: Limits) -> StageQueue:
        """Return the queue of a stage. By prompt or by entry who waits longest is first anyway."""
        if stage == TRAINER:
            return StageQueue(lanes=3)
        by_length = limits.order == "short_first" or (stage == ROLLOUT and len(limits.lanes) > 0)
        fair = limits.in_order or limits.order == "fifo" or stage == ROLLOUT
        return StageQueue(
            lanes=len(limits.lanes) + 1 if stage == ROLLOUT else 1,
            patience=math.inf if fair and not by_length else limits.fairness_seconds,
        )

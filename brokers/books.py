"""Where everything is: records, leases and the queues they stand in. Keeps them consistent; decides nothing."""

from collections.abc import Callable, Iterable

from brokers.queues import StageQueue
from brokers.record import ROLLOUT, Grant, Lease, Record, StageSpec
from common.errors import LeaseLost


class Books:
    """Records and leases by id, and one queue per stage. `on_free(group, section)`: its bytes are no longer needed."""

    def __init__(self, stages: Iterable[StageSpec], on_free: Callable[[str, str], None]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.records: dict[str, Record] = {}
        self.leases: dict[int, Lease] = {}
        self.queues = {name: StageQueue() for name in self.stages}
        self.evaluation = StageQueue()  # eval groups that wait for rollout: they need a version, not a credit
        self.order = StageQueue()  # train groups that were not handed out yet, in the order of their prompts
        self.changed: set[str] = set()  # stages for which something may have become leasable
        self._by_worker: dict[str, set[int]] = {}
        self.last_lease = 0
        self._on_free = on_free

    def insert(self, record: Record, now: float) -> None:
        """Take in a new record and put it where it is ready."""
        self.records[record.key.id] = record
        if record.is_train:
            self.order.push(record.key.id, (0, record.key.seq))
        self.free_unneeded(record)
        self.refresh(record, now, in_order=True)

    def refresh(self, record: Record, now: float, *, in_order: bool) -> None:
        """Put the group into the queue of every stage that could handle it now, by deadline or by prompt order."""
        for name in record.pending:
            stage = self.stages[name]
            if name in record.leases or record.trained_step is not None or not stage.requires <= record.sections.keys():
                continue
            if name == ROLLOUT and not record.is_train:
                self.evaluation.push(record.key.id, (record.key.min_version, record.key.seq))
            else:
                urgency = 0 if in_order else record.deadline or 0
                self.queues[name].enter(record.key.id, record.bytes_for(stage.requires), now)
                self.queues[name].push(record.key.id, (urgency, record.key.seq))
            self.changed.add(name)

    def grant(self, stage: str, worker: str, group: str, now: float, seconds: float) -> Grant:
        """Lease a group to a worker for `seconds`."""
        record = self.records[group]
        self.last_lease += 1
        record.attempts[stage] += 1
        lease = Lease(self.last_lease, group, stage, worker, record.attempts[stage], now + seconds)
        record.leases[stage] = lease.id
        if stage == ROLLOUT:
            record.started = now
        self.leases[lease.id] = lease
        self._by_worker.setdefault(worker, set()).add(lease.id)
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

    def oldest_held_by(self, worker: str) -> Lease | None:
        """Return the lease that a worker has had for longest, or None."""
        mine = self._by_worker.get(worker)
        return self.leases[min(mine)] if mine else None

    def end_lease(self, lease: Lease, *, keep: bool) -> None:
        """Close a lease. `keep`: what was put under it becomes part of the group, else it is freed."""
        del self.leases[lease.id]
        self._by_worker[lease.worker].discard(lease.id)
        record = self.records[lease.group]
        record.leases.pop(lease.stage, None)
        if keep:
            record.sections.update(lease.staged)
        else:
            for name in lease.staged:
                self._on_free(record.key.id, name)

    def free_unneeded(self, record: Record) -> None:
        """Free the sections that no pending stage requires."""
        needed = {name for stage in record.pending for name in self.stages[stage].requires}
        for name in [name for name in record.sections if name not in needed]:
            del record.sections[name]
            self._on_free(record.key.id, name)

    def forget(self, record: Record) -> None:
        """Remove a group with its leases, places in queues and sections."""
        for lease_id in list(record.leases.values()):
            self.end_lease(self.leases[lease_id], keep=False)
        for queue in (*self.queues.values(), self.evaluation, self.order):
            queue.leave(record.key.id)
        for name in record.sections:
            self._on_free(record.key.id, name)
        record.sections.clear()
        del self.records[record.key.id]

"""A ledger that tells what happens to it, in words from which the same ledger can be made again."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from brokers.ledger import Ledger
from brokers.record import ROLLOUT, TRAINER, End, Grant, Lease, Limits, Record, StageSpec
from common.group import GroupKey, PolicyVersion
from common.section import SectionInfo

KEPT = 1000
"""acknowledged leases that are remembered, the latest: a worker may repeat what it never saw confirmed"""

Note: TypeAlias = Callable[[str, str, str, Mapping[str, Any]], None]
"""(kind, group, stage, body)"""


def ignore(_kind: str, _group: str, _stage: str, _body: Mapping[str, Any]) -> None:
    """Nobody listens."""


class NotedLedger(Ledger):
    """Calls `note` after everything that changed groups, leases or counts of ends. It refuses what a ledger refuses.

    `acked`: the latest leases that ended with an acknowledgement.
    """

    def __init__(self, stages: Iterable[StageSpec], limits: Limits, on_free: Callable[[str, str], None]) -> None:
        super().__init__(stages, limits, on_free)
        self.note: Note = ignore
        self.acked: deque[int] = deque(maxlen=KEPT)

    def add(self, key: GroupKey, sections: Sequence[SectionInfo], now: float) -> bool:
        """Take in a group, and note it if it is new."""
        new = super().add(key, sections, now)
        if new:
            self.note("add", key.id, "", {"seq": key.seq, "purpose": key.purpose, "min_version": key.min_version})
        return new

    def lease(
        self, stage: str, worker: str, want: int, now: float, *, version: PolicyVersion = 0, at_least: int = 1
    ) -> list[Grant]:
        """Hand out groups, and note them."""
        granted = super().lease(stage, worker, want, now, version=version, at_least=at_least)
        for grant in granted:
            deadline = grant.record.deadline if stage == ROLLOUT else None
            body = {"lease": grant.lease.id, "worker": worker, "deadline": deadline}
            self.note("lease", grant.lease.group, stage, body)
        return granted

    def put(
        self,
        lease_id: int,
        worker: str,
        sections: Sequence[SectionInfo],
        versions: tuple[PolicyVersion, PolicyVersion] = (-1, -1),
        tokens: int = 0,
    ) -> list[str]:
        """Stage sections, and note it."""
        fresh = super().put(lease_id, worker, sections, versions, tokens)
        lease, _ = self.books.held(lease_id, worker)
        body = {"lease": lease_id, "worker": worker, "versions": list(versions), "tokens": tokens}
        self.note("put", lease.group, lease.stage, body)
        return fresh

    def ack(self, lease_id: int, worker: str, now: float, step: PolicyVersion = -1) -> None:
        """End a lease with its result, and note it."""
        lease, _ = self.books.held(lease_id, worker)
        super().ack(lease_id, worker, now, step)
        self.acked.append(lease_id)
        self.note("ack", lease.group, lease.stage, {"lease": lease_id, "worker": worker, "step": step})

    def advance(self, version: PolicyVersion) -> None:
        """Count an update, and note it unless it is a repeat."""
        before = self.window.version
        super().advance(version)
        if version != before:
            self.note("advance", "", "", {"version": version})

    def commit(self, version: PolicyVersion) -> None:
        """Forget what is on disk, and note it."""
        super().commit(version)
        self.note("commit", "", "", {"version": version})

    def end_of_data(self) -> None:
        """No further train group will be added."""
        super().end_of_data()
        self.note("data_end", "", "", {})

    def end(self, state: str, reason: str) -> None:
        """The run is over; the groups that ended with it are noted before."""
        if not self.ended:
            super().end(state, reason)
            self.note("run_end", "", "", {"state": state, "reason": reason})

    def resume(self, lease: Lease, deadline: PolicyVersion | None, now: float) -> None:
        """Hand out a group again, to the same worker under the same lease, as `_grant` noted it."""
        record, books = self.books.records[lease.group], self.books
        waiting = books.evaluation if lease.stage == ROLLOUT and not record.is_train else books.queues[lease.stage]
        waiting.remove(lease.group)
        books.last_lease = lease.id - 1
        books.grant(lease.stage, lease.worker, lease.group, now, self.limits.lease_seconds)
        if lease.stage == ROLLOUT and deadline is not None:
            record.deadline = deadline
            self.window.resume(deadline)
            self.counts.started += 1
        if lease.stage == TRAINER and record.deadline is not None:
            books.order.remove(lease.group)
            self.window.hand_out(record.deadline)
            record.handed = True

    def give_back(self, lease_id: int, reason: str, now: float, *, fault: bool) -> None:
        """End a lease as `_give_back` noted it."""
        lease = self.books.leases.get(lease_id)
        if lease is not None:
            self._give_back(lease, reason, now, fault=fault)

    def finish(self, group: str, end: End, reason: str) -> None:
        """End a group as `_finish` noted it."""
        record = self.books.records.get(group)
        if record is not None:
            self._finish(record, end, reason)

    def _lease_trainer(self, worker: str, want: int, now: float, version: PolicyVersion, at_least: int) -> list[Grant]:
        # What is given back because it was too little has never left: only stale groups are noted of such a try.
        note, noted = self.note, list[tuple[str, str, str, Mapping[str, Any]]]()
        self.note = lambda *what: noted.append(what)
        try:
            granted = super()._lease_trainer(worker, want, now, version, at_least)
        finally:
            self.note = note
            for what in noted:
                if what[0] != "back":
                    note(*what)
        return granted

    def _give_back(self, lease: Lease, reason: str, now: float, *, fault: bool = True) -> None:
        if lease.id in self.books.leases:
            self.note("back", lease.group, lease.stage, {"lease": lease.id, "reason": reason, "fault": fault})
        super()._give_back(lease, reason, now, fault=fault)

    def _finish(self, record: Record, end: End, reason: str) -> None:
        self.note("finish", record.key.id, "", {"end": end, "reason": reason})
        super()._finish(record, end, reason)

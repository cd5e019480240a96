"""A ledger that tells what happens to it, in words from which the same ledger can be made again.

What is noted are verbs that change something, and moves (`brokers.moves`), never the decisions that led to them: when
they happen again, no gate and no clock is asked.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from brokers.ledger import Ledger
from brokers.record import ROLLOUT, End, Grant, Lease, Limits, Record, StageSpec
from common.group import GroupKey, PolicyVersion
from common.section import SectionInfo

KEPT = 1000
"""acknowledged leases that are remembered, the latest: a worker may repeat what it never saw confirmed"""

Note: TypeAlias = Callable[[str, str, str, Mapping[str, Any]], None]
"""(kind, group, stage, body)"""


def ignore(_kind: str, _group: str, _stage: str, _body: Mapping[str, Any]) -> None:
    """Nobody listens."""


class NotedLedger(Ledger):
    """Calls `note` for everything that changed groups, leases or counts of ends. It refuses what a ledger refuses.

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
            body = {"seq": key.seq, "purpose": key.purpose, "min_version": key.min_version, "length": key.length}
            self.note("add", key.id, "", body)
        return new

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

    def grant(self, stage: str, worker: str, group: str, now: float, deadline: PolicyVersion | None = None) -> Grant:
        """Lease a group, and note it."""
        grant = super().grant(stage, worker, group, now, deadline)
        self.note("lease", group, stage, {"lease": grant.lease.id, "worker": worker, "deadline": deadline})
        return grant

    def give_back(self, lease: Lease, reason: str, now: float, *, fault: bool = True) -> None:
        """Note that a lease ends without a result, and what follows from it."""
        if lease.id in self.books.leases:
            self.note("back", lease.group, lease.stage, {"lease": lease.id, "reason": reason, "fault": fault})
        super().give_back(lease, reason, now, fault=fault)

    def finish(self, record: Record, end: End, reason: str) -> None:
        """Note the end of a group."""
        self.note("finish", record.key.id, "", {"end": end, "reason": reason})
        super().finish(record, end, reason)

    def regenerate(self, record: Record, reason: str, now: float) -> None:
        """Note that a group begins anew."""
        self.note("regenerate", record.key.id, ROLLOUT, {"reason": reason})
        super().regenerate(record, reason, now)

    def postpone(self, record: Record, due: PolicyVersion, now: float) -> None:
        """Note that a group is due by another step."""
        self.note("postpone", record.key.id, "", {"due": due})
        super().postpone(record, due, now)

    def rewind(self, version: PolicyVersion, now: float) -> None:
        """Take back what was trained, and note it behind the leases that ended with it."""
        super().rewind(version, now)
        self.note("rewind", "", "", {"version": version})

"""The sample broker that survives its own death: it confirms nothing that its journal does not hold.

Replies wait in memory until one commit has made everything durable that was handled together. When the disk is full,
only signs of life and questions of people are answered; producers wait.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from brokers.conduct import Facts
from brokers.journal import Event, Journal, number_of, segments
from brokers.noted import NotedLedger
from brokers.record import Limits, StageSpec
from brokers.recovery import replay, state_of
from brokers.roster import Member
from brokers.samples import SampleService
from brokers.service import Message, Outgoing
from brokers.store import MemoryStore, Store
from common.header import Header, Item
from common.section import Section

CONFIRM_NOTHING = frozenset({"beat", "status", "hello", "bye", ""})
"""verbs whose replies do not wait for the disk; the last is the probe of a name"""
COMMIT_BYTES = 2 << 20
"""sections that one commit waits for: more no longer share its cost, and lie in pages that no cache holds any more"""
RETRY_SECONDS = 0.5
"""between two tries to write to a disk that was full"""


class _NotingStore:
    """A store that tells of every section that it takes over."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read, self.free, self.retire = store.read, store.free, store.retire
        self.adopt, self.describe, self.close = store.adopt, store.describe, store.close
        self.on_keep: Callable[[str, Section], None] = lambda _group, _section: None

    @property
    def bytes(self) -> int:
        return self._store.bytes

    @property
    def memory_bytes(self) -> int:
        return self._store.memory_bytes

    def keep(self, group: str, section: Section) -> None:
        self._store.keep(group, section)
        self.on_keep(group, section)

    def __len__(self) -> int:
        return len(self._store)


class DurableService(SampleService):
    """A sample broker with a journal. What the journal's folder holds of this run happens again first.

    `keep`: delete no segment, also when no live group began in it.
    """

    def __init__(
        self,
        facts: Facts,
        stages: Iterable[StageSpec],
        limits: Limits,
        journal: Journal,
        now: float,
        store: Store | None = None,
        *,
        keep: bool = False,
    ) -> None:
        noting = _NotingStore(MemoryStore() if store is None else store)
        super().__init__(facts, stages, limits, noting, NotedLedger)
        assert isinstance(self.ledger, NotedLedger), "asked for"
        self.journal, self._noted, self._keep_all = journal, self.ledger, keep
        ledger = self.ledger
        recovered = replay(journal.folder, ledger, noting, now)
        self._began = recovered.began
        self._number = 0  # of the segment that is being written
        self._restore(recovered.run)
        self._repeats = frozenset(ledger.acked)
        self._absent_until = now + limits.lease_seconds
        self._held: list[Outgoing] = []
        self._durable_seq = dict(ledger.next_seq)
        self._retry_at = now
        self._events: list[Section] = []
        self._uncommitted_bytes = 0
        noting.on_keep, ledger.note = self._kept, self._note
        self._rotate()

    @property
    def holding(self) -> bool:
        """Whether something was done that is not durable yet, and more may share its commit."""
        return self.journal.dirty and self._uncommitted_bytes < COMMIT_BYTES

    def release(self, now: float) -> list[Outgoing]:
        """Make everything durable and return all replies; those that confirm nothing, if that cannot be done now."""
        if self._service_state() != self._told:
            self._told = self._service_state()
            self.journal.append(Event("run", body={"service": self._told}))
        out = self.flush()
        if self.journal.full_since is None or now >= self._retry_at:
            self._retry_at = now + RETRY_SECONDS
            if self.journal.commit():
                self._uncommitted_bytes = 0
                self._durable_seq = dict(self.ledger.next_seq)
                if self.journal.wants_rotation:
                    self._rotate()
                held, self._held = self._held, []
                return held + out
        self._held += [each for each in out if each.verb not in CONFIRM_NOTHING]
        return [self._confirming_nothing(each) for each in out if each.verb in CONFIRM_NOTHING]

    def state(self) -> dict[str, Any]:
        """Return how far the run is, and whether everybody waits for the disk."""
        full = self.journal.full_since is not None
        return {**super().state(), "stalled": f"waiting for room on the disk of {self.journal.folder}" if full else ""}

    def welcome(self, member: Member, message: Message) -> dict[str, Any]:
        """A successor of a worker inherits nothing of what that one had before the restart."""
        books, now = self.ledger.books, message.now
        for worker in {lease.worker for lease in books.leases.values()} - {member.peer}:
            if worker.rpartition("#")[0] == member.name:
                self.ledger.lost(worker, "replaced by a new incarnation", now)
                self.turn.lost(worker)
        return super().welcome(member, message)

    def on_time(self, now: float) -> None:
        """Nobody waits for ever for a holder of the turn that did not come back."""
        super().on_time(now)
        if now >= self._absent_until:
            self._absent_until = float("inf")
            for holder in [peer for peer in self.turn.holders if self.roster.find(peer) is None]:
                self.turn.lost(holder)

    def close(self) -> None:
        """Close the journal and the store."""
        self.journal.close()
        super().close()

    def _each(
        self, items: Sequence[tuple[Item, dict[str, Section]]], act: Callable[[Item, dict[str, Section]], None]
    ) -> Header:
        """Leave out what was acknowledged before the restart: only the reply to it was lost."""
        fresh = [(item, sections) for item, sections in items if item.lease not in self._repeats]
        self.ledger.counts.repeated += len(items) - len(fresh)
        return super()._each(fresh, act)

    def _note(self, kind: str, group: str, stage: str, body: Mapping[str, Any]) -> None:
        self._events = []
        self.journal.append(Event(kind, group, stage, body, self._events))
        if kind == "add":
            self._began[group] = self._number

    def _kept(self, group: str, section: Section) -> None:
        del group  # bytes are taken over right after the ledger took in what they belong to
        self._events.append(section)
        self._uncommitted_bytes += section.info.length

    def _rotate(self) -> None:
        """Begin a segment with all that must be known, then drop those in front of it that no live group needs."""
        live = self.ledger.books.records
        self._began = {group: number for group, number in self._began.items() if group in live}
        oldest = min(self._began.values(), default=self.journal.next_number)
        self._told = self._service_state()
        state = {**state_of(self._noted), "run": self.run, "service": self._told, "oldest": oldest}
        self._number = self.journal.rotate(state)
        if self.journal.commit() and not self._keep_all:
            for segment in segments(self.journal.folder):
                if number_of(segment) < oldest:
                    self.journal.drop(number_of(segment))

    def _service_state(self) -> dict[str, Any]:
        turn = [self.turn.side, self.turn.fence, sorted(self.turn.holders)]
        return {"evaluation": list(self.evaluation), "endpoints": dict(self.endpoints), "turn": turn}

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state:
            number, version = state["evaluation"]
            self.evaluation, self.endpoints = (number, version), dict(state["endpoints"])
            self.turn.side, self.turn.fence, holders = state["turn"]
            self.turn.holders = set(holders)

    def _confirming_nothing(self, out: Outgoing) -> Outgoing:
        """Return a reply that tells of no prompt that could still be forgotten."""
        body = cast(dict[str, Any], out.header.body)
        if "next_seq" not in body:
            return out
        header: Header = replace(out.header, body={**body, "next_seq": self._durable_seq})
        return replace(out, header=header)

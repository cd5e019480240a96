"""A ledger with its bytes and a clock that is moved by hand, and stages as a run with a reference model has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from brokers.journal import Event
from brokers.noted import NotedLedger
from brokers.record import Grant, Limits, StageSpec
from brokers.recovery import happen
from brokers.store import MemoryStore
from common.clock import ManualClock
from common.group import GroupKey, Purpose
from common.section import Section, SectionInfo

TRAIN: frozenset[Purpose] = frozenset({"train"})
EVAL: frozenset[Purpose] = frozenset({"eval"})
PROMPT = {"prompt": 5, "inputs": 7, "media": 100}
"""sections of a new group and their bytes; nobody requires media"""
ADDED = {"response": 11, "tokens": 13, "reward": 17, "reference": 19, "advantage": 23}


def stage(name: str, requires: str, adds: str, purposes: frozenset[Purpose] = TRAIN) -> StageSpec:
    return StageSpec(name, frozenset(requires.split()), frozenset(adds.split()), purposes)


STAGES = (
    stage("rollout", "prompt inputs", "response tokens", TRAIN | EVAL),
    stage("reward", "prompt response", "reward", TRAIN | EVAL),
    stage("reference", "inputs tokens", "reference"),
    stage("advantage", "reward tokens", "advantage"),
    stage("trainer", "inputs tokens reference advantage", ""),
    stage("evaluate", "reward", "", EVAL),
)
BY_NAME = {spec.name: spec for spec in STAGES}


def section(name: str, length: int = 0) -> Section:
    length = length or {**PROMPT, **ADDED}[name]
    return Section(SectionInfo(name, 1, length, 0), bytes(length))


class Bench:
    """The ledger as the sample broker drives it. `worker` is the stage's name unless a test says otherwise.

    `events`: all that was noted, from which `restart` makes the ledger anew.
    """

    def __init__(self, size: int, s: int = 0, **limits: object) -> None:
        self.clock = ManualClock()
        self.limits = Limits(size, s, **limits)  # pyright: ignore[reportArgumentType]
        self.freed: list[tuple[str, str]] = []
        self.events: list[Event] = []
        self._begin()

    def _begin(self) -> None:
        self.store = MemoryStore()
        self.ledger = NotedLedger(STAGES, self.limits, self._free)
        self.ledger.note = self._note

    def _note(self, kind: str, group: str, stage: str, body: Mapping[str, Any]) -> None:
        self.events.append(Event(kind, group, stage, body, []))

    def _keep(self, group: str, kept: Section) -> None:
        self.store.keep(group, kept)
        self.events[-1].sections.append(kept)  # pyright: ignore[reportAttributeAccessIssue]

    def _free(self, group: str, name: str) -> None:
        self.freed.append((group, name))
        self.store.free(group, name)

    def restart(self) -> None:
        """The broker's process is gone; what it noted happens again to a fresh ledger and an empty store."""
        events = self.events
        self._begin()
        self.events = []
        for event in events:
            happen(self.ledger, self.store, event, self.clock.now())
        self.events = events

    def decisions(self, since: int) -> list[Event]:
        """What the ledger decided by itself about groups, among the events from number `since` on."""
        mine = ("straggler", "stale", "rollout: straggler", "rollout: stale")
        return [
            event
            for event in self.events[since:]
            if event.kind in ("regenerate", "postpone") or (event.kind == "finish" and event.body["reason"] in mine)
        ]

    def portrait(self) -> dict[str, Any]:
        """All that must survive a restart; times begin anew."""
        ledger, books = self.ledger, self.ledger.books
        groups = {
            name: (
                (record.key, record.pending, list(record.sections.values()), record.leases, record.attempts),
                (record.history, record.deadline, record.due, record.place, record.weight, record.handed),
                (record.version_min, record.version_max, record.tokens, record.trained_step),
            )
            for name, record in books.records.items()
        }
        counts = {name: value for name, value in ledger.counts.to_wire().items() if name not in ("repeated", "expired")}
        return {
            "groups": groups,
            "leases": {lease.id: (lease.group, lease.worker, lease.attempt, lease.staged)
                       for lease in books.leases.values()},
            "queues": {name: (queue.groups, queue.bytes, queue.ready, queue.head(0))
                       for name, queue in books.queues.items()},
            "order": (books.order.ready, books.order.first(), list(books.started)),
            "uncommitted": {step: [record.key.id for record in records]
                            for step, records in ledger.uncommitted.items() if records},
            "window": vars(ledger.window) | {"_due": dict(ledger.window._due)},  # pyright: ignore[reportPrivateUsage]
            "counts": counts,
            "rest": (ledger.next_seq, ledger.committed, ledger.ended, ledger.data_ended, books.last_lease),
            "store": (self.store.bytes, len(self.store)),
        }  # fmt: skip

    def add(self, seq: int, purpose: Purpose = "train", min_version: int = 0, length: int = 0) -> bool:
        key = GroupKey(f"{purpose}-{seq}", seq, purpose, min_version, length)
        sections = [section(name) for name in PROMPT]
        taken = self.ledger.add(key, [each.info for each in sections], self.clock.now())
        if taken:
            for each in sections:
                if each.name in self.ledger.books.records[key.id].sections:
                    self._keep(key.id, each)
        return taken

    def lease(
        self,
        name: str,
        want: int = 1,
        version: int | None = None,
        at_least: int = 1,
        worker: str = "",
        lane: int | None = None,
    ) -> list[Grant]:
        version = self.ledger.window.version if version is None else version
        now = self.clock.now()
        return self.ledger.lease(name, worker or name, want, now, version=version, at_least=at_least, lane=lane)

    def put(self, grant: Grant, versions: tuple[int, int] | None = None, tokens: int = 3) -> list[str]:
        lease = grant.lease
        sections = [section(name) for name in sorted(BY_NAME[lease.stage].adds)]
        version = (grant.record.deadline or 0) - self.ledger.limits.max_staleness
        known = (max(0, version),) * 2 if lease.stage == "rollout" else (-1, -1)
        fresh = self.ledger.put(lease.id, lease.worker, [each.info for each in sections], versions or known, tokens)
        for each in sections:
            if each.name in fresh:
                self._keep(lease.group, each)
        return fresh

    def ack(self, grant: Grant, step: int | None = None) -> None:
        step = self.ledger.window.version if step is None else step
        self.ledger.ack(grant.lease.id, grant.lease.worker, self.clock.now(), step)

    def nack(self, grant: Grant, reason: str = "broken", *, fault: bool = True) -> None:
        self.ledger.nack(grant.lease.id, grant.lease.worker, reason, self.clock.now(), fault=fault)

    def finish(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self.put(grant)
            self.ack(grant)

    def serve(self, *stages: str) -> None:
        """Let the stages handle all they can get."""
        for name in stages:
            while grants := self.lease(name, 100):
                self.finish(grants)

    def generate(self) -> None:
        """Let everything up to the trainer handle all it can get."""
        self.serve("rollout", "reward", "reference", "advantage")

    def step(self, want: int = 100) -> list[str]:
        """Train on what may leave now, and commit; return the groups."""
        grants = self.lease("trainer", want)
        for grant in grants:
            self.ack(grant)
        version = self.ledger.window.version + 1
        self.ledger.advance(version)
        self.ledger.commit(version)
        return [grant.lease.group for grant in grants]

    def here(self, group: str) -> set[str]:
        """Sections of a group whose bytes are kept."""
        names = [*PROMPT, *ADDED]
        return {name for name in names if (group, name) in self.store._data}  # pyright: ignore[reportPrivateUsage]

    def ends(self) -> int:
        counts = self.ledger.counts
        return counts.trained + counts.dropped.total() + counts.dead.total()

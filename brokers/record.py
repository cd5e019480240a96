"""What the ledger keeps: the wiring of stages, a record per live group, a lease per group in work, counts of ends."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from common.group import GroupKey, PolicyVersion, Purpose
from common.section import SectionInfo

ROLLOUT, TRAINER = "rollout", "trainer"
End = Literal["dropped", "dead"]
Stragglers = Literal["wait", "drop", "regenerate", "down_weight"]
Ordering = Literal["fifo", "oldest_version", "short_first"]
DEAD_LETTERS = 1000
"""histories of dead groups that are kept, the latest"""
REASONS = 100
"""reasons that are told apart; the rest is counted together"""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of the pipeline in terms of sections. The order of stages follows from `requires` and `adds`."""

    name: str
    requires: frozenset[str]
    adds: frozenset[str]
    purposes: frozenset[Purpose]

    def to_wire(self) -> dict[str, Any]:
        """Return plain lists for a header or a file."""
        return {
            "name": self.name,
            "requires": sorted(self.requires),
            "adds": sorted(self.adds),
            "purposes": sorted(self.purposes),
        }

    @staticmethod
    def from_wire(spec: dict[str, Any]) -> "StageSpec":
        """Read back what `to_wire` wrote."""
        return StageSpec(
            spec["name"], frozenset(spec["requires"]), frozenset(spec["adds"]), frozenset(spec["purposes"])
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that bound a run. `total_groups`: train groups the run may start, None for no bound.

    `max_bytes`: of all sections of the run, wherever they lie; None for no bound but that of the rollout queue.
    `in_order`: hand groups to the trainer strictly in the order of their prompts (deterministic runs).
    `stragglers`: what becomes of a group that keeps the trainer waiting for `straggler_seconds`, see `brokers.gates`;
    `late_factor`: weight of a group per version beyond its deadline, under `down_weight`.
    `order`: of stage queues, see `brokers.books`; who waits for more than `fairness_seconds` leaves first.
    `lanes`: upper bounds, ascending, of predicted lengths in tokens; one more lane is for longer and unknown ones.
    """

    groups_per_step: int
    max_staleness: int = 0
    total_groups: int | None = None
    lease_seconds: float = 30.0
    max_attempts: int = 3
    max_queue_groups: int = 4096
    max_queue_bytes: int = 4 << 30
    max_bytes: int | None = None
    in_order: bool = False
    stragglers: Stragglers = "wait"
    straggler_seconds: float = 60.0
    late_factor: float = 0.5
    order: Ordering = "oldest_version"
    fairness_seconds: float = 300.0
    lanes: tuple[int, ...] = ()
    watchdog_seconds: float = 300.0
    watchdog_action: Literal["warn", "expire", "end"] = "warn"


@dataclass(slots=True)
class Record:
    """A live group. `pending`: stages that have not acknowledged it yet.

    `deadline`: last version that may train it. `due`: the step by which the gate wants it, see `brokers.window`.
    `place`: in the step that is made again, for a group that was part of it; else -1.
    """

    key: GroupKey
    pending: set[str]
    created: float
    sections: dict[str, SectionInfo] = field(default_factory=dict[str, SectionInfo])
    leases: dict[str, int] = field(default_factory=dict[str, int])
    attempts: Counter[str] = field(default_factory=Counter[str])
    history: list[str] = field(default_factory=list[str])
    deadline: PolicyVersion | None = None
    due: PolicyVersion = 0
    place: int = -1
    weight: float = 1.0
    version_min: PolicyVersion = -1
    version_max: PolicyVersion = -1
    tokens: int = 0
    handed: bool = False
    trained_step: PolicyVersion | None = None
    started: float = 0.0
    generated: float = 0.0

    @property
    def is_train(self) -> bool:
        """Whether the group counts for credits and staleness."""
        return self.key.purpose == "train"

    def bytes_for(self, sections: Iterable[str]) -> int:
        """Bytes of these sections that are here."""
        return sum(self.sections[name].length for name in sections if name in self.sections)


@dataclass(slots=True)
class Lease:
    """A group handed to a worker until `expires`, in seconds of the ledger's clock. `staged`: put, not yet acked."""

    id: int
    group: str
    stage: str
    worker: str
    attempt: int
    expires: float
    staged: dict[str, SectionInfo] = field(default_factory=dict[str, SectionInfo])


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease together with what the worker needs to know about its group."""

    lease: Lease
    record: Record
    sections: tuple[SectionInfo, ...]


@dataclass(slots=True)
class Counts:
    """How groups ended. `started` = trained + dropped + dead + those still under way.

    `restarted`: starts that came to nothing with their worker; `regenerated`: those given up because they were too slow
    or too old. Neither counts as started. `down_weighted`: groups that the trainer acknowledged beyond their deadline.
    """

    started: int = 0
    trained: int = 0
    evaluated: int = 0
    evaluation_lost: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    dead: Counter[str] = field(default_factory=Counter[str])
    restarted: int = 0
    regenerated: int = 0
    down_weighted: int = 0
    expired: int = 0
    repeated: int = 0

    def count_end(self, end: End, reason: str) -> None:
        """Count a group that ended without being trained; a run must not grow by reasons that name single groups."""
        reasons = self.dropped if end == "dropped" else self.dead
        reasons[reason if reason in reasons or len(reasons) < REASONS else "other reasons"] += 1

    def to_wire(self) -> dict[str, Any]:
        """Return plain numbers and maps."""
        return {
            "started": self.started,
            "trained": self.trained,
            "evaluated": self.evaluated,
            "evaluation_lost": self.evaluation_lost,
            "dropped": dict(self.dropped),
            "dead": dict(self.dead),
            "restarted": self.restarted,
            "regenerated": self.regenerated,
            "down_weighted": self.down_weighted,
            "expired": self.expired,
            "repeated": self.repeated,
        }

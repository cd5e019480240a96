"""A sample broker with one stage to serve: recorded groups are handed out as in a run, and what is done is noted.

The ledger, the verbs and the client are those of every run; the other stages are there in name only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brokers.conduct import Facts
from brokers.noted import NotedLedger
from brokers.record import ROLLOUT, TRAINER, Limits, StageSpec
from brokers.samples import SampleService
from brokers.store import MemoryStore
from common.clock import Clock
from common.config import to_json
from common.group import GroupKey, PolicyVersion
from common.section import Section
from workers.replay.material import Material

FOR_EVER = 1e9
"""seconds: worker and broker are one process, neither can fall silent"""


@dataclass(slots=True)
class Outcome:
    """What became of one group. `seconds`: from its last lease to its acknowledgement; `added`: what it was given.

    `end`: not handled, handled, dead or dropped. `step`: version that the trainer updated with it; `faults`: why it
    was given back, each time.
    """

    key: GroupKey
    end: str = "not handled"
    seconds: float = 0.0
    added: dict[str, Section] = field(default_factory=dict[str, Section])
    faults: list[str] = field(default_factory=list[str])
    step: PolicyVersion = -1
    versions: tuple[PolicyVersion, PolicyVersion] = (-1, -1)
    tokens: int = 0
    leased: float = 0.0


class _Results(MemoryStore):
    """Remembers what is put into it from now on, by group; it is freed there as soon as nobody requires it."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: Mapping[str, Outcome] = {}

    def keep(self, group: str, section: Section) -> None:
        super().keep(group, section)
        if group in self.outcomes:
            self.outcomes[group].added[section.name] = section


class ReplayService(SampleService):
    """`outcomes`: by group. The run ends when all groups have; the trainer's end is its own to declare."""

    def __init__(self, material: Material, folder: str, clock: Clock) -> None:
        facts = Facts(material.facts.run, to_json(material.config), folder)
        store, count = _Results(), len(material.groups)
        limits = Limits(
            groups_per_step=material.config.groups_per_step if material.role == TRAINER else count,
            max_staleness=material.config.max_staleness,
            lease_seconds=FOR_EVER,
            max_attempts=material.config.broker.max_attempts,
            max_queue_groups=count,
            max_queue_bytes=1 << 62,
        )
        nobody: frozenset[Any] = frozenset()
        others = [StageSpec(name, nobody, nobody, nobody) for name in {ROLLOUT, TRAINER} - {material.role}]
        super().__init__(facts, [material.spec, *others], limits, store, NotedLedger)
        assert isinstance(self.ledger, NotedLedger), "asked for"
        self._clock, self._role = clock, material.role
        self.outcomes = {group.key.id: Outcome(group.key) for group in material.groups}
        self._fill(material)
        store.outcomes, self.ledger.note = self.outcomes, self._note

    def serve(self, now: float) -> None:
        """End the run once nothing is left to do."""
        super().serve(now)
        if self._role != TRAINER and not self.ledger.books.records and not self.ledger.ended:
            self.ledger.end("finished", "every recorded group was handled")
            super().serve(now)

    def _fill(self, material: Material) -> None:
        """Put every group where it is ready for the stage; the trainer is given them step by step, in their order."""
        ledger, now = self.ledger, self._clock.now()
        first = max(0, material.groups[0].step)  # the replay begins at version 0, the record may begin later
        for place, group in enumerate(material.groups):
            key = GroupKey(group.key.id, place, group.key.purpose)  # any version may generate it
            key = key if self._role == TRAINER else GroupKey(group.key.id, group.key.seq, group.key.purpose)
            sections = group.sections(without=[self._role, *material.behind])
            ledger.add(key, [section.info for section in sections.values()], now)
            record = ledger.books.records[key.id]
            for name in record.sections:
                self.store.keep(key.id, sections[name])
            if self._role != ROLLOUT:
                record.version_min, record.version_max = (version - first for version in group.versions)
                record.tokens = group.tokens
            if self._role == TRAINER:
                ledger.begin(record, place // ledger.limits.groups_per_step, now)
        ledger.end_of_data()

    def _note(self, kind: str, group: str, stage: str, body: Mapping[str, Any]) -> None:
        outcome = self.outcomes.get(group)
        if outcome is None or stage not in (self._role, ""):
            return
        now = self._clock.now()
        match kind:
            case "lease":
                outcome.leased = now
            case "put":
                outcome.versions, outcome.tokens = (body["versions"][0], body["versions"][1]), body["tokens"]
            case "ack":
                outcome.end, outcome.step, outcome.seconds = "handled", body["step"], now - outcome.leased
            case "back":
                outcome.added.clear()
                if body["fault"]:
                    outcome.faults.append(body["reason"])
            case "finish" if body["reason"] != "run ended":
                outcome.end = body["end"]
            case _:
                pass

"""Groups on disk, to be worked on again: what a tap recorded, what a run's journal holds, what a replay left.

All three are segments of a journal. Reading changes nothing, so it is safe beside the broker that still writes them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from brokers.journal import Event, Journal, segments
from brokers.playback import Recovery, read
from brokers.record import TRAINER
from common.errors import BrokerError, ConfigError
from common.group import GroupKey, PolicyVersion
from common.process import write_atomically
from common.section import Section

RUN_FILE, PLAN_FILE = "run.json", "plan.json"
"""what tells of the run: beside a tap's segments, or in the folder around a journal's"""
SEGMENT_BYTES = 256 << 20
GRANT = "grant"
"""kind of a tap's events: a group as it was handed to a worker of the tap's stage"""


@dataclass(slots=True)
class Recorded:
    """A group of a recording. `given`: sections that it came with; `added`: by stage, what was acknowledged.

    `versions`: oldest and newest in its spans; `step`: version that the trainer updated with it. -1 where unknown.
    """

    key: GroupKey
    given: dict[str, Section]
    added: dict[str, dict[str, Section]] = field(default_factory=dict[str, dict[str, Section]])
    versions: tuple[PolicyVersion, PolicyVersion] = (-1, -1)
    tokens: int = 0
    step: PolicyVersion = -1

    def sections(self, *, without: Iterable[str] = ()) -> dict[str, Section]:
        """Return the sections by name, those that stages in `without` added left out."""
        left_out = set(without)
        stages = [sections for stage, sections in self.added.items() if stage not in left_out]
        return {name: section for sections in (self.given, *stages) for name, section in sections.items()}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run that was recorded. `config`: resolved, as JSON; `folder`: where the run's own files are, or were."""

    run: str
    config: Mapping[str, Any]
    folder: Path


@dataclass(slots=True)
class Recording:
    """What a folder holds. `lost`: groups whose beginning was in segments that the broker has dropped since.

    `torn`: where and why reading stopped, empty if it came to the end. `facts`: None where no file tells of the run.
    """

    folder: Path
    groups: dict[str, Recorded] = field(default_factory=dict[str, Recorded])
    lost: set[str] = field(default_factory=set[str])
    torn: str = ""
    facts: RunFacts | None = None


@dataclass(frozen=True, slots=True)
class _Staged:
    """What was put under a lease that is neither acknowledged nor over."""

    sections: Mapping[str, Section]
    versions: tuple[PolicyVersion, PolicyVersion]
    tokens: int


def load(folder: Path) -> Recording:
    """Read a tap's folder or a journal's, whole or torn; sections are views of the mapped files.

    Raises `ConfigError` for a folder that is neither, or belongs to another run than the files beside it tell of.
    """
    if not segments(folder):
        inside = folder / "journal"
        hint = f"; do you mean {inside}?" if segments(inside) else ""
        raise ConfigError(
            f"{folder} is no recording: it holds no segment-*.arrow, as `python -m brokers.tap` and broker.journal "
            f"write them{hint}"
        )
    found, recording, staged = Recovery(), Recording(folder), dict[int, _Staged]()
    run = ""
    for event in read(folder, found):
        if event.kind == "state":
            run = str(event.body.get("run", ""))
        _take(recording, staged, event)
    recording.torn = found.torn
    if not found.events:
        raise ConfigError(f"{folder}: nothing can be read of it: {found.torn or 'its segments hold no event'}")
    recording.facts = _facts(folder)
    if recording.facts is not None and run not in ("", recording.facts.run):
        raise ConfigError(f"{folder} holds run {run!r}, but the files beside it tell of run {recording.facts.run!r}")
    return recording


def new_folder(folder: Path) -> Path:
    """Return a folder to write into; raises `ConfigError` if something is in it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: not a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder} is not empty: name a new folder, nothing is overwritten")
    return folder


class Writer:
    """Writes a recording of run `run` into `folder`. Every `write` leaves whole files."""

    def __init__(self, folder: Path, facts: RunFacts, stage: str) -> None:
        tree = {"run": facts.run, "stage": stage, "folder": str(facts.folder), "config": dict(facts.config)}
        write_atomically(folder / RUN_FILE, tree)
        self._journal = Journal(folder, SEGMENT_BYTES, fsync=False)
        self._state = {"run": facts.run, "stage": stage}
        self.bytes = 0
        self._leases = 0

    def write(self, events: Iterable[Event]) -> None:
        """Append events in one commit; raises `BrokerError` when the disk is full."""
        if self._journal.wants_rotation:
            self._journal.rotate(self._state)
        for event in events:
            self._journal.append(event)
            self.bytes += sum(section.info.length for section in event.sections)
        if not self._journal.commit():
            raise BrokerError(f"disk full: the recording in {self._journal.folder} ends here; what it holds is whole")

    def group(self, group: Recorded, order: Iterable[str]) -> list[Event]:
        """Return the events that tell of a group; the stages that added to it come in this `order`."""
        key = group.key
        head = {"seq": key.seq, "purpose": key.purpose, "min_version": key.min_version}
        events = [Event("add", key.id, "", head, list(group.given.values()))]
        for stage in [stage for stage in order if stage in group.added]:
            self._leases += 1
            body = {"lease": self._leases, "worker": "replay", "versions": list(group.versions), "tokens": group.tokens}
            events.append(Event("put", key.id, stage, body, list(group.added[stage].values())))
            events.append(Event("ack", key.id, stage, {"lease": self._leases, "worker": "replay", "step": -1}))
        if group.step >= 0:
            self._leases += 1
            body = {"lease": self._leases, "worker": "replay", "step": group.step}
            events.append(Event("ack", key.id, TRAINER, body))
        return events

    def close(self) -> None:
        """Close the last segment."""
        self._journal.close()


def _take(recording: Recording, staged: dict[int, _Staged], event: Event) -> None:
    """Let one event tell of its group. Kinds that tell nothing of what a group holds are passed over."""
    body, sections = event.body, {section.name: section for section in event.sections}
    if event.kind in ("add", GRANT):
        key = GroupKey(event.group, body["seq"], body["purpose"], body["min_version"])
        recording.groups[event.group] = Recorded(key, sections)
    group = recording.groups.get(event.group)
    if group is None:
        if event.group:
            recording.lost.add(event.group)
        return
    match event.kind:
        case "grant":
            group.versions, group.tokens = (body["versions"][0], body["versions"][1]), body["tokens"]
            group.step = body["version"] if event.stage == TRAINER else -1
        case "put":
            oldest, newest = body["versions"]
            before = staged.get(body["lease"])
            held = {**(before.sections if before else {}), **sections}
            staged[body["lease"]] = _Staged(held, (oldest, newest), body["tokens"])
        case "ack" if event.stage == TRAINER:
            group.step = body["step"]
        case "ack":
            done = staged.pop(body["lease"], None)
            if done is not None:
                group.added[event.stage] = dict(done.sections)
                if done.versions[0] >= 0:
                    group.versions, group.tokens = done.versions, done.tokens
        case _:
            pass


def _facts(folder: Path) -> RunFacts | None:
    """Return what is written beside the segments, or around them, about the run."""
    for path, home in ((folder / RUN_FILE, None), (folder.parent / PLAN_FILE, folder.absolute().parent)):
        try:
            told = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
            # A run's folder may have been moved since: where the journal is now is what counts.
            return RunFacts(str(told["run"]), dict(told["config"]), home or Path(told["folder"]))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} does not tell of a run: {error!r}") from error
    return None

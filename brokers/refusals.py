"""What the ledger refuses because it cannot be, whoever says it; each raises `WireError` with the reason."""

from collections.abc import Sequence

from brokers.books import Books
from brokers.record import ROLLOUT, Limits, Record, StageSpec
from common.errors import WireError
from common.group import GroupKey, PolicyVersion
from common.section import SectionInfo


def new_group(books: Books, key: GroupKey, sections: Sequence[SectionInfo]) -> None:
    """Refuse a group that rollout could never lease, or whose id another prompt has."""
    if key.purpose not in ("train", "eval"):
        raise WireError(f"group {key.id}: unknown purpose {key.purpose!r}")
    missing = books.stages[ROLLOUT].requires - {info.name for info in sections}
    if missing:
        raise WireError(f"group {key.id} comes without sections {sorted(missing)}, which rollout requires")
    known = books.records.get(key.id)
    if known is not None and (known.key.purpose, known.key.seq) != (key.purpose, key.seq):
        raise WireError(f"group {key.id} is here already, as {known.key.purpose} prompt {known.key.seq}")


def foreign_sections(stage: StageSpec, sections: Sequence[SectionInfo]) -> None:
    """Refuse sections that a stage does not add."""
    foreign = {info.name for info in sections} - stage.adds
    if foreign:
        raise WireError(f"stage {stage.name!r} put sections {sorted(foreign)}, which it does not add")


def unfinished(stage: StageSpec, record: Record, put: Sequence[str]) -> None:
    """Refuse the acknowledgement of a group without all that the stage adds."""
    missing = stage.adds - set(put)
    if missing:
        raise WireError(f"stage {stage.name!r} acknowledges group {record.key.id} without {sorted(missing)}")


def spans(record: Record, versions: tuple[PolicyVersion, PolicyVersion], trainer: PolicyVersion) -> None:
    """Refuse spans of versions that no trainer has made. `trainer`: the newest that was ever reached."""
    if not 0 <= versions[0] <= versions[1] <= trainer:
        oldest, newest = versions
        raise WireError(f"group {record.key.id} holds versions {oldest} to {newest}, the trainer is at {trainer}")


def unknown_lane(lane: int | None, limits: Limits) -> None:
    """Refuse a lane that no setting makes."""
    if lane is not None and not 0 <= lane <= len(limits.lanes):
        raise WireError(f"lane {lane} of predicted lengths is asked for; broker.lanes makes {len(limits.lanes) + 1}")


def resumed(version: PolicyVersion, committed: PolicyVersion, trainer: PolicyVersion) -> None:
    """Refuse a checkpoint whose groups are gone, or that cannot be."""
    if not committed <= version <= trainer:
        raise WireError(
            f"trainer resumes at version {version}: it can at the last commit, {committed}, or later, "
            f"and not beyond {trainer}, which it had reached"
        )


def future_version(who: str, version: PolicyVersion, trainer: PolicyVersion) -> None:
    """Refuse a version that the trainer has not reached."""
    if version > trainer:
        raise WireError(f"{who} is at version {version}, the trainer only at {trainer}")


def other_step(what: str, step: PolicyVersion, expected: PolicyVersion) -> None:
    """Refuse any step but the one that is due."""
    if step != expected:
        raise WireError(f"{what} {step}, expected {expected}")

"""What a replay came to, for people: a line a group, and how what was added compares with what the run had added."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brokers.record import TRAINER
from brokers.recording import Recorded, Writer
from common import metrics
from common.group import Group
from common.section import Section, decode
from workers.replay.material import Material
from workers.replay.service import Outcome

METRICS_FILE = "metrics.jsonl"
STEP_COLUMNS = ("step", "groups", "reward", "loss", "grad_norm", "entropy", "staleness_max", "step_s")


@dataclass(frozen=True, slots=True)
class Difference:
    """How a column compares with the recorded one. `largest`: absolute difference of numbers, None without any."""

    equal: bool
    largest: float | None = None

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        return "different" if self.largest is None else f"differs by {self.largest:.4g}"


def compare(new: Section, old: Section) -> dict[str, Difference]:
    """Compare two sections column by column; NaN equals NaN, and floats of one shape differ by a number."""
    pairs = zip(decode(new).columns, decode(old).columns, decode(new).schema.names, strict=True)
    return {name: _difference(mine, theirs) for mine, theirs, name in pairs}


def _difference(new: Any, old: Any) -> Difference:
    if new.equals(old):
        return Difference(equal=True)
    flat_new, flat_old = new, old
    if pa.types.is_large_list(new.type):
        if new.value_lengths() != old.value_lengths():
            return Difference(equal=False)
        flat_new, flat_old = new.flatten(), old.flatten()
    if not pa.types.is_floating(flat_new.type) or len(flat_new) != len(flat_old):
        return Difference(equal=False)
    mine, theirs = (np.asarray(flat.to_numpy(zero_copy_only=False), np.float64) for flat in (flat_new, flat_old))
    with np.errstate(invalid="ignore"):
        apart = np.where(mine == theirs, 0.0, np.abs(mine - theirs))
    apart = np.where(np.isnan(mine) & np.isnan(theirs), 0.0, np.where(np.isnan(apart), np.inf, apart))
    largest = float(apart.max(initial=0.0))
    return Difference(largest == 0.0, largest)


def _reward(group: Group) -> str:
    statuses = Counter(group.values("reward_status"))
    scored = [r for r, s in zip(group.values("reward"), group.values("reward_status"), strict=True) if s == "ok"]
    mean = f"{np.mean(scored):.4f}" if scored else "-"
    return f"reward {mean}, {_counted(statuses)}"


def _advantage(group: Group) -> str:
    values = np.concatenate([np.zeros(0, np.float32), *group.arrays("advantages")])
    if not len(values):
        return "advantage of no token"
    return f"advantage mean {values.mean():.4f} std {values.std():.4f}"


def _response(group: Group) -> str:
    return f"{sum(group.values('num_tokens'))} tokens, {_counted(Counter(group.values('finish_reason')))}"


def _reference(group: Group) -> str:
    values = np.concatenate([np.zeros(0, np.float32), *group.arrays("ref_logprobs")])
    return f"log-prob mean {values.mean():.4f}" if len(values) else "log-prob of no token"


def _counted(counts: Counter[str]) -> str:
    return " ".join(f"{name} {count}" for name, count in counts.items())


_IN_WORDS: Mapping[str, Callable[[Group], str]] = {
    "reward": _reward,
    "advantage": _advantage,
    "response": _response,
    "reference": _reference,
}


def in_words(outcome: Outcome) -> str:
    """Return what a group was given, in a few words."""
    if outcome.end != "handled":
        return ""
    if outcome.step >= 0:
        return f"trained in step {outcome.step + 1}"
    group = Group(outcome.key, 1, dict(outcome.added))
    known = [_IN_WORDS[name](group) for name in outcome.added if name in _IN_WORDS]
    return "; ".join(known) or ", ".join(f"{each.info.rows} rows {name}" for name, each in outcome.added.items())


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows in columns; the first row is the head."""
    lines = list(rows)
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


class Account:
    """The account of one replay: `outcomes` by group id."""

    def __init__(self, material: Material, outcomes: Mapping[str, Outcome]) -> None:
        self._material, self._outcomes = material, outcomes
        self.ends = Counter(outcome.end for outcome in outcomes.values())
        self._columns: defaultdict[str, list[Difference]] = defaultdict(list)

    def text(self, folder: Path) -> str:
        """Return everything there is to say; `folder`: where a trainer left its metrics."""
        rows: list[Sequence[str]] = [("group", "seconds", "end", "added", "against the record", "given back")]
        for group in self._material.groups:
            outcome = self._outcomes[group.key.id]
            beside = self._compared(outcome, group)
            seconds = f"{outcome.seconds:.3f}" if outcome.end == "handled" else ""
            rows.append((group.key.id, seconds, outcome.end, in_words(outcome), beside, "; ".join(outcome.faults)))
        keep = [place for place in range(len(rows[0])) if any(row[place] for row in rows[1:])]
        parts = [table([row[place] for place in keep] for row in rows)]
        parts += [self._column(name, differences) for name, differences in self._columns.items()]
        if self._material.role == TRAINER:
            parts += self._steps(folder)
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.items())
        return "\n".join([*parts, f"{len(self._outcomes)} groups: {ends}"])

    def write(self, folder: Path) -> int:
        """Write a recording in which this stage's sections are the new ones; return its bytes.

        What stages behind this one had added was made of the old ones, and is left out.
        """
        material = self._material
        writer = Writer(folder, material.facts, material.role)
        stale = {material.role, *material.behind}
        for group in material.groups:
            outcome = self._outcomes[group.key.id]
            added = {stage: sections for stage, sections in group.added.items() if stage not in stale}
            result = Recorded(group.key, group.given, added, group.versions, group.tokens, group.step)
            if outcome.end == "handled" and outcome.added:
                result.added[material.role] = outcome.added
                if outcome.versions[0] >= 0:
                    result.versions, result.tokens = outcome.versions, outcome.tokens
            writer.write(writer.group(result, material.order))
        writer.close()
        return writer.bytes

    def _compared(self, outcome: Outcome, group: Recorded) -> str:
        old = group.added.get(self._material.role, {})
        if outcome.end != "handled" or not old:
            return ""
        found: dict[str, Difference] = {}
        for name in outcome.added.keys() & old.keys():
            found |= compare(outcome.added[name], old[name])
        for name, difference in found.items():
            self._columns[name].append(difference)
        return ", ".join(f"{name} {each}" for name, each in sorted(found.items()) if not each.equal) or "equal"

    def _column(self, name: str, differences: Sequence[Difference]) -> str:
        equal = sum(difference.equal for difference in differences)
        largest = [difference.largest for difference in differences if difference.largest is not None]
        by = f"; largest difference {max(largest):.4g}" if equal < len(differences) and largest else ""
        return f"column {name!r}: equal in {equal} of {len(differences)} groups{by}"

    def _steps(self, folder: Path) -> list[str]:
        """Return the trainer's metrics, beside those of the run where its folder still has them."""
        mine = _steps_in(folder)
        recorded = {row["step"]: row for row in _steps_in(self._material.facts.folder)}
        first = max(0, self._material.groups[0].step)
        names = [name for name in STEP_COLUMNS if any(name in row for row in mine)]
        head = [*names, *(["loss in the run"] if recorded else [])]
        rows = [[_number(row.get(name)) for name in names] for row in mine]
        if recorded:
            for cells, row in zip(rows, mine, strict=True):
                cells.append(_number(recorded.get(row["step"] + first, {}).get("loss")))
        return [table([head, *rows])] if rows else []


def _steps_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS_FILE
    return [row for row in metrics.read(path) if row["kind"] == "step"] if path.exists() else []


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)

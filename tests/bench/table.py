"""The figures that a benchmark prints: one row each, aligned, and as JSON for those who compare runs."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

COLUMNS = ("name", "value", "unit", "spread", "against", "target", "met")


@dataclass(frozen=True, slots=True)
class Row:
    """`against`: what the value is compared with. `target` and `met` are empty where nothing is promised.

    `spread`: how much worse the median repetition was than the best, which is the value; None for what is counted.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    target: str = ""
    met: bool | None = None
    spread: float | None = None


def at_least(name: str, value: float, unit: str, against: str, target: float) -> Row:
    """Return a row whose value should reach `target`."""
    return Row(name, value, unit, against, f">= {target:g}", value >= target)


def at_most(name: str, value: float, unit: str, against: str, target: float) -> Row:
    """Return a row whose value should not exceed `target`."""
    return Row(name, value, unit, against, f"<= {target:g}", value <= target)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a command line that knows `--json`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows as a list of objects")
    return made


def report(rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows; write them to `path` as JSON if there is one."""
    print(text(rows), flush=True)
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


def text(rows: Sequence[Row]) -> str:
    """Return the table; numbers stand right, everything else left. A column that is empty in every row is left out."""
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    used = [place for place in range(len(COLUMNS)) if any(line[place] for line in lines[1:])]
    widths = {place: max(len(line[place]) for line in lines) for place in used}
    right = {COLUMNS.index("value"), COLUMNS.index("spread")}
    return "\n".join(
        "  ".join(
            line[place].rjust(widths[place]) if place in right else line[place].ljust(widths[place]) for place in used
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    met = "" if row.met is None else "yes" if row.met else "NO"
    spread = "" if row.spread is None else f"{100 * row.spread:+.0f} %"
    return row.name, _number(row.value), row.unit, spread, row.against, row.target, met


def _number(value: float) -> str:
    """Three significant digits, but all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")

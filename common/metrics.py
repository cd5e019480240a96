"""Numbers of a run: one writer per file, each row committed when `write` returns."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np


class MetricsFile:
    """Appends rows as JSON lines; a row that was written survives a crash of the process.

    A line that an earlier writer left torn is cut off, else the first new row would be lost with it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole = path.read_bytes().rfind(b"\n") + 1
            os.truncate(path, whole)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; a non-finite number is written as null, which JSON can hold."""
        self._file.write(json.dumps({key: _plain(value) for key, value in row.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a torn last line is left out."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return `name_min`, `name_mean`, `name_p95` and `name_max` of the values; empty for no values."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {
        f"{name}_min": float(array.min()),
        f"{name}_mean": float(array.mean()),
        f"{name}_p95": float(np.percentile(array, 95)),
        f"{name}_max": float(array.max()),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast(Sequence[Any], value)]
    return value

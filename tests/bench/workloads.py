"""What the benchmarks of the sample broker send: the same values for every peer, from numpy alone.

A batch is 32 groups of 8 samples. A field has one row per sample or one per group; rows of a group follow each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

GROUPS, SAMPLES = 32, 8
ROWS = GROUPS * SAMPLES

Column: TypeAlias = "Sequence[np.ndarray[Any, Any]] | Sequence[str]"
"""one array or one text per row"""


@dataclass(frozen=True, slots=True)
class Batch:
    """`by_sample`: columns of 256 rows. `by_group`: columns of 32 rows."""

    by_sample: Mapping[str, Column]
    by_group: Mapping[str, Column]

    @property
    def num_bytes(self) -> int:
        """Bytes of the values: what a memcpy of the batch would move."""
        columns = [*self.by_sample.values(), *self.by_group.values()]
        return sum(len(row) if isinstance(row, str) else row.nbytes for column in columns for row in column)


def ragged() -> Batch:
    """Nine fields: three of float32 [4096], three of float32 [1..4096], three texts of 16 KiB; 31 MB together."""
    rng = np.random.default_rng(1)
    columns: dict[str, Column] = {}
    for number in range(3):
        columns[f"fixed_{number}"] = list(rng.random((ROWS, 4096), np.float32))
        columns[f"ragged_{number}"] = [rng.random(length, np.float32) for length in rng.integers(1, 4097, ROWS)]
        columns[f"text_{number}"] = [rng.bytes(8192).hex() for _ in range(ROWS)]
    return Batch(columns, {})


def images() -> Batch:
    """One image of 1 MB per prompt; 256 tokens and their log-probs per sample."""
    rng = np.random.default_rng(2)
    return Batch(_responses(rng), {"image": [rng.integers(0, 256, 1_000_000, np.uint8) for _ in range(GROUPS)]})


def stamp(batch: Batch, trip: int) -> None:
    """Make the images of one trip differ from those of every other, or a worker that keeps media need not get them."""
    for image in batch.by_group.get("image", ()):
        assert isinstance(image, np.ndarray), "images are arrays"
        image[:8] = np.frombuffer(trip.to_bytes(8, "little"), np.uint8)


def small() -> Batch:
    """256 tokens and their log-probs per sample."""
    return Batch(_responses(np.random.default_rng(3)), {})


def _responses(rng: np.random.Generator) -> dict[str, Column]:
    return {
        "ids": list(rng.integers(0, 50_000, (ROWS, 256), np.int32)),
        "logprobs": list(-rng.random((ROWS, 256), np.float32)),
    }


WORKLOADS: dict[str, Callable[[], Batch]] = {"ragged": ragged, "images": images, "small": small}


def same(found: Column, expected: Column) -> bool:
    """Whether two columns hold the same values in the same rows."""
    if len(found) != len(expected):
        return False
    return all(
        one == other if isinstance(other, str) else np.array_equal(one, other)  # pyright: ignore[reportArgumentType]
        for one, other in zip(found, expected, strict=True)
    )

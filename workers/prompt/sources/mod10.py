"""(x + y) mod 10 for two digits: the smallest task that a model learns by reward alone from random weights."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from common.seeds import seed_of
from common.settings import Table
from workers.prompt.source import Row, Rows

NUM_PAIRS = 100


class Mod10:
    """Prompts such as `3+9=` with label `2`.

    Training draws pairs with repetition; the held-out rows are of the same 100 pairs, each at most once, since there
    are no others: they measure what was learned, not how it generalises.
    """

    class Options(Table):
        """`size`: training rows. `heldout`: distinct held-out pairs; 100 are all of them, in ascending order."""

        size: int = Field(100_000, gt=0)
        heldout: int = Field(NUM_PAIRS, ge=0, le=NUM_PAIRS)

    def __init__(self, options: Options, seed: int) -> None:
        self.train: Sequence[Row] = _Draws(options.size, seed)
        pairs = list(range(NUM_PAIRS))
        if options.heldout < NUM_PAIRS:
            drawn = np.random.default_rng(seed_of(seed, "mod10", "heldout")).permutation(NUM_PAIRS)
            pairs = drawn[: options.heldout].tolist()
        self.heldout: Sequence[Row] = [_row(f"mod10/heldout/{place}", pair) for place, pair in enumerate(pairs)]


class _Draws(Rows):
    """A row is a hash of (seed, number), so no row is kept."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    def row(self, number: int) -> Row:
        """Return a pair drawn from the seed."""
        return _row(f"mod10/train/{number}", seed_of(self._seed, "mod10", number) % NUM_PAIRS)


def _row(name: str, pair: int) -> Row:
    x, y = divmod(pair, 10)
    return Row(name, ({"role": "user", "content": f"{x}+{y}="},), str((x + y) % 10))

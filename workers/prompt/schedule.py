"""Which row comes when, as a pure function of the place in the order: a restart needs no state but that place."""

from typing import Any

import numpy as np

from common.seeds import seed_of


class Schedule:
    """Every epoch is a permutation of all rows, drawn from (seed, epoch). `epochs` None: the order never ends."""

    def __init__(self, num_rows: int, epochs: int | None, seed: int) -> None:
        assert num_rows > 0, "a source has at least one row"
        self._num_rows, self._epochs, self._seed = num_rows, epochs, seed
        self._drawn: tuple[int, np.ndarray[Any, Any]] | None = None

    def row_of(self, seq: int) -> tuple[int, int] | None:
        """Return (epoch, row) of the prompt number `seq` >= 0, or None after the last epoch."""
        assert seq >= 0, "prompts are counted from 0"
        epoch, place = divmod(seq, self._num_rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._drawn is None or self._drawn[0] != epoch:
            generator = np.random.default_rng(seed_of(self._seed, "epoch", epoch))
            self._drawn = epoch, generator.permutation(self._num_rows)
        return epoch, int(self._drawn[1][place])

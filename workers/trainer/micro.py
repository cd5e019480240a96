"""How rows become micro-batches under a budget of padded tokens."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def plan(length_R: Array, kind_R: Array, max_tokens: int) -> list[Array]:
    """Return micro-batches as ascending indices of rows; each row is in exactly one.

    `length_R`: tokens per row; `kind_R`: rows of different kinds cannot share a micro-batch. A micro-batch of n rows
    costs n times its longest row and stays within `max_tokens`, unless it is a single row that is longer by itself.
    Rows of one kind keep their order; kinds follow each other by their first row.
    """
    batches: list[Array] = []
    _, first = np.unique(kind_R, return_index=True)
    for start in np.sort(first):
        rows = np.flatnonzero(kind_R == kind_R[start])
        batches += np.split(rows, _cuts(length_R[rows], max_tokens))
    return batches


def _cuts(lengths: Array, max_tokens: int) -> list[int]:
    """Places where a greedy reader must begin a new micro-batch."""
    cuts: list[int] = []
    begin, longest = 0, 0
    for i, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if i > begin and (i - begin + 1) * longest > max_tokens:
            cuts.append(i)
            begin, longest = i, length
    return cuts

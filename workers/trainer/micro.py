"""How rows become micro-batches under a budget of padded tokens, with little padding."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAX_PADDING = 128
"""padded positions of a micro-batch at most: about as much as the fixed cost of one more forward and backward pass"""


def plan(length_R: Array, kind_R: Array, max_tokens: int) -> list[Array]:
    """Return micro-batches as ascending indices of rows; each row is in exactly one.

    `length_R`: tokens per row; `kind_R`: rows of different kinds cannot share a micro-batch. A micro-batch of n rows
    costs n times its longest row and stays within `max_tokens`, unless it is a single row that is longer by itself.
    Rows of similar length share a micro-batch, the longest ones first; kinds follow each other by their first row.
    """
    batches: list[Array] = []
    _, first = np.unique(kind_R, return_index=True)
    for start in np.sort(first):
        rows = np.flatnonzero(kind_R == kind_R[start])
        rows = rows[np.argsort(-length_R[rows], kind="stable")]
        batches += [np.sort(batch) for batch in np.split(rows, _cuts(length_R[rows], max_tokens))]
    return batches


def _cuts(lengths: Array, max_tokens: int) -> list[int]:
    """Places where a greedy reader of descending lengths must begin a new micro-batch."""
    cuts: list[int] = []
    begin, padding = 0, 0
    for i, length in enumerate(lengths.tolist()):
        longest = int(lengths[begin])
        padding += longest - length
        if i > begin and ((i - begin + 1) * longest > max_tokens or padding > MAX_PADDING):
            cuts.append(i)
            begin, padding = i, 0
    return cuts

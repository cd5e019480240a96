"""Stop and forbidden ids of the running rows as tables, one line per kind: rows of one step may differ in them.

Shapes: R rows, K kinds, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from workers.rollout.engine import SamplingParams


class Kinds:
    """Numbers the distinct (stop ids, forbidden ids); ids outside the vocabulary can never be drawn and are ignored."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._stop_KV = self._forbidden_KV = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)

    def number(self, sampling: SamplingParams) -> int:
        """Return the line of these ids in the tables, adding it if need be."""
        key = (sampling.stop_ids, sampling.forbidden_ids)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._stop_KV = torch.cat([self._stop_KV, self._line(sampling.stop_ids)])
            self._forbidden_KV = torch.cat([self._forbidden_KV, self._line(sampling.forbidden_ids)])
        return self._numbers[key]

    def stops(self, kind_R: Tensor, token_R: Tensor) -> Tensor:
        """Return bool [R]: whether the token ends its row."""
        return self._stop_KV[kind_R, token_R]

    def forbidden(self, kind_R: Tensor) -> Tensor | None:
        """Return bool [R or 1, V]: what the rows must not draw; None when nothing is forbidden."""
        if not any(forbidden for _, forbidden in self._numbers):
            return None
        return self._forbidden_KV if len(self._numbers) == 1 else self._forbidden_KV[kind_R]

    def _line(self, ids: Iterable[int]) -> Tensor:
        line = torch.zeros(1, self._vocabulary, dtype=torch.bool, device=self._device)
        line[0, [token for token in ids if 0 <= token < self._vocabulary]] = True
        return line

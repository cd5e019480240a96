"""The samples that are being decoded, one row each, as tensors: a step touches no Python object per row.

Shapes: R rows, T response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from common.group import PolicyVersion
from workers.rollout.admission import Start
from workers.rollout.engine import FinishReason, Generation

_WIDTH = 64
"""Response tokens for which there is room at first; it doubles."""


@dataclass(slots=True)
class Rows:
    """State per row. `tokens_RT`, `logprobs_RT`, `versions_RT`: what was generated, valid up to `count_R`."""

    group_R: Tensor
    """key of the running group, int64 like all below"""
    sample_R: Tensor
    seed_R: Tensor
    kind_R: Tensor
    """row of the tables of stop and forbidden ids"""
    limit_R: Tensor
    """response tokens at which the row ends"""
    count_R: Tensor
    """response tokens so far"""
    position_R: Tensor
    """rotary position of the next token fed"""
    token_R: Tensor
    """last token, which the next pass feeds"""
    temperature_R: Tensor
    """float32"""
    tokens_RT: Tensor
    """int32"""
    logprobs_RT: Tensor
    """float32"""
    versions_RT: Tensor
    """int64, the policy version behind each token"""
    longest: int
    """no count is greater; known without asking the device"""

    def __len__(self) -> int:
        return self.group_R.shape[0]

    @classmethod
    def begin(cls, starts: Sequence[Start], kinds: Sequence[int], device: torch.device) -> "Rows":
        """Return one row per sample of `starts`, with what it had before; `kinds`: one per start; positions are 0."""
        each = [
            (start.running, sample, kind) for start, kind in zip(starts, kinds, strict=True) for sample in start.samples
        ]
        begun = [running.begun[sample] for running, sample, _ in each]
        integers = [
            (running.key, sample, running.request.seeds[sample], kind, running.limits[sample], len(had.ids))
            for (running, sample, kind), had in zip(each, begun, strict=True)
        ]
        temperatures = [running.request.sampling.temperature for running, _, _ in each]
        longest = max(len(had.ids) for had in begun)
        width = max(_WIDTH, 2 * longest)
        tokens_RT, logprobs_RT = np.zeros((len(each), width), np.int32), np.zeros((len(each), width), np.float32)
        versions_RT = np.zeros((len(each), width), np.int64)
        for row, had in enumerate(begun if longest else ()):
            tokens_RT[row, : len(had.ids)], logprobs_RT[row, : len(had.ids)] = had.ids, had.logprobs
            for first, version in had.spans:
                versions_RT[row, first:] = version
        key_R, sample_R, seed_R, kind_R, limit_R, count_R = torch.tensor(integers, device=device).unbind(1)
        return cls(
            group_R=key_R,
            sample_R=sample_R,
            seed_R=seed_R,
            kind_R=kind_R,
            limit_R=limit_R,
            count_R=count_R,
            position_R=torch.zeros_like(key_R),
            token_R=torch.zeros_like(key_R),
            temperature_R=torch.tensor(temperatures, device=device),
            tokens_RT=torch.from_numpy(tokens_RT).to(device),
            logprobs_RT=torch.from_numpy(logprobs_RT).to(device),
            versions_RT=torch.from_numpy(versions_RT).to(device),
            longest=longest,
        )

    def append(self, other: "Rows") -> None:
        """Add the rows of `other` behind these."""
        width = max(self.tokens_RT.shape[1], other.tokens_RT.shape[1])
        self._widen(width)
        other._widen(width)
        for name in _TENSORS:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        self.longest = max(self.longest, other.longest)

    def record(self, token_R: Tensor, logprob_R: Tensor, version: PolicyVersion) -> None:
        """Add one token to every row."""
        if self.longest == self.tokens_RT.shape[1]:
            self._widen(max(_WIDTH, 2 * self.longest))
        index = torch.arange(len(self), device=token_R.device), self.count_R
        self.tokens_RT[index] = token_R.int()
        self.logprobs_RT[index] = logprob_R
        self.versions_RT[index] = version
        self.token_R = token_R
        self.count_R = self.count_R + 1
        self.longest += 1

    def keep(self, into_R: Tensor, from_R: Tensor, rows: int) -> None:
        """Copy rows `from_R` over rows `into_R`, then keep the first `rows`."""
        for name in _TENSORS:
            values: Tensor = getattr(self, name)
            values[into_R] = values[from_R]
            setattr(self, name, values[:rows])
        self.longest = int(self.count_R.max()) if rows else 0

    def generations(self, index_R: Tensor, reasons: Sequence[FinishReason]) -> list[tuple[int, int, Generation]]:
        """Return (group key, sample, generation) of rows `index_R`, each with at least one token."""
        group, sample, count = (t[index_R].tolist() for t in (self.group_R, self.sample_R, self.count_R))
        tokens, logprobs = self.tokens_RT[index_R].tolist(), self.logprobs_RT[index_R].tolist()
        versions = self.versions_RT[index_R].cpu().numpy()
        changes = (versions[:, 1:] != versions[:, :-1]) & (np.arange(1, versions.shape[1]) < np.array(count)[:, None])
        is_mixed = changes.any(axis=1).tolist()
        first = versions[:, 0].tolist()
        result: list[tuple[int, int, Generation]] = []
        for i, n in enumerate(count):
            starts = [0, *(np.flatnonzero(changes[i]) + 1).tolist()] if is_mixed[i] else None
            spans = ((0, first[i]),) if starts is None else tuple((s, int(versions[i, s])) for s in starts)
            done = Generation(tuple(tokens[i][:n]), tuple(logprobs[i][:n]), spans, reasons[i])
            result.append((group[i], sample[i], done))
        return result

    def _widen(self, width: int) -> None:
        extra = width - self.tokens_RT.shape[1]
        if extra > 0:
            self.tokens_RT = torch.nn.functional.pad(self.tokens_RT, (0, extra))
            self.logprobs_RT = torch.nn.functional.pad(self.logprobs_RT, (0, extra))
            self.versions_RT = torch.nn.functional.pad(self.versions_RT, (0, extra))


_TENSORS = tuple(field.name for field in fields(Rows) if field.name != "longest")

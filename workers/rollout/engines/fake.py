"""Engine `fake`: deterministic tokens out of hashes, in a time that is set and not spent; no torch.

For measuring and testing everything around an engine. It passes the same conformance suite as the real ones.
"""

import math
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from common.errors import Reject, WireError
from common.group import PolicyVersion
from common.safetensors import shapes_in
from common.seeds import seed_of
from common.tensor import NamedTensor
from workers.rollout.engine import Completion, FinishReason, Generation, Request

_NORMAL = NormalDist()


@dataclass(slots=True)
class _Sample:
    """`target`: tokens it will have; `versions`: version of each token so far."""

    seed: int
    target: int
    reason: FinishReason
    begun: int = 0
    """tokens that it was resumed with"""
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[PolicyVersion] = field(default_factory=list[PolicyVersion])

    def generation(self, version: PolicyVersion) -> Generation:
        """`version`: the one the group was started with."""
        ended = len(self.ids) >= self.target
        starts = [i for i, v in enumerate(self.versions) if i == 0 or v != self.versions[i - 1]]
        spans = tuple((i, self.versions[i]) for i in starts) or ((0, version),)
        return Generation(tuple(self.ids), tuple(self.logprobs), spans, self.reason if ended else "abort")


@dataclass(slots=True)
class _Group:
    request: Request
    version: PolicyVersion
    started: float
    """monotonic seconds"""
    cap: int
    """tokens that take `seconds_per_group`"""
    seconds: float = 0.0
    samples: list[_Sample] = field(default_factory=list[_Sample])
    candidates: tuple[int, ...] = ()

    @property
    def ended(self) -> bool:
        return all(len(sample.ids) >= sample.target for sample in self.samples)

    def completion(self) -> Completion:
        return Completion(self.request.group, tuple(sample.generation(self.version) for sample in self.samples))


class FakeEngine:
    """Tokens are a hash of (seed, position); log-probs are a hash of those and the policy version, in (-4, 0)."""

    requires: ClassVar[frozenset[str]] = frozenset({"prompt_ids"})

    class Options(BaseModel):
        """`fixed` lengths are `max_tokens`; `long-tail`: log-normal with median a quarter of it, cut at `min_tokens`.

        `max_tokens` is capped by the request. A response that is shorter than that cap ends with a stop id; a request
        that names none gets all the tokens that it allows.
        """

        model_config = ConfigDict(extra="forbid", frozen=True)

        vocabulary: int = Field(default=256, ge=2)
        """token ids are below this"""
        seconds_per_group: NonNegativeFloat = 0.0
        """time for a response of `max_tokens`; shorter ones take their share. 0: every step advances"""
        tokens_per_step: PositiveInt | None = None
        """tokens that a step adds to each sample when `seconds_per_group` is 0; None: all of them"""
        max_running_groups: PositiveInt = 64
        lengths: Literal["fixed", "long-tail"] = "fixed"
        dtype: str | None = None
        """dtype of the weights it takes; unset: those of the folder"""
        min_tokens: PositiveInt = 1
        max_tokens: PositiveInt = 1 << 20

    def __init__(self, options: Options, folder: Path, deterministic: bool) -> None:  # noqa: ARG002  (it always is)
        self.version: PolicyVersion = 0
        self.generated = 0  # tokens, ever
        self._options = options
        self._manifest = {name: (options.dtype or dtype, shape) for name, (dtype, shape) in shapes_in(folder).items()}
        self._groups: dict[str, _Group] = {}
        self._interrupted = threading.Event()

    def room(self) -> int:
        """Return how many more groups it would run now."""
        return max(0, self._options.max_running_groups - len(self._groups))

    def running(self) -> Collection[str]:
        """Return the groups that are neither finished nor aborted."""
        return tuple(self._groups)

    def submit(self, request: Request) -> None:
        """Start a group; raises `Reject` for a token outside the vocabulary or a request for nothing."""
        if request.group in self._groups:
            raise Reject(f"group {request.group} is running already")
        for token in request.prompt_ids:
            if not 0 <= token < self._options.vocabulary:
                raise Reject(
                    f"group {request.group}: token id {token} is outside the vocabulary of {self._options.vocabulary}"
                )
        limits = request.sampling.limits(len(request.seeds))
        if not limits or min(limits) < 1 or len(request.begun) not in {0, len(limits)}:
            raise Reject(
                f"group {request.group}: needs max_tokens >= 1, seeds, and one begun generation per seed or none"
            )
        kept_out = {*request.sampling.stop_ids, *request.sampling.forbidden_ids}
        candidates = tuple(token for token in range(self._options.vocabulary) if token not in kept_out)
        if not candidates:
            raise Reject(f"group {request.group}: stop and forbidden ids leave no token")
        cap = min(self._options.max_tokens, max(limits))
        group = _Group(request, self.version, time.monotonic(), cap, candidates=candidates)
        group.samples = [self._sample(request, index, limit) for index, limit in enumerate(limits)]
        left = max(sample.target - len(sample.ids) for sample in group.samples)
        group.seconds = self._options.seconds_per_group * left / cap
        self._groups[request.group] = group

    def step(self, wait_seconds: float) -> list[Completion]:
        """Wait for the next group to end, up to `wait_seconds`; return the groups that have."""
        if self._options.seconds_per_group and self._groups:
            next_end = min(group.started + group.seconds for group in self._groups.values())
            self._interrupted.wait(max(0.0, min(wait_seconds, next_end - time.monotonic())))
            self._interrupted.clear()
        for group in self._groups.values():
            self._advance(group)
        return self._taken([name for name, group in self._groups.items() if group.ended])

    def interrupt(self) -> None:
        """End a wait."""
        self._interrupted.set()

    def abort(self, groups: Collection[str]) -> list[Completion]:
        """End these groups with the tokens they have; those that do not run are passed over."""
        return self._taken([name for name in self._groups if name in groups])

    def load(self, version: PolicyVersion, tensors: Iterable[NamedTensor]) -> None:
        """Check names, shapes and dtypes against the folder's safetensors, then serve `version`."""
        given: dict[str, tuple[str, tuple[int, ...]]] = {}
        for tensor in tensors:
            if tensor.name in given:
                raise WireError(f"weights: tensor {tensor.name!r} comes twice")
            given[tensor.name] = (tensor.dtype, tensor.shape)
        expected = self._manifest or given
        for name in sorted({*given, *expected}):
            if given.get(name) != expected.get(name):
                raise WireError(f"weights: tensor {name!r} is {given.get(name)}, the model's is {expected.get(name)}")
        for group in self._groups.values() if self._options.seconds_per_group else ():
            self._advance(group)
        self._manifest, self.version = expected, version

    def sleep(self) -> None:
        """Nothing to free; allowed when nothing runs."""
        assert not self._groups, "an engine sleeps when nothing runs"

    def wake(self) -> None:
        """Undo `sleep`."""

    def close(self) -> None:
        """Drop the groups."""
        self._groups.clear()

    def _sample(self, request: Request, index: int, limit: int) -> _Sample:
        seed, cap = request.seeds[index], min(self._options.max_tokens, limit)
        target = cap if request.sampling.stop_ids else limit
        if self._options.lengths == "long-tail" and request.sampling.stop_ids:
            quantile = (seed_of(seed, "length") % (1 << 52) + 0.5) / (1 << 52)
            target = min(cap, max(self._options.min_tokens, round(cap / 4 * math.exp(0.9 * _NORMAL.inv_cdf(quantile)))))
        reason: FinishReason = "stop" if target < limit else "length"
        sample = _Sample(seed, target, reason)
        if request.begun:
            begun = request.begun[index]
            sample.begun, sample.ids, sample.logprobs = len(begun.ids), list(begun.ids), list(begun.logprobs)
            ends = [first for first, _ in begun.spans[1:]] + [len(begun.ids)]
            for (first, version), end in zip(begun.spans, ends, strict=True):
                sample.versions += [version] * (end - first)
            if begun.finish_reason != "abort":
                sample.target, sample.reason = len(begun.ids), begun.finish_reason
        return sample

    def _advance(self, group: _Group) -> None:
        """Give each sample the tokens that are due; all samples run at the same rate."""
        cap, seconds = group.cap, self._options.seconds_per_group
        # The small addition keeps the last token from being late by a rounding error.
        by_time = math.floor((time.monotonic() - group.started) * cap / seconds + 1e-6) if seconds else 0
        for sample in group.samples:
            due = sample.begun + by_time if seconds else len(sample.ids) + (self._options.tokens_per_step or cap)
            for position in range(len(sample.ids), min(sample.target, due)):
                is_end = position == sample.target - 1 and sample.reason == "stop"
                drawn = group.candidates[seed_of(sample.seed, position) % len(group.candidates)]
                sample.ids.append(group.request.sampling.stop_ids[0] if is_end else drawn)
                sample.logprobs.append(-4.0 * (seed_of(sample.seed, position, self.version) % 9999 + 1) / 10000)
                sample.versions.append(self.version)
                self.generated += 1

    def _taken(self, names: Collection[str]) -> list[Completion]:
        return [self._groups.pop(name).completion() for name in names]

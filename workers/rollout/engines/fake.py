"""Engine `fake`: deterministic tokens out of hashes, in a time that is set and not spent; no torch.

For measuring and testing everything around an engine. It passes the same conformance suite as the real ones.
"""

import json
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
from common.seeds import seed_of
from common.tensor import NamedTensor
from workers.rollout.engine import Completion, FinishReason, Generation, Request

_NORMAL = NormalDist()
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "U8": "uint8"}
"""dtype names of the safetensors format"""


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
    seconds: float
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

        `max_tokens` is capped by the request. A response that is shorter than that cap ends with a stop id.
        """

        model_config = ConfigDict(extra="forbid", frozen=True)

        vocabulary: int = Field(default=256, ge=2)
        """token ids are below this"""
        stop_id: int = Field(default=1, ge=0)
        """end mark of requests that name no stop id"""
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
        self._options = options
        self._manifest = _manifest(folder, options.dtype)
        self._groups: dict[str, _Group] = {}
        self._closed = threading.Event()

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
        if request.sampling.max_tokens < 1 or not request.seeds or len(request.begun) not in {0, len(request.seeds)}:
            raise Reject(
                f"group {request.group}: needs max_tokens >= 1, seeds, and one begun generation per seed or none"
            )
        kept_out = {*request.sampling.stop_ids, *request.sampling.forbidden_ids, self._options.stop_id}
        candidates = tuple(token for token in range(self._options.vocabulary) if token not in kept_out)
        if not candidates:
            raise Reject(f"group {request.group}: stop and forbidden ids leave no token")
        cap = self._cap(request)
        group = _Group(request, self.version, time.monotonic(), 0.0, candidates=candidates)
        group.samples = [self._sample(request, index, cap) for index in range(len(request.seeds))]
        left = max(sample.target - len(sample.ids) for sample in group.samples)
        group.seconds = self._options.seconds_per_group * left / cap
        self._groups[request.group] = group

    def step(self, wait_seconds: float) -> list[Completion]:
        """Wait for the next group to end, up to `wait_seconds`; return the groups that have."""
        if self._options.seconds_per_group and self._groups:
            next_end = min(group.started + group.seconds for group in self._groups.values())
            self._closed.wait(max(0.0, min(wait_seconds, next_end - time.monotonic())))
        for group in self._groups.values():
            self._advance(group)
        return self._taken([name for name, group in self._groups.items() if group.ended])

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
        """Drop the groups and end a wait."""
        self._groups.clear()
        self._closed.set()

    def _cap(self, request: Request) -> int:
        return min(self._options.max_tokens, request.sampling.max_tokens)

    def _sample(self, request: Request, index: int, cap: int) -> _Sample:
        seed, target = request.seeds[index], cap
        if self._options.lengths == "long-tail":
            quantile = (seed_of(seed, "length") % (1 << 52) + 0.5) / (1 << 52)
            target = min(cap, max(self._options.min_tokens, round(cap / 4 * math.exp(0.9 * _NORMAL.inv_cdf(quantile)))))
        reason: FinishReason = "stop" if target < request.sampling.max_tokens else "length"
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
        stop_id = (group.request.sampling.stop_ids or (self._options.stop_id,))[0]
        cap, seconds = self._cap(group.request), self._options.seconds_per_group
        # The small addition keeps the last token from being late by a rounding error.
        by_time = math.floor((time.monotonic() - group.started) * cap / seconds + 1e-6) if seconds else 0
        for sample in group.samples:
            due = sample.begun + by_time if seconds else len(sample.ids) + (self._options.tokens_per_step or cap)
            for position in range(len(sample.ids), min(sample.target, due)):
                is_end = position == sample.target - 1 and sample.reason == "stop"
                drawn = group.candidates[seed_of(sample.seed, position) % len(group.candidates)]
                sample.ids.append(stop_id if is_end else drawn)
                sample.logprobs.append(-4.0 * (seed_of(sample.seed, position, self.version) % 9999 + 1) / 10000)
                sample.versions.append(self.version)

    def _taken(self, names: Collection[str]) -> list[Completion]:
        return [self._groups.pop(name).completion() for name in names]


def _manifest(folder: Path, dtype: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes from the headers of the folder's safetensors: 8 bytes of length, then JSON."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {
            n: (dtype or _DTYPES.get(t["dtype"], t["dtype"]), tuple(t["shape"]))
            for n, t in header.items()
            if "shape" in t
        }
    return found

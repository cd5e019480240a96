"""What the rollout worker asks of an inference engine, whether it lives in this process or behind HTTP."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import BaseModel

from common.errors import Reject
from common.group import PolicyVersion
from common.tensor import NamedTensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; log-probs are then of the unscaled logits.

    `max_tokens`: longest response, one number for all samples or one for each. `stop_ids` end a sample and belong to
    it. `forbidden_ids` (media placeholders) get a logit of minus infinity, in the trainer too.
    """

    temperature: float
    max_tokens: int | tuple[int, ...]
    stop_ids: tuple[int, ...]
    forbidden_ids: tuple[int, ...] = ()

    def limits(self, num_samples: int) -> tuple[int, ...]:
        """Return the longest response of each sample; raises `Reject` when there are not as many as samples."""
        if isinstance(self.max_tokens, int):
            return (self.max_tokens,) * num_samples
        if len(self.max_tokens) != num_samples:
            raise Reject(f"max_tokens for {len(self.max_tokens)} samples, but there are {num_samples}")
        return self.max_tokens


@dataclass(frozen=True, slots=True)
class ProcessorTensor:
    """An output of the processor beside the token ids. `per_token`: its last axis is the prompt."""

    tensor: NamedTensor
    per_token: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample so far. `spans`: (first token, policy version), first tokens strictly increasing from 0.

    An empty response has one span (0, version it was started with).
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, PolicyVersion], ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and one seed per sample wanted. `begun`: what earlier generations left, one per seed, to be resumed."""

    group: str
    prompt_ids: np.ndarray[Any, Any]
    tensors: tuple[ProcessorTensor, ...]
    media: tuple[Any, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    begun: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """All samples of one request, in the order of its seeds."""

    group: str
    samples: Sequence[Generation]


class Engine(Protocol):
    """`Engine(options, folder, deterministic)`; `folder` holds the initial weights (version 0).

    In deterministic mode the tokens and log-probs of a group depend on its request and the weights alone, bit for bit,
    and not on what else is running.
    """

    Options: type[BaseModel]
    requires: ClassVar[frozenset[str]]
    """Columns of the prompt that requests are made from."""

    @property
    def version(self) -> PolicyVersion:
        """The version whose weights it serves."""
        ...

    @property
    def generated(self) -> int:
        """Tokens drawn since it was made, of groups that run, finished or were aborted: it moves as generation does."""
        ...

    def room(self) -> int:
        """Return how many more groups it would run now."""
        ...

    def running(self) -> Collection[str]:
        """Return the groups that are neither finished nor aborted."""
        ...

    def submit(self, request: Request) -> None:
        """Admit a group, also while others are decoding.

        Raises `Reject` when a token id is outside the vocabulary or the prompt leaves no room for a response.
        """
        ...

    def step(self, wait_seconds: float) -> list[Completion]:
        """Advance (in this process) or wait up to `wait_seconds` (behind HTTP); return the groups that finished."""
        ...

    def interrupt(self) -> None:
        """End the wait of a `step` that is running, or else of the next one; called from other threads."""
        ...

    def abort(self, groups: Collection[str]) -> list[Completion]:
        """End these groups now; unfinished samples keep their tokens and say `abort`."""
        ...

    def load(self, version: PolicyVersion, tensors: Iterable[NamedTensor]) -> None:
        """Switch to other weights between two steps; running samples go on under them in a new span.

        Raises `WireError`, and goes on serving the old weights unchanged, when a name, shape or dtype does not fit or a
        tensor is missing.
        """
        ...

    def sleep(self) -> None:
        """Free device memory until `wake`; allowed when nothing runs."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """End the engine and what it started."""
        ...

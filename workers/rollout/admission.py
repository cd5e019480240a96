"""Groups inside engine `torch`: checked when they come, cut into prompts to prefill when rows are free."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import Reject
from common.group import PolicyVersion
from workers.rollout.engine import Completion, Generation, Request
from workers.rollout.network import Prompt, check_tensors

_NOTHING = Generation((), (), (), "abort")


@dataclass(frozen=True, slots=True)
class Start:
    """Samples that begin with the same tokens: prefilled once, copied to a row each."""

    running: "Running"
    samples: tuple[int, ...]
    prompt: Prompt


class Running:
    """A group that is neither finished nor aborted. `limits`: tokens that each response may have."""

    def __init__(self, key: int, request: Request, version: PolicyVersion, limits: tuple[int, ...]) -> None:
        self.key, self.request, self.version, self.limits = key, request, version, limits
        self.begun = request.begun or (_NOTHING,) * len(request.seeds)
        self.done: dict[int, Generation] = {}
        for sample, begun in enumerate(self.begun):
            if begun.finish_reason != "abort":
                self.done[sample] = begun
            elif len(begun.ids) >= limits[sample]:
                self.done[sample] = Generation(begun.ids, begun.logprobs, begun.spans, "length")

    @property
    def num_open(self) -> int:
        """Samples that are not finished."""
        return len(self.request.seeds) - len(self.done)

    def starts(self) -> list[Start]:
        """Return what to prefill: the prompt for all samples without tokens, and each sample that has some."""
        request, by_ids = self.request, dict[tuple[int, ...], list[int]]()
        for sample, begun in enumerate(self.begun):
            if sample not in self.done:
                by_ids.setdefault(begun.ids, []).append(sample)
        prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        return [
            Start(self, tuple(samples), Prompt(np.append(prompt, np.array(ids, dtype=np.int64)), request.tensors))
            for ids, samples in by_ids.items()
        ]

    def end_waiting(self) -> None:
        """End the samples that no row ever took up, with what earlier generations left."""
        for sample, begun in enumerate(self.begun):
            empty = Generation((), (), ((0, self.version),), "abort")
            self.done.setdefault(sample, begun if begun.ids else empty)

    def completion(self) -> Completion:
        """Return the samples in the order of their seeds."""
        return Completion(self.request.group, tuple(self.done[i] for i in range(len(self.request.seeds))))


def batches(starts: Sequence[Start], most_tokens: int) -> Iterator[list[Start]]:
    """Cut into prefills: prompts of one kind, at most `most_tokens` tokens with pads unless one prompt has more."""
    kinds: dict[object, list[Start]] = {}
    for start in starts:
        kinds.setdefault(start.prompt.kind, []).append(start)
    for alike in kinds.values():
        batch: list[Start] = []
        for start in alike:
            longest = max(len(other.prompt.ids) for other in [*batch, start])
            if batch and (len(batch) + 1) * longest > most_tokens:
                yield batch
                batch = []
            batch.append(start)
        yield batch


def check_request(request: Request, vocabulary: int, context: int | None) -> tuple[int, ...]:
    """Return how many tokens each response may have; raises `Reject` for a request that cannot be served."""
    num_tokens, num_samples = len(request.prompt_ids), len(request.seeds)
    if not num_tokens or not num_samples:
        raise Reject(
            f"group {request.group}: {num_tokens} prompt tokens and {num_samples} seeds; both must be positive"
        )
    if request.begun and len(request.begun) != num_samples:
        raise Reject(f"group {request.group}: {len(request.begun)} generations to resume for {num_samples} seeds")
    for ids in (request.prompt_ids, *(begun.ids for begun in request.begun)):
        for token in (np.min(ids), np.max(ids)) if len(ids) else ():
            if not 0 <= token < vocabulary:
                raise Reject(f"group {request.group}: token id {token} is outside the vocabulary of {vocabulary}")
    check_tensors(request.tensors, num_tokens)
    wanted = request.sampling.limits(num_samples)
    room = max(wanted) if context is None else context - num_tokens
    limits = tuple(min(limit, room) for limit in wanted)
    if min(limits) < 1:
        raise Reject(
            f"group {request.group}: no room for a response of max_tokens = {request.sampling.max_tokens} after "
            f"{num_tokens} prompt tokens in {context}"
        )
    return limits

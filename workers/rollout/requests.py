"""From a leased group to a request for the engine, and from its completion to the sections that rollout adds."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from brokers.client import Leased, Result
from common.config import Config
from common.errors import Reject
from common.group import Group, concatenate
from common.section import encode
from common.seeds import seed_of
from common.tensor import NamedTensor
from workers.rollout.engine import Completion, Generation, ProcessorTensor, Request, SamplingParams

OVERRIDES = {"temperature", "max_tokens", "num_samples"}
"""sampling settings that a prompt may bring along"""


def request_of(leased: Leased, config: Config, stop_ids: tuple[int, ...], forbidden_ids: tuple[int, ...]) -> Request:
    """Return what the engine is asked for; raises `Reject` for an unknown sampling setting."""
    group = leased.group
    overrides: dict[str, Any] = json.loads(group.value("sampling"))
    if unknown := sorted(overrides.keys() - OVERRIDES):
        raise Reject(f"group {group.key.id}: sampling settings {unknown} are unknown; known: {sorted(OVERRIDES)}")
    settings = {**config.sampling.model_dump(), "num_samples": config.group_size, **overrides}
    params = SamplingParams(settings["temperature"], settings["max_tokens"], stop_ids, forbidden_ids)
    names = (config.seed, group.key.purpose, group.key.seq)
    seeds = tuple(seed_of(*names, sample, group.attempt) for sample in range(settings["num_samples"]))
    prompt_ids = group.arrays("prompt_ids")[0]
    media = tuple(_media(group)) if "media" in group.sections else ()
    return Request(group.key.id, prompt_ids, tuple(_tensors(group)), media, seeds, params)


def result_of(
    leased: Leased, request: Request, completion: Completion, decode: Callable[[Sequence[int]], str]
) -> Result:
    """Return the sections `response` and `tokens` of a finished group."""
    samples = completion.samples
    response = encode(
        "response",
        {
            "text": [decode(sample.ids) for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "num_tokens": [len(sample.ids) for sample in samples],
        },
    )
    tokens = encode(
        "tokens",
        {
            "response_ids": concatenate([sample.ids for sample in samples], "int32"),
            "logprobs": concatenate([sample.logprobs for sample in samples], "float32"),
            "temperature": [request.sampling.temperature] * len(samples),
            "span_start": concatenate([[start for start, _ in sample.spans] for sample in samples], "int32"),
            "span_version": concatenate([[version for _, version in sample.spans] for sample in samples], "int64"),
            "seed": list(request.seeds),
        },
    )
    versions = versions_of(samples)
    return Result(leased, (response, tokens), min(versions), max(versions), sum(len(s.ids) for s in samples))


def versions_of(samples: Sequence[Generation]) -> list[int]:
    """Return the policy version of every span of every sample."""
    return [version for sample in samples for _, version in sample.spans]


def _tensors(group: Group) -> list[ProcessorTensor]:
    if "tensors" not in group.sections:
        return []
    columns = ("tensor_name", "tensor_dtype", "tensor_shape", "tensor_data", "tensor_per_token")
    rows = zip(*(group.column(name) for name in columns), strict=True)
    return [
        ProcessorTensor(
            NamedTensor(name.as_py(), dtype.as_py(), tuple(shape.as_py()), memoryview(data.as_buffer())),
            per_token.as_py(),
        )
        for name, dtype, shape, data, per_token in rows
    ]


def _media(group: Group) -> list[tuple[str, str, bytes]]:
    return list(zip(*(group.values(f"media_{part}") for part in ("kind", "format", "data")), strict=True))

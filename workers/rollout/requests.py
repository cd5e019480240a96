"""From a leased group to a request for the engine, and from its completion to the sections that rollout adds."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from pydantic import Field, PositiveInt, ValidationError

from brokers.client import Leased, Result
from common.errors import Reject
from common.group import Group, concatenate
from common.section import encode
from common.seeds import seed_of
from common.settings import Config, Table
from workers.processed import processor_tensors
from workers.rollout.engine import Completion, Generation, Request, SamplingParams


class Overrides(Table):
    """Sampling settings that a prompt may bring along; those it leaves out are the run's.

    `max_tokens`: one number, or a list of one for each sample. `ignore_stop`: end marks do not end a response; they can
    be drawn as any other token, so log-probs remain those of the whole vocabulary, as the trainer computes them.
    """

    temperature: float = Field(ge=0, allow_inf_nan=False)
    max_tokens: PositiveInt | tuple[PositiveInt, ...]
    num_samples: PositiveInt
    ignore_stop: bool = False


def request_of(leased: Leased, config: Config, stop_ids: tuple[int, ...], forbidden_ids: tuple[int, ...]) -> Request:
    """Return what the engine is asked for; raises `Reject` for a sampling setting that is unknown or does not fit."""
    group = leased.group
    settings = _settings(group, config)
    stops = () if settings.ignore_stop else stop_ids
    params = SamplingParams(settings.temperature, settings.max_tokens, stops, forbidden_ids)
    params.limits(settings.num_samples)
    names = (config.seed, group.key.purpose, group.key.seq)
    seeds = tuple(seed_of(*names, sample, group.attempt) for sample in range(settings.num_samples))
    prompt_ids = group.arrays("prompt_ids")[0]
    tensors = processor_tensors(group) if "tensors" in group.sections else ()
    media = tuple(_media(group)) if "media" in group.sections else ()
    return Request(group.key.id, prompt_ids, tensors, media, seeds, params)


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


def _settings(group: Group, config: Config) -> Overrides:
    run = {**config.sampling.model_dump(), "num_samples": config.group_size}
    try:
        given: Any = json.loads(group.value("sampling"))
        if not isinstance(given, dict):
            raise Reject(f"group {group.key.id}: sampling settings are an object, not {given!r}")
        return Overrides.model_validate({**run, **cast(dict[str, Any], given)})
    except json.JSONDecodeError as error:
        raise Reject(f"group {group.key.id}: sampling settings are not JSON: {error}") from error
    except ValidationError as error:
        known = ", ".join(Overrides.model_fields)
        flaws = "; ".join(f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}" for flaw in error.errors())
        raise Reject(f"group {group.key.id}: sampling settings: {flaws}; known are {known}") from error


def _media(group: Group) -> list[tuple[str, str, bytes]]:
    return list(zip(*(group.values(f"media_{part}") for part in ("kind", "format", "data")), strict=True))

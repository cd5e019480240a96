"""Batches of groups that the benchmarks of the sample broker send."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from common.group import concatenate
from common.section import Section, encode

PAYLOAD = ("media", "tensors", "tokens")
"""sections that each group of a batch has"""


def empty_prompt() -> Section:
    """A prompt that says nothing."""
    names = ("prompt_id", "messages", "label", "source", "reward_kind")
    return encode("prompt", {**{name: [""] for name in names}, "sampling": ["{}"], "evaluation_size": [0]})


def media(blobs: Sequence[bytes]) -> Section:
    """Media rows with these bytes."""
    names = {name: ["x"] * len(blobs) for name in ("media_hash", "media_kind", "media_format")}
    return encode("media", {**names, "media_data": list(blobs)})


def tensors(arrays: Sequence[np.ndarray[Any, Any]]) -> Section:
    """Tensor rows with these values."""
    columns = {
        "tensor_name": ["x"] * len(arrays),
        "tensor_dtype": [array.dtype.name for array in arrays],
        "tensor_shape": [list(array.shape) for array in arrays],
        "tensor_per_token": [False] * len(arrays),
        "tensor_data": [array.tobytes() for array in arrays],
    }
    return encode("tensors", columns)


def tokens(samples: int, length: int) -> Section:
    """Token rows as rollout adds them."""
    ids, logprobs = [np.zeros(length, "int32")] * samples, [np.zeros(length, "float32")] * samples
    columns = {
        "response_ids": concatenate(ids, "int32"),
        "logprobs": concatenate(logprobs, "float32"),
        "temperature": [1.0] * samples,
        "span_start": concatenate([[0]] * samples, "int32"),
        "span_version": concatenate([[0]] * samples, "int64"),
        "seed": [0] * samples,
    }
    return encode("tokens", columns)


def ragged_batch(rng: np.random.Generator) -> list[tuple[Section, ...]]:
    """256 rows of 9 fields, 8 rows a group: 3 float32 [4096], 3 ragged float32 [1..4096], 3 strings of 16 KiB."""
    groups: list[tuple[Section, ...]] = []
    for _ in range(32):
        lengths = [4096] * 24 + rng.integers(1, 4097, 24).tolist()
        texts = [rng.bytes(16384) for _ in range(24)]
        groups.append((media(texts), tensors([rng.random(n, np.float32) for n in lengths]), tokens(1, 1)))
    return groups


def image_batch(rng: np.random.Generator) -> list[tuple[Section, ...]]:
    """32 groups of 8 samples of 256 tokens with one image of 1 MB."""
    return [(media([rng.bytes(1_000_000)]), tensors([]), tokens(8, 256)) for _ in range(32)]


def small_batch(_rng: np.random.Generator) -> list[tuple[Section, ...]]:
    """32 groups of 8 samples of 256 tokens."""
    return [(media([]), tensors([]), tokens(8, 256)) for _ in range(32)]


BATCHES: dict[str, Callable[[np.random.Generator], list[tuple[Section, ...]]]] = {
    "ragged and strings": ragged_batch,
    "image groups": image_batch,
    "small groups": small_batch,
}

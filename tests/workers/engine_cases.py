"""What the engine tests share: tiny models, requests, and an engine run to its end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.tensor import NamedTensor, from_numpy
from workers.models.load import load_model, load_processor, media_token_ids, to_named
from workers.rollout.engine import Completion, Engine, Generation, ProcessorTensor, Request, SamplingParams

END = 1  # id of <eos> in the tiny tokenizers


@dataclass(frozen=True)
class Case:
    """An engine class with options, a model folder, and a prompt it can take."""

    engine: Any
    folder: Path
    options: dict[str, Any]
    prompt_ids: np.ndarray[Any, Any]
    tensors: tuple[ProcessorTensor, ...] = ()
    forbidden: tuple[int, ...] = ()

    def start(self, *, deterministic: bool = False, **options: Any) -> Engine:
        return self.engine(self.engine.Options(**{**self.options, **options}), self.folder, deterministic)

    def request(
        self,
        group: str = "g",
        *,
        seeds: Sequence[int] = (11, 12, 13),
        max_tokens: int | tuple[int, ...] = 12,
        temperature: float = 1.0,
        stop_ids: tuple[int, ...] = (END,),
        begun: tuple[Generation, ...] = (),
        rotate: int = 0,
    ) -> Request:
        """`rotate`: drop so many of the last prompt tokens, for prompts of unequal length."""
        keep = len(self.prompt_ids) - rotate
        tensors = tuple(_cut(part, keep) for part in self.tensors)
        sampling = SamplingParams(temperature, max_tokens, stop_ids, self.forbidden)
        return Request(group, self.prompt_ids[:keep], tensors, (), tuple(seeds), sampling, begun)


def _cut(part: ProcessorTensor, keep: int) -> ProcessorTensor:
    if not part.per_token:
        return part
    return replace(part, tensor=from_numpy(part.tensor.name, part.tensor.numpy()[..., :keep]))


def image_prompt(folder: Path, shade: int = 90) -> tuple[np.ndarray[Any, Any], tuple[ProcessorTensor, ...]]:
    """A prompt with one 16x16 picture: 2x2 merged patches of 8 pixels are 4 placeholders."""
    pixels = (np.arange(16 * 16 * 3, dtype=np.int64).reshape(16, 16, 3) * 7 + shade) % 256
    encoded = load_processor(folder)(
        text=["0<vs><img><ve>Q:012"], images=[Image.fromarray(pixels.astype(np.uint8))], return_tensors="np"
    )
    tensors = tuple(
        ProcessorTensor(from_numpy(name, np.asarray(values)), per_token=name == "mm_token_type_ids")
        for name, values in encoded.items()
        if name not in {"input_ids", "attention_mask"}
    )
    return np.asarray(encoded["input_ids"][0], dtype=np.int32), tensors


def weights(folder: Path, noise: float = 0.0) -> list[NamedTensor]:
    """The folder's weights without the names that are tied to others, each shifted by normal noise."""
    model = load_model(folder)
    generator = torch.Generator().manual_seed(5)
    seen: set[int] = set()
    result: list[NamedTensor] = []
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            result.append(to_named(name, value + noise * torch.randn(value.shape, generator=generator)))
    return result


def run(engine: Engine, *requests: Request) -> dict[str, Sequence[Generation]]:
    """Submit, step until nothing runs, return the samples by group."""
    for request in requests:
        engine.submit(request)
    return collected(finish(engine))


def finish(engine: Engine) -> list[Completion]:
    done: list[Completion] = []
    for _ in range(1000):
        if not engine.running():
            return done
        done += engine.step(1.0)
    raise AssertionError(f"still running after 1000 steps: {engine.running()}")


def collected(completions: Collection[Completion]) -> dict[str, Sequence[Generation]]:
    return {completion.group: completion.samples for completion in completions}


def ids(samples: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [sample.ids for sample in samples]


def alike(samples: Sequence[Generation], others: Sequence[Generation]) -> bool:
    """Equal but for the rounding of log-probs, which depends on what else is in a batch."""
    return len(samples) == len(others) and all(
        replace(one, logprobs=()) == replace(other, logprobs=())
        and np.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        for one, other in zip(samples, others, strict=True)
    )


def media_forbidden(folder: Path) -> tuple[int, ...]:
    return media_token_ids(load_model(folder).config)

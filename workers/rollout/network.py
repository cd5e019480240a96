"""A transformers model as decoding uses it: a prefill of several prompts, and one more token of every row.

Shapes: I prompts of a prefill, R rows, T tokens, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from common.errors import ConfigError, Reject
from workers.models.caches import Continuation
from workers.models.load import media_token_ids, to_torch
from workers.rollout.engine import ProcessorTensor

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to prefill, and the processor outputs that belong to the first of them."""

    ids: np.ndarray[Any, Any]
    tensors: tuple[ProcessorTensor, ...] = ()

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal for two prompts to share a forward pass; without tensors always."""
        return tuple(
            (p.tensor.name, p.tensor.dtype, p.per_token, None if p.per_token else p.tensor.shape[1:])
            for p in self.tensors
        )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Right-padded keys and values, logits of the next token [I, V], tokens per prompt, position minus token index."""

    cache: Cache
    logits_IV: Tensor
    length_I: Tensor
    delta_I: Tensor


class Network:
    """The forward passes of one model. Raises `ConfigError` for a model that keeps more than keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config()
        foreign = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
        if foreign:
            raise ConfigError(
                f"setting 'engine.name' = 'torch' serves attention layers only, the model has {sorted(foreign)}"
            )
        parameters = inspect.signature(model.forward).parameters
        self.model = model
        self._continuation = Continuation(model)
        self._keeps_logits = "logits_to_keep" in parameters
        self.vocabulary: int = text.vocab_size
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        media = media_token_ids(model.config)
        self._filler = next(token for token in range(self.vocabulary) if token not in media)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def prefill(self, prompts: Sequence[Prompt]) -> Prefilled:
        """Run prompts of one `kind` in one pass, padded on the right.

        Pads come after all real tokens, so causality alone hides them and no mask is needed; positions are the model's
        own, three axes of M-RoPE included.
        """
        lengths = [len(prompt.ids) for prompt in prompts]
        ids_IT = np.full((len(prompts), max(lengths)), self._filler, dtype=np.int64)
        for row, prompt in zip(ids_IT, prompts, strict=True):
            row[: len(prompt.ids)] = prompt.ids
        length_I = torch.tensor(lengths, device=self.device)
        keyword, cache = self._merged(prompts, ids_IT.shape[1]), DynamicCache()
        keep, inverse_I = (length_I - 1).unique(return_inverse=True)
        self._continuation.forget()
        ids = torch.from_numpy(ids_IT).to(self.device)
        if keyword:
            # Omni models find their three axes only with a mask; pads count as text behind the media, which changes
            # neither positions nor deltas.
            keyword["attention_mask"] = torch.ones_like(ids)
        if self._keeps_logits:
            keyword["logits_to_keep"] = keep
        output = self._forward(ids, cache, keyword)
        column_I = inverse_I if self._keeps_logits else length_I - 1
        logits_IV = output.logits[torch.arange(len(prompts), device=self.device), column_I]
        return Prefilled(cache, logits_IV, length_I, self._continuation.delta(len(prompts), self.device))

    def decode(self, token_R: Tensor, position_R: Tensor, cache: Cache, mask_RT: Tensor | None) -> Tensor:
        """Return the logits [R, V] after one more token per row; `cache` takes its keys and values."""
        keyword = {"position_ids": self._continuation.positions(position_R[:, None]), "attention_mask": mask_RT}
        return self._forward(token_R[:, None], cache, keyword).logits[:, -1]

    def _forward(self, ids_RT: Tensor, cache: Cache, keyword: dict[str, Any]) -> Any:
        return self.model(input_ids=ids_RT, **self._continuation.using(cache), **keyword)

    def _merged(self, prompts: Sequence[Prompt], width: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for index, part in enumerate(prompts[0].tensors):
            parts = [_values(prompt.tensors[index], width) for prompt in prompts]
            values = torch.cat(parts).to(self.device)
            merged[part.tensor.name] = values.to(self.model.dtype) if values.is_floating_point() else values
        return merged


def check_tensors(tensors: Sequence[ProcessorTensor], num_tokens: int) -> None:
    """Raise `Reject` when a tensor that follows the prompt's tokens has another length than the prompt."""
    for part in tensors:
        if part.per_token and part.tensor.shape not in {(num_tokens,), (1, num_tokens)}:
            raise Reject(
                f"tensor {part.tensor.name!r} has shape {list(part.tensor.shape)}, the prompt {num_tokens} tokens"
            )


def _values(part: ProcessorTensor, width: int) -> Tensor:
    """The tensor with a first axis to concatenate along; per token: [1, width], 0 behind the prompt."""
    values = to_torch(part.tensor)
    if not part.per_token:
        return values
    return torch.nn.functional.pad(values.reshape(1, -1), (0, width - values.shape[-1]))

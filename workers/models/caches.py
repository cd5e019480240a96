"""How a transformers model takes keys and values of earlier tokens, and which position follows them."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class Continuation:
    """Facts about one model that a pass behind a cache needs.

    Models with M-RoPE give a picture fewer positions than tokens; a prefill leaves the difference per prompt in the
    module that computes positions, from where `delta` reads it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # `past_key_values` before transformers 5.24.
        self._keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._rope_holder: Any = next((m for m in model.modules() if "rope_deltas" in vars(m)), None)

    def using(self, cache: Cache) -> dict[str, Any]:
        """Return the keyword arguments that make a forward pass read and extend `cache`."""
        return {self._keyword: cache, "use_cache": True}

    def forget(self) -> None:
        """Begin a prefill without what an earlier one left."""
        if self._rope_holder is not None:
            self._rope_holder.rope_deltas = None

    def delta(self, num_prompts: int, device: torch.device) -> Tensor:
        """Return next position minus number of tokens, int64 [num_prompts], as the last prefill left it."""
        found: Tensor | None = None if self._rope_holder is None else self._rope_holder.rope_deltas
        zeros = torch.zeros(num_prompts, dtype=torch.int64, device=device)
        return zeros if found is None else zeros + found.reshape(-1).to(zeros)

    def positions(self, position_RT: Tensor) -> Tensor:
        """Return positions of text as the model wants them: [R, T], or [3, R, T] under M-RoPE."""
        return position_RT if self._rope_holder is None else position_RT.expand(3, -1, -1)

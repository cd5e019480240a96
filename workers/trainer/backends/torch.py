"""Backend `torch`: a transformers model and AdamW in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field

from common.group import Group
from common.settings import Table
from common.tensor import NamedTensor
from workers.trainer.algorithm import Algorithm

if TYPE_CHECKING:
    from workers.trainer.torch_backend import Training

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


class TorchBackend:
    """See `workers.trainer.backend.Backend`. The work is in `Training`, which alone imports torch."""

    class Options(Table):
        """Settings of optimizer and device.

        `grad_clip`: largest norm of the gradient of the mean loss; inf never clips. `warmup_steps`: updates until the
        learning rate is reached, on a straight line. `schedule`: what it does afterwards; linear and cosine reach 0
        behind the last step of the run. `max_tokens_per_micro`: rows times longest row of one forward pass.
        `serve_dtype`: what `weights` are cast to; not set: the dtype they are trained in.
        """

        lr: float = Field(1e-6, ge=0)
        betas: tuple[float, float] = (0.9, 0.95)
        weight_decay: float = Field(0.0, ge=0)
        grad_clip: float = Field(1.0, gt=0)
        warmup_steps: int = Field(0, ge=0)
        schedule: Literal["constant", "linear", "cosine"] = "constant"
        max_tokens_per_micro: int = Field(16384, gt=0)
        device: str = "cpu"
        dtype: Dtype = "float32"
        serve_dtype: Dtype | None = None

    requires: ClassVar[frozenset[str]] = frozenset(
        {
            *("prompt_ids", "placeholder_start", "placeholder_length"),
            *("tensor_name", "tensor_dtype", "tensor_shape", "tensor_per_token", "tensor_data"),
            *("response_ids", "logprobs", "temperature", "advantages", "loss_weight"),
        }
    )

    def __init__(self, options: Options, folder: Path, deterministic: bool) -> None:
        from workers.trainer.torch_backend import Training  # noqa: PLC0415 - configurations are checked without torch

        self._training: Training = Training(options, folder, deterministic)

    def prepare_training(self, algorithm: Algorithm, total_steps: int | None) -> None:
        """Create optimizer and schedule; raises `ConfigError` for a schedule that needs a number of steps."""
        self._training.prepare_training(algorithm, total_steps)

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the gradients of the summed token losses; raises `Reject`, with nothing added, for a malformed group."""
        self._training.accumulate(groups)

    def update(self) -> Mapping[str, float]:
        """Make one update of what was accumulated; return the step's metrics."""
        return self._training.update()

    def logprobs(self, groups: Sequence[Group]) -> list[list[np.ndarray[Any, Any]]]:
        """Return float32 log-probs of the response tokens: [group][sample][token]."""
        return self._training.logprobs(groups)

    def weights(self) -> Iterator[NamedTensor]:
        """Return a snapshot of the weights, taken before this returns."""
        return self._training.weights()

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint, tokenizer and processor included."""
        self._training.save(folder)

    def offload(self) -> None:
        """Move everything off the device."""
        self._training.offload()

    def reload(self) -> None:
        """Undo `offload`."""
        self._training.reload()

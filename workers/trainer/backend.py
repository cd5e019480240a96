"""What the trainer and the reference worker ask of a training backend."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import BaseModel

from common.group import Group
from common.tensor import NamedTensor
from workers.trainer.algorithm import Algorithm


def loss_weights(group: Group) -> np.ndarray[Any, Any]:
    """Return by how much the loss of each sample counts, float32 [sample]; less for a group that came late."""
    return group.numpy("loss_weight") * np.float32(group.weight)


class Backend(Protocol):
    """`Backend(options, folder, deterministic)`; `folder` holds the initial weights. The ranks of one act together."""

    Options: type[BaseModel]
    requires: ClassVar[frozenset[str]]
    """Columns that `accumulate` reads, beside what the algorithm's loss requires."""

    def prepare_training(self, algorithm: Algorithm, total_steps: int | None) -> None:
        """Create optimizer and schedule; not called in the reference role."""
        ...

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the gradients of the summed token losses of these groups (one or more micro-batches).

        Raises `Reject`, with nothing added, when a group is malformed: a token id outside the vocabulary, columns of
        unequal length, placeholder runs that do not match the media.
        """
        ...

    def update(self) -> Mapping[str, float]:
        """Divide by the tokens accumulated since the last update, clip, step; return the step's metrics.

        Metrics: loss, grad_norm, lr, tokens, entropy and what the algorithm names, all token means.
        """
        ...

    def logprobs(self, groups: Sequence[Group]) -> list[list[np.ndarray[Any, Any]]]:
        """Return float32 log-probs of each response token at the sample's temperature: [group][sample][token]."""
        ...

    def weights(self) -> Iterator[NamedTensor]:
        """Yield a snapshot of the weights under Hugging Face names, in the dtype they are served in."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint that `from_pretrained` loads, tokenizer and processor included."""
        ...

    def offload(self) -> None:
        """Move weights, gradients and optimizer state off the device until `reload`."""
        ...

    def reload(self) -> None:
        """Undo `offload`."""
        ...

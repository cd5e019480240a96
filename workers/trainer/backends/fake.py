"""Backend `fake`: weights and log-probs out of hashes, updates in a time that is set and not spent; no torch.

For measuring and testing everything around a trainer, with engine `fake` or any engine that takes such weights.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import NonNegativeFloat

from common.errors import Reject
from common.group import Group
from common.process import write_atomically
from common.safetensors import shapes_in
from common.seeds import seed_of
from common.settings import Table
from common.tensor import BFLOAT16, NamedTensor, from_numpy
from workers.trainer.algorithm import Algorithm
from workers.trainer.backend import loss_weights

MARKER = "fake.json"
"""what `save` writes: the number of updates and the state that they led to"""
_WITHOUT_A_MODEL = {"fake.weight": ("float32", (16,))}


class FakeBackend:
    """Its state is a hash of which groups each update was made of, whatever their order; its weights show that state.

    Weights have the names, dtypes and shapes of the model folder's safetensors; a folder without gets a single tensor.
    """

    class Options(Table):
        """`seconds_per_group`: time in `accumulate`; `seconds_per_update`: time in `update`. Neither uses a CPU."""

        seconds_per_group: NonNegativeFloat = 0.0
        seconds_per_update: NonNegativeFloat = 0.0

    requires: ClassVar[frozenset[str]] = frozenset({"response_ids", "logprobs", "advantages", "loss_weight"})

    def __init__(self, options: Options, folder: Path, deterministic: bool) -> None:  # noqa: ARG002  (it always is)
        self._options = options
        self._shapes = shapes_in(folder) or _WITHOUT_A_MODEL
        self._never = threading.Event()
        self._updates = self._state = 0
        self._forget_step()

    def prepare_training(self, algorithm: Algorithm, total_steps: int | None) -> None:
        """Nothing to create."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Count these groups in; raises `Reject`, with nothing counted, for columns of unequal length."""
        until = time.monotonic() + self._options.seconds_per_group * len(groups)
        lengths = [_lengths(group) for group in groups]
        for group, length_S in zip(groups, lengths, strict=True):
            ids = group.arrays("response_ids")
            self._sum += seed_of(group.key.id, *(seed_of(*sample.tolist()) for sample in ids))
            weight_S = loss_weights(group)
            gains = [float(advantage.sum()) for advantage in group.arrays("advantages")]
            self._loss -= float(np.dot(gains, weight_S))
            self._tokens += int(length_S[weight_S > 0].sum())
        self._wait(until)

    def update(self) -> Mapping[str, float]:
        """Make one update. Metrics are those of a policy whose ratio is 1: the loss is minus the mean advantage."""
        until = time.monotonic() + self._options.seconds_per_update
        self._state = seed_of(self._state, self._sum)
        self._updates += 1
        metrics = {"loss": self._loss / max(self._tokens, 1), "grad_norm": 0.0, "lr": 0.0, "entropy": 0.0}
        metrics["tokens"] = float(self._tokens)
        self._forget_step()
        self._wait(until)
        return metrics

    def logprobs(self, groups: Sequence[Group]) -> list[list[np.ndarray[Any, Any]]]:
        """Return float32 log-probs in (-4, 0), a hash of token id and position: [group][sample][token]."""
        return [
            [
                np.array([-4.0 * (seed_of(int(t), i) % 9999 + 1) / 10000 for i, t in enumerate(sample)], np.float32)
                for sample in group.arrays("response_ids")
            ]
            for group in groups
        ]

    def weights(self) -> Iterator[NamedTensor]:
        """Return tensors that hold one number each, a hash of the tensor's name and the state."""
        filled = {name: self._filled(name, dtype, shape) for name, (dtype, shape) in self._shapes.items()}
        return iter(filled.values())

    def save(self, folder: Path) -> None:
        """Write the marker; no model."""
        write_atomically(folder / MARKER, {"updates": self._updates, "state": self._state})

    def offload(self) -> None:
        """Nothing to move."""

    def reload(self) -> None:
        """Undo `offload`."""

    def _filled(self, name: str, dtype: str, shape: tuple[int, ...]) -> NamedTensor:
        kind = "uint16" if dtype == BFLOAT16 else dtype
        value = seed_of(name, self._state) % 128  # fits every dtype; as the bits of a bfloat16, a number next to 0
        return from_numpy(name, np.full(shape, value, kind), dtype)

    def _forget_step(self) -> None:
        self._sum = self._tokens = 0
        self._loss = 0.0

    def _wait(self, until: float) -> None:
        self._never.wait(max(0.0, until - time.monotonic()))


def _lengths(group: Group) -> np.ndarray[Any, Any]:
    """Return the tokens of each sample; raises `Reject` naming group and column when columns differ."""
    length_S = np.array([len(ids) for ids in group.arrays("response_ids")], np.int64)
    for name in ("logprobs", "advantages"):
        found = [len(values) for values in group.arrays(name)]
        if found != length_S.tolist():
            raise Reject(f"group {group.key.id}: {name} have lengths {found}, the responses {length_S.tolist()}")
    weights = len(group.numpy("loss_weight"))
    if weights != len(length_S):
        raise Reject(f"group {group.key.id}: {weights} loss weights for {len(length_S)} samples")
    return length_S

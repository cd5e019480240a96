"""Replacing the weights of a loaded model by named tensors, all of them or none."""

from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from common.errors import WireError
from common.tensor import NamedTensor
from workers.models.load import to_torch


@torch.no_grad()
def replace_weights(model: PreTrainedModel, tensors: Iterable[NamedTensor]) -> None:
    """Copy `tensors` into the model once every one of them has been checked.

    Names are those of the state dict. Tied weights share one value: any of their names will do, several must agree.
    Raises `WireError`, with the model unchanged, when a name is unknown or comes twice, a shape or dtype differs, or a
    weight is missing.
    """
    targets: Mapping[str, torch.Tensor] = model.state_dict()
    given: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise WireError(f"weights: tensor {tensor.name!r} comes twice")
        if tensor.name not in targets:
            raise WireError(f"weights: the model has no tensor {tensor.name!r}")
        given[tensor.name] = _checked(tensor, targets[tensor.name])
    for names in _tied(targets):
        present = [name for name in names if name in given]
        if not present:
            raise WireError(f"weights: tensor {names[0]!r} is missing")
        for name in present[1:]:
            if not torch.equal(given[name], given[present[0]]):
                raise WireError(f"weights: {name!r} and {present[0]!r} are tied in this model but differ")
    for name, value in given.items():
        targets[name].copy_(value)


def _checked(tensor: NamedTensor, target: torch.Tensor) -> torch.Tensor:
    dtype = str(target.dtype).removeprefix("torch.")
    if tensor.dtype != dtype or tensor.shape != tuple(target.shape):
        raise WireError(
            f"weights: tensor {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}, "
            f"the model's is {dtype}{list(target.shape)}"
        )
    return to_torch(tensor)


def _tied(targets: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names by the memory they stand for; an untied weight is alone."""
    names: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, target in targets.items():
        names.setdefault((target.data_ptr(), tuple(target.shape)), []).append(name)
    return list(names.values())

"""Outputs of the processor as a group carries them, and how many placeholder tokens media of their size take."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from common.group import Group
from common.tensor import NamedTensor
from workers.rollout.engine import ProcessorTensor


def processor_tensors(group: Group) -> tuple[ProcessorTensor, ...]:
    """Return the processor tensors of a group's prompt as views of its section.

    Tensors without a single entry (an empty list of images) are left out: to the model such a prompt is text.
    """
    columns = ("tensor_name", "tensor_dtype", "tensor_shape", "tensor_per_token")
    rows = zip(*(group.values(name) for name in columns), group.column("tensor_data"), strict=True)
    return tuple(
        ProcessorTensor(NamedTensor(name, dtype, tuple(shape), memoryview(data.as_buffer())), per_token)
        for name, dtype, shape, per_token, data in rows
        if per_token or 0 not in shape
    )


def expected_placeholders(grids: Sequence[Sequence[int]] | np.ndarray[Any, Any], merge: int) -> Fraction:
    """Return the placeholder tokens that media take: the sum of t * h * w / merge² over grids (t, h, w) in patches.

    `merge`: patches per placeholder along each spatial axis. The result is whole unless the grids are wrong.
    """
    grids_M3 = np.asarray(grids, dtype=np.int64)
    return Fraction(int(grids_M3.prod(axis=-1).sum()) if grids_M3.size else 0, merge**2)

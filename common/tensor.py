"""A named tensor as bytes: how weights and processor outputs travel without torch."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from common.errors import WireError
from common.section import Buffer

BFLOAT16 = "bfloat16"
_NUMBERS = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def width(dtype: str) -> int:
    """Return bytes per value; raises `WireError` for what is neither a number of numpy nor bfloat16."""
    if dtype == BFLOAT16:
        return 2
    if dtype not in _NUMBERS:
        raise WireError(f"unknown dtype {dtype!r}")
    return np.dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """Little-endian values in C order. `dtype`: numpy name, or bfloat16, whose bits are carried as uint16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise WireError(f"tensor {self.name!r}: shape {list(self.shape)} has a negative size")
        expected = prod(self.shape) * width(self.dtype)
        length = memoryview(self.data).nbytes
        if length != expected:
            raise WireError(f"tensor {self.name!r}: {length} bytes for {self.dtype}{list(self.shape)}, not {expected}")

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a view of the bytes (read-only if they are); bfloat16 appears as uint16."""
        kind = "uint16" if self.dtype == BFLOAT16 else self.dtype
        return np.frombuffer(self.data, dtype=kind).reshape(self.shape)


def from_numpy(name: str, array: np.ndarray[Any, Any], dtype: str | None = None) -> NamedTensor:
    """Wrap an array without a copy where it is contiguous. `dtype`: pass `bfloat16` for uint16 bits."""
    contiguous = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return NamedTensor(name, dtype or contiguous.dtype.name, array.shape, contiguous.reshape(-1).view("u1").data)

"""What a version of the weights consists of: tensors laid end to end and cut into chunks with a checksum each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, cast

import xxhash

from common.errors import Damaged, WireError
from common.group import PolicyVersion
from common.section import Buffer
from common.tensor import NamedTensor, width


@dataclass(frozen=True, slots=True)
class Manifest:
    """An immutable version. `tensors`: (name, dtype, shape) in order; `chunks`: (bytes, xxh3-64) in order."""

    version: PolicyVersion
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    chunks: tuple[tuple[int, int], ...]

    def to_wire(self) -> dict[str, Any]:
        """Return plain values for a header."""
        tensors = [[name, dtype, list(shape)] for name, dtype, shape in self.tensors]
        return {"version": self.version, "tensors": tensors, "chunks": [list(chunk) for chunk in self.chunks]}

    @staticmethod
    def from_wire(body: Any) -> "Manifest":
        """Read what `to_wire` wrote; raises `WireError` when it is not a manifest or its sizes do not add up."""
        try:
            tensors = tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in body["tensors"])
            chunks = tuple((int(length), int(checksum)) for length, checksum in body["chunks"])
            manifest = Manifest(int(body["version"]), tensors, chunks)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"not a manifest: {error!r}") from error
        if not tensors:
            raise WireError(f"version {manifest.version} has no tensors")
        if len({name for name, _, _ in tensors}) < len(tensors):
            raise WireError(f"version {manifest.version} names a tensor twice")
        sizes = [length for length, _ in chunks] + [size for _, _, shape in tensors for size in shape]
        if min(sizes, default=0) < 0:
            raise WireError(f"version {manifest.version} announces a negative size")
        announced = sum(length for length, _ in chunks)
        needed = sum(prod(shape) * width(dtype) for _, dtype, shape in tensors)
        if announced != needed:
            raise WireError(f"version {manifest.version}: chunks hold {announced} bytes, its tensors need {needed}")
        return manifest

    def check(self, index: int, data: Buffer) -> None:
        """Raise `Damaged` unless `data` is chunk `index`."""
        length, checksum = self.chunks[index]
        if memoryview(data).nbytes != length or xxhash.xxh3_64_intdigest(data) != checksum:
            raise Damaged(f"version {self.version}, chunk {index}: length or checksum differs")


def cut(tensors: Sequence[NamedTensor], version: PolicyVersion, chunk_bytes: int) -> tuple[Manifest, list[Buffer]]:
    """Lay tensors end to end and cut them into chunks of `chunk_bytes` (the last may be shorter)."""
    whole = memoryview(b"".join(tensor.data for tensor in tensors))
    places = [*range(0, whole.nbytes, chunk_bytes), whole.nbytes]
    chunks: list[Buffer] = [whole[start:end] for start, end in pairwise(places)]
    named = tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    checksums = tuple((memoryview(chunk).nbytes, xxhash.xxh3_64_intdigest(chunk)) for chunk in chunks)
    return Manifest(version, named, checksums), chunks


def join(manifest: Manifest, chunks: Sequence[Buffer]) -> Iterator[NamedTensor]:
    """Yield the tensors of a version as views of its joined chunks, which must have been checked."""
    whole, place = memoryview(b"".join(cast(Sequence[bytes], chunks))), 0
    for name, dtype, shape in manifest.tensors:
        length = prod(shape) * width(dtype)
        yield NamedTensor(name, dtype, shape, whole[place : place + length])
        place += length

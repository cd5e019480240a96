"""What a data source is: rows by number, with media as encoded bytes."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import xxhash
from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Medium:
    """Encoded bytes of an image, a video or a sound. `kind`: image, video or audio. `format`: MIME type."""

    kind: str
    format: str
    data: bytes

    @property
    def hash(self) -> str:
        """xxh3-128 of the bytes, hexadecimal."""
        return xxhash.xxh3_128_hexdigest(self.data)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt. A content part `{"type": "image"}` in `messages` stands for the next medium of that kind."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    label: str
    media: tuple[Medium, ...] = ()
    reward_kind: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Rows(Sequence[Row]):
    """Rows that are made when they are asked for."""

    @abstractmethod
    def row(self, number: int) -> Row:
        """Return the row with this number, 0 <= number < len."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        numbers = range(len(self))[index]
        return self.row(numbers) if isinstance(numbers, int) else [self.row(number) for number in numbers]


class Source(Protocol):
    """`Source(options, seed)`. Rows depend on options and seed alone, so that a restart sees the same rows."""

    Options: type[BaseModel]
    train: Sequence[Row]
    heldout: Sequence[Row]

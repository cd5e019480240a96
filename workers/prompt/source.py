"""What a data source is: rows by number, with media as encoded bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Source(Protocol):
    """`Source(options, seed)`. Rows depend on options and seed alone, so that a restart sees the same rows."""

    Options: type[BaseModel]
    train: Sequence[Row]
    heldout: Sequence[Row]

"""Frame 0 of every message: a msgpack map that says who asks what of whom, and what the other frames hold.

Nothing in it is trusted: a peer that speaks another protocol, belongs to another run, or announces frames that are not
there is refused with the reason, and nothing of its message is kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgpack

from common.errors import Damaged, WireError
from common.section import Buffer, Section, SectionInfo, check

PROTOCOL = 1
MAX_HEADER_BYTES = 4 << 20
LARGEST = 2**63 - 1
"""integer: journals hold 64 bits with a sign, and sequence numbers are counted on from"""


@dataclass(frozen=True, slots=True)
class Item:
    """One group, or one lease of it, inside a message.

    `lease`: 0 where no lease is meant. `tokens`: response tokens of the group. `version_min`/`version_max`: oldest and
    newest policy version in its spans, -1 where it has none. `facts`: what the broker knows beside (seconds, deadline).
    """

    group: str
    seq: int = 0
    purpose: str = "train"
    min_version: int = 0
    attempt: int = 0
    lease: int = 0
    tokens: int = 0
    version_min: int = -1
    version_max: int = -1
    sections: tuple[SectionInfo, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Header:
    """A request or a reply. `run` is empty only in a first HELLO, which asks for it."""

    verb: str
    run: str = ""
    worker: str = ""
    incarnation: str = ""
    request: int = 0
    stage: str = ""
    deadline_s: float = 0.0
    items: tuple[Item, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    protocol: int = PROTOCOL


def pack(header: Header) -> bytes:
    """Encode a header as msgpack; raises `WireError` for a value that msgpack cannot hold (integers beyond 64 bits)."""
    items = [
        [
            item.group,
            item.seq,
            item.purpose,
            item.min_version,
            item.attempt,
            item.lease,
            item.tokens,
            item.version_min,
            item.version_max,
            [[info.name, info.rows, info.length, info.checksum] for info in item.sections],
            dict(item.facts),
        ]
        for item in header.items
    ]
    fields = (header.verb, header.run, header.worker, header.incarnation, header.request, header.stage)
    message = [header.protocol, *fields, header.deadline_s, items, dict(header.body)]
    try:
        return cast(bytes, msgpack.packb(message))
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"header of {header.verb!r} cannot be encoded: {error!r}") from error


def unpack(data: Buffer) -> Header:
    """Decode a header; raises `WireError` for anything that is not one."""
    if memoryview(data).nbytes > MAX_HEADER_BYTES:
        raise WireError(f"header of {memoryview(data).nbytes} bytes; at most {MAX_HEADER_BYTES} are read")
    try:
        message: Any = msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException, TypeError, RecursionError) as error:
        raise WireError(f"header is not msgpack: {error!r}") from error
    if not isinstance(message, list) or not message:
        raise WireError(f"header is a {type(message).__name__}, expected a list")
    parts = cast(list[Any], message)
    if parts[0] != PROTOCOL:
        raise WireError(f"peer speaks protocol {parts[0]!r}, this side speaks {PROTOCOL}")
    kinds = (int, str, str, str, str, int, str, (int, float), list, dict)
    _expect("header", parts, kinds)
    _, verb, run, worker, incarnation, request, stage, deadline_s, items, body = parts
    if not math.isfinite(deadline_s):
        raise WireError(f"header announces a deadline of {deadline_s} s")
    return Header(
        verb, run, worker, incarnation, request, stage, float(deadline_s), tuple(_item(i) for i in items), body
    )


def _item(parts: Any) -> Item:
    if not isinstance(parts, list):
        raise WireError(f"item is a {type(parts).__name__}, expected a list")
    fields = cast(list[Any], parts)
    _expect("item", fields, (str, int, str, int, int, int, int, int, int, list, dict))
    *plain, sections, facts = fields
    return Item(*plain, tuple(_info(s) for s in sections), facts)  # pyright: ignore[reportCallIssue]


def _info(parts: Any) -> SectionInfo:
    if not isinstance(parts, list):
        raise WireError(f"section is a {type(parts).__name__}, expected a list")
    fields = cast(list[Any], parts)
    name, rows, length, checksum = _expect("section", fields, (str, int, int, int), unsigned=3)
    if rows < 0 or length < 0:
        raise WireError(f"section {name!r} announces {rows} rows and {length} bytes")
    return SectionInfo(name, rows, length, checksum)


def _expect(what: str, parts: Sequence[Any], kinds: Sequence[Any], unsigned: int = -1) -> Sequence[Any]:
    """Return the parts if they are of these kinds, and integers at most `LARGEST`, but for the one at `unsigned`."""
    if len(parts) != len(kinds):
        raise WireError(f"{what} has {len(parts)} fields, expected {len(kinds)}")
    for place, (value, kind) in enumerate(zip(parts, kinds, strict=True)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WireError(f"{what} field {place} is a {type(value).__name__}")
        if isinstance(value, int) and value > LARGEST and place != unsigned:
            raise WireError(f"{what} field {place} is {value}; at most {LARGEST} is read")
    return parts


def frames_of(header: Header) -> list[SectionInfo]:
    """Return what frames 1..n hold, in order."""
    return [info for item in header.items for info in item.sections]


def attach(header: Header, frames: Sequence[Buffer]) -> list[tuple[Item, dict[str, Section]]]:
    """Pair each item with its sections after checking lengths and checksums.

    Raises `Damaged` when the number of frames, a length or a checksum differs from what the header announces.
    """
    expected = frames_of(header)
    if len(expected) != len(frames):
        raise Damaged(f"{len(frames)} frames arrived, {len(expected)} were announced")
    remaining = iter(frames)
    paired: list[tuple[Item, dict[str, Section]]] = []
    for item in header.items:
        sections = {info.name: Section(info, next(remaining)) for info in item.sections}
        if len(sections) != len(item.sections):
            raise WireError(f"group {item.group}: a section is announced twice")
        for section in sections.values():
            check(section.info, section.data)
        paired.append((item, sections))
    return paired

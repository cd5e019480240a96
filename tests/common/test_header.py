"""Headers: what is packed comes back, and nothing that a peer can send raises anything but `WireError`."""

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Damaged, WireError
from common.header import MAX_HEADER_BYTES, PROTOCOL, Header, Item, attach, frames_of, pack, unpack
from common.section import Section, SectionInfo, encode
from section_cases import example

pytestmark = pytest.mark.unit

_INT = st.integers(-(2**63), 2**63 - 1)
_WIDE = st.integers(-(2**63), 2**64 - 1)
_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
_COUNT = st.integers(0, 2**63 - 1)
_PLAIN = st.one_of(st.none(), st.booleans(), _WIDE, st.floats(allow_nan=False), _TEXT, st.binary(max_size=8))
_BODY = st.dictionaries(_TEXT, st.one_of(_PLAIN, st.lists(_PLAIN, max_size=3)), max_size=3)
_ITEMS = st.builds(
    Item, group=_TEXT, seq=_INT, purpose=_TEXT, min_version=_INT, attempt=_INT, lease=_INT, tokens=_INT,
    version_min=_INT, version_max=_INT, facts=_BODY,
    sections=st.lists(st.builds(SectionInfo, _TEXT, _COUNT, _COUNT, _WIDE), max_size=3).map(tuple),
)  # fmt: skip
_HEADERS = st.builds(
    Header, verb=_TEXT, run=_TEXT, worker=_TEXT, incarnation=_TEXT, request=_INT, stage=_TEXT,
    deadline_s=st.floats(allow_nan=False, allow_infinity=False),
    items=st.lists(_ITEMS, max_size=3).map(tuple), body=_BODY,
)  # fmt: skip
_ANYTHING = st.recursive(
    st.one_of(_PLAIN, st.floats()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=12,
)


def read(data: bytes, frames: Sequence[bytes] = ()) -> None:
    """What every receiver does with a message."""
    try:
        attach(unpack(data), frames)
    except WireError:
        return


@given(header=_HEADERS)
@settings(max_examples=80, deadline=None)
def test_a_header_comes_back_as_it_was_packed(header: Header) -> None:
    assert unpack(pack(header)) == header


@given(data=st.binary(max_size=200), frames=st.lists(st.binary(max_size=8), max_size=2))
@settings(max_examples=150, deadline=None)
def test_random_bytes_are_at_most_a_wire_error(data: bytes, frames: list[bytes]) -> None:
    read(data, frames)


@given(message=_ANYTHING)
@settings(max_examples=150, deadline=None)
def test_any_msgpack_value_is_at_most_a_wire_error(message: Any) -> None:
    read(msgpack.packb(message))


@given(header=_HEADERS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_valid_message_with_changed_bytes_is_at_most_a_wire_error(header: Header, data: st.DataObject) -> None:
    packed = bytearray(pack(header))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(packed[: data.draw(st.integers(0, len(packed)))] if data.draw(st.booleans()) else packed))


@given(header=_HEADERS, place=st.integers(0, 9), value=_ANYTHING)
@settings(max_examples=150, deadline=None)
def test_a_field_of_another_type_is_at_most_a_wire_error(header: Header, place: int, value: Any) -> None:
    message = msgpack.unpackb(pack(header))
    message[place] = value
    read(msgpack.packb(message))


@pytest.mark.parametrize(
    ("place", "value"),
    [(1, b"lease"), (1, None), (2, 3), (5, "7"), (5, 7.0), (5, True), (7, "1"), (7, False), (8, {}), (9, [])],
)
def test_a_field_of_another_type_is_refused(place: int, value: Any) -> None:
    message = msgpack.unpackb(pack(Header("lease", "run", "w", "1", 7, "reward", 1.0)))
    message[place] = value
    with pytest.raises(WireError, match=f"field {place} is a {type(value).__name__}"):
        unpack(msgpack.packb(message))


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), float("-inf")])
def test_a_deadline_that_never_comes_is_refused(deadline: float) -> None:
    with pytest.raises(WireError, match="deadline"):
        unpack(pack(Header("lease", deadline_s=deadline)))


@pytest.mark.parametrize("other", [0, 2, "1", None, -1, 1.5])
def test_another_protocol_is_refused_with_both_numbers(other: Any) -> None:
    message = msgpack.unpackb(pack(Header("hello")))
    message[0] = other
    with pytest.raises(WireError, match=rf"peer speaks protocol {other!r}, this side speaks {PROTOCOL}"):
        unpack(msgpack.packb(message))


def test_a_later_protocol_may_have_any_shape_and_is_still_named() -> None:
    with pytest.raises(WireError, match="protocol 2"):
        unpack(msgpack.packb([2, {"verb": "hello"}]))


def test_a_header_beyond_its_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match=f"at most {MAX_HEADER_BYTES}"):
        unpack(bytes(MAX_HEADER_BYTES + 1))


@pytest.mark.parametrize("body", [{"seed": 2**64}, {"seed": -(2**63) - 1}, {"x": object()}, {"text": "\ud800"}])
def test_what_msgpack_cannot_hold_is_refused_before_it_is_sent(body: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="header of 'put' cannot be encoded"):
        pack(Header("put", body=body))


def test_tuples_arrive_as_lists_in_the_body_and_as_tuples_where_they_are_declared() -> None:
    item = Item("g", sections=(SectionInfo("media", 1, 2, 3),))
    header = unpack(pack(Header("put", items=(item,), body={"a": (1,)})))
    assert header.body == {"a": [1]}
    assert header.items[0].sections == (SectionInfo("media", 1, 2, 3),)


def test_negative_rows_or_lengths_are_refused() -> None:
    for info in (SectionInfo("media", -1, 0, 0), SectionInfo("media", 0, -1, 0)):
        with pytest.raises(WireError, match="announces"):
            unpack(pack(Header("put", items=(Item("g", sections=(info,)),))))


def message() -> tuple[Header, list[Section]]:
    sections = [encode(name, example(name)) for name in ("response", "tokens", "reward")]
    first = Item("a", sections=(sections[0].info, sections[1].info))
    return Header("put", items=(first, Item("b", sections=(sections[2].info,)))), sections


def test_frames_are_paired_with_the_groups_that_announce_them() -> None:
    header, sections = message()
    assert frames_of(header) == [section.info for section in sections]
    paired = attach(header, [section.data for section in sections])
    assert [(item.group, list(found)) for item, found in paired] == [("a", ["response", "tokens"]), ("b", ["reward"])]


def test_a_frame_that_is_missing_too_many_swapped_or_altered_is_damage() -> None:
    header, sections = message()
    frames = [bytes(section.data) for section in sections]
    altered = bytearray(frames[1])
    altered[len(altered) // 2] ^= 16
    swapped = [frames[1], frames[0], frames[2]]
    for wrong in (frames[:2], [*frames, b""], swapped, [frames[0], bytes(altered), frames[2]]):
        with pytest.raises(Damaged):
            attach(header, wrong)


def test_a_section_announced_twice_for_one_group_is_refused() -> None:
    _, sections = message()
    header = Header("put", items=(Item("a", sections=(sections[0].info, sections[0].info)),))
    with pytest.raises(WireError, match="announced twice"):
        attach(header, [sections[0].data, sections[0].data])

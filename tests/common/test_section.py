"""Sections survive the way unchanged, or are refused: never half, never altered."""

import mmap
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from common.columns import COLUMNS, SCHEMAS, SECTIONS, columns_of, sections_of
from common.errors import Damaged, WireError
from common.group import Group, GroupKey
from common.section import Section, SectionInfo, check, decode, encode
from section_cases import columns, example

pytestmark = pytest.mark.unit

MIB = 1 << 20


def announced(name: str, rows: int, data: Any) -> Section:
    """A section whose header tells the truth about `data`, whatever that is."""
    return Section(SectionInfo(name, rows, memoryview(data).nbytes, xxhash.xxh3_64_intdigest(data)), data)


def stream(*batches: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_section_comes_back_as_it_was_encoded(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SECTIONS))
    values = data.draw(columns(name))
    section = encode(name, values)
    batch = decode(section)
    assert batch.schema.equals(SCHEMAS[name])
    assert batch.to_pydict() == values
    assert section.info.rows == batch.num_rows
    assert section.info.length == memoryview(section.data).nbytes


@pytest.mark.parametrize("name", SECTIONS)
def test_no_rows_are_no_bytes(name: str) -> None:
    section = encode(name, {field.name: [] for field in SCHEMAS[name]})
    assert (section.info.rows, section.info.length) == (0, 0)
    assert decode(section).num_rows == 0


def has_32_bit_offsets(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return pa.types.is_list(kind) or any(has_32_bit_offsets(kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_dictionary(kind)


def test_no_column_has_32_bit_offsets_or_allows_nulls() -> None:
    assert has_32_bit_offsets(pa.large_list(pa.string()))  # the check itself
    for schema in SCHEMAS.values():
        for field in schema:
            assert not has_32_bit_offsets(field.type), field
            assert not field.nullable, field


def test_each_column_belongs_to_one_section_with_one_kind_of_row_and_one_owner() -> None:
    assert set(SCHEMAS) == set(SECTIONS)
    assert sum(len(schema) for schema in SCHEMAS.values()) == len(COLUMNS)
    for section in SECTIONS:
        members = [column for column in COLUMNS.values() if column.section == section]
        assert len({column.rows for column in members}) == 1
        assert len({column.owner for column in members}) == 1


def test_columns_are_found_by_owner_and_sections_by_columns() -> None:
    assert columns_of("reward") == {"reward", "reward_status"}
    assert sections_of(["reward", "logprobs", "response_ids"]) == {"reward", "tokens"}
    with pytest.raises(KeyError):
        sections_of(["nobody_declared_this"])


def test_media_beyond_two_gib_of_one_column_are_reached_without_offset_overflow() -> None:
    # 40 x 64 MiB = 2,560 MiB of address space that is never written, so it costs no memory; the last value starts at
    # 39 x 64 MiB = 2,496 MiB, beyond what a 32-bit offset can say.
    size = 64 * MIB
    values = mmap.mmap(-1, 40 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    offsets = pa.py_buffer(np.arange(41, dtype=np.int64) * size)
    column = pa.Array.from_buffers(COLUMNS["media_data"].type, 40, [None, offsets, pa.py_buffer(values)])
    section = encode("media", {**example("media", 1), "media_data": column.slice(39, 1)})
    assert size < section.info.length < size + 4096
    assert decode(section).column("media_data").buffers()[2].size == size
    with pytest.raises((pa.ArrowInvalid, OverflowError)):
        pa.array([40 * size], pa.int32())  # the last offset of `binary`


def test_forty_media_come_back_and_are_encoded_once() -> None:
    # The same shape with 256 KiB a value: 10 MiB on the wire and no more than that again while it is encoded.
    medium = bytes(range(256)) * 1024
    values = {**example("media", 40), "media_data": [medium] * 40}
    tracemalloc.start()
    section = encode("media", values)
    batch = decode(section)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert section.info.length < 40 * len(medium) + 8192
    assert batch.column("media_data")[39].as_py() == medium
    assert python_peak < MIB  # the bytes are Arrow's and are viewed, not copied into Python
    first = batch.column("media_data").buffers()[2].address
    whole = pa.py_buffer(section.data)
    assert whole.address <= first < whole.address + whole.size


@pytest.mark.parametrize("name", SECTIONS)
def test_a_missing_or_foreign_column_is_named(name: str) -> None:
    values = example(name)
    gone = next(iter(values))
    with pytest.raises(WireError, match=rf"missing columns \['{gone}'\]"):
        encode(name, {key: column for key, column in values.items() if key != gone})
    with pytest.raises(WireError, match=r"undeclared columns \['extra'\]"):
        encode(name, {**values, "extra": [1, 2]})


@pytest.mark.parametrize("column", sorted(COLUMNS))
@pytest.mark.parametrize("wrong", [None, {}, object(), "\ud800"], ids=["null", "map", "object", "surrogate"])
def test_a_value_that_does_not_fit_its_column_is_refused_with_the_columns_name(column: str, wrong: Any) -> None:
    name = COLUMNS[column].section
    values = example(name)
    values[column] = [values[column][0], wrong]
    with pytest.raises(WireError, match=f"column {column!r}"):
        encode(name, values)


@pytest.mark.parametrize("column", ["response_ids", "logprobs", "span_version", "tensor_shape"])
def test_a_null_inside_a_list_is_refused(column: str) -> None:
    name = COLUMNS[column].section
    values = example(name)
    with pytest.raises(WireError, match=f"column {column!r}: 1 null"):
        encode(name, {**values, column: [[1, None], [2]]})


def test_a_token_id_beyond_32_bits_is_refused() -> None:
    with pytest.raises(WireError, match="response_ids"):
        encode("tokens", {**example("tokens", 1), "response_ids": [[2**31]]})


def test_an_arrow_column_of_another_type_is_refused() -> None:
    with pytest.raises(WireError, match="type float, declared large_list"):
        encode("tokens", {**example("tokens", 1), "logprobs": pa.array([0.5], pa.float32())})
    words = pa.array(["math"]).dictionary_encode()
    with pytest.raises(WireError, match="dictionary"):
        encode("prompt", {**example("prompt", 1), "source": words})


def test_columns_of_different_lengths_are_refused_with_all_lengths() -> None:
    with pytest.raises(WireError, match=r"differ in length: \{'reward': 2, 'reward_status': 1\}"):
        encode("reward", {"reward": [1.0, 2.0], "reward_status": ["ok"]})


def test_an_unknown_section_is_refused_with_the_known_ones() -> None:
    with pytest.raises(WireError, match="unknown section 'rewards'; known: prompt, inputs"):
        encode("rewards", {})
    with pytest.raises(WireError, match="unknown section"):
        decode(announced("rewards", 0, b""))


def test_a_stream_cut_at_a_batch_border_is_refused_where_arrow_reads_fewer_rows() -> None:
    batch = pa.record_batch([pa.array([1.0, 2, 3, 4], pa.float32()), pa.array(["ok"] * 4, pa.large_string())],
                            schema=SCHEMAS["reward"])  # fmt: skip
    whole, one = stream(batch, batch, batch), stream(batch)
    cut = whole[: len(one) - 8]  # a stream ends with a mark of 8 bytes
    with pa.ipc.open_stream(cut) as reader:
        assert reader.read_all().num_rows == 4  # Arrow itself sees nothing wrong
    section = announced("reward", 12, whole)
    assert decode(section).num_rows == 12
    with pytest.raises(Damaged, match=f"{len(cut)} bytes arrived, {len(whole)} were announced"):
        decode(Section(section.info, cut))
    with pytest.raises(WireError, match="4 rows arrived, 12 were announced"):
        decode(announced("reward", 12, cut))  # even if length and checksum were those of the cut stream


@pytest.mark.parametrize("name", SECTIONS)
def test_any_flipped_bit_is_damage(name: str) -> None:
    section = encode(name, example(name))
    for place in range(0, section.info.length, 37):
        flipped = bytearray(section.data)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(Damaged, match="checksum"):
            check(section.info, flipped)
        with pytest.raises(Damaged):
            decode(Section(section.info, flipped))


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_stream_are_a_wire_error_even_with_the_right_checksum(data: st.DataObject) -> None:
    whole = bytes(encode("reward", example("reward")).data)
    head = data.draw(st.integers(0, len(whole)))
    wrong = data.draw(st.one_of(st.binary(max_size=64), st.just(whole[:head])))
    if wrong == whole:
        return
    try:
        batch = decode(announced("reward", 2, wrong))
    except WireError:
        return
    assert batch.to_pydict() == example("reward")  # only the mark at the end of the stream was cut off


def test_another_schema_is_refused_although_it_is_a_stream() -> None:
    other = pa.record_batch({"reward": pa.array([1.0], pa.float64())})
    with pytest.raises(WireError, match="differs from the declared"):
        decode(announced("reward", 1, stream(other)))


def test_nulls_that_a_peer_sends_against_the_schema_are_refused() -> None:
    schema = SCHEMAS["reward"]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1.0, None], pa.float32()), pa.array(["ok", "ok"], pa.large_string())], schema=schema
    )
    with pytest.raises(WireError, match="'reward': 1 null"):
        decode(announced("reward", 2, stream(batch)))


def test_one_row_of_a_32_mib_column_ships_as_one_row() -> None:
    parent = pa.array([bytes(MIB)] * 32, pa.large_binary())
    values = {**example("media", 1), "media_data": parent.slice(17, 1)}
    assert MIB < encode("media", values).info.length < 1.1 * MIB


def test_one_row_of_a_list_column_ships_as_one_row() -> None:
    parent = pa.array([list(range(10_000))] * 32, pa.large_list(pa.int32()))
    values = {**example("inputs", 1), "prompt_ids": parent.slice(31, 1)}
    section = encode("inputs", values)
    assert 40_000 < section.info.length < 44_000  # 10,000 ids of 4 bytes
    assert decode(section).column("prompt_ids")[0].as_py() == list(range(10_000))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decoded_columns_cannot_be_written(kind: type) -> None:
    section = encode("tokens", example("tokens"))
    raw: Any = bytearray(section.data) if kind is bytearray else kind(bytes(section.data))
    group = Group(GroupKey("g", 0), sections={"tokens": Section(section.info, raw)})
    for view in (group.numpy("temperature"), *group.arrays("logprobs")):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 7.0
    check(section.info, raw)

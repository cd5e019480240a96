"""A section: the columns one stage added to a group, as one Arrow IPC stream with its length and checksum.

An Arrow stream that is cut at a message border reads as fewer rows and no error, and a flipped bit reads as another
number, so a section is never decoded before its row count, byte length and checksum match what the header announced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import xxhash

from common.columns import SCHEMAS
from common.errors import Damaged, WireError

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """What a header says of one section: rows, length in bytes, xxh3-64 of those bytes."""

    name: str
    rows: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Section:
    """Encoded columns of one section. No rows are encoded as no bytes."""

    info: SectionInfo
    data: Buffer

    @property
    def name(self) -> str:
        """Name of the section, a key of `common.columns.SCHEMAS`."""
        return self.info.name


def encode(name: str, columns: Mapping[str, Sequence[Any] | pa.Array]) -> Section:
    """Encode the columns of section `name`.

    Raises `WireError` when a column is missing, foreign, holds a null, does not fit its declared type, or when the
    columns differ in length.
    """
    schema = _schema(name)
    if set(columns) != set(schema.names):
        missing, foreign = sorted(set(schema.names) - set(columns)), sorted(set(columns) - set(schema.names))
        raise WireError(f"section {name!r}: missing columns {missing}, undeclared columns {foreign}")
    arrays = [_array(name, field, columns[field.name]) for field in schema]
    lengths = {field.name: len(array) for field, array in zip(schema, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise WireError(f"section {name!r}: columns differ in length: {lengths}")
    rows = len(arrays[0])
    if rows == 0:
        return Section(SectionInfo(name, 0, 0, xxhash.xxh3_64_intdigest(b"")), b"")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    data = memoryview(sink.getvalue())
    return Section(SectionInfo(name, rows, data.nbytes, xxhash.xxh3_64_intdigest(data)), data)


def check(info: SectionInfo, data: Buffer) -> None:
    """Raise `Damaged` unless `data` has the length and checksum that `info` announces."""
    length = memoryview(data).nbytes
    if length != info.length:
        raise Damaged(f"section {info.name!r}: {length} bytes arrived, {info.length} were announced")
    if xxhash.xxh3_64_intdigest(data) != info.checksum:
        raise Damaged(f"section {info.name!r}: checksum of {length} bytes differs from the announced one")


def decode(section: Section) -> pa.RecordBatch:
    """Return the columns as read-only views of the section's bytes.

    Raises `WireError` when length, checksum, row count or schema differ from what was announced or declared.
    """
    info, schema = section.info, _schema(section.info.name)
    check(info, section.data)
    if info.rows == 0:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    try:
        with pa.ipc.open_stream(pa.py_buffer(section.data)) as reader:
            if not reader.schema.equals(schema):
                raise WireError(f"section {info.name!r}: schema {reader.schema} differs from the declared {schema}")
            table = reader.read_all()
    except (pa.ArrowException, OSError) as error:
        raise WireError(f"section {info.name!r}: not an Arrow stream ({error})") from error
    if table.num_rows != info.rows:
        raise WireError(f"section {info.name!r}: {table.num_rows} rows arrived, {info.rows} were announced")
    batch = table.combine_chunks().to_batches()[0]
    for name, array in zip(schema.names, batch.columns, strict=True):
        if _nulls(array):
            raise WireError(f"section {info.name!r}, column {name!r}: {_nulls(array)} null values")
    return batch


def _schema(name: str) -> pa.Schema:
    schema = SCHEMAS.get(name)
    if schema is None:
        raise WireError(f"unknown section {name!r}; known: {', '.join(SCHEMAS)}")
    return schema


def _array(section: str, field: pa.Field, values: Sequence[Any] | pa.Array) -> pa.Array:
    try:
        array: Any = values if isinstance(values, pa.Array) else pa.array(values, field.type)
    except (ValueError, TypeError, OverflowError) as error:  # Arrow's own errors and, from text, UnicodeEncodeError
        raise WireError(f"section {section!r}, column {field.name!r}: {error}") from error
    if array.type != field.type:
        raise WireError(f"section {section!r}, column {field.name!r}: type {array.type}, declared {field.type}")
    nulls = _nulls(array)
    if nulls:
        raise WireError(f"section {section!r}, column {field.name!r}: {nulls} null values")
    return array


def _nulls(array: Any) -> int:
    """Nulls of a column, those inside its lists included."""
    return array.null_count + (array.flatten().null_count if pa.types.is_large_list(array.type) else 0)

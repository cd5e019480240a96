"""Reading a journal: the events of its whole records, up to the first that is torn. See `brokers.journal`."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

import pyarrow as pa

from brokers.journal import SCHEMA, SECTION, Event, number_of, row_checksum, segments
from common.section import Section, SectionInfo

_decode = json.JSONDecoder().raw_decode  # of a body as it was encoded here: `json.loads` looks for blanks around it


@dataclass(slots=True)
class Recovery:
    """What reading a journal found. `torn`: where and why it stopped, empty if it came to the end."""

    events: int = 0
    bytes: int = 0
    torn: str = ""


def recover(folder: Path, found: Recovery) -> Iterator[tuple[int, Event]]:
    """Yield (segment number, event) up to the first torn record, which is told in `found` and cut off.

    Segments behind it are set aside as `*.lost`, so that what is written from now on is read the next time.
    """
    for segment in _needed(folder):
        if found.torn:
            segment.rename(segment.with_suffix(".lost"))
            continue
        number, whole = number_of(segment), 0
        for end, events in _commits(segment, found):
            whole = end
            found.events += len(events)
            for event in events:
                yield number, event
        if found.torn:
            os.truncate(segment, whole)
            if not whole:
                segment.unlink()


def _needed(folder: Path) -> list[Path]:
    """Return the segments in which a live group may have begun, as the newest state that can be read tells."""
    known = segments(folder)
    for segment in reversed(known):
        for _, events in _commits(segment, Recovery()):
            if events:
                oldest = events[0].body.get("oldest", 0)
                return [each for each in known if number_of(each) >= oldest]
    return known


def read(folder: Path, found: Recovery) -> Iterator[Event]:
    """Yield the events up to the first torn record, which is told in `found`; unlike `recover`, change nothing."""
    for segment in segments(folder):
        for _, events in _commits(segment, found):
            found.events += len(events)
            yield from events
        if found.torn:
            return


def _commits(segment: Path, found: Recovery) -> Iterator[tuple[int, list[Event]]]:
    """Yield (end in the file, events) of each whole batch; the bytes of sections are views of the mapped file."""
    size = segment.stat().st_size
    if size == 0:
        found.torn = f"{segment.name}: empty"
        return
    with pa.memory_map(str(segment)) as file:
        try:
            reader = pa.ipc.open_stream(file)
            if reader.schema != SCHEMA:
                found.torn = f"{segment.name}: not a segment of a journal"
                return
            yield file.tell(), []
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                batch.validate(full=True)
                events = _events(batch)
                found.bytes += batch.nbytes
                yield file.tell(), events
        except (pa.ArrowException, OSError, ValueError) as error:
            found.torn = f"{segment.name}: byte {file.tell()} of {size}: {error}"


def _events(batch: pa.RecordBatch) -> list[Event]:
    """Return the events of a batch; raises `ValueError` when a row is not what was written."""
    columns = {name: batch.column(name).to_pylist() for name in SCHEMA.names if name != "data"}
    texts = zip(*(columns[name] for name in ("event", "group", "stage", "body")), strict=True)
    infos = zip(*(columns[name] for name in ("section", "rows", "checksum")), strict=True)
    events: list[Event] = []
    rows = zip(texts, infos, _views(batch.column("data")), columns["row_checksum"], strict=True)
    for (kind, group, stage, body), (name, num_rows, checksum), data, told in rows:
        info = SectionInfo(name, num_rows, data.nbytes, checksum)
        if row_checksum((kind, group, stage, body), info, data) != told:
            raise ValueError(f"checksum of an event {kind!r} of group {group!r}")
        if kind == SECTION:
            cast(list[Section], events[-1].sections).append(Section(info, data))
        else:
            events.append(Event(kind, group, stage, _decode(body)[0], []))
    return events


def _views(column: pa.LargeBinaryArray) -> Iterator[memoryview]:
    """Yield the bytes of each row where they lie; a scalar of Arrow's would hold a copy of them."""
    _, offsets, data = column.buffers()
    places = memoryview(offsets).cast("q")[column.offset : column.offset + len(column) + 1]
    whole = memoryview(b"" if data is None else data)
    return (whole[start:end] for start, end in pairwise(places))

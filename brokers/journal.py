"""The journal: what happened to groups, as Arrow IPC streams on disk. A broker that restarts lost nothing it confirmed.

A segment is a file of record batches; a batch is one commit and holds many events: many confirmations cost one write.
An event is a row; the sections that it brought follow as rows of their own. Any Arrow reader can read a segment, also
while it is being written: it is the log for people, too. `pyarrow.ipc.open_stream(path).read_pandas()` is a data frame
of it, `polars.read_ipc_stream(path)` another; the `data` of a row "section" is an Arrow stream itself. Segments in
which no live group began are deleted; with `broker.journal_keep` all stay, and recovery reads those that it needs.

A batch that was cut, or holds a row whose checksum does not match, ends the recovery before it, and the journal says
so: what comes behind was never confirmed, or the disk has lost it.
"""

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import structlog
import xxhash

from common.section import Buffer, Section, SectionInfo

SCHEMA = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("event", pa.large_string(), nullable=False),
        pa.field("group", pa.large_string(), nullable=False),
        pa.field("stage", pa.large_string(), nullable=False),
        pa.field("body", pa.large_string(), nullable=False),
        pa.field("section", pa.large_string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
        pa.field("row_checksum", pa.uint64(), nullable=False),
    ]
)
SECTION = "section"
"""kind of the rows that hold an event's sections"""


_log = structlog.get_logger(part="journal")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `body`: plain values, as JSON; `sections`: what came with it, complete at `commit`."""

    kind: str
    group: str = ""
    stage: str = ""
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sections: Sequence[Section] = ()


class Journal:
    """Appends events to `folder`; `commit` makes everything appended so far durable, in one write.

    `segment_bytes`: a new segment begins above this. `fsync`: survive a power cut too, not only the process's death.
    """

    def __init__(self, folder: Path, segment_bytes: int, *, fsync: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._segment_bytes, self._fsync = folder, segment_bytes, fsync
        self._events: list[Event] = []
        self._number = max((number_of(segment) for segment in segments(folder)), default=0)
        self._file: int | None = None
        self._size = 0
        self.full_since: float | None = None

    @property
    def dirty(self) -> bool:
        """Whether something is appended that is not durable yet."""
        return bool(self._events)

    @property
    def next_number(self) -> int:
        """Number of the segment that the next `rotate` begins."""
        return self._number + 1

    @property
    def wants_rotation(self) -> bool:
        """Whether the current segment is above its size: call `rotate` with the state that a reader must know."""
        return self._file is None or self._size >= self._segment_bytes

    def append(self, event: Event) -> None:
        """Note an event; it is durable after the next successful `commit`."""
        self._events.append(event)

    def rotate(self, state: Mapping[str, Any]) -> int:
        """Begin a new segment that opens with `state`; return its number. Everything before must be durable."""
        assert not self._events, "the state holds what these events did; they would be counted twice"
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._number += 1
        self._events.append(Event("state", body=state))
        return self._number

    def commit(self) -> bool:
        """Write what was appended; False when the disk is full: nothing is lost, and nothing may be confirmed yet."""
        if not self._events:
            return True
        try:
            if self._file is None:
                self._open()
            self._write(_batch(self._events).serialize())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self.full_since is None:
                _log.error("disk full: producers wait until there is room", folder=str(self.folder))
                self.full_since = time.monotonic()
            return False
        if self.full_since is not None:
            _log.warning("there is room again", waited_s=round(time.monotonic() - self.full_since, 1))
            self.full_since = None
        self._events = []
        return True

    def drop(self, number: int) -> None:
        """Delete a segment in which no live group began."""
        path(self.folder, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Commit and close."""
        self.commit()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        name = path(self.folder, self._number)
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0
        try:
            self._write(SCHEMA.serialize())
        except OSError:
            os.close(self._file)
            self._file = None
            name.unlink(missing_ok=True)
            raise

    def _write(self, data: pa.Buffer) -> None:
        """Write all of it or nothing: after an error the file is cut back to its last whole batch."""
        assert self._file is not None, "a segment is open"
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
            if self._fsync:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += data.size


def segments(folder: Path) -> list[Path]:
    """Return the segments of a journal, oldest first."""
    return sorted(folder.glob("segment-*.arrow"), key=number_of)


def path(folder: Path, number: int) -> Path:
    """Return the file of a segment."""
    return folder / f"segment-{number:08d}.arrow"


def number_of(segment: Path) -> int:
    """Return the number of a segment's file."""
    return int(segment.stem.partition("-")[2])


_NOTHING = Section(SectionInfo("", 0, 0, 0), b"")


def _batch(events: Sequence[Event]) -> pa.RecordBatch:
    now = time.time_ns()
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for event in events:
        head = (event.kind, event.group, event.stage, json.dumps(dict(event.body)))
        behind = (SECTION, event.group, event.stage, "")
        for texts, section in ((head, _NOTHING), *((behind, section) for section in event.sections)):
            info = section.info
            checksum = row_checksum(texts, info, section.data)
            row = (now, *texts, info.name, info.rows, info.checksum, section.data, checksum)
            for name, value in zip(SCHEMA.names, row, strict=True):
                columns[name].append(value)
    arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
    return pa.record_batch(arrays, schema=SCHEMA)


def row_checksum(texts: Sequence[str], info: SectionInfo, data: Buffer) -> int:
    """Return the checksum of all that a row says."""
    words = "\0".join((*texts, info.name)).encode()
    head = words + info.rows.to_bytes(8, "little") + info.checksum.to_bytes(8, "little")
    if not data:
        return xxhash.xxh3_64_intdigest(head)
    digest = xxhash.xxh3_64(head)
    digest.update(data)
    return digest.intdigest()

"""A store that writes what does not fit into memory to disk, a file per section, and hands it out as memory maps.

A queue is first in, first out, so what came last is needed last: while memory is full, an incoming section goes to disk
at once, and nothing that lies in memory moves. Only what the trainer is done with goes before it: that is needed again
only if the trainer has to return to its last checkpoint.

A file holds exactly its section's bytes, an Arrow IPC stream: `pyarrow.ipc.open_stream(path)` reads it. Nothing here
outlives the broker: files of an earlier one are deleted, and a broker with a journal makes its sections from that.
"""

import mmap
import os
import re
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from brokers.store import Store
from common.section import Buffer, Section, SectionInfo

LEAST_BYTES = 4096
"""smaller sections stay in memory: a file takes a whole page anyway"""
MAPS_AT_ONCE = 256
"""each map holds a file descriptor, of which a process may have 1024; beyond these a file is read into memory"""

_log = structlog.get_logger(part="spill")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    length: int


class SpillStore:
    """Puts sections of at least `least_bytes` into `folder` while `store` holds `memory_bytes` of memory.

    A disk without room is no error: sections then stay in memory, and the next one tries again.
    """

    def __init__(self, store: Store, folder: Path, memory_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self._store, self._folder = store, folder
        self._memory_bytes, self._least_bytes = memory_bytes, least_bytes
        self._movable: dict[tuple[str, str], SectionInfo] = {}  # in memory, large enough for a file
        self._retired: dict[tuple[str, str], SectionInfo] = {}  # those of them that the trainer is done with
        self._files: dict[tuple[str, str], _File] = {}
        self._file_bytes = 0
        self._number = 0
        self._refused = False
        self._maps: set[weakref.ref[mmap.mmap]] = set()
        for leftover in folder.glob("*.arrow"):
            leftover.unlink()

    @property
    def bytes(self) -> int:
        """Of all sections, in memory and on disk."""
        return self._store.bytes + self._file_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the sections that take this process's memory."""
        return self._store.memory_bytes

    def keep(self, group: str, section: Section) -> None:
        """Take over a section: into memory if there is room, else to disk."""
        self.free(group, section.name)
        self._make_room(section.info.length)
        movable = section.info.length >= max(1, self._least_bytes)  # a file without a byte cannot be mapped
        full = self.memory_bytes + section.info.length > self._memory_bytes
        if movable and full and self._write(group, section.info, section.data):
            return
        if movable:
            self._movable[group, section.name] = section.info
        self._store.keep(group, section)

    def adopt(self, group: str, section: Section) -> None:
        """Take over a section that lies on disk already."""
        self.free(group, section.name)
        self._store.adopt(group, section)

    def read(self, group: str, info: SectionInfo) -> Buffer:
        """Return the bytes of a section, read-only if they come from disk; it must be here.

        A file that was damaged or lost comes back as what is left of it: whoever checks it against `info` will see.
        """
        file = self._files.get((group, info.name))
        return self._store.read(group, info) if file is None else self._read(file)

    def free(self, group: str, section: str) -> None:
        """Forget a section. Maps of it that are still being sent stay valid: an unlinked file lives as long as they."""
        self._movable.pop((group, section), None)
        self._retired.pop((group, section), None)
        file = self._files.pop((group, section), None)
        if file is None:
            self._store.free(group, section)
            return
        self._file_bytes -= file.length
        file.path.unlink(missing_ok=True)

    def retire(self, group: str, sections: Iterable[str]) -> None:
        """Let these sections go to disk before all others: the group is trained and waits for its checkpoint."""
        keys = [(group, section) for section in sections]
        self._retired.update({key: self._movable[key] for key in keys if key in self._movable})
        self._make_room(0)
        self._store.retire(group, sections)

    def describe(self) -> dict[str, int]:
        """Return how much lies where."""
        return {**self._store.describe(), "spilled_bytes": self._file_bytes, "spilled_files": len(self._files)}

    def close(self) -> None:
        """Delete all files, and their folder if nothing else is in it."""
        for file in self._files.values():
            file.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()
        self._store.close()

    def __len__(self) -> int:
        return len(self._store) + len(self._files)

    def _make_room(self, length: int) -> None:
        """Move retired sections to disk until `length` bytes fit; the latest first, whose checkpoint is farthest."""
        while self._retired and self.memory_bytes + length > self._memory_bytes:
            (group, name), info = self._retired.popitem()
            if not self._write(group, info, self._store.read(group, info)):
                self._retired[group, name] = info
                return
            del self._movable[group, name]
            self._store.free(group, name)

    def _write(self, group: str, info: SectionInfo, data: Buffer) -> bool:
        """Write a section to a new file; False if that cannot be done now."""
        self._number += 1
        path = self._folder / f"{self._number:09d}-{_plain(group)}-{_plain(info.name)}.arrow"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path, data)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if not self._refused:
                _log.error(
                    "cannot spill: sections stay in memory until there is room", file=str(path), error=str(error)
                )
            self._refused = True
            return False
        if self._refused:
            _log.warning("sections spill again", folder=str(self._folder))
        self._refused = False
        self._files[group, info.name] = _File(path, info.length)
        self._file_bytes += info.length
        return True

    def _read(self, file: _File) -> Buffer:
        try:
            with file.path.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if not size or len(self._maps) >= MAPS_AT_ONCE:  # no bytes cannot be mapped
                    return opened.read()
                mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            _log.error("a spilled section is lost", file=str(file.path), error=str(error))
            return b""
        self._maps.add(weakref.ref(mapped, self._maps.discard))
        return memoryview(mapped)


def _create(path: Path, data: Buffer) -> None:
    """Write a new file that only its owner may read."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)


def _plain(name: str) -> str:
    """Return a name as it can be part of a file's: peers choose the names of groups."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80]

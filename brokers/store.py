"""Where the bytes of sections lie. This one keeps them in memory."""

from collections.abc import Iterable
from typing import Protocol

from common.section import Buffer, Section, SectionInfo


class Store(Protocol):
    """Bytes by (group, section). A section is kept once, however many stages require it."""

    @property
    def bytes(self) -> int:
        """Of all sections that are kept, wherever they lie."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Of those that take this process's memory."""
        ...

    def keep(self, group: str, section: Section) -> None:
        """Take over a section; one of the same name is replaced."""
        ...

    def adopt(self, group: str, section: Section) -> None:
        """Take over a section whose bytes are a map of a file that outlives it: it takes no memory."""
        ...

    def read(self, group: str, info: SectionInfo) -> Buffer:
        """Return the bytes of a section; it must be here."""
        ...

    def free(self, group: str, section: str) -> None:
        """Forget a section; one that is not here is left alone."""
        ...

    def retire(self, group: str, sections: Iterable[str]) -> None:
        """A group is trained: these sections are needed only if the trainer returns to its last checkpoint."""
        ...

    def describe(self) -> dict[str, int]:
        """Return how much lies where, for people."""
        ...

    def close(self) -> None:
        """Let go of what outlives the process."""
        ...

    def __len__(self) -> int: ...


class MemoryStore:
    """A `Store` in this process's memory."""

    def __init__(self) -> None:
        self.bytes = self.mapped_bytes = 0
        self._data: dict[tuple[str, str], tuple[Section, bool]] = {}  # with whether it is a map of a file

    @property
    def memory_bytes(self) -> int:
        """All bytes but those that are maps of files."""
        return self.bytes - self.mapped_bytes

    def keep(self, group: str, section: Section) -> None:
        """Take over a section."""
        self._take(group, section, mapped=False)

    def adopt(self, group: str, section: Section) -> None:
        """Take over a map of a file."""
        self._take(group, section, mapped=True)

    def read(self, group: str, info: SectionInfo) -> Buffer:
        """Return the bytes of a section; it must be here."""
        return self._data[group, info.name][0].data

    def free(self, group: str, section: str) -> None:
        """Forget a section."""
        gone = self._data.pop((group, section), None)
        if gone is not None:
            self._count(-gone[0].info.length, mapped=gone[1])

    def retire(self, group: str, sections: Iterable[str]) -> None:
        """Everything stays where it is."""

    def describe(self) -> dict[str, int]:
        """Return how much lies where."""
        return {"memory_bytes": self.memory_bytes, "mapped_bytes": self.mapped_bytes}

    def close(self) -> None:
        """Nothing outlives the process."""

    def __len__(self) -> int:
        return len(self._data)

    def _take(self, group: str, section: Section, *, mapped: bool) -> None:
        self.free(group, section.name)
        self._data[group, section.name] = section, mapped
        self._count(section.info.length, mapped=mapped)

    def _count(self, length: int, *, mapped: bool) -> None:
        self.bytes += length
        self.mapped_bytes += length if mapped else 0

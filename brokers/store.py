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
        self.bytes = 0
        self._data: dict[tuple[str, str], Section] = {}

    def keep(self, group: str, section: Section) -> None:
        """Take over a section."""
        self.free(group, section.name)
        self._data[group, section.name] = section
        self.bytes += section.info.length

    def read(self, group: str, info: SectionInfo) -> Buffer:
        """Return the bytes of a section; it must be here."""
        return self._data[group, info.name].data

    def free(self, group: str, section: str) -> None:
        """Forget a section."""
        gone = self._data.pop((group, section), None)
        if gone is not None:
            self.bytes -= gone.info.length

    @property
    def memory_bytes(self) -> int:
        """All bytes are in memory."""
        return self.bytes

    def retire(self, group: str, sections: Iterable[str]) -> None:
        """Everything stays where it is."""

    def describe(self) -> dict[str, int]:
        """Return how much lies where."""
        return {"memory_bytes": self.bytes}

    def close(self) -> None:
        """Nothing outlives the process."""

    def __len__(self) -> int:
        return len(self._data)

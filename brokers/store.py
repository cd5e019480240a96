"""Where the bytes of sections lie. This one keeps them in memory."""

from typing import Protocol

from common.section import Buffer, Section, SectionInfo


class Store(Protocol):
    """Bytes by (group, section). A section is kept once, however many stages require it."""

    @property
    def bytes(self) -> int:
        """Of all sections that are kept, wherever they lie."""
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

    def __len__(self) -> int:
        return len(self._data)

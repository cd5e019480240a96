"""A store that spills, under any order of everything that can happen to it, against a plain dict."""

import shutil
import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from brokers.spill import SpillStore
from brokers.store import MemoryStore
from common.section import Section, SectionInfo

GROUPS, NAMES = st.sampled_from(["g", "h", "i"]), st.sampled_from(["media", "prompt", "response"])


def section(name: str, length: int) -> Section:
    data = (name.encode() * length)[:length]
    return Section(SectionInfo(name, 1, length, xxhash.xxh3_64_intdigest(data)), data)


class StoreMachine(RuleBasedStateMachine):
    """Whatever is kept, freed, retired or does not fit on the disk: the bytes are those that were given."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="spill-"))
        self.store = SpillStore(MemoryStore(), self.folder / "spill", 300, 50)
        self.model: dict[tuple[str, str], Section] = {}
        self.disk_was_full = False

    @rule(group=GROUPS, name=NAMES, length=st.integers(0, 200), mapped=st.booleans())
    def take(self, group: str, name: str, length: int, mapped: bool) -> None:
        self.model[group, name] = section(name, length)
        (self.store.adopt if mapped else self.store.keep)(group, self.model[group, name])

    @rule(group=GROUPS, name=NAMES)
    def free(self, group: str, name: str) -> None:
        self.model.pop((group, name), None)
        self.store.free(group, name)

    @rule(group=GROUPS, names=st.lists(NAMES))
    def retire(self, group: str, names: list[str]) -> None:
        self.store.retire(group, names)

    @rule()
    def fill_the_disk(self) -> None:
        """A file where the folder should be keeps everything out that is not there yet, as a full disk does."""
        if not (self.folder / "spill").exists():
            self.disk_was_full = True
            (self.folder / "spill").write_bytes(b"")

    @rule()
    def make_room_on_the_disk(self) -> None:
        if (self.folder / "spill").is_file():
            (self.folder / "spill").unlink()

    @invariant()
    def nothing_is_lost_and_everything_is_counted(self) -> None:
        for (group, _), kept in self.model.items():
            assert bytes(self.store.read(group, kept.info)) == bytes(kept.data)
        told = self.store.describe()
        assert self.store.bytes == sum(kept.info.length for kept in self.model.values())
        assert self.store.bytes == told["memory_bytes"] + told["mapped_bytes"] + told["spilled_bytes"]
        assert len(self.store) == len(self.model)
        files = list((self.folder / "spill").glob("*.arrow"))
        assert (len(files), sum(file.stat().st_size for file in files)) == (
            told["spilled_files"],
            told["spilled_bytes"],
        )
        small = sum(kept.info.length for kept in self.model.values() if kept.info.length < 50)
        assert told["memory_bytes"] <= 300 + small or self.disk_was_full

    def teardown(self) -> None:
        self.store.close()
        assert list(self.folder.glob("spill/*")) == []
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestStoreMachine = pytest.mark.unit(StoreMachine.TestCase)

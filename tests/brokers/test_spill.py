"""Sections that go to disk: which, where, how they come back, and what happens when the disk is full or loses them."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import structlog
import xxhash

from brokers import spill
from brokers.conduct import Facts
from brokers.durable import DurableService
from brokers.journal import Journal
from brokers.record import Limits
from brokers.samples import SampleService
from brokers.spill import SpillStore
from brokers.store import MemoryStore
from common.config import to_json
from common.errors import Damaged
from common.section import Section, SectionInfo, check, encode
from contract import CONFIG, STAGES, MemoryWorld, World, prompt
from small_disk import small_disk

pytestmark = pytest.mark.unit
PAGE = 4096


def section(name: str = "media", length: int = PAGE) -> Section:
    data = name.encode() * length
    return Section(SectionInfo(name, 1, length, xxhash.xxh3_64_intdigest(data[:length])), data[:length])


def where(store: SpillStore) -> tuple[int, int, int]:
    """Bytes in memory, bytes in files, files."""
    told = store.describe()
    return told["memory_bytes"], told["spilled_bytes"], told["spilled_files"]


def test_what_comes_after_memory_is_full_goes_to_disk_and_nothing_in_memory_moves(tmp_path: Path) -> None:
    store = SpillStore(MemoryStore(), tmp_path, 2 * PAGE)
    for number in range(4):
        store.keep(f"g{number}", section())
    assert where(store) == (2 * PAGE, 2 * PAGE, 2)
    assert (store.bytes, len(store)) == (4 * PAGE, 4)
    store.free("g0", "media")
    store.keep("g4", section())  # there is room again
    assert where(store) == (2 * PAGE, 2 * PAGE, 2)
    assert [bytes(store.read(f"g{number}", section().info)) for number in range(1, 5)] == [section().data] * 4


def test_a_section_below_a_page_stays_in_memory_also_when_that_is_full(tmp_path: Path) -> None:
    store = SpillStore(MemoryStore(), tmp_path, 1)
    store.keep("g", section("prompt", PAGE - 1))
    store.keep("g", section("response", PAGE))
    assert where(store) == (PAGE - 1, PAGE, 1)


def test_a_spilled_file_is_an_arrow_stream_that_only_its_owner_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "spill"
    store = SpillStore(MemoryStore(), folder, 0)
    texts = ["ä" * 3000, "b"]
    store.keep("../train/7", encode("response", {"text": texts, "finish_reason": ["stop"] * 2, "num_tokens": [1, 2]}))
    (file,) = folder.iterdir()
    assert file.name == "000000001-.._train_7-response.arrow"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as reader:
        assert reader.read_all().column("text").to_pylist() == texts


def test_what_comes_from_disk_cannot_be_written_and_outlives_its_file(tmp_path: Path) -> None:
    store = SpillStore(MemoryStore(), tmp_path, 0)
    store.keep("g", section())
    view = store.read("g", section().info)
    assert isinstance(view, memoryview)
    assert view.readonly
    store.free("g", "media")
    assert list(tmp_path.iterdir()) == []
    assert view == section().data  # a message under way still needs it
    assert (store.bytes, len(store), where(store)) == (0, 0, (0, 0, 0))


def test_a_section_that_comes_again_replaces_the_one_on_disk(tmp_path: Path) -> None:
    store = SpillStore(MemoryStore(), tmp_path, 0)
    store.keep("g", section())
    store.keep("g", section(length=2 * PAGE))
    assert where(store) == (0, 2 * PAGE, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_trained_groups_go_to_disk_before_what_comes_in_the_latest_first(tmp_path: Path) -> None:
    store = SpillStore(MemoryStore(), tmp_path, 3 * PAGE)
    for number in range(3):
        store.keep(f"g{number}", section())
    store.retire("g0", ["media", "prompt"])
    store.retire("g1", ["media"])
    assert where(store) == (3 * PAGE, 0, 0)  # there is room for all
    store.keep("g3", section())
    assert [file.name for file in tmp_path.iterdir()] == ["000000001-g1-media.arrow"]
    store.free("g0", "media")  # its checkpoint came
    store.keep("g4", section())
    store.keep("g5", section())
    assert where(store) == (3 * PAGE, 2 * PAGE, 2)  # g2, g3, g4 against g1, g5
    store.retire("g1", ["media"])  # acknowledged once more, after a trainer came back
    store.keep("g6", section())
    assert where(store) == (3 * PAGE, 3 * PAGE, 3)
    assert len(store) == 6


def test_files_of_an_earlier_broker_are_deleted_and_others_left_alone(tmp_path: Path) -> None:
    SpillStore(MemoryStore(), tmp_path, 0).keep("g", section())
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    store = SpillStore(MemoryStore(), tmp_path, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    store.keep("h", section())
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_more_maps_than_a_process_has_descriptors_for_are_read_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "MAPS_AT_ONCE", 2)
    store = SpillStore(MemoryStore(), tmp_path, 0)
    store.keep("g", section())
    views = [store.read("g", section().info) for _ in range(3)]
    assert [type(view) for view in views] == [memoryview, memoryview, bytes]
    del views
    assert isinstance(store.read("g", section().info), memoryview)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda file: os.truncate(file, 100), "100 bytes arrived"),
        (lambda file: os.truncate(file, 0), "0 bytes arrived"),
        (lambda file: file.unlink(), "0 bytes arrived"),
        (lambda file: file.write_bytes(b"\1" + file.read_bytes()[1:]), "checksum"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "4097 bytes arrived"),
    ],
)
def test_a_file_that_the_disk_damaged_or_lost_is_found_out_by_its_reader(
    tmp_path: Path, harm: object, reason: str
) -> None:
    store = SpillStore(MemoryStore(), tmp_path, 0)
    store.keep("g", section())
    harm(next(tmp_path.iterdir()))  # pyright: ignore[reportCallIssue]
    with pytest.raises(Damaged, match=reason):
        check(section().info, store.read("g", section().info))
    store.free("g", "media")
    assert where(store) == (0, 0, 0)


def test_on_a_full_disk_sections_stay_in_memory_until_there_is_room_and_two_lines_are_logged(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16 * PAGE) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(15 * PAGE))
        store = SpillStore(MemoryStore(), disk / "spill", PAGE)
        with structlog.testing.capture_logs() as logged:
            for number in range(4):
                store.keep(f"g{number}", section(length=2 * PAGE))
            assert where(store) == (8 * PAGE, 0, 0)
            assert list((disk / "spill").iterdir()) == []
            ballast.unlink()
            store.keep("g4", section(length=2 * PAGE))
            store.keep("g5", section(length=2 * PAGE))
        assert where(store) == (8 * PAGE, 4 * PAGE, 2)
        assert [(each["event"], each["log_level"]) for each in logged] == [
            ("cannot spill: sections stay in memory until there is room", "error"),
            ("sections spill again", "warning"),
        ]
        assert "No space left on device" in logged[0]["error"]
        store.retire("g0", ["media"])  # what stayed in memory goes as soon as it may
        assert where(store) == (6 * PAGE, 6 * PAGE, 3)


LIMITED = """
import resource, sys
from pathlib import Path
from brokers.spill import SpillStore
from brokers.store import MemoryStore
from common.section import Section, SectionInfo
store = SpillStore(MemoryStore(), Path(sys.argv[1]), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
store.keep("g", Section(SectionInfo("media", 1, 20_000, 0), bytes(20_000)))
assert store.memory_bytes == 20_000 and store.describe()["spilled_files"] == 0
assert store.read("g", SectionInfo("media", 1, 20_000, 0)) == bytes(20_000)
assert list(Path(sys.argv[1]).iterdir()) == []
store.keep("h", Section(SectionInfo("media", 1, 5_000, 0), bytes(5_000)))
assert store.describe()["spilled_files"] == 1
"""


def test_a_file_that_the_system_does_not_let_grow_is_given_up_whole(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def spilling(folder: Path, limits: Limits, memory_bytes: int = 0, least_bytes: int = PAGE) -> World:
    def make(facts: Facts, limits: Limits) -> SampleService:
        return SampleService(facts, STAGES, limits, SpillStore(MemoryStore(), folder, memory_bytes, least_bytes))

    return MemoryWorld(limits, make)


def test_a_spilled_section_is_deleted_when_its_last_reader_is_done_and_a_dropped_groups_at_once(tmp_path: Path) -> None:
    """Of sections beyond a page there are here: media, for rollout only. Results are smaller and stay in memory."""
    world = spilling(tmp_path, Limits(2))
    worker, trainer = world.join("w"), world.join("trainer-0", "trainer")
    worker.offer(0, 1, 2, media=bytes(10_000))
    assert trainer.status()["store"]["spilled_files"] == 3
    worker.drop(["train-2"], "filtered")
    assert len(list(tmp_path.iterdir())) == 2
    leases = worker.get("rollout", 2, 0)
    assert [leased.group.value("media_data") for leased in leases] == [bytes(10_000)] * 2
    assert len(list(tmp_path.iterdir())) == 2
    worker.finish("rollout", leases)
    assert list(tmp_path.iterdir()) == []
    worker.serve("reward")
    batch = trainer.get("trainer", 2, 0)
    trainer.ack(batch, 0)
    trainer.advance(1)
    assert trainer.status()["bytes"] > 0  # until the checkpoint
    trainer.commit(1)
    assert trainer.status()["bytes"] == 0


def test_what_waits_for_its_checkpoint_makes_room_for_what_comes_in_and_comes_back_from_disk(tmp_path: Path) -> None:
    prompts = sum(each.info.length for each in prompt(0, bytes(500)))
    world = spilling(tmp_path, Limits(1), prompts + 500, 1)
    worker = world.join("w")
    worker.offer(0).result(0.0)
    worker.serve("rollout", "reward")
    (trained,) = worker.get("trainer", 1, 0)
    assert list(tmp_path.iterdir()) == []
    worker.ack([trained], 0)
    worker.offer(1, media=bytes(500)).result(0.0)
    assert sorted(file.name.partition("-")[2] for file in tmp_path.iterdir()) == [
        "train-0-response.arrow",
        "train-0-reward.arrow",
    ]
    response = trained.group.sections["response"]
    assert bytes(world.samples.store.read("train-0", response.info)) == bytes(response.data)


def test_what_a_journal_gives_back_stays_there_and_takes_no_memory(tmp_path: Path) -> None:
    def make(_facts: Facts, limits: Limits) -> DurableService:
        journal = Journal(tmp_path / "journal", 1 << 20, fsync=False)
        store = SpillStore(MemoryStore(), tmp_path / "spill", 0)
        return DurableService(Facts("run-a", to_json(CONFIG), "/runs/a"), STAGES, limits, journal, 0.0, store)

    world = MemoryWorld(Limits(2), make)
    world.join("w").offer(0, media=bytes(10_000))
    kept = world.samples.store.bytes
    assert len(list((tmp_path / "spill").iterdir())) == 1
    again = MemoryWorld(Limits(2), make)  # the first one was killed
    assert list((tmp_path / "spill").iterdir()) == []
    assert again.samples.store.describe() == {
        "memory_bytes": 0, "mapped_bytes": kept, "spilled_bytes": 0, "spilled_files": 0,
    }  # fmt: skip
    (leased,) = again.join("w").get("rollout", 1, 0)
    assert leased.group.value("media_data") == bytes(10_000)
    again.samples.ledger.drop("train-0", "filtered")
    assert again.samples.store.describe()["mapped_bytes"] == 0

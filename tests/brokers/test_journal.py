"""The journal: what comes back from disk, whole, cut, damaged, or written when there was no room."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from brokers.journal import Event, Journal, segments
from brokers.playback import Recovery, recover
from common.section import Section, SectionInfo

pytestmark = pytest.mark.unit
MIB = 1 << 20


def section(name: str, data: bytes) -> Section:
    return Section(SectionInfo(name, 1, len(data), xxhash.xxh3_64_intdigest(data)), data)


def event(number: int, *sections: Section) -> Event:
    return Event("put", f"group-{number}", "reward", {"number": number, "text": "ä\n\0"}, list(sections))


def plain(events: list[Event]) -> list[tuple[object, ...]]:
    return [
        (e.kind, e.group, e.stage, dict(e.body), [(section.info, bytes(section.data)) for section in e.sections])
        for e in events
    ]


def journal(folder: Path, segment_bytes: int = MIB) -> Journal:
    return Journal(folder, segment_bytes, fsync=False)


def begun(folder: Path) -> Journal:
    made = journal(folder)
    made.rotate({"version": 0})
    assert made.commit()
    return made


def read(folder: Path) -> tuple[list[Event], Recovery]:
    found = Recovery()
    return [event for _, event in recover(folder, found)], found


def test_events_come_back_with_their_sections(tmp_path: Path) -> None:
    made = begun(tmp_path)
    media = section("media", bytes(range(256)) * 40)
    events = [event(0, section("prompt", b"abc"), media), event(1), event(2, section("prompt", b""))]
    for each in events:
        made.append(each)
    assert made.dirty
    assert made.commit()
    assert not made.dirty
    made.append(event(3, section("reward", b"r")))
    made.close()
    back, found = read(tmp_path)
    assert plain(back) == plain([Event("state", body={"version": 0}), *events, event(3, section("reward", b"r"))])
    assert (found.events, found.torn) == (5, "")


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    begun(tmp_path).append(event(0))
    assert [each.kind for each in read(tmp_path)[0]] == ["state"]


def test_any_arrow_reader_reads_a_segment(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.append(event(7, section("prompt", b"abc")))
    made.close()
    with pa.OSFile(str(segments(tmp_path)[0])) as file, pa.ipc.open_stream(file) as reader:
        table = reader.read_all()
    assert table.column("event").to_pylist() == ["state", "put", "section"]
    assert table.column("data").to_pylist() == [b"", b"", b"abc"]


def anonymous_bytes() -> int:
    """Memory of this process that is no map of a file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def written(folder: Path, commits: int) -> tuple[Path, list[int]]:
    """A segment of so many commits, and the size of the file after each."""
    made = begun(folder)
    (file,) = segments(folder)
    sizes = [file.stat().st_size]
    for number in range(1, commits + 1):
        made.append(event(number, section("prompt", b"x" * 100)))
        made.commit()
        sizes.append(file.stat().st_size)
    made.close()
    return file, sizes


def test_a_segment_that_is_cut_anywhere_gives_back_its_whole_commits(tmp_path: Path) -> None:
    file, sizes = written(tmp_path / "whole", 2)
    whole = file.read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    for size in range(0, len(whole), 7):
        (folder / file.name).write_bytes(whole[:size])
        back, found = read(folder)
        assert len(back) == sum(size >= end for end in sizes)
        if size not in sizes and size > sizes[0]:
            assert not (folder / file.name).exists() or (folder / file.name).stat().st_size in sizes
        again, after = read(folder)
        assert (plain(again), after.torn) == (plain(back), ""), found.torn


def test_a_segment_with_a_flipped_bit_gives_back_nothing_false(tmp_path: Path) -> None:
    file, _ = written(tmp_path / "whole", 2)
    whole = file.read_bytes()
    expected = plain(read(tmp_path / "whole")[0])
    folder = tmp_path / "flipped"
    folder.mkdir()
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        (folder / file.name).write_bytes(damaged)
        back, found = read(folder)
        assert plain(back) == expected[: len(back)]
        assert len(back) == len(expected) or found.torn


def test_what_is_written_after_a_torn_segment_is_read_the_next_time(tmp_path: Path) -> None:
    file, sizes = written(tmp_path, 3)
    with file.open("r+b") as cut:
        cut.truncate(sizes[1] + 20)
    lost = tmp_path / "segment-00000002.arrow"
    lost.write_bytes(file.read_bytes())
    assert len(read(tmp_path)[0]) == 2
    assert not lost.exists()
    assert lost.with_suffix(".lost").exists()
    made = journal(tmp_path)
    made.rotate({"version": 1})
    made.append(event(9))
    made.close()
    back, found = read(tmp_path)
    assert [each.group for each in back] == ["", "group-1", "", "group-9"]
    assert not found.torn


def test_a_segment_above_its_size_asks_for_the_next_and_segments_can_be_dropped(tmp_path: Path) -> None:
    made = journal(tmp_path, 2_000)
    assert made.wants_rotation
    assert made.rotate({}) == 1
    made.commit()
    assert not made.wants_rotation
    made.append(event(1, section("prompt", bytes(2_000))))
    made.commit()
    assert made.wants_rotation
    assert made.rotate({"version": 3}) == 2
    made.append(event(2))
    made.commit()
    made.drop(1)
    back, _ = read(tmp_path)
    assert [(each.kind, dict(each.body).get("version")) for each in back] == [("state", 3), ("put", None)]


FULL = """
import errno, os, resource, signal, sys
from pathlib import Path
from brokers import journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
write = os.write
def until_full(file, data):
    try:
        return write(file, data)
    except OSError as error:
        if error.errno == errno.EFBIG:  # a limit on files stands for a disk without room
            raise OSError(errno.ENOSPC, "No space left on device") from error
        raise
journal.os.write = until_full
made = journal.Journal(Path(sys.argv[1]), 1 << 20, fsync=True)
made.rotate({"version": 0})
assert made.commit()
from common.section import Section, SectionInfo
big = Section(SectionInfo("media", 1, 50_000, 0), bytes(50_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
made.append(journal.Event("add", "g", "", {}, [big]))
assert not made.commit() and not made.commit()
assert made.dirty and made.full_since is not None
size = journal.segments(Path(sys.argv[1]))[0].stat().st_size
assert size < 20_000, size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert made.commit() and made.full_since is None
made.close()
"""


def test_on_a_full_disk_nothing_is_half_written_and_nothing_is_forgotten(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    back, found = read(tmp_path)
    assert [(each.kind, sum(section.info.length for section in each.sections)) for each in back] == [
        ("state", 0),
        ("add", 50_000),
    ]
    assert not found.torn


def test_what_is_recovered_lies_in_the_file_and_not_in_memory(tmp_path: Path) -> None:
    made, data = begun(tmp_path), bytes(64 * MIB)
    made.append(event(1, section("media", data), section("prompt", b"")))
    made.close()
    before = anonymous_bytes()
    events, _ = read(tmp_path)
    media, prompt = events[1].sections
    assert isinstance(media.data, memoryview)
    assert media.data.readonly
    assert (media.data == data, bytes(prompt.data)) == (True, b"")
    assert anonymous_bytes() - before < 16 * MIB

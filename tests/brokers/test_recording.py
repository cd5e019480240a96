"""Recordings read back: a tap's, a journal's, whole, torn, damaged, compacted, or something else altogether."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from brokers.conduct import Facts
from brokers.durable import DurableService
from brokers.journal import Event, Journal, number_of, segments
from brokers.record import Limits
from brokers.recording import Recorded, RunFacts, Writer, load, new_folder
from brokers.service import Message
from common.errors import ConfigError
from common.group import GroupKey
from common.header import Header, Item
from common.section import Section, SectionInfo
from contract import STAGES

pytestmark = pytest.mark.unit


def section(name: str, data: bytes) -> Section:
    return Section(SectionInfo(name, 1, len(data), xxhash.xxh3_64_intdigest(data)), data)


def granted(seq: int, stage: str = "reward", attempt: int = 1, version: int = 5) -> Event:
    """What a tap writes of group `train-SEQ`."""
    key = {"seq": seq, "purpose": "train", "min_version": 0}
    body = {**key, "attempt": attempt, "versions": [3, 4], "tokens": 7, "version": version}
    return Event("grant", f"train-{seq}", stage, body, [section("response", f"{seq}, {attempt}".encode())])


def tapped(folder: Path, *events: Event) -> Path:
    """A tap's folder, with a commit for each event."""
    writer = Writer(folder, RunFacts("run-a", {"name": "r"}, Path("/runs/a")), "reward")
    writer.write([])
    for event in events:
        writer.write([event])
    writer.close()
    return folder


class Story:
    """A journaled broker's ledger, driven by verbs, with leases in hand."""

    def __init__(self, folder: Path, segment_bytes: int = 1 << 20) -> None:
        journal = Journal(folder, segment_bytes, fsync=False)
        self.service = DurableService(Facts("run-a", "{}", "/runs/a"), STAGES, Limits(2), journal, 0.0)
        self._requests = 0
        self.send(Header("hello", worker="w", body={"role": "all"}))

    def send(self, header: Header, frames: Sequence[bytes] = ()) -> tuple[Item, ...]:
        self._requests += 1
        numbered = replace(header, request=self._requests)
        out = self.service.handle(Message("w#1", numbered, frames, 0.0))
        assert out[-1].header.verb == "ok", out[-1].header.body
        return out[-1].header.items

    def add(self, seq: int, size: int = 8) -> None:
        parts = [section("prompt", bytes(size)), section("media", b"")]
        item = Item(f"train-{seq}", seq, sections=tuple(part.info for part in parts))
        self.send(Header("add", items=(item,)), [bytes(part.data) for part in parts])

    def lease(self, stage: str) -> Item:
        (item,) = self.send(Header("lease", stage=stage, body={"want": 1, "version": 0}))
        return item

    def put(self, leased: Item, part: Section, *, versions: int = -1, ack: bool = True) -> None:
        item = Item(leased.group, lease=leased.lease, tokens=3, version_min=versions, version_max=versions)
        item = Item(**{**{name: getattr(item, name) for name in item.__slots__}, "sections": (part.info,)})
        self.send(Header("put", items=(item,), body={"ack": ack}), [bytes(part.data)])

    def through(self, seq: int) -> None:
        """Bring a group to the trainer."""
        self.add(seq)
        self.put(self.lease("rollout"), section("response", f"r{seq}".encode()), versions=0)
        self.put(self.lease("reward"), section("reward", f"s{seq}".encode()))


def test_a_taps_record_is_what_was_handed_out_with_what_is_known_of_it(tmp_path: Path) -> None:
    recording = load(tapped(tmp_path, granted(0), granted(1)))
    assert list(recording.groups) == ["train-0", "train-1"]
    group = recording.groups["train-1"]
    assert (group.key, group.versions, group.tokens, group.step) == (GroupKey("train-1", 1), (3, 4), 7, -1)
    assert bytes(group.sections()["response"].data) == b"1, 1"
    assert recording.facts == RunFacts("run-a", {"name": "r"}, Path("/runs/a"))


def test_of_a_group_that_was_handed_out_twice_the_later_one_counts(tmp_path: Path) -> None:
    recording = load(tapped(tmp_path, granted(0), granted(1), granted(0, attempt=2)))
    assert bytes(recording.groups["train-0"].given["response"].data) == b"0, 2"


def test_what_a_trainer_was_handed_says_for_which_step(tmp_path: Path) -> None:
    assert load(tapped(tmp_path, granted(0, "trainer", version=5))).groups["train-0"].step == 5


def test_a_journal_says_what_each_stage_added_and_which_step_trained_it(tmp_path: Path) -> None:
    story = Story(tmp_path / "journal")
    for seq in range(2):
        story.through(seq)
    items = [story.lease("trainer") for _ in range(2)]
    story.send(Header("ack", items=tuple(Item(item.group, lease=item.lease) for item in items), body={"step": 0}))
    story.send(Header("advance", body={"version": 1}))
    story.add(2)
    story.service.close()
    recording = load(tmp_path / "journal")
    group = recording.groups["train-1"]
    assert list(group.given) == ["prompt", "media"]
    assert {stage: list(sections) for stage, sections in group.added.items()} == {
        "rollout": ["response"],
        "reward": ["reward"],
    }
    assert (group.versions, group.tokens, group.step) == ((0, 0), 3, 0)
    assert group.sections(without=["reward"]).keys() == {"prompt", "media", "response"}
    assert (recording.groups["train-2"].added, recording.groups["train-2"].step) == ({}, -1)


def test_what_was_put_and_given_back_is_not_what_the_stage_added(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.add(0)
    first = story.lease("rollout")
    story.put(first, section("response", b"first"), versions=0, ack=False)
    story.send(Header("nack", items=(Item(first.group, lease=first.lease),), body={"reason": "no"}))
    assert load(tmp_path).groups["train-0"].added == {}
    story.put(story.lease("rollout"), section("response", b"second"), versions=0)
    story.service.close()
    assert bytes(load(tmp_path).groups["train-0"].added["rollout"]["response"].data) == b"second"


def test_reading_changes_nothing_and_a_torn_end_is_told(tmp_path: Path) -> None:
    """The last commit was cut in the middle: the group before it is there, and the file is as it was."""
    (segment,) = segments(tapped(tmp_path, granted(0), granted(1)))
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-300])
    recording = load(tmp_path)
    assert list(recording.groups) == ["train-0"]
    assert recording.torn.startswith(f"{segment.name}: byte ")
    assert segment.read_bytes() == whole[:-300]


def test_a_flipped_bit_ends_the_reading_before_its_commit(tmp_path: Path) -> None:
    (segment,) = segments(tapped(tmp_path, granted(0), granted(1), granted(2)))
    data = bytearray(segment.read_bytes())
    data[data.index(b"1, 1")] ^= 1
    segment.write_bytes(data)
    recording = load(tmp_path)
    assert list(recording.groups) == ["train-0"]
    assert "checksum" in recording.torn


def test_groups_whose_beginning_was_dropped_are_counted_not_invented(tmp_path: Path) -> None:
    """The journal without its first segment, as compaction leaves it: group 0 began there."""
    story = Story(tmp_path, 1)  # a segment for every commit
    story.add(0)
    first = story.lease("rollout")
    story.add(1)
    story.put(first, section("response", b"r"), versions=0)
    story.service.close()
    numbers = {event.group: number for number, event in _additions(tmp_path)}
    for segment in segments(tmp_path):
        if number_of(segment) <= numbers["train-0"]:
            segment.unlink()
    recording = load(tmp_path)
    assert (list(recording.groups), recording.lost) == (["train-1"], {"train-0"})


def _additions(folder: Path) -> list[tuple[int, Event]]:
    from brokers.playback import Recovery, _commits  # noqa: PLC0415

    return [
        (number_of(segment), event)
        for segment in segments(folder)
        for _, events in _commits(segment, Recovery())
        for event in events
        if event.kind == "add"
    ]


def test_a_journals_run_is_told_by_the_plan_around_it_wherever_the_folder_is_now(tmp_path: Path) -> None:
    tapped(tmp_path / "journal", granted(0))
    (tmp_path / "journal" / "run.json").unlink()
    plan: dict[str, Any] = {"run": "run-a", "config": {"name": "b"}, "folder": "/where/it/was"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert load(tmp_path / "journal").facts == RunFacts("run-a", {"name": "b"}, tmp_path)
    (tmp_path / "plan.json").unlink()
    assert load(tmp_path / "journal").facts is None


def test_a_folder_that_is_none_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recording: it holds no segment-\*\.arrow.*brokers\.tap"):
        load(tmp_path)
    tapped(tmp_path / "journal", granted(0))
    with pytest.raises(ConfigError, match=f"do you mean {tmp_path / 'journal'}"):
        load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"not Arrow at all, but of some length", bytes(4096)])
def test_a_file_that_is_no_segment_is_refused_with_its_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "segment-00000001.arrow").write_bytes(data)
    with pytest.raises(ConfigError, match="segment-00000001"):
        load(tmp_path)


def test_files_of_another_run_beside_the_segments_are_an_error(tmp_path: Path) -> None:
    tapped(tmp_path, granted(0))
    (tmp_path / "run.json").write_text(json.dumps({"run": "run-b", "config": {}, "folder": "/b"}))
    with pytest.raises(ConfigError, match="holds run 'run-a', but the files beside it tell of run 'run-b'"):
        load(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match="does not tell of a run"):
        load(tmp_path)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Stages in the order that was asked for; one that is not in it is left out."""
    group = Recorded(GroupKey("train-0", 0, "train", 2), {"prompt": section("prompt", b"p")}, {}, (1, 2), 9, 4)
    group.added = {name: {name: section(name, name.encode())} for name in ("reward", "response", "advantage")}
    writer = Writer(tmp_path, RunFacts("run-a", {}, tmp_path), "reward")
    writer.write(writer.group(group, ["response", "reward"]))
    writer.close()
    del group.added["advantage"]
    back = load(tmp_path).groups["train-0"]
    assert list(back.added) == ["response", "reward"]
    assert (back.key, back.versions, back.tokens, back.step) == (group.key, (1, 2), 9, 4)
    assert {name: bytes(each.data) for name, each in back.sections().items()} == {
        "prompt": b"p",
        "response": b"response",
        "reward": b"reward",
    }


def test_a_record_never_goes_into_a_folder_that_holds_something(tmp_path: Path) -> None:
    assert new_folder(tmp_path / "new") == tmp_path / "new"
    assert new_folder(tmp_path) == tmp_path
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        new_folder(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        new_folder(tmp_path / "x")

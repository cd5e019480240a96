"""A tap sees what a stage is given, and nobody sees the tap: over every transport, with and without a journal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from brokers.channel import Channel, Pending, Reply, wait
from brokers.recording import Recording, load
from brokers.tap import Recorder
from brokers.tapping import TAPS
from common.errors import BrokerError, WireError
from common.header import Header
from contract import SECONDS, Build, Mangling, Worker, World, answer

pytestmark = pytest.mark.contract


def tapped(world: World, folder: Path, queue: str = "reward", name: str = "tap", **options: Any) -> Recorder:
    """A tap that the broker knows."""
    recorder = Recorder(world.open(world.samples, name, "1"), queue, folder, **options)
    assert take(recorder) == 0
    return recorder


def asked(recorder: Recorder, seconds: float) -> Pending:
    """A question that has reached the broker."""
    pending = recorder.ask(seconds)
    recorder._channel.request(Header("status")).result(SECONDS)  # behind it, on the same connection
    return pending


def take(recorder: Recorder, *, end: bool = False) -> int:
    return recorder.take(wait(recorder.ask(0.0, end=end), SECONDS))


def all_of(recorder: Recorder) -> int:
    """Everything that the broker has for it."""
    total = 0
    while count := take(recorder):
        total += count
    return total


def recorded(recorder: Recorder, folder: Path) -> Recording:
    recorder.close()
    return load(folder)


def scored(world: World, *seqs: int, media: bytes = b"") -> Worker:
    """A worker that brought these groups through rollout and reward."""
    worker = world.join("w")
    worker.offer(*seqs, media=media).result(SECONDS)
    worker.serve("rollout", "reward")
    return worker


def test_a_tap_is_given_what_its_stage_is_given_and_nothing_else(world: World, tmp_path: Path) -> None:
    """The reward stage requires responses, not prompts; rollout says that version 0 made 3 tokens."""
    recorder = tapped(world, tmp_path)
    scored(world, 0, 1, 2)
    assert all_of(recorder) == 3
    recording = recorded(recorder, tmp_path)
    assert list(recording.groups) == ["train-0", "train-1", "train-2"]
    for seq, group in enumerate(recording.groups.values()):
        assert (group.key.seq, group.key.purpose, group.versions, group.tokens) == (seq, "train", (0, 0), 3)
        assert list(group.given) == ["response"]
    assert recording.facts is not None
    assert (recording.facts.run, recording.facts.folder, recording.facts.config["name"]) == (
        "run-a",
        Path("/runs/a"),
        "r",
    )


def test_bytes_arrive_as_they_were_handed_out(world: World, tmp_path: Path) -> None:
    recorder = tapped(world, tmp_path, "rollout")
    worker = world.join("w")
    worker.offer(0, media=bytes(range(256)) * 400).result(SECONDS)
    (leased,) = worker.get("rollout", 1, 0)
    all_of(recorder)
    given = recorded(recorder, tmp_path).groups["train-0"].given
    expected = leased.group.sections
    assert {name: bytes(each.data) for name, each in given.items()} == {
        name: bytes(each.data) for name, each in expected.items()
    }


def story(world: World) -> tuple[list[Any], dict[str, Any]]:
    """What a worker is granted in a run with a group that dies, and how the run stands then."""
    worker = world.join("w")
    worker.offer(0, 1, 2, 3).result(SECONDS)
    worker.serve("rollout")
    first = worker.get("reward", 2)
    worker.nack(first[:1], "no")
    worker.finish("reward", first[1:])
    rest = worker.get("reward", 10)
    worker.finish("reward", rest)
    batch = worker.get("trainer", 4, 0)
    worker.ack(batch, step=0)
    worker.advance(1)
    worker.commit(1)
    told = worker.status(SECONDS)
    grants = [(leased.group.key.id, leased.id, leased.group.attempt) for leased in (*first, *rest, *batch)]
    names = ("counts", "queues", "outstanding", "bytes", "version", "state")
    numbers = {name: told[name] for name in names}
    assert [member["name"] for member in told["workers"]] == ["w"]
    return grants, numbers


def test_nobody_else_notices_a_tap(build: Build, tmp_path: Path) -> None:
    """The same grants under the same leases, the same counts, no member more; the given-back group is seen twice."""
    alone = story(build(4))
    world = build(4)
    recorders = [tapped(world, tmp_path / stage, stage, stage) for stage in ("rollout", "reward", "trainer")]
    assert story(world) == alone
    assert [all_of(recorder) for recorder in recorders] == [4, 5, 4]
    assert {group.step for group in recorded(recorders[2], tmp_path / "trainer").groups.values()} == {0}


def test_a_slow_tap_misses_groups_and_is_told_how_many_while_workers_get_all(world: World, tmp_path: Path) -> None:
    """Room for 2.5 sections of media: of 6 groups the first two wait for the slow tap, four are lost to it."""
    media = bytes(40_000)
    slow = tapped(world, tmp_path / "slow", "rollout", "slow", buffer_bytes=100_000)
    quick = tapped(world, tmp_path / "quick", "rollout", "quick")
    scored(world, 0, 1, 2, 3, 4, 5, media=media)
    assert (all_of(slow), slow.dropped) == (2, 4)
    assert (all_of(quick), quick.dropped) == (6, 0)
    assert world.samples.ledger.counts.to_wire()["dropped"] == {}
    assert "2 groups" in (line := slow.close())
    assert "4 dropped" in line


def test_a_reply_that_is_lost_or_damaged_comes_again_and_is_recorded_once(world: World, tmp_path: Path) -> None:
    channel = Mangling(world.open(world.samples, "tap", "1"))
    recorder = Recorder(channel, "reward", tmp_path)
    take(recorder)
    scored(world, 0, 1)
    wait(recorder.ask(0.0), SECONDS)  # and never looked at
    channel.replies["tap"] = 1
    assert take(recorder) == 0
    assert all_of(recorder) == 2
    late = Reply(wait(recorder.ask(0.0), SECONDS).header, ())
    assert recorder.take(late) == 0
    assert list(recorded(recorder, tmp_path).groups) == ["train-0", "train-1"]


def test_a_tap_that_the_broker_forgot_goes_on_and_still_counts_what_it_missed(world: World, tmp_path: Path) -> None:
    """As after a restart of the broker: room for 2.5 sections, so of 3 and of 3 groups one each is lost to it."""
    recorder = tapped(world, tmp_path, "rollout", buffer_bytes=100_000)
    worker = scored(world, 0, 1, 2, media=bytes(40_000))
    assert all_of(recorder) == 2
    world.samples.taps.forget("tap#1")
    assert take(recorder) == 0
    worker.offer(3, 4, 5, media=bytes(40_000)).result(SECONDS)
    worker.serve("rollout")
    assert all_of(recorder) == 2
    assert recorder.dropped == 2
    assert list(recorded(recorder, tmp_path).groups) == ["train-0", "train-1", "train-3", "train-4"]


def test_a_question_is_answered_as_soon_as_something_is_handed_out(world: World, tmp_path: Path) -> None:
    recorder = tapped(world, tmp_path)
    question = asked(recorder, 1000.0)
    scored(world, 0)
    assert recorder.take(wait(question, SECONDS)) == 1


def test_a_question_waits_no_longer_than_its_deadline(world: World, tmp_path: Path) -> None:
    recorder = tapped(world, tmp_path)
    question = asked(recorder, 5.0)
    world.let_pass(6.0)
    assert recorder.take(wait(question, SECONDS)) == 0


def test_after_the_last_question_nothing_more_is_kept_and_the_tap_is_forgotten(world: World, tmp_path: Path) -> None:
    recorder = tapped(world, tmp_path)
    worker = scored(world, 0)
    assert take(recorder, end=True) == 1
    worker.offer(1).result(SECONDS)
    worker.serve("rollout", "reward")
    assert len(worker.status(SECONDS)["taps"]) == 1
    assert take(recorder, end=True) == 0
    assert worker.status(SECONDS)["taps"] == []


def test_a_tap_that_died_is_forgotten(world: World, tmp_path: Path) -> None:
    """Its question ends with its deadline of 5 s; 30 s later, the time of a lease, nobody keeps anything for it."""
    recorder = tapped(world, tmp_path)
    worker = world.join("w")
    question = asked(recorder, 5.0)
    assert len(worker.status(SECONDS)["taps"]) == 1
    world.let_pass(6.0)
    wait(question, SECONDS)
    for _ in range(2):
        world.let_pass(20.0)
        world.beat(worker)
    assert _settled(world, worker) == []


def _settled(world: World, worker: Worker) -> Sequence[Any]:
    for _ in range(100):
        if not (taps := worker.status(SECONDS)["taps"]):
            return taps
        world.let_pass(0.0)
    return worker.status(SECONDS)["taps"]


def test_the_end_of_the_run_ends_a_tap_with_all_that_was_handed_out(world: World, tmp_path: Path) -> None:
    recorder = tapped(world, tmp_path)
    question = asked(recorder, 1000.0)
    worker = scored(world, 0)
    worker.end("finished")
    recorder.take(wait(question, SECONDS))
    while not recorder.done:
        take(recorder)
    assert (recorder.groups, recorder.ended) == (1, True)


def test_a_tap_stops_at_as_many_groups_as_it_was_told(world: World, tmp_path: Path) -> None:
    recorder = tapped(world, tmp_path, groups=2)
    scored(world, 0, 1, 2)
    assert take(recorder) == 2
    assert recorder.done
    assert take(recorder, end=True) == 0
    assert len(recorded(recorder, tmp_path).groups) == 2


def test_queues_that_are_not_there_and_taps_beyond_the_bound_are_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="unknown stage 'rewards'; known: rollout, reward, trainer, evaluate"):
        tapped(world, tmp_path, "rewards")
    for number in range(TAPS):
        tapped(world, tmp_path / str(number), name=f"tap-{number}")
    with pytest.raises(BrokerError, match="8 taps are at work already"):
        tapped(world, tmp_path / "one more", name="one more")


def test_a_tap_of_another_run_is_refused(world: World, tmp_path: Path) -> None:
    channel: Channel = world.open(world.samples, "tap", "1")
    with pytest.raises(WireError, match="run 'run-b'"):
        take(Recorder(channel, "reward", tmp_path, run="run-b"))


def test_a_group_that_workers_still_answer_is_as_if_there_were_no_tap(world: World, tmp_path: Path) -> None:
    """A tap that never asks again holds nobody up: its buffer is of one group, and 20 pass."""
    tapped(world, tmp_path, buffer_bytes=1)
    worker = world.join("w")
    worker.offer(*range(20)).result(SECONDS)
    worker.serve("rollout")
    leases = worker.get("reward", 20)
    results = [answer("reward", leased) for leased in leases]
    assert worker.confirm(worker.put(results), results) == []

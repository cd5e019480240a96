"""A replay from its command line to its last word, with brokers in memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers.client import SampleClient
from brokers.journal import segments
from brokers.recording import Recorded, RunFacts, Writer
from common.config import to_json
from common.errors import WorkerError
from common.group import GroupKey
from pipeline_parts import ByLength, Encoder, config, row
from test_replay import response
from workers import stage
from workers.replay.session import replayed
from workers.session import parse

pytestmark = pytest.mark.unit


@pytest.fixture
def tapped(tmp_path: Path) -> Path:
    """A recording of the reward queue: 3 groups of one sample each."""
    folder = tmp_path / "tapped"
    writer = Writer(folder, RunFacts("run-a", json.loads(to_json(config())), tmp_path), "reward")
    for seq in range(3):
        prompt = {part.name: part for part in Encoder().encode(row(f"train/{seq}"), {}, 0)}
        group = Recorded(GroupKey(f"g{seq}", seq), {"prompt": prompt["prompt"], "response": response("r")})
        writer.write(writer.group(group, []))
    writer.close()
    return folder


def replaying(folder: Path, work: Callable[[SampleClient], None]) -> None:
    with replayed("reward", parse("reward", ["--replay", str(folder)], "")) as session:
        work(session.client)


def test_a_worker_runs_until_every_group_is_handled_and_its_results_are_told_and_kept(
    tapped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tapped.parent / "out"
    with replayed("reward", parse("reward", ["--replay", str(tapped), "--out", str(out)], "")) as session:
        assert stage.run("reward", ByLength(), session.client, lambda: session.over, 2) == 3
    said = capsys.readouterr().out
    assert f"replaying 3 groups of run run-a from {tapped} into reward" in said
    assert "3 groups: 3 handled" in said
    assert len(segments(out)) == 1


def test_what_is_before_a_torn_end_is_replayed_and_the_rest_is_told(
    tapped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (segment,) = segments(tapped)
    segment.write_bytes(segment.read_bytes()[:-300])
    with replayed("reward", parse("reward", ["--replay", str(tapped)], "")) as session:
        assert stage.run("reward", ByLength(), session.client, lambda: session.over, 2) == 2
    assert f"torn: {segment.name}: byte" in capsys.readouterr().out


def test_limit_takes_the_first_groups(tapped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with replayed("reward", parse("reward", ["--replay", str(tapped), "--limit", "1"], "")) as session:
        assert stage.run("reward", ByLength(), session.client, lambda: session.over, 2) == 1
    assert "g0" in capsys.readouterr().out


def test_a_replay_in_which_a_group_died_ends_with_code_5(tapped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(client: SampleClient) -> None:
        for _ in range(3):  # broker.max_attempts
            client.nack(client.lease("reward", 1, 0.0).leases, "unreadable")

    with pytest.raises(WorkerError, match="1 of 3 groups died") as ended:
        replaying(tapped, refuse)
    assert ended.value.exit_code == 5
    assert "unreadable; unreadable; unreadable" in (said := capsys.readouterr().out)
    assert "3 groups: 1 dead, 2 not handled" in said


def test_a_worker_that_fails_leaves_an_account_of_what_was_done(
    tapped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def handle_one_and_fail(client: SampleClient) -> None:
        results = stage.answer(ByLength(), client.lease("reward", 1, 0.0).leases, client)
        client.confirm(client.put(results), results)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replaying(tapped, handle_one_and_fail)
    assert "3 groups: 1 handled, 2 not handled" in capsys.readouterr().out


def test_a_lease_request_that_nothing_answers_ends_in_its_time(tapped: Path) -> None:
    """All groups are in this worker's hands, so nothing can come; the brokers in memory still notice the time."""
    with replayed("reward", parse("reward", ["--replay", str(tapped)], "")) as session:
        assert len(session.client.lease("reward", 3, 0.0).leases) == 3
        assert session.client.lease("reward", 1, 0.01).starved == "waiting for groups in queue 'reward'"


def test_a_rollout_worker_finds_a_weight_broker_without_a_newer_version(tapped: Path) -> None:
    with replayed("reward", parse("reward", ["--replay", str(tapped)], "")) as session:
        reply = session.weights("rollout").ask(0, 0.01).result(20.0)
    assert reply.header.body == {"latest": -1}

"""Groups of a run worked on again without it: from a tap that watched, and from the journal of a finished run."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers.journal import segments
from brokers.recording import load
from runs import FAKE, PACED, Run, python, started, until, with_model

pytestmark = pytest.mark.e2e
SHORTER = 'reward={name="paced:Paced", seconds=0.0}'
"""another reward than that of the run, with the same scores"""
EXACT = 'reward={name="exact", character_share=0.5}'
"""a reward with other scores"""


def ended(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command to its end; return its exit code and what it printed."""
    process = python(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def replay(run: Run, role: str, *arguments: str, of: str = "journal") -> str:
    """Replay a finished run's groups and return what was printed."""
    folder = str(run.folder / of) if of == "journal" else of
    code, out, err = ended(run.cwd, "-m", f"workers.{role}", "--replay", folder, *arguments)
    assert code == 0, out + err
    return out


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Run]:
    """A finished run of 8 steps; one tap watched its reward queue to the end, another was stopped by Ctrl-C."""
    cwd = tmp_path_factory.mktemp("watched")
    settings = ("steps=8", "evaluation.prompts=0", "broker.journal=true", "algorithm.kl=0.01", "max_staleness=0")
    with started(cwd, with_model(model), *FAKE, PACED, *settings) as run:
        tap = ("-m", "brokers.tap", "--broker", run.address, "--queue")
        taps = [python(*tap, *queue, cwd=cwd) for queue in (("reward", "--out", "tapped"), ("trainer", "--out", "cut"))]
        until(lambda: segments(cwd / "cut"), "a tap that records")
        told = run.at_step(1)
        assert not [worker for worker in told["workers"] if "tap" in worker["name"]]
        taps[1].send_signal(signal.SIGINT)
        cut = taps[1].communicate(timeout=60)
        run.hurry()
        whole = taps[0].communicate(timeout=60)
        run.end()
        assert (taps[0].returncode, taps[1].returncode) == (0, 0), whole[1] + cut[1]
        (cwd / "tapped.txt").write_text(whole[0])
        (cwd / "cut.txt").write_text(cut[0])
        yield run


def test_a_run_that_is_watched_ends_as_any_other(watched: Run) -> None:
    assert (watched.up.returncode, watched.stderr) == (0, "")
    assert watched.summary["groups"] == {"started": 32, "trained": 32, "dropped": 0, "dead": 0}


def test_taps_end_with_the_run_or_by_ctrl_c_and_say_what_they_have(watched: Run) -> None:
    """A tap that began late, or was cut short, has some of the run's 32 groups."""
    for name, queue in (("tapped", "reward"), ("cut", "trainer")):
        found = re.search(
            rf"recorded (\d+) groups of queue '{queue}' of run \S+, (\d+) bytes",
            (said := (watched.cwd / f"{name}.txt").read_text()),
        )
        assert found, said
        assert said.rstrip().endswith("0 dropped")
        recording = load(watched.cwd / name)
        assert recording.torn == ""
        assert len(recording.groups) == int(found[1]) <= 32
        assert json.loads((watched.cwd / name / "run.json").read_text())["run"] == watched.summary["run"]


def test_a_tapped_queue_is_scored_by_another_reward(watched: Run) -> None:
    """The tap holds what the stage was given, not what it added: nothing to compare with."""
    recorded = len(load(watched.cwd / "tapped").groups)
    out = replay(watched, "reward", "--set", EXACT, "--limit", "3", of="tapped")
    assert recorded >= 3
    assert "3 groups: 3 handled" in out
    assert "against the record" not in out


def test_a_journal_is_replayed_into_an_unchanged_reward_and_is_left_as_it_was(watched: Run) -> None:
    before = files(watched.folder)
    out = replay(watched, "reward", "--set", SHORTER)
    assert "column 'reward': equal in 32 of 32 groups" in out
    assert "32 groups: 32 handled" in out
    assert files(watched.folder) == before


def test_another_reward_is_compared_column_by_column_and_its_results_go_into_the_next_stage(watched: Run) -> None:
    """A reward worth 2 for any response differs by 2 where the run's was 0, and makes every advantage 0."""
    (watched.cwd / "generous.py").write_text(GENEROUS)
    out = replay(watched, "reward", "--set", 'reward={name="generous:Generous"}', "--out", "generous")
    assert "column 'reward_status': equal in 32 of 32 groups" in out
    assert "column 'reward': equal in 0 of 32 groups; largest difference 2" in out
    again = replay(watched, "advantage", of="generous")
    assert again.count("advantage mean 0.0000 std 0.0000") == 32


GENEROUS = """
from common.settings import Table

class Generous:
    class Options(Table):
        pass

    def __init__(self, options):
        pass

    def score(self, response):
        return 2.0
"""


@pytest.mark.parametrize(("role", "column"), [("advantage", "advantages"), ("reference", "ref_logprobs")])
def test_stages_give_what_they_gave_in_the_run(watched: Run, role: str, column: str) -> None:
    assert f"column '{column}': equal in 32 of 32 groups" in replay(watched, role)


def test_rollout_generates_again_what_the_initial_weights_generated(watched: Run) -> None:
    """On-policy: the first step's 4 groups were made by version 0, and tokens depend on seeds alone here."""
    out = replay(watched, "rollout", "--limit", "4")
    assert "column 'response_ids': equal in 4 of 4 groups" in out
    assert "column 'logprobs': equal in 4 of 4 groups" in out


def test_the_trainer_makes_the_same_steps_again(watched: Run) -> None:
    """Its last columns are the loss of the replay and of the run: the same groups in the same steps, on-policy."""
    out = replay(watched, "trainer", "--out", "trained")
    table = [line.split() for line in out.splitlines() if re.match(r"\d+ +4 ", line)]
    assert len(table) == 8
    losses = [f"{row['loss']:.5g}" for row in watched.rows()]
    assert [row[-1] for row in table] == losses
    assert [row[3] for row in table] == losses
    assert (watched.cwd / "trained" / "checkpoint").exists()

"""The panel is rendered to a terminal of 80 x 24 in memory; the clock is moved by hand."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from brokers.__main__ import limits_of
from brokers.conduct import Facts
from brokers.record import StageSpec
from brokers.report import describe
from brokers.roster import Member
from brokers.samples import SampleService
from common.clock import ManualClock
from launch.panel import Panel
from launch.screen import duration, sparkline, state_word
from statuses import config, status, trainer, worker

pytestmark = pytest.mark.unit

NAMES = ("samples", "weights", "prompt-0", "trainer-0", "rollout-0", "reward-0", "reference-0", "advantage-0")
RUNNING = dict.fromkeys(NAMES, "running")


class Screen:
    """A panel on a terminal, or on something that is none, whose text can be read back."""

    def __init__(self, *, terminal: bool = True, **settings: Any) -> None:
        self.clock = ManualClock()
        self.console = Console(file=StringIO(), force_terminal=terminal, record=True, width=80, height=24)
        self.panel = Panel(config(**settings), "mod10-3fa2c9d1", Path("runs/mod10"), self.console, self.clock)

    def after(self, seconds: float, told: dict[str, Any], processes: dict[str, str] = RUNNING) -> None:
        self.clock.advance(seconds)
        self.panel.update(told, processes)

    def lines(self, told: dict[str, Any], processes: dict[str, str] = RUNNING) -> list[str]:
        """Return what is on the screen, as text without colours."""
        self.console.export_text(clear=True)
        self.console.print(self.panel.screen(told, processes))
        return [line.rstrip() for line in self.console.export_text(clear=True).splitlines()]

    def printed(self) -> list[str]:
        return self.console.export_text(clear=True).splitlines()


def test_the_status_of_these_tests_has_the_shape_of_the_brokers() -> None:
    stages = [StageSpec("rollout", frozenset(), frozenset(), frozenset({"train"}))]
    told = describe(SampleService(Facts("r", "{}", "/r"), stages, limits_of(config())), 0.0)
    member = Member("w", "w#1", "rollout", "node-a", 1, joined=0.0, seen=0.0).describe(0.0)
    recorded = status()
    assert recorded.keys() == told.keys()
    assert recorded["counts"].keys() == told["counts"].keys()
    assert recorded["queues"]["rollout"].keys() == told["queues"]["rollout"].keys()
    assert recorded["workers"][0].keys() == member.keys()


def test_the_panel_of_a_usual_run_fits_on_80_by_24_and_says_what_matters() -> None:
    screen = Screen()
    with screen.panel:
        screen.after(60.0, status(trainer(step=10, reward=0.2)))
        screen.after(2.0, status())
    lines = screen.lines(status())
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(" mod10  async  running")
    assert lines[0].endswith("3fa2c9d1  0:01:02")
    # 2 steps in 2 s, so the other 48 take 48 s; 12 / 60 = 20 %
    assert "12 of 60" in lines[1]
    assert lines[1].endswith("20%  0:00:48 left")
    assert lines[2].split() == ["reward", "0.431", "▁█", "0.200", "to", "0.431"]
    assert lines[3].split("   ") == [" held-out  0.250 at version 10", "staleness 1 of at most 1", "123.4 samples/s"]
    assert lines[10].split() == ["trainer", "5", "5", "3.34", "1.7", "s", "0"]  # 3,500,000 / 2^20 = 3.34
    assert lines[9].split() == ["advantage", "0", "0", "0.00", "1"]
    words = [" ".join(line.split()) for line in lines]
    assert "trainer-0 trainer 12 0.4 s step 0.52 s, wait 0.11 s" in words
    assert "rollout-0 rollout 12 0.4 s tokens 48,210, running 6" in words
    assert " groups    115 started  96 trained  3 dropped  1 dead  2 expired  0 refused" in lines
    assert words[-1] == "dropped: stale 3, dead: reward failed 1"


def test_who_is_in_trouble_is_shown_first_and_the_others_are_summed_up() -> None:
    crowd = [worker(f"rollout-{i}", "rollout", progress={"running": i}) for i in range(40)]
    crowd[33]["lost"] = "its connection is gone"
    processes = {**RUNNING, "reward-0": "restarts in 0.3 s", "rollout-0": "running, restarted 1 of 5"}
    lines = Screen().lines(status(trainer(), *crowd), processes)
    assert len(lines) < 24
    start = next(i for i, line in enumerate(lines) if line.startswith(" worker"))
    first, second, third, fourth = (line.split() for line in lines[start + 1 : start + 5])
    assert first == ["reward-0", "restarts", "in", "0.3", "s"]
    assert second == ["rollout-33", "rollout", "0.4", "s", "lost:", "its", "connection", "is", "gone"]
    assert third[0] == "trainer-0"
    assert fourth == ["rollout-0", "rollout", "0.4", "s", "restarted", "1", "of", "5", "running", "0"]
    # 41 members and 6 processes that are none (8 less trainer-0 and rollout-0): 47 rows
    rows = [line for line in lines[start + 1 :] if line.split()[0].count("-") or line.split()[0] == "samples"]
    assert f" {47 - len(rows)} more" in "\n".join(lines)


def test_a_run_without_an_answer_a_reward_or_a_last_step_is_shown_too() -> None:
    assert Screen().lines({}, {"samples": "running"})[0].startswith(" mod10  async  starting")
    screen = Screen(steps=None, epochs=2)
    with screen.panel:
        screen.after(1.0, status(trainer(step=1, steps=None, reward=float("nan"), heldout=None, heldout_version=None)))
    lines = screen.lines(status(version=1))
    assert lines[1].split() == ["step", "1"]
    assert lines[2].split() == ["reward", "–"]
    assert lines[3].startswith(" held-out  –   staleness 1")


def test_the_reason_of_an_end_has_a_line_of_its_own_and_the_numbers_stay_when_the_trainer_has_left() -> None:
    screen = Screen()
    with screen.panel:
        screen.after(1.0, status())
    lines = screen.lines(status(worker("prompt-0", "prompt"), state="failed", reason="trainer-0 exited 5", version=13))
    assert lines[0].startswith(" mod10  async  failed")
    assert lines[1] == " trainer-0 exited 5"
    assert "13 of 60" in lines[2]
    assert lines[3].split()[:2] == ["reward", "0.431"]


STUCK = {
    "stage": "rollout",
    "worker": "rollout-0",
    "group": "train-7",
    "seconds": 312.4,
    "why": "rollout-0 is heard and holds 2 groups, of which none gets on",
}


def test_what_does_not_get_on_has_a_line_under_the_title() -> None:
    lines = Screen().lines(status(stuck=[STUCK]))
    # cut where the terminal of 80 columns ends
    assert lines[1].startswith(" stuck for 0:05:12: rollout train-7: rollout-0 is heard and holds 2 groups")
    assert "12 of 60" in lines[2]
    crowded = Screen().lines(status(stuck=[STUCK] * 9))
    assert [line.startswith(" stuck") for line in crowded].count(True) == 3
    assert len(crowded) < 24


def test_without_a_terminal_what_is_stuck_is_told_when_it_begins() -> None:
    screen = Screen(terminal=False)
    with screen.panel:
        for stuck in ([STUCK], [{**STUCK, "seconds": 400.0}], [], [STUCK]):
            screen.after(0.1, status(stuck=stuck))
    told = [line for line in screen.printed() if line.startswith("stuck")]
    assert told == [f"stuck for 0:05:12: rollout train-7: {STUCK['why']}"] * 2


def test_the_history_is_bounded_and_forgets_steps_that_are_made_again() -> None:
    screen = Screen(terminal=False)
    with screen.panel:
        for step in range(1, 301):
            screen.after(0.1, status(trainer(step=step, reward=float(step))))
        # 240 steps are kept, so the lowest is 300 - 239 = 61
        assert "  61.000 to 300.000" in screen.lines(status())[2]
        screen.after(0.1, status(trainer(step=71, reward=0.0)))
    assert "  0.000 to 70.000" in screen.lines(status())[2]


def test_on_a_terminal_the_last_screen_stays() -> None:
    screen = Screen()
    with screen.panel:
        screen.after(0.0, status())
        screen.after(0.5, status(state="finished"))
    assert "finished" in screen.console.file.getvalue()  # type: ignore[attr-defined] - a StringIO


def test_without_a_terminal_steps_are_told_every_two_seconds_and_the_last_one_at_the_end() -> None:
    screen = Screen(terminal=False)
    with screen.panel:
        screen.after(0.0, {}, {"samples": "running"})
        for step in range(1, 13):
            screen.after(0.5, status(trainer(step=step, heldout=None, heldout_version=None)))
    lines = screen.printed()
    assert lines[:2] == ["mod10 starting (async, runs/mod10)", "mod10 running (async, runs/mod10)"]
    # a step every 0.5 s: step 1 with the change of state, then 2 s later step 5, then 9, and 12 at the end
    assert [line.split()[1] for line in lines[2:]] == ["1", "5", "9", "12"]
    # 48 steps at 0.5 s
    assert lines[-1] == "step 12 of 60  reward 0.431  staleness 1 of 1  123.4 samples/s  0:00:24 left"


def test_without_a_terminal_every_change_is_told_once() -> None:
    screen = Screen(terminal=False)
    with screen.panel:
        screen.after(0.0, status(), {"reward-0": "not started"})
        for text in ("running", "restarts in 0.3 s", "restarts in 0.2 s", "running, restarted 1 of 5"):
            screen.after(0.1, status(), {"reward-0": text})
        end = status(trainer(heldout=0.75, heldout_version=12), state="failed", reason="out of memory")
        screen.after(0.1, end, {"reward-0": "exited 0"})
    assert screen.printed()[1:] == [
        "step 12 of 60  reward 0.431  staleness 1 of 1  123.4 samples/s  0:00:25 left",  # 48 x 0.519 s
        "held-out 0.250 at version 10",
        "processes: reward-0 restarts",
        "processes: reward-0 running, restarted 1 of 5",
        "held-out 0.750 at version 12",
        "mod10 failed: out of memory",
    ]


def test_a_sparkline_averages_what_it_has_no_columns_for() -> None:
    assert sparkline([], 30) == ""
    assert sparkline([0.0, 7.0], 30) == "▁█"
    assert sparkline([3.0, 3.0, 3.0], 30) == "▁▁▁"
    assert sparkline([0.0, 0.0, 3.0, 5.0, 7.0, 7.0], 3) == "▁▅█"  # means 0, 4, 7: bars 0, 4 and 7 of 0 to 7


def test_durations_and_process_states_are_written_for_people() -> None:
    assert duration(59.6) == "0:01:00"
    assert duration(36_061.0) == "10:01:01"
    assert state_word("restarts in 1.0 s") == "restarts"
    assert state_word("exited 5") == "exited 5"

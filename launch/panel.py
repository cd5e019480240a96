"""The live panel of a run on a terminal, and the few plain lines that stand for it where there is none.

Everything shown comes from the broker's status and the supervisor's words about its processes; nothing is computed by
the run for the panel's sake.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table

from common.clock import Clock, SystemClock
from common.settings import Config
from launch.screen import (
    count_lines,
    duration,
    finite,
    grid,
    label,
    line,
    number,
    queue_table,
    sparkline,
    state_word,
    stuck_words,
    worker_table,
)

HISTORY = 240
"""steps whose rewards are kept for the sparkline, and that the time left is estimated from"""
SPARKLINE_COLUMNS = 30
PLAIN_SECONDS = 2.0
"""shortest time between two lines about steps where there is no terminal"""
LEAST_WORKERS = 3
LATE_HEARTBEATS = 5
MOST_STUCK = 3
"""lines about what does not get on"""
STATE_STYLES = {"running": "green", "finished": "bold green", "failed": "bold red", "stopped": "yellow"}


class Observed(NamedTuple):
    """A step as it was first seen. `at`: seconds of the panel's clock."""

    step: int
    reward: float | None
    at: float


class Panel:
    """Shows a run; a context manager whose screen changes only in `update`. `run`: the run's id."""

    def __init__(
        self, config: Config, run: str, folder: Path, console: Console | None = None, clock: Clock | None = None
    ) -> None:
        self._config, self._run, self._folder = config, run, folder
        self._console = console or Console()
        self._clock = clock or SystemClock()
        self._began = self._clock.now()
        self._history: deque[Observed] = deque(maxlen=HISTORY)
        self._reported: Mapping[str, Any] = {}
        self._live: Live | None = None
        self._spoke_at = float("-inf")
        self._untold = ""
        self._state = ""
        self._told_heldout: Any = None
        self._processes: dict[str, str] = {}
        self._stuck: set[tuple[str, str]] = set()

    def __enter__(self) -> "Panel":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._tell_step()

    def update(self, status: Mapping[str, Any], processes: Mapping[str, str]) -> None:
        """Show this state of the run. `status`: as the sample broker describes it, empty before its first answer."""
        is_new = self._observe(trainer_progress(status))
        if self._live is not None:
            self._live.update(self.screen(status, processes), refresh=True)
        else:
            self._speak(status, processes, is_new)

    def screen(self, status: Mapping[str, Any], processes: Mapping[str, str]) -> RenderableType:
        """Return what the terminal shows; as many workers as its height has room for."""
        counts = count_lines(status.get("counts", {}))
        queues: Mapping[str, Any] = status.get("queues", {})
        head = [self._title(status), *self._progress(status.get("version", 0))]
        if status.get("reason"):
            head.insert(1, line((status["reason"], "yellow")))
        head[1:1] = [line((stuck_words(stuck), "bold yellow")) for stuck in status.get("stuck", ())[:MOST_STUCK]]
        blanks_and_headers = 4
        used = len(head) + len(queues) + len(counts) + blanks_and_headers
        room = max(LEAST_WORKERS, self._console.height - 1 - used)  # a full screen would scroll
        late = LATE_HEARTBEATS * self._config.broker.heartbeat_seconds
        workers = worker_table(status.get("workers", ()), processes, room, late)
        return Padding(Group(*head, "", queue_table(queues), "", workers, *counts), (0, 1))

    def _observe(self, progress: Mapping[str, Any]) -> bool:
        """Remember a report; True if its step is new.

        What a trainer last said stays after it has left. One that came back makes its steps again: the old ones go.
        """
        self._reported = progress or self._reported
        step = progress.get("step")
        if step is None or (self._history and self._history[-1].step == step):
            return False
        while self._history and self._history[-1].step >= step:
            self._history.pop()
        self._history.append(Observed(step, finite(progress.get("reward")), self._clock.now()))
        return True

    def _seconds_left(self, progress: Mapping[str, Any]) -> float | None:
        """Return the time that the remaining steps take at the pace so far; None if that is unknown."""
        steps = progress.get("steps") or self._config.steps
        if steps is None or not self._history:
            return None
        first, last = self._history[0], self._history[-1]
        if last.step > first.step:
            pace = (last.at - first.at) / (last.step - first.step)
        else:
            pace = finite(progress.get("step_s"))
        return None if pace is None else max(0.0, (steps - last.step) * pace)

    def _title(self, status: Mapping[str, Any]) -> Table:
        state = status.get("state", "starting")
        left = line((self._config.name, "bold"), (f"  {self._config.mode}  ", ""), (state, STATE_STYLES.get(state, "")))
        right = line(
            (f"{self._run.removeprefix(f'{self._config.name}-')}  ", "dim"),
            (duration(self._clock.now() - self._began), ""),
        )
        return grid(left, right, ratio=(1, 0))

    def _progress(self, version: int) -> list[RenderableType]:
        progress = self._reported
        step, steps = max(version, progress.get("step", 0)), progress.get("steps") or self._config.steps
        left = self._seconds_left(progress)
        rest = "" if left is None else f"  {duration(left)} left"
        if steps:
            bar = ProgressBar(total=steps, completed=step, complete_style="green", finished_style="green")
            first = grid(label("step"), f"{step} of {steps}  ", bar, f"  {step / steps:.0%}{rest}", ratio=(0, 0, 1, 0))
        else:
            first = grid(label("step"), str(step), ratio=(0, 1))
        rewards = [seen.reward for seen in self._history if seen.reward is not None]
        scale = f"  {min(rewards):.3f} to {max(rewards):.3f}" if rewards else ""
        reward = line(
            (number(progress.get("reward"), 3), "bold"), (f"  {sparkline(rewards, SPARKLINE_COLUMNS)}", "green")
        )
        reward.append(scale, "dim")
        oldest, bound = progress.get("staleness_max"), self._config.max_staleness
        is_too_old = oldest is not None and oldest > bound
        facts = line((number(progress.get("heldout"), 3), "bold"))
        if progress.get("heldout_version") is not None:
            facts.append(f" at version {progress['heldout_version']}")
        facts.append("   staleness ", "dim").append(number(oldest, 0), "bold red" if is_too_old else "bold")
        facts.append(f" of at most {bound}   ").append(number(progress.get("samples_per_s"), 1), "bold")
        facts.append(" samples/s")
        return [first, grid(label("reward"), reward, ratio=(0, 1)), grid(label("held-out"), facts, ratio=(0, 1))]

    def _speak(self, status: Mapping[str, Any], processes: Mapping[str, str], is_new: bool) -> None:
        """Print what changed, in lines that a log can hold."""
        state = status.get("state", "starting")
        is_other, self._state = state != self._state, state
        if is_other and state in ("starting", "running"):
            self._print(f"{self._config.name} {state} ({self._config.mode}, {self._folder})")
        if is_new:
            self._untold = self._step_line(self._reported)
        if is_other or self._clock.now() - self._spoke_at >= PLAIN_SECONDS:
            self._tell_step()
        version = self._reported.get("heldout_version")
        if version != self._told_heldout:
            self._told_heldout = version
            self._print(f"held-out {number(self._reported.get('heldout'), 3)} at version {version}")
        self._tell_processes(processes)
        self._tell_stuck(status.get("stuck", ()))
        if is_other and state not in ("starting", "running"):
            reason = f": {status['reason']}" if status.get("reason") else ""
            self._print(f"{self._config.name} {state}{reason}")

    def _tell_processes(self, processes: Mapping[str, str]) -> None:
        """Print whose state changed; an orderly start or end is no news."""
        words = {name: state_word(text) for name, text in processes.items()}
        changed = [f"{name} {word}" for name, word in words.items() if word != self._processes.get(name, "running")]
        self._processes.update(words)
        news = [text for text in changed if not text.endswith((" not started", " running", " exited 0"))]
        if news:
            self._print("processes: " + ", ".join(news))

    def _tell_stuck(self, stuck: Sequence[Mapping[str, Any]]) -> None:
        """Print what does not get on, once each time it begins."""
        for one in stuck:
            if (one["stage"], one["worker"]) not in self._stuck:
                self._print(stuck_words(one))
        self._stuck = {(one["stage"], one["worker"]) for one in stuck}

    def _step_line(self, progress: Mapping[str, Any]) -> str:
        steps, left = progress.get("steps") or self._config.steps, self._seconds_left(progress)
        return (
            f"step {progress['step']}{f' of {steps}' if steps else ''}"
            f"  reward {number(progress.get('reward'), 3)}"
            f"  staleness {number(progress.get('staleness_max'), 0)} of {self._config.max_staleness}"
            f"  {number(progress.get('samples_per_s'), 1)} samples/s"
        ) + ("" if left is None else f"  {duration(left)} left")

    def _tell_step(self) -> None:
        if self._untold:
            self._print(self._untold)
            self._untold, self._spoke_at = "", self._clock.now()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def trainer_progress(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the trainer last reported; a living trainer goes before a lost one."""
    trainers = [worker for worker in status.get("workers", ()) if worker["role"] == "trainer"]
    living = [worker for worker in trainers if not worker["lost"]]
    return (living or trainers)[-1]["progress"] if trainers else {}

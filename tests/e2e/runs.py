"""Runs of real processes: started as a user starts them, watched through the broker, read from their folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from brokers.client import SampleClient
from brokers.dealer import DealerChannel
from common import metrics
from common.errors import RelaxError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = HERE / "tiny.toml"
PACED = 'reward={name="paced:Paced"}'
"""a step takes at least 0.3 s, until `Run.hurry`"""
FAKE = ('engine={name="fake"}', 'backend={name="fake"}')
"""engine and backend without a model, for runs in which nothing is learned"""
ROLES = ("samples", "weights", "prompt-0", "rollout-0", "reward-0", "reference-0", "advantage-0", "trainer-0")
DEADLINE = 120.0
"""seconds; far more than anything here takes on a machine that is busy"""
LOOK_SECONDS = 0.05
WATCH_SECONDS = 0.2

Status = Mapping[str, Any]
Found = TypeVar("Found")


def environment() -> dict[str, str]:
    """What commands run with; `paced` can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "HF_HUB_OFFLINE": "1"}


def python(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS` in a process group of its own."""
    pipe = subprocess.PIPE
    command, group = [sys.executable, *arguments], {"start_new_session": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(), stdout=pipe, stderr=pipe, text=True, **group)


def until(look: Callable[[], Found | None], what: str, seconds: float = DEADLINE) -> Found:
    """Return the first truthy value of `look()`; fails after `seconds`, saying `what` did not come."""
    never, end = threading.Event(), time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        never.wait(LOOK_SECONDS)
    return found


def worker(told: Status, name: str) -> Mapping[str, Any]:
    """What a status says of one worker; empty if it is not there."""
    return next((member for member in told["workers"] if member["name"] == name), {})


def alive(group: int) -> bool:
    """Whether a process group still has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Run:
    """A run that `relaxq up` began in `cwd`. `groups`: process groups that were seen, by process name."""

    up: subprocess.Popen[str]
    cwd: Path
    folder: Path
    groups: dict[str, int] = field(default_factory=dict[str, int])
    stdout: str = ""
    stderr: str = ""
    _channel: DealerChannel | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Remember the processes of the run, from its beginning to its end; for a thread."""
        while not self._ended.wait(WATCH_SECONDS):
            with suppress(RelaxError):
                if self.announcement:
                    self.status()

    @property
    def announcement(self) -> Mapping[str, Any] | None:
        """What the sample broker wrote, or None."""
        path = self.folder / "broker.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def address(self) -> str:
        """Address of the sample broker, as soon as there is one."""
        return until(self._announced, "a sample broker")["address"]

    def status(self) -> Status:
        """What the broker says; remembers the processes it names. Raises `BrokerError` when there is none any more."""
        with self._lock:
            if self._channel is None:
                self._channel = DealerChannel(self.address, "test", f"{os.getpid()}-{id(self)}")
                self.groups["samples"] = (self.announcement or {})["pid"]
        told = SampleClient(self._channel, "test").status(seconds=5.0)
        self.groups |= {worker["name"]: worker["pid"] for worker in told["workers"] if worker["role"] != "head"}
        return told

    def when(self, condition: Callable[[Status], Any], what: str, seconds: float = DEADLINE) -> Status:
        """Return the first status for which `condition` holds."""

        def look() -> Status | None:
            told = self.status()
            assert told["state"] == "running" or condition(told), f"{what}: the run is {told['state']} {told['reason']}"
            return told if condition(told) else None

        return until(look, what, seconds)

    def at_step(self, version: int) -> Status:
        """Return the status once the trainer is at this version and every role has joined."""
        return self.when(lambda told: told["version"] >= version, f"version {version}")

    def pid(self, name: str) -> int:
        """Process id of a process of the run."""
        return self.groups[name]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a process of the run, return its id."""
        os.kill(self.pid(name), number)
        return self.pid(name)

    def another(self, name: str, old: int) -> Status:
        """Return the first status in which a process other than `old` has this name."""
        return self.when(lambda told: worker(told, name).get("pid", old) != old, f"another {name}")

    def hurry(self) -> None:
        """The middle of a `PACED` run is over."""
        (self.cwd / "hurry").touch()

    def end(self, seconds: float = DEADLINE) -> int:
        """Wait for `up` to end and return its exit code."""
        self.stdout, self.stderr = self.up.communicate(timeout=seconds)
        self._ended.set()
        return self.up.returncode

    def left(self) -> list[str]:
        """Names of processes that outlived `up`; what has just been told to die is given a moment."""
        never = threading.Event()
        for _ in range(200):
            names = [name for name, group in self.groups.items() if alive(group)]
            if not names:
                break
            never.wait(LOOK_SECONDS)
        return names

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        return json.loads((self.folder / "summary.json").read_text())

    def rows(self, kind: str = "step") -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl` of one kind."""
        return [row for row in metrics.read(self.folder / "metrics.jsonl") if row["kind"] == kind]

    def logs(self) -> dict[str, str]:
        """Text of each process's log, by process name."""
        return {path.stem: path.read_text() for path in (self.folder / "logs").iterdir()}

    def clean(self) -> None:
        """End everything of the run, whatever state it is in."""
        if not self._ended.is_set():
            self.up.terminate()
            self.end()
        if self._channel is not None:
            self._channel.close(drain_seconds=0.0)
        for group in self.groups.values():
            if alive(group):
                os.killpg(group, signal.SIGKILL)

    def _announced(self) -> Mapping[str, Any] | None:
        if self.up.poll() is not None and not self.stderr:
            self.end()
        assert self.up.returncode is None or self.announcement, f"up ended: {self.stdout}{self.stderr}"
        return self.announcement


@contextmanager
def started(cwd: Path, *overrides: str, config: Path = TINY) -> Iterator[Run]:
    """Start `relaxq up` in `cwd` with `--set` overrides; nothing of it is left after the block."""
    settings = dict(override.split("=", 1) for override in overrides)
    sets = [part for override in overrides for part in ("--set", override)]
    name = settings.get("name", config.stem)
    run = Run(python("-m", "launch", "up", str(config), *sets, cwd=cwd), cwd, cwd / "runs" / name)
    watcher = threading.Thread(target=run.watch)
    watcher.start()
    try:
        yield run
    finally:
        run.clean()
        watcher.join()


def with_model(folder: Path) -> str:
    """The override that takes a model that is there instead of making one."""
    return f'model={{path="{folder}"}}'


def accounted(groups: Mapping[str, int]) -> bool:
    """Whether every group that was started has one end."""
    return groups["started"] == groups["trained"] + groups["dropped"] + groups["dead"]

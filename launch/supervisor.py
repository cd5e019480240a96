"""Starts the processes of one node, keeps them alive, ends them in order. No controller: if it dies, they go on.

starting ──▶ running ──▶ exited(code) ──▶ waiting to restart ──▶ running       (workers, up to max_restarts)
                                └──▶ failed(reason)                            (trainer and brokers, or exit code 2)
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from common.errors import ConfigError, RelaxError, WorkerError
from common.process import Stop
from common.settings import Supervisor as Settings
from launch.plan import ADDRESS, KEY, Process

FIRST_PAUSE_SECONDS = 0.2
"""before the first restart; doubles with every further one"""
POLL_SECONDS = 0.1


@dataclass(slots=True)
class Child:
    """One process of the plan and what became of it."""

    process: Process
    popen: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    restart_at: float = 0.0
    code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.popen is not None and self.popen.poll() is None

    def describe(self, now: float, limit: int) -> str:
        """Return its state in a few words."""
        if self.alive:
            return "running" if not self.restarts else f"running, restarted {self.restarts} of {limit}"
        if self.restart_at:
            return f"restarts in {max(0.0, self.restart_at - now):.1f} s"
        return "not started" if self.code is None else f"exited {self.code}"


@dataclass(slots=True)
class NodeSupervisor:
    """The processes of one node. Logs go to `folder`/logs, one file a process."""

    settings: Settings
    folder: Path
    environment: Mapping[str, str]
    children: list[Child] = field(default_factory=list[Child])
    failure: str = ""

    def start(self, processes: Sequence[Process], address: str = "", key: Path | None = None) -> None:
        """Start processes in the order given; `address` of the sample broker and `key` complete their command lines."""
        told = {ADDRESS: (address,), KEY: ("--key", str(key)) if key else ()}
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for process in processes:
            command = tuple(word for part in process.command for word in told.get(part, (part,)))
            child = Child(Process(process.name, process.role, process.node, command, process.restart))
            self.children.append(child)
            self._spawn(child)

    def run_once(self, process: Process, stop: Stop) -> None:
        """Run a process that must end by itself, until it has or `stop` is set; raises as `check` does."""
        self.start([process])
        child, seconds = self.children[-1], self.settings.start_seconds
        until = time.monotonic() + seconds
        while child.alive and not stop.is_set():
            if time.monotonic() >= until:
                self.stop(frozenset({process.role}))
                raise ConfigError(f"{process.name} took more than supervisor.start_seconds = {seconds:g}")
            stop.wait(POLL_SECONDS)
        self.stop(frozenset({process.role}))
        self.children.remove(child)
        if stop.is_set():
            raise WorkerError(f"asked to stop while {process.name} was running")
        if child.code:
            raise self._error(child)

    def check(self, name: str) -> None:
        """Raise `ConfigError` or `WorkerError` with the last words of a process that has ended."""
        for child in self.children:
            if child.process.name == name and child.popen is not None and not child.alive:
                child.code = child.popen.returncode
                raise self._error(child)

    def look(self) -> None:
        """Notice who has died, restart who may be restarted, remember why the run failed."""
        now = time.monotonic()
        for child in self.children:
            if child.restart_at and child.restart_at <= now:
                child.restart_at = 0.0
                child.restarts += 1
                self._spawn(child)
            elif child.popen is not None and not child.restart_at and child.code is None and not child.alive:
                self._died(child, child.popen.returncode, now)

    def left(self) -> str:
        """Return the name of a process that nobody replaces and that has left in order, as it was asked to."""
        return next((c.process.name for c in self.children if c.code == 0 and not c.process.restart), "")

    def stop(self, roles: frozenset[str] | None = None) -> None:
        """Ask processes to end (SIGTERM), wait for the grace time, then end their groups (SIGKILL)."""
        chosen = [child for child in self.children if roles is None or child.process.role in roles]
        for child in chosen:
            child.restart_at = 0.0
            if child.alive:
                self._signal(child, signal.SIGTERM)
        until = time.monotonic() + self.settings.grace_seconds
        for child in chosen:
            if child.popen is None:
                continue
            try:
                child.popen.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                structlog.get_logger(part="supervisor").warning("killed after grace", process=child.process.name)
            self._signal(child, signal.SIGKILL)  # also what it may have left behind in its group
            child.code = child.popen.wait()

    def wait_for_exit(self, roles: frozenset[str], seconds: float) -> bool:
        """Wait until no process of these roles runs; False if some still do after `seconds`."""
        until = time.monotonic() + seconds
        chosen = [child.popen for child in self.children if child.process.role in roles and child.popen is not None]
        for popen in chosen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(max(0.0, until - time.monotonic()))
        return all(popen.poll() is not None for popen in chosen)

    def describe(self) -> dict[str, str]:
        """Return the state of every process by name."""
        now = time.monotonic()
        return {child.process.name: child.describe(now, self.settings.max_restarts) for child in self.children}

    def last_words(self, name: str) -> str:
        """Return the last line that a process wrote to its log."""
        path = self.log_of(name)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return lines[-1] if lines else "(it wrote nothing)"

    def log_of(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def _spawn(self, child: Child) -> None:
        child.code = None
        with self.log_of(child.process.name).open("ab") as log:
            child.popen = subprocess.Popen(
                child.process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                start_new_session=True,  # a group of its own: ended as a whole, deaf to the terminal's Ctrl-C
            )

    def _died(self, child: Child, code: int, now: float) -> None:
        child.code = code
        name, settings = child.process.name, self.settings
        if code == 0:
            return
        ending = self._ending(child)
        structlog.get_logger(part="supervisor").warning("process died", process=name, ending=ending)
        if not child.process.restart or code == ConfigError.exit_code:
            self.failure = self.failure or f"{name} {ending}"
        elif child.restarts >= settings.max_restarts:
            self.failure = self.failure or f"{name} died {child.restarts + 1} times, at last it {ending}"
        else:
            child.code = None
            child.restart_at = now + FIRST_PAUSE_SECONDS * 2**child.restarts

    def _ending(self, child: Child) -> str:
        """Say how a process ended; one that was killed had no time for last words."""
        if child.code is not None and child.code < 0:
            return f"was ended by {signal.Signals(-child.code).name}"
        return f"ended with code {child.code}: {self.last_words(child.process.name)}"

    def _error(self, child: Child) -> RelaxError:
        kind = ConfigError if child.code == ConfigError.exit_code else WorkerError
        return kind(f"{child.process.name} {self._ending(child)}".replace(f"{kind.__name__}: ", ""))

    @staticmethod
    def _signal(child: Child, number: int) -> None:
        if child.popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.popen.pid, number)

"""Processes that a benchmark talks with: one line of JSON in, one line of JSON out, and no wait without an end."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from brokers.record import StageSpec
from common.config import to_json
from common.process import write_atomically
from common.settings import Config

ROOT = Path(__file__).resolve().parents[2]
_CPUCLOCK_SCHED = 2  # clock_getcpuclockid(3), which Python does not have
SECONDS = 120.0
"""longest wait for an answer"""


class Driver:
    """A process that answers each line it reads; its first line says that it is there."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, errors: Path | None = None
    ) -> None:
        self._name = " ".join(Path(part).name for part in command[1:4])
        self._errors = (errors or Path(os.devnull)).open("ab")
        everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=everything, cwd=ROOT
        )

    @cached_property
    def told(self) -> dict[str, Any]:
        """What the process said when it was there: whoever starts several waits for them afterwards."""
        return self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer; raises `RuntimeError` when none comes."""
        self.begin(**request)
        return self.end()

    def begin(self, **request: Any) -> None:
        """Send a request."""
        assert self.told is not None, "it is there"
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Return the answer to the request that was begun."""
        return self._answer()

    def close(self) -> None:
        """End the process: it ends by itself when nobody writes to it any more."""
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        """Skip what a library prints: answers are the lines that begin with a brace."""
        assert self._process.stdout is not None, "a pipe was asked for"
        until = time.monotonic() + SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                line = self._process.stdout.readline()
                if line.startswith(b"{"):
                    return json.loads(line)
                if not line:
                    break
        raise RuntimeError(f"{self._name}: no answer; it ended with {self._process.poll()}, or {SECONDS:g} s passed")


class BrokerProcess:
    """A sample broker in a process of its own, as `relaxq up` starts it. `broker`: its table of settings."""

    def __init__(
        self,
        folder: Path,
        stages: Sequence[StageSpec],
        broker: Mapping[str, Any] | None = None,
        key: Path | None = None,
        groups_per_step: int = 4096,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tables = {"model": {"path": "x"}, "data": {"name": "x"}, "evaluation": {"prompts": 0}, "broker": broker or {}}
        tables["supervisor"] = {"grace_seconds": 0.1}  # how long it waits for workers when it is told to stop
        config = Config.model_validate(
            {"name": "bench", "groups_per_step": groups_per_step, "group_size": 8, "max_staleness": 1, **tables}
        )
        plan = {"run": "bench", "folder": str(folder), "config": json.loads(to_json(config))}
        write_atomically(folder / "plan.json", {**plan, "stages": [stage.to_wire() for stage in stages]})
        told = folder / "broker.json"
        told.unlink(missing_ok=True)
        command = [sys.executable, "-m", "brokers", "samples", "--plan", str(folder / "plan.json")]
        command += ["--announce", str(told), *(["--key", str(key)] if key else [])]
        self.log = folder / "broker.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
        self.address = str(_announced(told, self.process, self.log)["address"])

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far, by the clock that Linux keeps for each process."""
        return time.clock_gettime((~self.process.pid << 3) | _CPUCLOCK_SCHED)

    def resident_bytes(self) -> int:
        """Memory that it holds."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Tell it to stop; it waits a moment for its workers, and takes away what it shares with them."""
        self.process.terminate()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _announced(path: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    until = time.monotonic() + SECONDS
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the broker did not start: {log.read_text(encoding='utf-8')[-2000:]}")
        time.sleep(0.01)
    return json.loads(path.read_text(encoding="utf-8"))


def serve(answer: Any, told: Mapping[str, Any] | None = None) -> None:
    """The other end of a `Driver`: answer every line by `answer(request)` until there is none."""
    print(json.dumps(dict(told or {})), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)

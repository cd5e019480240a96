"""One run on one node: folder, model, brokers, workers, panel, and an orderly end with a summary."""

import contextlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from brokers.client import SampleClient
from brokers.dealer import DealerChannel
from brokers.router import Router
from brokers.service import Service
from common.clock import SystemClock
from common.config import Broker, Config
from common.errors import BrokerError, ConfigError, Unreachable, WorkerError
from common.process import Stop, write_atomically
from launch import summary
from launch.panel import Panel
from launch.plan import ANNOUNCEMENT, PLAN, Plan, Process
from launch.supervisor import POLL_SECONDS, NodeSupervisor

WORKERS = frozenset({"prompt", "rollout", "reward", "reference", "advantage", "trainer"})
HEAD = "head"
BROKERS = frozenset({"samples", "weights"})
STATUS_SECONDS = 2.0
"""how long one question for the run's state may wait; in between, the processes are looked after"""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what processes of a run inherit: one thread each unless the user says otherwise, no hub, no buffering."""
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**defaults, **environ, "PYTHONUNBUFFERED": "1"}


def answers(address: str) -> bool:
    """Whether a sample broker at this address still has a run under way."""
    channel = DealerChannel(address, "status", f"{os.getpid()}")
    try:
        return SampleClient(channel, "status").status(seconds=0.5)["state"] == "running"
    except BrokerError:
        return False
    finally:
        channel.close(drain_seconds=0.0)


def clear(folder: Path) -> None:
    """Move what an earlier run of this name left out of the way, to the first free `NAME.1`, `NAME.2` ...

    Raises `ConfigError` when that run is still alive.
    """
    if not folder.exists():
        return
    path = folder / ANNOUNCEMENT
    if path.exists():
        told = json.loads(path.read_text(encoding="utf-8"))
        if answers(told["address"]):
            raise ConfigError(f"run {told['run']} is alive in {folder}: stop it, or set another name or folder")
    number = 1
    while (older := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(older)


def check_port(host: str, broker: Broker) -> None:
    """Raise `ConfigError` if the sample broker could not bind its port, before anything that takes time is done."""
    if broker.port:
        service = Service("", "samples")
        Router(service, f"tcp://{host}:{broker.port}", SystemClock(), broker.high_water_mark).close()


def announced(folder: Path, run: str, seconds: float, stop: Stop, check: Callable[[], None] = lambda: None) -> str:
    """Return the sample broker's address once the broker of this very run has announced it.

    `check` is called again and again; it raises when there is nobody left to wait for.
    """
    path, until = folder / ANNOUNCEMENT, time.monotonic() + seconds
    while not stop.is_set():
        # The head of this run may be moving an earlier run's folder away just now.
        with contextlib.suppress(FileNotFoundError):
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["run"] == run:
                return told["address"]
        check()
        if time.monotonic() >= until:
            raise Unreachable(f"no broker of run {run} announced itself in {path} within {seconds:g} s")
        stop.wait(POLL_SECONDS)
    raise WorkerError("stopped while waiting for the sample broker")


class Head:
    """Node 0 of a run: it alone has brokers, shows the panel and writes the summary."""

    def __init__(self, plan: Plan, stop: Stop) -> None:
        self._plan, self._stop = plan, stop
        self._config: Config = plan.config
        self._folder = Path(plan.folder)
        self._supervisor = NodeSupervisor(plan.config.supervisor, self._folder, environment(os.environ))
        self._status: dict[str, Any] = {}

    def run(self) -> int:
        """Run to the end; return 0 if the run finished, 5 if it failed or was stopped."""
        check_port(self._plan.host, self._config.broker)
        clear(self._folder)
        write_atomically(self._folder / PLAN, self._plan.to_json())
        write_atomically(self._folder / "config.json", json.loads(self._plan.to_json())["config"])
        began = time.monotonic()
        try:
            channel = self._start()
            client = SampleClient(channel, HEAD, self._plan.run)
            try:
                # A member: the broker, told to stop, stays until the head has heard its last word and left.
                client.hello(HEAD, socket.gethostname(), os.getpid(), seconds=self._config.supervisor.start_seconds)
                channel.start_heartbeats()
                state, reason = self._watch(client)
                self._end(client, state, reason)
                result = self._summarise(state, reason, time.monotonic() - began)
            finally:
                channel.close(drain_seconds=0.5)
        finally:
            self._supervisor.stop(WORKERS)
            self._supervisor.stop(BROKERS)
        summary.plot(self._folder, summary.rows_of(self._folder))
        print(summary.text(result), flush=True)
        return 0 if state == "finished" else WorkerError.exit_code

    def _start(self) -> DealerChannel:
        folder, seconds = self._folder, self._config.supervisor.start_seconds
        if self._config.model.recipe is not None:
            command = (sys.executable, "-m", "workers.prepare", "--plan", str(folder / PLAN))
            self._supervisor.run_once(Process("prepare", "prepare", 0, command, restart=False), self._stop)
        processes = self._plan.on(0)
        samples = [process for process in processes if process.role == "samples"]
        self._supervisor.start(samples)
        address = announced(folder, self._plan.run, seconds, self._stop, lambda: self._supervisor.check("samples"))
        structlog.get_logger(part="head").info("serves; more rollout workers may join", broker=address)
        self._supervisor.start([process for process in processes if process.role != "samples"], address)
        return DealerChannel(address, HEAD, uuid.uuid4().hex[:8])

    def _watch(self, client: SampleClient) -> tuple[str, str]:
        """Show the run until it ends; return its state and the reason."""
        silent_since = time.monotonic()
        with Panel(self._config, self._plan.run, self._folder) as panel:
            while True:
                self._supervisor.look()
                if self._supervisor.failure:
                    return "failed", self._supervisor.failure
                if self._stop.is_set():
                    return "stopped", "asked to stop"
                left = self._supervisor.left()
                try:
                    self._status = client.status(seconds=STATUS_SECONDS)
                except BrokerError as error:
                    if time.monotonic() - silent_since > self._config.broker.request_seconds:
                        return "failed", str(error)
                    continue
                silent_since = time.monotonic()
                others = [worker for worker in self._status["workers"] if worker["role"] != HEAD]
                panel.update({**self._status, "workers": others}, self._supervisor.describe())
                if self._status["state"] != "running":
                    return self._status["state"], self._status["reason"]
                if left:
                    return "stopped", f"{left} was asked to stop"
                self._stop.wait(0.5)

    def _end(self, client: SampleClient, state: str, reason: str) -> None:
        """Let the workers leave by themselves where the run has ended; keep the last word of the broker."""
        if state == "finished":
            self._supervisor.wait_for_exit(WORKERS, self._config.supervisor.grace_seconds)
        self._supervisor.stop(WORKERS)
        try:
            self._status = client.status(seconds=STATUS_SECONDS)  # whether it answers at all
            if state != "finished":
                client.end(state, reason)
                self._status = client.status(seconds=STATUS_SECONDS)
            client.leave(seconds=STATUS_SECONDS)
        except BrokerError:
            pass  # the broker itself has died; the last status that was heard stands

    def _summarise(self, state: str, reason: str, wall_s: float) -> dict[str, Any]:
        """Write the summary, before anything that takes time: who stopped the run may end it by force soon."""
        status = {**self._status, "reason": reason}
        result = summary.summarise(self._folder, self._config, status, wall_s, state)
        summary.write(self._folder, result)
        return result

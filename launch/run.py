"""One run on one node: folder, model, brokers, workers, panel, and an orderly end with a summary."""

import contextlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from brokers import keys
from brokers.client import SampleClient
from brokers.dealer import DealerChannel
from brokers.router import Router
from brokers.service import Service
from common.clock import SystemClock
from common.errors import BrokerError, ConfigError, Unreachable, WorkerError
from common.process import Stop, write_atomically
from common.settings import Broker, Config
from launch import summary
from launch.panel import Panel
from launch.plan import ANNOUNCEMENT, KEYS, PLAN, Plan, Process
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


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a sample broker told in its run's folder. `key`: file of the workers' key, None if it is not encrypted."""

    address: str
    run: str
    key: Path | None

    def connect(self, name: str) -> DealerChannel:
        """Open a channel to the broker as a new incarnation of `name`; raises `ConfigError` for an unreadable key."""
        key = None if self.key is None else keys.read_worker_key(self.key)
        return DealerChannel(self.address, name, uuid.uuid4().hex[:8], key=key)


def announcement(folder: Path) -> Announcement:
    """Read the announcement in a run's folder; raises `FileNotFoundError` when there is none."""
    told = json.loads((folder / ANNOUNCEMENT).read_text(encoding="utf-8"))
    key = folder / KEYS / keys.WORKER_FILE if told.get("encrypted") else None
    return Announcement(told["address"], told["run"], key)


def answers(told: Announcement) -> bool:
    """Whether a sample broker that announced itself still has a run under way."""
    channel = told.connect("status")
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
    with contextlib.suppress(FileNotFoundError):
        told = announcement(folder)
        if (told.key is None or told.key.exists()) and answers(told):  # without its key nobody can ask
            raise ConfigError(f"run {told.run} is alive in {folder}: stop it, or set another name or folder")
    number = 1
    while (older := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(older)


def check_port(host: str, broker: Broker) -> None:
    """Raise `ConfigError` if the sample broker could not bind its port, before anything that takes time is done."""
    if broker.port:
        service = Service("", "samples")
        Router(service, f"tcp://{host}:{broker.port}", SystemClock(), broker.high_water_mark).close()


def announced(
    folder: Path, run: str, seconds: float, stop: Stop, check: Callable[[], None] = lambda: None
) -> Announcement:
    """Return what the sample broker of this very run has announced, once it has.

    `check` is called again and again; it raises when there is nobody left to wait for.
    """
    until = time.monotonic() + seconds
    while not stop.is_set():
        # The head of this run may be moving an earlier run's folder away just now.
        with contextlib.suppress(FileNotFoundError):
            told = announcement(folder)
            if told.run == run:
                return told
        check()
        if time.monotonic() >= until:
            path = folder / ANNOUNCEMENT
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
        if self._plan.encrypted:
            keys.create(self._folder / KEYS)
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
        told = announced(folder, self._plan.run, seconds, self._stop, lambda: self._supervisor.check("samples"))
        structlog.get_logger(part="head").info(
            "serves; more rollout workers may join", broker=told.address, key=told.key and str(told.key)
        )
        self._supervisor.start([process for process in processes if process.role != "samples"], told.address, told.key)
        return told.connect(HEAD)

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

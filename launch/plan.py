"""From a configuration to the processes of a run: who runs where, with which command line. Pure functions of values."""

import ipaddress
import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brokers.keys import BROKER_FILE, WORKER_FILE
from brokers.record import StageSpec
from common.config import load, to_json
from common.errors import ConfigError
from common.settings import Config
from workers import registry, wiring

ANNOUNCEMENT, PLAN = "broker.json", "plan.json"
"""files in a run's folder: where the sample broker is, and the plan"""
KEYS = "keys"
"""folder in an encrypted run's folder, for its owner alone"""
ADDRESS = "{broker}"
"""stands in command lines for the sample broker's address, which is known when it has bound its port"""
KEY = "{key}"
"""stands for `--key FILE`, or for nothing in a run that is not encrypted: far nodes are told with the address"""


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `restart`: another one takes its place when it dies; otherwise its death ends the run."""

    name: str
    role: str
    node: int
    command: tuple[str, ...]
    restart: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: `folder` is absolute, `stages` are what the broker must know of the pipeline, `host` what it binds.

    `encrypted` depends on `host` by default, so it is the head's plan that knows.
    """

    run: str
    folder: str
    config: Config
    stages: tuple[StageSpec, ...]
    processes: tuple[Process, ...]
    host: str
    encrypted: bool

    def to_json(self) -> str:
        """Return the plan as JSON, the resolved configuration included."""
        tree: dict[str, Any] = {
            "run": self.run,
            "folder": self.folder,
            "config": json.loads(to_json(self.config)),
            "stages": [stage.to_wire() for stage in self.stages],
            "processes": [asdict(process) for process in self.processes],
        }
        return json.dumps(tree, indent=2)

    def on(self, node: int) -> list[Process]:
        """Return the processes of one node, in starting order."""
        return [process for process in self.processes if process.node == node]


def read(path: Path, overrides: Sequence[str]) -> Config:
    """Read and check a configuration file; raises `ConfigError` with every mistake."""
    config = load(path, overrides, registry.options)
    model = config.model.path
    if model is not None and not (Path(model) / "config.json").exists():
        raise ConfigError(f"setting 'model.path' = {model!r}: not a Hugging Face folder, it holds no config.json")
    if model is None:
        return config
    # Workers run in folders of their own: what is relative to the user's is told to them in full.
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(Path(model).absolute())})})


def make(config: Config, root: Path, *, run: str = "", nodes: int = 1, host: str = "") -> Plan:
    """Lay out a run under `root` (absolute) on `nodes` nodes; raises `ConfigError` when its wiring cannot work.

    Node 0 has the brokers and everything but rollout, which is on the other nodes if there are any: `workers.rollout`
    processes on each of them. `host`: address that the brokers bind; by default `broker.host`.
    """
    assert root.is_absolute(), f"the run's folder must not depend on where a worker is started: {root}"
    run = run or f"{config.name}-{uuid.uuid4().hex[:8]}"
    folder = root / config.run_folder
    stages = wiring.stages_of(config)
    inline = {"reference", "advantage"} if config.mode == "hybrid" else set[str]()
    counts = {role: 0 if role in inline else count for role, count in config.workers.model_dump().items()}
    needed = {stage.name for stage in stages}
    counts = {role: count for role, count in counts.items() if role in needed}
    served = {role for role, count in counts.items() if count} | (inline & needed) | {"trainer", "evaluate"}
    wiring.check(stages, frozenset(served))
    bound = host or config.broker.host
    encrypted = not is_loopback(bound) if config.broker.encrypt == "auto" else config.broker.encrypt
    processes = [
        *_brokers(run, folder, host, encrypted=encrypted, restart=config.broker.journal),
        *_workers(run, "prompt", 1, [0]),
        *_workers(run, "trainer", 1, [0], restart=False),
    ]
    for role, count in counts.items():
        places = list(range(1, nodes)) if role == "rollout" and nodes > 1 else [0]
        processes += _workers(run, role, count * len(places), places)
    specs = tuple(stage.spec() for stage in stages)
    return Plan(run, str(folder), config, specs, tuple(processes), bound, encrypted)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host; a name other than `localhost` or `lo` is taken for reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in {"localhost", "lo"}


def _brokers(run: str, folder: Path, host: str, *, encrypted: bool, restart: bool) -> list[Process]:
    bound = ("--host", host) if host else ()
    key = ("--key", str(folder / KEYS / BROKER_FILE)) if encrypted else ()
    worker_key = ("--worker-key", str(folder / KEYS / WORKER_FILE)) if encrypted else ()
    module = (sys.executable, "-m", "brokers")
    samples = ("samples", "--plan", str(folder / PLAN), "--announce", str(folder / ANNOUNCEMENT))
    weights = ("weights", "--broker", ADDRESS, "--name", "weights", "--run", run)
    return [
        Process("samples", "samples", 0, (*module, *samples, *bound, *key), restart=restart),
        Process("weights", "weights", 0, (*module, *weights, *bound, *key, *worker_key), restart=False),
    ]


def _workers(run: str, role: str, count: int, nodes: Sequence[int], *, restart: bool = True) -> list[Process]:
    command = (sys.executable, "-m", f"workers.{role}", "--broker", ADDRESS, KEY, "--run", run, "--name")
    names = [f"{role}-{number}" for number in range(count)]
    return [
        Process(name, role, nodes[number % len(nodes)], (*command, name), restart) for number, name in enumerate(names)
    ]

"""CURVE keys of one run: a pair for its brokers and a pair that all its workers share, in two files of mode 0600.

A peer without the run's worker key never gets past the handshake: the broker knows the one public key that it lets in.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import zmq

from common.errors import ConfigError

BROKER_FILE, WORKER_FILE = "broker.key", "worker.key"


@dataclass(frozen=True, slots=True)
class BrokerKey:
    """What a broker holds: its own pair, and the public key that its workers must have."""

    public: str
    secret: str
    workers: str


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """What a worker holds: its pair, and the public key of the broker that it expects."""

    public: str
    secret: str
    broker: str


def create(folder: Path) -> tuple[Path, Path]:
    """Make the keys of a new run and return the broker's and the workers' file."""
    broker_public, broker_secret = (key.decode() for key in zmq.curve_keypair())
    worker_public, worker_secret = (key.decode() for key in zmq.curve_keypair())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = folder / BROKER_FILE, folder / WORKER_FILE
    _write(files[0], asdict(BrokerKey(broker_public, broker_secret, worker_public)))
    _write(files[1], asdict(WorkerKey(worker_public, worker_secret, broker_public)))
    return files


def read_broker_key(path: Path) -> BrokerKey:
    """Read a broker's key; raises `ConfigError` when the file is not one or others may read it."""
    return BrokerKey(**_read(path, {"public", "secret", "workers"}))


def read_worker_key(path: Path) -> WorkerKey:
    """Read a worker's key; raises `ConfigError` when the file is not one or others may read it."""
    return WorkerKey(**_read(path, {"public", "secret", "broker"}))


def use(socket: zmq.Socket[Any], key: WorkerKey) -> None:
    """Encrypt a socket that is about to connect."""
    socket.curve_secretkey = key.secret.encode()
    socket.curve_publickey = key.public.encode()
    socket.curve_serverkey = key.broker.encode()


def _write(path: Path, content: dict[str, str]) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)


def _read(path: Path, names: set[str]) -> dict[str, str]:
    try:
        mode, content = path.stat().st_mode, json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--key {path}: cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"--key {path}: others may read it; chmod 600 {path}")
    if not isinstance(content, dict) or set(cast(dict[str, Any], content)) != names:
        raise ConfigError(f"--key {path}: is not a key of this kind; brokers take {BROKER_FILE}, others {WORKER_FILE}")
    told = {name: str(value) for name, value in cast(dict[str, Any], content).items()}
    try:
        whole = all(zmq.curve_public(value.encode()) for value in told.values())  # fails for what is no key at all
        whole = whole and zmq.curve_public(told["secret"].encode()) == told["public"].encode()
    except (zmq.ZMQError, ValueError):
        whole = False
    if not whole:
        raise ConfigError(f"--key {path}: is damaged; every run has keys of its own in its folder")
    return told

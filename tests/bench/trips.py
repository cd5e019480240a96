"""Round trips: put by one process, got by another, kept by a third in between; columns in, columns out, compared.

A trip is the seconds that the putting process needs until its put is confirmed, plus those that the getting process
needs until it has the columns. Columns are at hand in the form that each peer takes: Arrow arrays here, tensors there.
For RelaxQ the first half includes encoding, the second decoding and the acknowledgement; prompts and the leases on them
are handled before. Bare pyzmq neither encodes nor decodes, so it is compared twice: with
whole trips, and with what is left of them without coding. Whoever competes takes turns, so whatever else the machine
does falls on all; the best of all turns is the value. Bytes are those of the values, each counted once, for all alike.
"""

import contextlib
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from brokers import keys
from common.settings import Broker
from tests.bench.driver import ROOT, BrokerProcess, Driver
from tests.bench.sections import stages
from tests.bench.table import Row, at_least, at_most
from tests.bench.workloads import GROUPS, WORKLOADS

SIDE = str(ROOT / "tests/bench/side.py")
PEER = str(ROOT / "tests/bench/peers/transferqueue_side.py")
WARM = 3
"""turns that do not count"""
SHARED_BYTES = 1 << 30
"""shared memory that a broker may use for its arenas"""


@dataclass(slots=True)
class Trips:
    """Seconds of each turn, and the part of them that is encoding and decoding."""

    seconds: list[float] = field(default_factory=list[float])
    coding: list[float] = field(default_factory=list[float])

    @property
    def best(self) -> float:
        """Seconds of the fastest turn."""
        return min(self.seconds)

    @property
    def moving(self) -> float:
        """Seconds without encoding and decoding, of the turn that was fastest without them."""
        return min(whole - coding for whole, coding in zip(self.seconds, self.coding, strict=True))

    @property
    def spread(self) -> float:
        """How much longer the median turn took than the fastest, as a share of it."""
        return statistics.median(self.seconds) / self.best - 1


class Route(Protocol):
    """A way from one process to another."""

    def trip(self) -> tuple[float, float]:
        """Return the seconds of put and get, and those of them for encoding and decoding."""
        ...

    def intact(self) -> bool:
        """Whether what the last trip brought equals what was sent."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class RelaxQ:
    """Through a sample broker. `settings`: its table."""

    def __init__(self, folder: Path, workload: str, settings: Mapping[str, Any], *, encrypt: bool = False) -> None:
        pair = keys.create(folder / "keys") if encrypt else None
        self._broker = BrokerProcess(folder, stages(workload), settings, pair[0] if pair else None)
        more = ["--keep", "--address", self._broker.address, *(["--key", str(pair[1])] if pair else [])]
        command = [sys.executable, SIDE]
        self._ends = [
            Driver([*command, kind, workload, *more], errors=folder / f"{kind}.log") for kind in ("put", "get")
        ]

    def trip(self) -> tuple[float, float]:
        """Put, then get."""
        halves = [end.ask(trip=True) for end in self._ends]
        return sum(half["seconds"] for half in halves), sum(half["coding"] for half in halves)

    def intact(self) -> bool:
        """Compare."""
        return self._ends[1].ask(check=True)["equal"]

    def close(self) -> None:
        """End broker and workers."""
        for end in self._ends:
            end.close()
        self._broker.close()


class Bare:
    """The same encoded sections through bare pyzmq: a process that stores frames and forwards them, without a look.

    `keep`: with the settings of malloc that processes of RelaxQ have, which pyzmq alone does not make.
    """

    def __init__(self, workload: str, *, keep: bool = False) -> None:
        self._relay = Driver([sys.executable, SIDE, "bare-relay", workload, *(["--keep"] if keep else [])])
        more = [workload, "--address", self._relay.told["address"], *(["--keep"] if keep else [])]
        self._put, self._get = (Driver([sys.executable, SIDE, kind, *more]) for kind in ("bare-put", "bare-get"))

    def trip(self) -> tuple[float, float]:
        """Put, then get; the relay serves one request at a time."""
        seconds = 0.0
        for end in (self._put, self._get):
            self._relay.begin(serve=1)
            seconds += end.ask(trip=True)["seconds"]
            self._relay.end()
        return seconds, 0.0

    def intact(self) -> bool:
        """Frames are not decoded here: ZeroMQ brings them whole or not at all."""
        return True

    def close(self) -> None:
        """End all three."""
        for driver in (self._put, self._get, self._relay):
            driver.close()


class TransferQueue:
    """Through TransferQueue with its own storage, `SimpleStorage`. One installation serves all workloads."""

    def __init__(self, python: Path, folder: Path, units: int) -> None:
        # A token of our own: Ray would else make one and leave it in the home directory.
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        self._home = tempfile.TemporaryDirectory(prefix="rq-ray-")  # Ray's sockets need a short path
        errors, command = folder / "transferqueue.log", [str(python), PEER]
        serve = [*command, "serve", "--units", str(units), "--temporary", self._home.name]
        self._server = Driver(serve, env, errors)
        more = ["--address", self._server.told["address"]]
        self._ends = [Driver([*command, kind, *more], env, errors) for kind in ("put", "get")]
        self.workload = ""

    def trip(self) -> tuple[float, float]:
        """Put, then get."""
        return sum(end.ask(workload=self.workload)["seconds"] for end in self._ends), 0.0

    def intact(self) -> bool:
        """Compare."""
        return self._ends[1].ask(check=True)["equal"]

    def close(self) -> None:
        """End Ray and everything in it."""
        for driver in (*self._ends, self._server):
            driver.close()
        self._home.cleanup()


class Memcpy:
    """One copy of the same bytes between pages that are mapped already, in this process."""

    def __init__(self, num_bytes: int) -> None:
        self._source, self._target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def trip(self) -> tuple[float, float]:
        """Copy."""
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - began, 0.0

    def intact(self) -> bool:
        """A memcpy is trusted."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def measure(routes: Mapping[str, Route], rounds: int) -> dict[str, Trips]:
    """Let routes take turns; raises `ValueError` if one of them brings something else than was sent."""
    found = {name: Trips() for name in routes}
    warm = min(WARM, rounds)
    for number in range(warm + rounds):
        for name, route in routes.items():
            seconds, coding = route.trip()
            if number >= warm:
                found[name].seconds.append(seconds)
                found[name].coding.append(coding)
    for name, route in routes.items():
        if not route.intact():
            raise ValueError(f"{name}: other columns came out than went in")
    return found


def shared_memory() -> dict[str, Any] | None:
    """Return the settings of a broker that shares memory with workers of its host; None where it cannot yet."""
    return {"shared_memory_bytes": SHARED_BYTES} if "shared_memory_bytes" in Broker.model_fields else None


def rows(folder: Path, peer: TransferQueue | None, rounds: int) -> list[Row]:
    """Return bytes a second of every workload on every route, with the ratios that are promised."""
    table: list[Row] = []
    for workload, build in WORKLOADS.items():
        size = build().num_bytes
        with contextlib.ExitStack() as stack:
            routes = _routes(folder / workload, workload, size, stack)
            if peer is not None:
                peer.workload = workload
                routes["TransferQueue"] = peer
            found = measure(routes, rounds)
        table += _rows_of(workload, size, found)
    return table


def tcp() -> dict[str, Any]:
    """Return the settings of a broker that uses its sockets alone."""
    return {} if shared_memory() is None else {"shared_memory_bytes": 0}


def _routes(folder: Path, workload: str, size: int, stack: contextlib.ExitStack) -> dict[str, Route]:
    shared = shared_memory()
    routes: dict[str, Route] = {}

    def add(name: str, route: Route) -> None:
        routes[name] = route
        stack.callback(route.close)

    add("TCP", RelaxQ(folder / "tcp", workload, tcp()))
    if shared is not None:
        add("shared memory", RelaxQ(folder / "shm", workload, shared))
    add("pyzmq", Bare(workload))
    add("pyzmq with our malloc settings", Bare(workload, keep=True))
    add("memcpy", Memcpy(size))
    if workload != "images":
        add("TCP, encrypted", RelaxQ(folder / "curve", workload, tcp(), encrypt=True))
    if workload == "small":
        add("TCP, journal", RelaxQ(folder / "journal", workload, {**tcp(), "journal": True}))
        durable = {"journal": True, "journal_fsync": True}
        add("TCP, journal with fsync", RelaxQ(folder / "fsync", workload, {**tcp(), **durable}))
    return routes


def _rows_of(workload: str, size: int, found: Mapping[str, Trips]) -> list[Row]:
    best = {name: trips.best for name, trips in found.items()}
    table = [
        Row(f"{workload}: {name}", size / trips.best / 1e6, "MB/s", f"{size / 1e6:.1f} MB", spread=trips.spread)
        for name, trips in found.items()
    ]
    table += [
        Row(
            f"{workload}: {name}, encoding and decoding", min(trips.coding) * 1e3, "ms", f"of {trips.best * 1e3:.1f} ms"
        )
        for name, trips in found.items()
        if name in ("TCP", "shared memory")
    ]
    if workload == "small":
        table += [
            Row(f"{workload}: {name}, groups", GROUPS / trips.best, "groups/s", "8 x 256 tokens", spread=trips.spread)
            for name, trips in found.items()
            if name.startswith("TCP")
        ]
    table += [
        Row(f"{workload}: {name} over TCP", best["TCP"] / best[name], "times", "TCP, no journal, not encrypted")
        for name in found
        if name.startswith("TCP, ")
    ]
    plain = found["TCP"].moving
    for name, seconds in (("TCP over pyzmq", best["TCP"]), ("TCP without coding over pyzmq", plain)):
        table.append(_judged(workload, at_least, f"{workload}: {name}", best["pyzmq"] / seconds, "pyzmq", 0.9))
    if "TransferQueue" in best:
        ratio = best["TransferQueue"] / best["TCP"]
        table.append(Row(f"{workload}: TCP over TransferQueue", ratio, "times", "TransferQueue"))
    if "shared memory" in best:
        shared = best["shared memory"]
        name = f"{workload}: shared memory over"
        if "TransferQueue" in best:
            ratio = best["TransferQueue"] / shared
            table.append(_judged(workload, at_least, f"{name} TransferQueue", ratio, "TransferQueue", 10.0))
        table.append(_judged(workload, at_most, f"{name} memcpy, seconds", shared / best["memcpy"], "memcpy", 2.0))
    return table


def _judged(workload: str, judge: Any, name: str, value: float, against: str, target: float) -> Row:
    """Targets are for batches that move bytes; small groups are stated beside them."""
    return Row(name, value, "times", against) if workload == "small" else judge(name, value, "times", against, target)

"""What the sample broker costs: bytes through it, operations in it, memory per group. No figure here is a promise yet.

    python tests/bench/broker.py [--json FILE]

Round trips put a batch of groups as a rollout worker does and lease it as the next stage does, over TCP, from this
process to a broker in another one and back; sections are encoded before and their checksums verified on the way. Beside
it, on the same machine: the same frames through a process that stores and forwards them with bare pyzmq, and one memcpy
of their bytes. Each figure is the median of several rounds; bytes count once, the seconds of put and get together.

Operations go through `SampleService.handle` in this process: a lease of one group and its ack count as two. Headers are
packed and unpacked as on a socket, but nothing is sent. Their seconds are those of the CPU, since nothing waits there.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script finds only its own folder

from brokers.channel import wait  # noqa: E402
from brokers.client import Leased, Result, SampleClient  # noqa: E402
from brokers.conduct import Facts  # noqa: E402
from brokers.dealer import DealerChannel  # noqa: E402
from brokers.record import Limits, StageSpec  # noqa: E402
from brokers.samples import SampleService  # noqa: E402
from brokers.service import Message  # noqa: E402
from common import logs  # noqa: E402
from common.config import to_json  # noqa: E402
from common.group import GroupKey, Purpose  # noqa: E402
from common.header import Header, Item, pack, unpack  # noqa: E402
from common.process import write_atomically  # noqa: E402
from common.section import Section  # noqa: E402
from common.settings import Config  # noqa: E402
from tests.bench import table  # noqa: E402
from tests.bench.batches import BATCHES, PAYLOAD, empty_prompt  # noqa: E402

ROUNDS = 7
BOTH: frozenset[Purpose] = frozenset({"train", "eval"})
OPERATIONS = 2000
"""leases, and as many acks, per measurement; fewer where fewer groups are queued"""


class Broker:
    """A sample broker in a process of its own, and two workers of it in this one."""

    def __init__(self, folder: Path) -> None:
        sizes = {"groups_per_step": 4096, "group_size": 8, "evaluation": {"prompts": 0}}
        config = Config.model_validate({"name": "bench", "model": {"path": "x"}, "data": {"name": "x"}, **sizes})
        stages = [stage.to_wire() for stage in payload_stages()]
        plan = {"run": "bench", "folder": "x", "config": json.loads(to_json(config)), "stages": stages}
        write_atomically(folder / "plan.json", plan)
        told = folder / "broker.json"
        command = [sys.executable, "-m", "brokers", "samples", "--plan", str(folder / "plan.json")]
        self._process = subprocess.Popen([*command, "--announce", str(told)], cwd=ROOT, stderr=subprocess.DEVNULL)
        address = announced(told, self._process)
        self._channels = [DealerChannel(address, name, "0") for name in ("rollout", "reader")]
        self._writer, self._reader = (SampleClient(c, c.endpoint) for c in self._channels)
        for client, role in ((self._writer, "rollout"), (self._reader, "reader")):
            client.hello(role, "", os.getpid())
        self._seq = 0

    def round_trip(self, batch: Sequence[tuple[Section, ...]]) -> float:
        """Return the seconds of put and get; the groups are gone afterwards."""
        prompt = empty_prompt()
        keys = [GroupKey(f"g{self._seq + i}", self._seq + i) for i in range(len(batch))]
        self._seq += len(batch)
        wait(self._writer.add([(key, (prompt,)) for key in keys], 10.0))
        leases = leased(self._writer, "rollout", len(batch))
        results = [Result(lease, sections, 0, 0) for lease, sections in zip(leases, batch, strict=True)]
        began = time.perf_counter()
        self._writer.confirm(self._writer.put(results), results)
        got = leased(self._reader, "reward", len(batch))
        seconds = time.perf_counter() - began
        assert sum(len(lease.group.sections) for lease in got) == len(batch) * len(PAYLOAD)
        self._writer.drop([key.id for key in keys], "measured")
        return seconds

    def close(self) -> None:
        """End the broker."""
        for channel in self._channels:
            channel.close(0.0)
        self._process.terminate()
        self._process.wait()


class BareZmq:
    """Frames that a process keeps under `put` and sends back under `get`, with nothing but pyzmq."""

    def __init__(self, folder: Path) -> None:
        told = folder / "bare.json"
        self._process = subprocess.Popen([sys.executable, __file__, "--store-and-forward", str(told)])
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(announced(told, self._process))

    def round_trip(self, frames: Sequence[Any]) -> float:
        """Return the seconds of put and get."""
        began = time.perf_counter()
        self._socket.send_multipart([b"put", *frames], copy=False)
        self._socket.recv_multipart()
        self._socket.send(b"get")
        got = self._socket.recv_multipart(copy=False)
        seconds = time.perf_counter() - began
        assert len(got) == len(frames)
        return seconds

    def close(self) -> None:
        """End the process."""
        self._socket.close(0)
        self._context.term()
        self._process.terminate()
        self._process.wait()


def payload_stages() -> list[StageSpec]:
    """Rollout adds the payload, reward reads it, the trainer never gets anything."""
    payload, none = frozenset(PAYLOAD), frozenset[str]()
    return [
        StageSpec("rollout", frozenset({"prompt"}), payload, BOTH),
        StageSpec("reward", payload, none, BOTH),
        StageSpec("trainer", payload | {"advantage"}, none, BOTH),
    ]


def leased(client: SampleClient, stage: str, want: int) -> list[Leased]:
    """Return `want` groups of a stage."""
    found: list[Leased] = []
    while len(found) < want:
        batch = client.lease(stage, want - len(found), 10.0, 0 if stage == "rollout" else None)
        assert batch.leases, f"{stage}: {batch.starved}"
        found += batch.leases
    return found


def announced(path: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address that a process writes into a file."""
    while not path.exists():
        assert process.poll() is None, "it ended before it was there"
        time.sleep(0.01)
    return json.loads(path.read_text())["address"]


def store_and_forward(path: Path) -> None:
    """The other end of `BareZmq`: serve until killed."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    write_atomically(path, {"address": f"tcp://127.0.0.1:{port}"})
    kept: list[Any] = []
    while True:
        peer, verb, *frames = socket.recv_multipart(copy=False)
        if bytes(verb.buffer) == b"put":
            kept = frames
            socket.send_multipart([peer, b"ok"])
        else:
            socket.send_multipart([peer, *kept], copy=False)


def memcpy_s(num_bytes: int) -> float:
    """Return the seconds of one copy between pages that are mapped already."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def round_trips(folder: Path) -> list[table.Row]:
    """Return bytes a second of each batch, through the broker and beside it."""
    rng, broker, bare = np.random.default_rng(0), Broker(folder), BareZmq(folder)
    rows: list[table.Row] = []
    for name, build in BATCHES.items():
        batch = build(rng)
        frames = [section.data for sections in batch for section in sections]
        size = sum(memoryview(frame).nbytes for frame in frames)
        # In turns, so that whatever else the machine does falls on both.
        pairs = [(broker.round_trip(batch), bare.round_trip(frames)) for _ in range(ROUNDS + 1)][1:]
        mine, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        copy = memcpy_s(size)
        rows += [
            table.Row(f"{name}, broker over TCP", size / mine / 1e6, "MB/s", f"{size / 1e6:.1f} MB"),
            table.Row(f"{name}, bare pyzmq", size / theirs / 1e6, "MB/s", "the same frames"),
            table.Row(f"{name}, broker over pyzmq", theirs / mine, "times", "bare pyzmq"),
            table.Row(f"{name}, broker over memcpy", mine / copy, "times as long", f"{size / copy / 1e9:.1f} GB/s"),
        ]
    broker.close()
    bare.close()
    return rows


class Headers:
    """A service with groups that carry nothing, and workers that only send headers."""

    def __init__(self, workers: int) -> None:
        none = frozenset[str]()
        stages = [StageSpec(name, none, none, BOTH) for name in ("rollout", "reward")]
        stages += [StageSpec(name, frozenset({"advantage"}), none, BOTH) for name in ("waited", "trainer")]
        limits = Limits(groups_per_step=1 << 30, max_queue_groups=1 << 30)
        self.service = SampleService(Facts("bench", "{}", "x"), stages, limits)
        self._peers = [f"w{i}#0" for i in range(workers)]
        for number, peer in enumerate(self._peers):
            self.send(peer, Header("hello", run="bench", worker=f"w{number}"))
        self.groups = 0

    def send(self, peer: str, header: Header) -> Header | None:
        """Hand a header to the service as a router does; return the answer, if there is one now."""
        out = self.service.handle(Message(peer, unpack(pack(header)), (), 1.0))
        replies = [unpack(pack(message.header)) for message in out]
        return replies[0] if replies else None

    def add(self, count: int) -> None:
        """Queue groups."""
        for first in range(self.groups, self.groups + count, 1000):
            numbers = range(first, min(first + 1000, self.groups + count))
            self.send(self._peers[0], Header("add", run="bench", items=tuple(Item(f"g{n}", n) for n in numbers)))
        self.groups += count

    def let_wait(self) -> None:
        """Let every worker ask for a stage that has nothing."""
        for peer in self._peers:
            self.send(peer, Header("lease", run="bench", stage="waited", deadline_s=1e6, body={"want": 1}))

    def per_second(self, operations: int) -> float:
        """Return leases and acks a second of CPU, the workers taking turns."""
        began = time.process_time()
        for number in range(operations):
            peer = self._peers[number % len(self._peers)]
            reply = self.send(peer, Header("lease", run="bench", stage="reward", body={"want": 1}))
            assert reply is not None
            items = (Item(reply.items[0].group, lease=reply.items[0].lease),)
            self.send(peer, Header("ack", run="bench", items=items))
        return 2 * operations / (time.process_time() - began)


def resident_bytes() -> int:
    """Return what this process holds in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def header_only() -> list[table.Row]:
    """Return operations a second at several depths and numbers of workers, and the memory of a queued group."""
    rows: list[table.Row] = []
    memory = 0.0
    for depth in (1_000, 100_000):
        for workers in (1, 1_000):
            gc.collect()
            headers, before = Headers(workers), resident_bytes()
            headers.add(depth)
            if depth == 100_000 and workers == 1:
                memory = (resident_bytes() - before) / depth
            name = f"headers, {depth:,} groups, {workers:,} worker{'s' * (workers > 1)}"
            rows.append(table.Row(name, headers.per_second(min(OPERATIONS, depth // 2)), "leases + acks/CPU s"))
            if workers > 1:
                headers.let_wait()
                speed = headers.per_second(min(OPERATIONS, depth // 2))
                rows.append(table.Row(f"{name} waiting elsewhere", speed, "leases + acks/CPU s"))
    rows.append(table.Row("memory of a queued group without sections", memory, "bytes", "resident, 100,000 groups"))
    return rows


def main() -> None:
    """Measure both."""
    parser = table.parser(__doc__)
    parser.add_argument("--store-and-forward", type=Path, help="(started by this script itself)")
    args = parser.parse_args()
    if args.store_and_forward:
        store_and_forward(args.store_and_forward)
    logs.configure("bench", level="warning")
    rows = header_only()
    with tempfile.TemporaryDirectory(prefix="relaxq-bench-") as home:
        rows += round_trips(Path(home))
    table.report(rows, args.json)


if __name__ == "__main__":
    main()

"""One end of a round trip, in a process of its own; `trips` starts two or three of them and asks them in turns.

    python tests/bench/side.py {put|get|bare-put|bare-get|bare-relay} WORKLOAD [--address A] [--key FILE] [--keep]

`put` and `get` are workers of a sample broker: columns go in at one and come out at the other. The `bare-` ones move
the same encoded sections with nothing but pyzmq through a process that keeps what it is put and sends it to who gets.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a script finds only its own folder

from brokers.channel import wait  # noqa: E402
from brokers.client import Leased, Result, SampleClient  # noqa: E402
from brokers.dealer import DealerChannel  # noqa: E402
from brokers.keys import read_worker_key  # noqa: E402
from common import logs  # noqa: E402
from common.allocator import keep_freed_memory  # noqa: E402
from common.group import GroupKey  # noqa: E402
from tests.bench import sections  # noqa: E402
from tests.bench.driver import serve  # noqa: E402
from tests.bench.workloads import GROUPS, WORKLOADS, same, stamp  # noqa: E402

WAIT_SECONDS = 30.0


class Worker:
    """A worker of the sample broker that moves one workload."""

    def __init__(self, kind: str, workload: str, address: str, key: Path | None) -> None:
        self.batch = WORKLOADS[workload]()
        self._in = list[sections.Columns]()
        self._trip = 0
        self._kind = kind
        self._channel = DealerChannel(address, kind, "0", key=read_worker_key(key) if key else None)
        self.client = SampleClient(self._channel, kind)
        self.client.hello("rollout" if kind == "put" else "reward", socket.gethostname(), os.getpid())
        self._channel.start_heartbeats()
        self._next, self._columns = 0, list[dict[str, Any]]()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one half of a round trip, or check what came out of the last one."""
        if "check" in request:
            found = sections.restored(self._columns)
            pairs = [(found.by_sample, self.batch.by_sample), (found.by_group, self.batch.by_group)]
            return {"equal": all(same(mine[name], theirs[name]) for mine, theirs in pairs for name in theirs)}
        self._trip += 1
        stamp(self.batch, self._trip)
        return self.put() if self._kind == "put" else self.get()

    def put(self) -> dict[str, Any]:
        """Encode and put 32 groups that were leased before."""
        if not self._in or self.batch.by_group:
            self._in = sections.columns(self.batch)
        keys = [GroupKey(f"g{seq}", seq) for seq in range(self._next, self._next + GROUPS)]
        self._next += GROUPS
        prompt = sections.empty_prompt()
        wait(self.client.add([(key, (prompt,)) for key in keys], WAIT_SECONDS))
        leases = self.leased("rollout", 0)
        began = time.perf_counter()
        results = [Result(lease, group, 0, 0) for lease, group in zip(leases, sections.encoded(self._in), strict=True)]
        encoded = time.perf_counter()
        lost = self.client.confirm(self.client.put(results), results)
        ended = time.perf_counter()
        assert not lost, f"groups {lost} were lost"
        return {"seconds": ended - began, "coding": encoded - began}

    def get(self) -> dict[str, Any]:
        """Lease and decode 32 groups, acknowledge them."""
        self._columns = []
        began = time.perf_counter()
        leases = self.leased("reward", None)
        arrived = time.perf_counter()
        columns = sections.decoded([lease.group for lease in leases])
        decoded = time.perf_counter()
        self.client.ack(leases)
        ended = time.perf_counter()
        self.client.drop([lease.group.key.id for lease in leases], "measured")
        self._columns = columns
        return {"seconds": ended - began, "coding": decoded - arrived}

    def leased(self, stage: str, version: int | None) -> list[Leased]:
        """Return the groups of a batch."""
        found: list[Leased] = []
        while len(found) < GROUPS:
            batch = self.client.lease(stage, GROUPS - len(found), WAIT_SECONDS, version)
            assert batch.leases, f"{stage}: {batch.starved}"
            found += batch.leases
        return found


class BareEnd:
    """An end of the bare round trip: it never looks into a frame."""

    def __init__(self, kind: str, workload: str, address: str) -> None:
        self._kind = kind
        groups = sections.encoded(sections.columns(WORKLOADS[workload]())) if kind == "bare-put" else []
        self._frames = [section.data for group in groups for section in group]
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_SECONDS))
        self._socket.connect(address)

    def answer(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Put or get all frames in one message."""
        began = time.perf_counter()
        if self._kind == "bare-put":
            self._socket.send_multipart([b"put", *self._frames], copy=False)
            self._socket.recv_multipart()
        else:
            self._socket.send(b"get")
            self._socket.recv_multipart(copy=False)
        return {"seconds": time.perf_counter() - began}


def relay() -> None:
    """Keep what is put and send it to whoever gets, until this process is ended."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    kept: list[Any] = []

    def answer(_request: dict[str, Any]) -> dict[str, Any]:
        nonlocal kept
        peer, verb, *frames = router.recv_multipart(copy=False)
        if bytes(verb.buffer) == b"put":
            kept = frames
            router.send_multipart([peer, b"ok"])
        else:
            router.send_multipart([peer, *kept], copy=False)
        return {}

    serve(answer, {"address": f"tcp://127.0.0.1:{port}"})


def main() -> None:
    """Serve one end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["put", "get", "bare-put", "bare-get", "bare-relay"])
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--address")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--keep", action="store_true", help="let malloc keep freed memory, as every worker does")
    args = parser.parse_args()
    if args.keep:
        keep_freed_memory()
    logs.configure(args.kind, level="warning")
    if args.kind == "bare-relay":
        relay()
    elif args.kind.startswith("bare-"):
        serve(BareEnd(args.kind, args.workload, args.address).answer)
    else:
        serve(Worker(args.kind, args.workload, args.address, args.key).answer)


if __name__ == "__main__":
    main()

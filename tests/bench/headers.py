"""The header path: leases and acknowledgements of groups that carry no bytes, through the real router over TCP.

A broker process serves simulated workers, each a DEALER of its own in this process. 64 requests are under way at any
time, so the broker never waits for anybody. One lease and its ack count as one pair; each is a message with an answer,
unless a row says that they go in batches. The rate is pairs per second of processor time of the broker, all its threads
together: what one core does, whatever else the machine is busy with. Consumed groups are replaced, unmeasured, so that
the depth stays what the row says.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgpack
import zmq

from brokers.conduct import Facts
from brokers.record import Limits, StageSpec
from brokers.samples import SampleService
from brokers.service import Message
from common.header import Header, Item, pack, unpack
from tests.bench.driver import BrokerProcess
from tests.bench.sections import BOTH
from tests.bench.table import Row, at_least, at_most

TARGET = 20_000.0
FLAT = 0.2
UNDER_WAY = 64
"""requests that wait for an answer at any time"""
BURST, ROUND = 500, 100
"""pairs between two refills, and pairs of a round in which groups come one by one"""
WAIT_MS = 30_000
ITEM_GROUP, ITEM_LEASE, ITEMS = 0, 5, 8
"""places in a packed item and in a packed header"""


def stages() -> list[StageSpec]:
    """`reward` is ready at once; nobody asks for rollout; `waited` never gets a group."""
    none = frozenset[str]()
    unready = frozenset({"advantage"})
    return [
        StageSpec("rollout", none, unready, BOTH),
        StageSpec("reward", none, none, BOTH),
        StageSpec("waited", unready, none, BOTH),
        StageSpec("trainer", unready, none, BOTH),
    ]


class Crowd:
    """Workers of one broker: sockets that say as little as possible. One more adds and drops groups."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._refill = self._dealer("refill")
        self.groups = 0

    def resize(self, workers: int) -> None:
        """Connect workers, or let some say goodbye."""
        while len(self._sockets) > workers:
            socket = self._sockets.pop()
            socket.send(pack(Header("bye", run="bench")))
            socket.recv()
            socket.close(0)
        while len(self._sockets) < workers:
            self._sockets.append(self._dealer(f"w{len(self._sockets)}"))

    def add(self, count: int) -> None:
        """Queue groups."""
        for first in range(self.groups, self.groups + count, 1000):
            numbers = range(first, min(first + 1000, self.groups + count))
            self._ask(Header("add", run="bench", items=tuple(Item(f"g{n}", n) for n in numbers), deadline_s=30.0))
        self.groups += count

    def pairs(self, bursts: int, want: int = 1) -> list[float]:
        """Return pairs a second of the broker's processor time, of each burst; all workers take turns.

        `want`: groups per message.
        """
        rates: list[float] = []
        for _ in range(bursts):
            before = self._broker.cpu_seconds()
            gone = self._burst(want)
            rates.append(len(gone) / (self._broker.cpu_seconds() - before))
            self._ask(Header("drop", run="bench", items=tuple(Item(group) for group in gone)))
            self.add(len(gone))
        return rates

    def take_all(self) -> None:
        """Drop every group that is queued; the last thousands are few enough to be asked for."""
        for first in range(0, self.groups, 1000):
            self._ask(Header("drop", run="bench", items=tuple(Item(f"g{n}") for n in range(first, first + 1000))))

    def wait(self, stage: str) -> None:
        """Let every worker ask for a stage that has nothing."""
        header = pack(Header("lease", run="bench", stage=stage, deadline_s=600.0, body={"want": 1}))
        for socket in self._sockets:
            socket.send(header)

    def handed(self, rounds: int) -> list[float]:
        """Return pairs a second of processor time, of each round, when all wait already and groups come one by one."""
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        self.wait("reward")
        ask = pack(Header("lease", run="bench", stage="reward", deadline_s=600.0, body={"want": 1}))
        rates: list[float] = []
        for _ in range(rounds):
            before, got = self._broker.cpu_seconds(), list[str]()
            while len(got) < ROUND:
                self.add(1)
                socket = cast("zmq.Socket[bytes]", poller.poll(WAIT_MS)[0][0])
                items = _items(socket.recv())
                got += [item[ITEM_GROUP] for item in items]
                socket.send(pack(_ack(items)))
                socket.recv()
                socket.send(ask)
            rates.append(ROUND / (self._broker.cpu_seconds() - before))
            self._ask(Header("drop", run="bench", items=tuple(Item(group) for group in got)))
        return rates

    def close(self) -> None:
        """Close all sockets."""
        for socket in (*self._sockets, self._refill):
            socket.close(0)
        self._context.term()

    def _burst(self, want: int) -> list[str]:
        """Lease and acknowledge `BURST` groups; each worker's replies come in the order of its requests."""
        lease = pack(Header("lease", run="bench", stage="reward", body={"want": want}))
        asked: deque[tuple[zmq.Socket[bytes], bool]] = deque()
        gone: list[str] = []
        sent, turns = 0, BURST // want
        while sent < turns or asked:
            while sent < turns and len(asked) < UNDER_WAY:
                socket = self._sockets[sent % len(self._sockets)]
                socket.send(lease)
                asked.append((socket, True))
                sent += 1
            socket, is_lease = asked.popleft()
            reply = socket.recv()
            if is_lease:
                items = _items(reply)
                gone += [item[ITEM_GROUP] for item in items]
                socket.send(pack(_ack(items)))
                asked.append((socket, False))
        return gone

    def _dealer(self, name: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt_string(zmq.IDENTITY, f"{name}#0")
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._broker.address)
        socket.send(pack(Header("hello", run="bench", worker=name, body={"role": "reward"})))
        unpack(socket.recv())
        return socket

    def _ask(self, header: Header) -> None:
        self._refill.send(pack(header))
        reply = unpack(self._refill.recv())
        assert reply.verb == "ok", f"{header.verb}: {reply.body}"


def _items(reply: bytes) -> list[list[Any]]:
    items = msgpack.unpackb(reply)[ITEMS]
    assert items, "a lease brought nothing"
    return items


def _ack(items: Sequence[Sequence[Any]]) -> Header:
    return Header("ack", run="bench", items=tuple(Item(item[ITEM_GROUP], lease=item[ITEM_LEASE]) for item in items))


def rows(folder: Path, depths: Sequence[int], workers: Sequence[int], bursts: int) -> list[Row]:
    """Return rates at every depth and number of workers, their flatness, and the memory of a queued group."""
    # Leases outlast the measurement: the crowd sends no heartbeats.
    settings = {"lease_seconds": 3600.0, "max_queue_bytes": 1 << 40}
    broker = BrokerProcess(folder / "headers", stages(), settings, groups_per_step=1 << 30)
    with contextlib.closing(broker), contextlib.closing(Crowd(broker)) as crowd:
        table = _measured(broker, crowd, depths, workers, bursts)
    return [*table, _in_process(bursts)]


def _measured(
    broker: BrokerProcess, crowd: Crowd, depths: Sequence[int], workers: Sequence[int], bursts: int
) -> list[Row]:
    empty, queued, memory = broker.resident_bytes(), 0, 0.0
    found: dict[tuple[int, int], list[float]] = {}
    for depth in depths:
        crowd.add(depth - queued)
        queued, memory = depth, (broker.resident_bytes() - empty) / depth
        for count in workers:
            crowd.resize(count)
            found[depth, count] = crowd.pairs(bursts)
        batched = crowd.pairs(bursts, want=16)
        crowd.resize(workers[0])
    table = [_rate(f"headers: {depth:,} groups, {count:,} workers", rates) for (depth, count), rates in found.items()]
    best = {place: max(rates) for place, rates in found.items()}
    slowest = min(best.values())
    table += [
        at_least("headers: slowest of these", slowest, "pairs/s", "one core", TARGET),
        Row("headers: the same, messages", 2 * slowest, "messages/s", "a lease or an ack each"),
        at_most("headers: slowest below fastest", 1 - slowest / max(best.values()), "share", "fastest", FLAT),
        _rate("headers: 16 groups a message", batched),
    ]
    table += _waiting(crowd, workers, bursts)
    table.append(Row("headers: memory of a queued group", memory, "bytes", f"resident, {queued:,} groups, no sections"))
    return table


def _waiting(crowd: Crowd, workers: Sequence[int], bursts: int) -> list[Row]:
    """Return rates when the queue is empty and every worker waits for its next group."""
    crowd.take_all()
    rates: list[Row] = []
    for count in (workers[0], workers[-1]):
        crowd.resize(0)  # who waited is asked to wait no longer
        crowd.resize(count)
        name = f"headers: groups come one by one, {count:,} workers wait"
        rates.append(_rate(name, crowd.handed(max(2, bursts // 3))))
    return rates


def _rate(name: str, rates: Sequence[float]) -> Row:
    best = max(rates)
    return Row(name, best, "pairs/s", "one core", spread=best / statistics.median(rates) - 1)


def _in_process(bursts: int) -> Row:
    """Return what the service does without sockets, in this process: headers are unpacked and packed as there."""
    service = SampleService(Facts("bench", "{}", "x"), stages(), Limits(1 << 30, max_queue_groups=1 << 30))

    def send(header: Header) -> Header:
        out = service.handle(Message("w#0", unpack(pack(header)), (), 1.0))
        return unpack(pack(out[0].header))

    send(Header("hello", run="bench", worker="w"))
    rates: list[float] = []
    lease = pack(Header("lease", run="bench", stage="reward", body={"want": 1}))
    for burst in range(bursts):
        numbers = range(burst * BURST, (burst + 1) * BURST)
        send(Header("add", run="bench", items=tuple(Item(f"g{n}", n) for n in numbers)))
        seconds = 0.0
        for _ in numbers:
            began = time.process_time()
            granted = pack(service.handle(Message("w#0", unpack(lease), (), 1.0))[0].header)
            seconds += time.process_time() - began
            ack = pack(_ack(_items(granted)))
            began = time.process_time()
            pack(service.handle(Message("w#0", unpack(ack), (), 1.0))[0].header)
            seconds += time.process_time() - began
        rates.append(BURST / seconds)
    return _rate("headers: service alone, no sockets", rates)

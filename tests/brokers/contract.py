"""The brokers in memory and behind sockets, alike: workers join, die and come back, and time is moved by hand."""

import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.monitor as zmq_monitor

from brokers import keys
from brokers.channel import Channel, MemoryBroker, Pending, Pulse, Reply
from brokers.client import Leased, Result, SampleClient
from brokers.conduct import Facts
from brokers.dealer import DealerChannel
from brokers.keys import BrokerKey, WorkerKey
from brokers.record import Limits, StageSpec
from brokers.router import Router
from brokers.samples import SampleService
from brokers.service import Service
from brokers.weight_client import WeightClient
from brokers.weights import WeightService
from common.clock import ManualClock
from common.config import to_json
from common.group import GroupKey, Purpose
from common.header import Header
from common.section import Buffer, Section, encode
from common.settings import Config

SECONDS = 20.0
"""longest wait of a test for something that happens at once on an idle machine"""
CONFIG = Config.model_validate(
    {"name": "r", "groups_per_step": 2, "group_size": 1, "steps": 5, "model": {"path": "m"}, "data": {"name": "d"}}
)
TRAIN: frozenset[Purpose] = frozenset({"train"})
EVAL: frozenset[Purpose] = frozenset({"eval"})
STAGES = (
    StageSpec("rollout", frozenset({"prompt", "media"}), frozenset({"response"}), TRAIN | EVAL),
    StageSpec("reward", frozenset({"response"}), frozenset({"reward"}), TRAIN | EVAL),
    StageSpec("trainer", frozenset({"response", "reward"}), frozenset(), TRAIN),
    StageSpec("evaluate", frozenset({"reward"}), frozenset(), EVAL),
)


def prompt(seq: int, media: bytes = b"", evaluation_size: int = 0) -> list[Section]:
    words = {"messages": "[]", "label": "7", "source": "s", "reward_kind": "", "sampling": "{}"}
    row = {"prompt_id": f"p{seq}", **words, "evaluation_size": evaluation_size}
    medium = {"media_hash": "0", "media_kind": "image", "media_format": "image/png", "media_data": media}
    return [
        encode("prompt", {name: [value] for name, value in row.items()}),
        encode("media", {name: [value] if media else [] for name, value in medium.items()}),
    ]


def answer(stage: str, leased: Leased) -> Result:
    if stage == "rollout":
        row = {"text": [leased.group.key.id], "finish_reason": ["stop"], "num_tokens": [3]}
        return Result(leased, [encode("response", row)], 0, 0, 3)
    return Result(leased, [encode("reward", {"reward": [1.0], "reward_status": ["ok"]})])


class Worker(SampleClient):
    """A client with short words for what tests do again and again."""

    def offer(
        self, *seqs: int, purpose: Purpose = "train", version: int = 0, media: bytes = b"", seconds: float = 0.0
    ) -> Pending:
        keys = [GroupKey(f"{purpose}-{seq}", seq, purpose, version) for seq in seqs]
        return self.add([(key, prompt(key.seq, media)) for key in keys], seconds)

    def get(self, stage: str, want: int = 1, version: int | None = None) -> list[Leased]:
        """Lease what is there now."""
        return list(self.lease(stage, want, 0.0, version).leases)

    def ask(self, stage: str, want: int = 1, seconds: float = 1000.0) -> Pending:
        """Lease and let the broker keep the request."""
        return self.request_lease(stage, want, seconds)

    def finish(self, stage: str, leases: Iterable[Leased]) -> list[str]:
        """Put and acknowledge; return the groups that were lost."""
        results = [answer(stage, leased) for leased in leases]
        return self.confirm(self.put(results), results)

    def serve(self, *stages: str) -> None:
        for stage in stages:
            while leases := self.get(stage, 100, 0 if stage == "rollout" else None):
                assert self.finish(stage, leases) == []


MakeService = Callable[[Facts, Limits], SampleService]
"""makes the sample broker of a world, which adds the transport"""
Build = Callable[..., "World"]
"""`build(groups_per_step, max_staleness, **limits)`: makes a world"""


def plain(facts: Facts, limits: Limits) -> SampleService:
    return SampleService(facts, STAGES, limits)


class World(ABC):
    """A run's brokers."""

    def __init__(self, limits: Limits, service: MakeService = plain) -> None:
        self.clock = ManualClock()
        self.samples = service(Facts("run-a", to_json(CONFIG), "/runs/a"), limits)
        self.weights = WeightService("run-a", 2)
        self.wrap: Callable[[Channel], Channel] = lambda channel: channel

    @abstractmethod
    def open(self, service: Service, name: str, incarnation: str) -> Channel:
        """Return a channel to one of the brokers."""

    @abstractmethod
    def kill(self, worker: Worker | WeightClient) -> None:
        """End a worker as SIGKILL does: it says nothing, and the broker may or may not notice."""

    @abstractmethod
    def beat(self, worker: Worker) -> None:
        """Let a worker give one sign of life and wait until it was heard."""

    @abstractmethod
    def let_pass(self, seconds: float) -> None:
        """Let the brokers notice that time has passed."""

    @abstractmethod
    def close(self) -> None:
        """End everything."""

    def stranger(self, name: str, incarnation: str = "1", run: str = "") -> Worker:
        """Return a client that has not said hello."""
        return Worker(self.wrap(self.open(self.samples, name, incarnation)), name, run)

    def join(self, name: str, role: str = "rollout", incarnation: str = "1") -> Worker:
        worker = self.stranger(name, incarnation)
        worker.hello(role, "host-a", 4711, seconds=SECONDS)
        return worker

    def publisher(self, name: str, incarnation: str = "1") -> WeightClient:
        client = WeightClient(self.wrap(self.open(self.weights, name, incarnation)), name, "run-a")
        client.hello("trainer", "host-a", 4711, seconds=SECONDS)
        return client


class MemoryWorld(World):
    def __init__(self, limits: Limits, service: MakeService = plain) -> None:
        super().__init__(limits, service)
        self.brokers = {service: MemoryBroker(service, self.clock) for service in (self.samples, self.weights)}

    def open(self, service: Service, name: str, incarnation: str) -> Channel:
        return self.brokers[service].connect(name, incarnation)

    def kill(self, worker: Worker | WeightClient) -> None:
        worker.channel.close(0.0)

    def beat(self, worker: Worker) -> None:
        worker.channel.request(Header("beat")).result(0.0)

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for broker in self.brokers.values():
            broker.tick()

    def close(self) -> None:
        pass


class TcpWorld(World):
    """`keys`: of the brokers and of the workers."""

    keys: tuple[BrokerKey | None, WorkerKey | None] = (None, None)

    def __init__(self, limits: Limits, service: MakeService = plain) -> None:
        super().__init__(limits, service)
        self._routers: dict[Service, Router] = {}
        self._threads: list[threading.Thread] = []
        self._channels: list[DealerChannel] = []
        self._stop = threading.Event()
        self._monitor: zmq.Socket[bytes] | None = None

    def open(self, service: Service, name: str, incarnation: str) -> DealerChannel:
        if service not in self._routers:
            router = Router(service, "tcp://127.0.0.1:0", self.clock, 10, self.keys[0])
            if service is self.samples:
                socket: Any = router._socket  # pyright: ignore[reportPrivateUsage]
                socket.disable_monitor()  # a socket has one at most: here ends are watched, not refusals
                self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, "inproc://ends")
            self._routers[service] = router
            self._threads.append(threading.Thread(target=router.run, args=(self._stop.is_set,)))
            self._threads[-1].start()
        channel = DealerChannel(self._routers[service].address, name, incarnation, high_water_mark=10, key=self.keys[1])
        self._channels.append(channel)
        return channel

    def kill(self, worker: Worker | WeightClient) -> None:
        worker.channel.close(0.0)
        if isinstance(worker, Worker):
            assert self._monitor is not None
            assert self._monitor.poll(1000 * SECONDS), "the router did not notice the end of a connection"
            zmq_monitor.recv_monitor_message(self._monitor)
            self.flush()

    def beat(self, worker: Worker) -> None:
        worker.channel.request(Header("beat")).result(SECONDS)

    def let_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def flush(self) -> None:
        """Return when the router has gone through its loop since the call."""
        channel = self.open(self.samples, "flush", str(len(self._channels)))
        for _ in range(2):
            channel.request(Header("status")).result(SECONDS)

    def close(self) -> None:
        for channel in self._channels:
            if not channel._stopped:  # pyright: ignore[reportPrivateUsage]
                channel.close(0.0)
        self._stop.set()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        if self._monitor is not None:
            self._monitor.close(0)
        for router in self._routers.values():
            router._socket.disable_monitor()  # pyright: ignore[reportPrivateUsage]
            router.close()


class EncryptedWorld(TcpWorld):
    def __init__(self, limits: Limits, service: MakeService = plain) -> None:
        super().__init__(limits, service)
        self.keys = new_keys()


def new_keys() -> tuple[BrokerKey, WorkerKey]:
    """Return the keys of a new run."""
    with tempfile.TemporaryDirectory() as folder:
        broker, worker = keys.create(Path(folder))
        return keys.read_broker_key(broker), keys.read_worker_key(worker)


class Mangling:
    """A channel on which bytes change under way: of the next requests or replies with a verb, so many times."""

    def __init__(self, channel: Channel) -> None:
        self.requests: dict[str, int] = {}
        self.replies: dict[str, int] = {}
        self._channel = channel

    @property
    def pulse(self) -> Pulse:
        return self._channel.pulse

    @pulse.setter
    def pulse(self, pulse: Pulse) -> None:
        self._channel.pulse = pulse

    def request(self, header: Header, frames: Sequence[Buffer] = (), *, seconds: float | None = None) -> Pending:
        sent = self._channel.request(header, self._mangled(header.verb, frames, self.requests), seconds=seconds)
        received: Pending = Future()

        def pass_on(done: Pending) -> None:
            error = done.exception()
            if error is not None:
                received.set_exception(error)
                return
            reply = done.result()
            received.set_result(Reply(reply.header, self._mangled(header.verb, reply.frames, self.replies)))

        sent.add_done_callback(pass_on)
        return received

    def close(self, drain_seconds: float) -> int:
        return self._channel.close(drain_seconds)

    @staticmethod
    def _mangled(verb: str, frames: Sequence[Buffer], left: dict[str, int]) -> tuple[Buffer, ...]:
        if not frames or not left.get(verb):
            return tuple(frames)
        left[verb] -= 1
        longest = max(range(len(frames)), key=lambda place: memoryview(frames[place]).nbytes)
        flipped = bytearray(frames[longest])
        flipped[len(flipped) // 2] ^= 4
        return (*frames[:longest], bytes(flipped), *frames[longest + 1 :])

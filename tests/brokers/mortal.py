"""Brokers behind sockets that die at a chosen moment and come back at the same address."""

import threading
from pathlib import Path

from brokers.conduct import Facts
from brokers.dealer import DealerChannel
from brokers.durable import DurableService
from brokers.journal import Journal
from brokers.record import Limits
from brokers.router import Router
from brokers.service import Message, Outgoing
from common.clock import ManualClock
from common.config import to_json
from contract import CONFIG, SECONDS, STAGES, Worker


class Mortal:
    """A broker that can be killed, and comes back at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.address = "tcp://127.0.0.1:0"
        self.channels: list[DealerChannel] = []
        self.start()

    def start(self) -> None:
        journal = Journal(self.folder, 10_000, fsync=False)
        facts, limits = Facts("run-a", to_json(CONFIG), "/runs/a"), Limits(100, 0)
        self.service = DurableService(facts, STAGES, limits, journal, self.clock.now())
        self.router = Router(self.service, self.address, self.clock)
        self.address = self.router.address
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.router.run, args=(self.stop.is_set,))
        self.thread.start()

    def kill(self) -> None:
        self.stop.set()
        self.thread.join()
        self.router.close()

    def join(self, name: str) -> Worker:
        channel = DealerChannel(self.address, name, "1", heartbeat_seconds=0.05)
        self.channels.append(channel)
        worker = Worker(channel, name)
        worker.hello("rollout", "h", 1)
        channel.start_heartbeats()
        return worker

    def close(self) -> None:
        for channel in self.channels:
            channel.close(0.0)
        self.kill()


class Doomed(DurableService):
    """Dies at the first message of a verb: before it has done anything, or when all is done and nothing is told."""

    doom = ("", "")  # verb, "before" or "after"
    is_dead = False

    def take(self, message: Message) -> None:
        verb, moment = self.doom
        if not self.is_dead and message.header.verb == verb:
            if moment == "after":
                super().take(message)
                super().release(message.now)
            self.is_dead = True
        if not self.is_dead:
            super().take(message)

    def release(self, now: float) -> list[Outgoing]:
        return [] if self.is_dead else super().release(now)

    def tick(self, now: float) -> list[Outgoing]:
        return [] if self.is_dead else super().tick(now)


class Reviving:
    """A `Doomed` broker and, as soon as it has died, its successor. `deaths`: how often that happened."""

    def __init__(self, folder: Path, doom: tuple[str, str], **limits: int) -> None:
        self.folder, self.clock, self.limits = folder, ManualClock(), Limits(2, 0, **limits)
        self.address, self.deaths, self.channels = "tcp://127.0.0.1:0", 0, list[DealerChannel]()
        self.closing = threading.Event()
        self.start(doom)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def start(self, doom: tuple[str, str]) -> None:
        journal = Journal(self.folder, 10_000, fsync=False)
        self.service = Doomed(Facts("run-a", to_json(CONFIG), "/runs/a"), STAGES, self.limits, journal, 0.0)
        self.service.doom = doom
        self.router = Router(self.service, self.address, self.clock)
        self.address = self.router.address

    def run(self) -> None:
        self.router.run(lambda: self.closing.is_set() or self.service.is_dead)
        while not self.closing.is_set():
            self.deaths += 1
            self.router.close()
            self.start(("", ""))
            self.router.run(self.closing.is_set)

    def open(self, name: str) -> DealerChannel:
        self.channels.append(DealerChannel(self.address, name, "1"))
        return self.channels[-1]

    def close(self) -> None:
        for channel in self.channels:
            if not channel._stopped:  # pyright: ignore[reportPrivateUsage]
                channel.close(0.0)
        self.closing.set()
        self.thread.join(SECONDS)
        self.router.close()
        self.service.close()

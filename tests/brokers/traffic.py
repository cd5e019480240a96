"""The messages of a run through every verb, as they are on the wire, and ways to spoil them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from brokers.channel import MemoryBroker, wait
from brokers.record import Limits
from brokers.service import Service
from common.clock import Clock
from common.header import Header, pack
from common.section import Buffer
from contract import Mangling, MemoryWorld
from lifecycle import live

Parts = list[bytes]
"""sender, header, frames"""
LIMITS = Limits(2, 1, max_queue_groups=6)


class Recording(MemoryBroker):
    """Keeps what goes in, as bytes."""

    def __init__(self, service: Service, clock: Clock) -> None:
        super().__init__(service, clock)
        self.messages: list[Parts] = []

    def send(self, peer: str, header: Header, frames: Sequence[Buffer]) -> None:
        self.messages.append([peer.encode(), pack(header), *(bytes(frame) for frame in frames)])
        super().send(peer, header, frames)


def recorded() -> list[Parts]:
    """Return the messages of a run in which every verb occurs; played to a fresh broker they do the same again."""
    world = MemoryWorld(LIMITS)
    broker = world.brokers[world.samples] = Recording(world.samples, world.clock)
    world.wrap = Mangling
    worker = world.join("worker-0")
    assert isinstance(worker.channel, Mangling)
    live(worker, worker.channel)
    world.wrap = lambda channel: channel
    other = world.join("worker-1", "trainer")
    wait(other.offer(0, purpose="eval", media=bytes(range(256)) * 4), 0.0)
    other.serve("rollout", "reward")
    other.ack(other.get("evaluate"))
    wait(other.offer(2, 3, media=bytes(range(256)) * 4), 0.0)
    leases = other.get("rollout", 2, 1)
    other.drop([leases[0].group.key.id], "filtered")
    other.give_turn("rollout", other.take_turn("rollout", 0.0))
    other.request_lease("reward", 1, 100.0)
    world.beat(other)
    other.channel.request(Header("pong", run="run-a"))
    other.channel.request(Header("tap", run="run-a", stage="reward"))
    other.resume(other.version)
    other.status(0.0)
    worker.leave(0.0)
    other.end("finished")
    return broker.messages


# Ways to spoil a message. Each takes the message, all messages and a source of chance, and returns another message.

Spoil = Callable[[Parts, list[Parts], random.Random], Parts]
HUGE = (2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
ODD = (None, True, False, float("nan"), float("inf"), -1.5, "", "x", b"", b"\xff", [], [[]], {}, {"a": 1}, 0, 1)
LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1")
"""array, text, bytes and map of 2^32 - 1; a byte that msgpack does not use"""


def flip(parts: Parts, _all: list[Parts], chance: random.Random) -> Parts:
    """One bit of one frame, the sender's name included."""
    place = chance.randrange(len(parts))
    frame = bytearray(parts[place])
    if frame:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    return [*parts[:place], bytes(frame), *parts[place + 1 :]]


def cut(parts: Parts, _all: list[Parts], chance: random.Random) -> Parts:
    """One frame is shorter."""
    place = chance.randrange(len(parts))
    return [*parts[:place], parts[place][: chance.randrange(len(parts[place]) + 1)], *parts[place + 1 :]]


def frames(parts: Parts, messages: list[Parts], chance: random.Random) -> Parts:
    """Frames are missing, twice there, in another order, or another message's."""
    changed, kind = list(parts), chance.randrange(4)
    place = chance.randrange(len(changed))
    if kind == 0:
        del changed[place]
    elif kind == 1:
        changed.insert(place, changed[place])
    elif kind == 2:
        chance.shuffle(changed)
    else:
        changed[place] = chance.choice(chance.choice(messages))
    return changed or [b""]


def splice(parts: Parts, messages: list[Parts], chance: random.Random) -> Parts:
    """The header is another message's, from some byte on or as a whole."""
    other = chance.choice(messages)[1]
    here = chance.randrange(len(parts[1]) + 1) if chance.random() < 0.5 else 0
    return [parts[0], parts[1][:here] + other[here:], *parts[2:]]


def lengthen(parts: Parts, _all: list[Parts], chance: random.Random) -> Parts:
    """Somewhere in the header something of a huge length is announced."""
    place = chance.randrange(len(parts[1]) + 1)
    return [parts[0], parts[1][:place] + chance.choice(LENGTHS) + parts[1][place:], *parts[2:]]


def retype(parts: Parts, _all: list[Parts], chance: random.Random) -> Parts:
    """One value of the header, wherever it stands, is of another type or size."""
    tree = msgpack.unpackb(parts[1])
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in range(len(node)) if isinstance(node, list) else list(node):
            places.append((node, key))
            if isinstance(node[key], list | dict):
                walk(node[key])

    walk(tree)
    node, key = chance.choice(places)
    is_number = isinstance(node[key], int) and chance.random() < 0.5
    node[key] = chance.choice(HUGE) if is_number else chance.choice(ODD)
    return [parts[0], msgpack.packb(tree), *parts[2:]]


def disguise(parts: Parts, _all: list[Parts], chance: random.Random) -> Parts:
    """Another run, another worker, another sender, another protocol."""
    tree = msgpack.unpackb(parts[1])
    place = chance.choice((0, 2, 3, 4, 5, None))
    names = ("run-b", "", "worker-1", "worker-9", "2", "x" * 300)
    if place is None:
        sender = chance.choice((b"worker-1#1", b"worker-0#2", b"", b"\xff\xfe", b"\x00\x01\x02\x03\x04"))
        return [sender, *parts[1:]]
    tree[place] = chance.choice((0, 2, 255)) if place in (0, 5) else chance.choice(names)
    return [parts[0], msgpack.packb(tree), *parts[2:]]


def misplace(_parts: Parts, messages: list[Parts], chance: random.Random) -> Parts:
    """Another message of the run, whole, at the wrong time."""
    return chance.choice(messages)


SPOILS: tuple[Spoil, ...] = (flip, cut, frames, splice, lengthen, retype, disguise, misplace)

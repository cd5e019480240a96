"""Who watches a stage: each tap is given what is handed out there, or a count of what it was too slow for.

A tap is no worker: it holds no lease, takes no credit, keeps no run alive, and nobody waits for it. What it is given
are references to bytes that the worker is sent anyway; they wait in a buffer of the tap's own until it says that it
has them. What does not fit is dropped, for this tap alone.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from brokers.conduct import Facts
from brokers.record import StageSpec
from brokers.service import Message
from brokers.waiting import Waiting
from common.errors import BrokerError, WireError
from common.header import Header, Item
from common.section import Buffer

TAPS = 8
"""at a time; each may hold `BUFFER_BYTES` of groups that are otherwise gone"""
BUFFER_GROUPS, BUFFER_BYTES = 4096, 256 << 20
"""what one tap's buffer holds at most, or less if it asks for less"""
REPLY_GROUPS, REPLY_BYTES = 64, 16 << 20
"""what one reply brings at most, but always one group"""

Reply: TypeAlias = Callable[[str, Header, Header, tuple[Buffer, ...]], None]
"""(peer, request, reply, frames)"""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One group as it was handed to a worker. `number`: of this tap's copies, without gaps."""

    number: int
    item: Item
    frames: tuple[Buffer, ...]
    bytes: int


@dataclass(slots=True)
class _Tap:
    """One subscription. `next`: number of its next copy; `heard`: seconds of the broker's clock."""

    peer: str
    stage: str
    max_groups: int
    max_bytes: int
    next: int
    heard: float
    buffer: deque[_Copy] = field(default_factory=deque[_Copy])
    bytes: int = 0
    dropped: int = 0
    ending: bool = False
    waiting: Waiting | None = None

    def keep(self, item: Item, frames: tuple[Buffer, ...]) -> None:
        size = sum(info.length for info in item.sections)
        if len(self.buffer) >= self.max_groups or self.bytes + size > self.max_bytes:
            self.dropped += 1
            return
        self.buffer.append(_Copy(self.next, item, frames, size))
        self.next += 1
        self.bytes += size

    def has(self, number: int) -> None:
        """The tap has every copy below `number`."""
        while self.buffer and self.buffer[0].number < number:
            self.bytes -= self.buffer.popleft().bytes

    def batch(self) -> list[_Copy]:
        """Return what one reply brings."""
        taken, size = list[_Copy](), 0
        for copy in self.buffer:
            size += copy.bytes
            if taken and (len(taken) >= REPLY_GROUPS or size > REPLY_BYTES):
                break
            taken.append(copy)
        return taken


class Taps:
    """The taps of one sample broker: `stages` are its queues, by name. `facts`: what a new tap is told of the run.

    `state`: what every reply carries; `reply`: sends an answer.
    """

    def __init__(
        self, facts: Facts, stages: Mapping[str, StageSpec], state: Callable[[], dict[str, Any]], reply: Reply
    ) -> None:
        self._facts, self._stages, self._state, self._reply = facts, stages, state, reply
        self._taps: dict[str, _Tap] = {}

    def ask(self, message: Message) -> None:
        """Begin a tap or go on with it: answer with what was handed out since, as soon as there is something.

        `have`: the tap has every copy below this number, the others are sent again. `end`: it wants no new ones; once
        it has the rest, it is forgotten.
        """
        stage, have = message.header.stage, message.integer("have", 0)
        if stage not in self._stages:
            raise WireError(f"unknown stage {stage!r}; known: {', '.join(self._stages)}")
        tap = self._taps.get(message.peer)
        is_new = tap is None or tap.stage != stage
        if tap is None or tap.stage != stage:
            if len(self._taps) >= TAPS:
                raise BrokerError(f"{TAPS} taps are at work already, more are not served: end one of them")
            bounds = (message.integer("groups", BUFFER_GROUPS), message.integer("bytes", BUFFER_BYTES))
            tap = _Tap(message.peer, stage, min(bounds[0], BUFFER_GROUPS), min(bounds[1], BUFFER_BYTES), have, 0.0)
            self._taps[message.peer] = tap
        tap.has(have)
        tap.heard = message.now
        tap.ending = tap.ending or bool(message.header.body.get("end"))
        if tap.waiting is not None:  # superseded: what it would have brought comes with the newer one
            self._reply(tap.peer, tap.waiting.message.header, Header("ok", body=self._told(tap, 0)), ())
        tap.waiting = Waiting(message, message.now + message.header.deadline_s)
        if is_new or message.header.deadline_s <= 0:  # a new one is told at once what it records
            self._answer(tap, new=is_new)

    def granted(self, stage: str, items: Sequence[Item], frames: Sequence[Buffer], version: int) -> None:
        """These groups were handed out with these frames, while the trainer was at `version`."""
        for tap in self._taps.values():
            if tap.stage != stage or tap.ending:
                continue
            place = 0
            for item in items:
                mine = tuple(frames[place : place + len(item.sections)])
                place += len(item.sections)
                tap.keep(replace(item, facts={**item.facts, "version": version}), mine)

    def serve(self, *, ended: bool) -> None:
        """Answer the taps for which there is something, or all of them if the run has `ended`."""
        for tap in list(self._taps.values()):
            if tap.waiting is not None and (tap.buffer or ended or tap.ending):
                self._answer(tap)

    def on_time(self, now: float, silent_seconds: float) -> None:
        """Tell those who waited long enough that there is nothing; forget those who do not ask any more."""
        for tap in list(self._taps.values()):
            if tap.waiting is not None and tap.waiting.until <= now:
                tap.heard = now
                self._answer(tap)
            elif tap.waiting is None and now - tap.heard > silent_seconds:
                self.forget(tap.peer)

    def forget(self, peer: str) -> None:
        """This peer is gone."""
        self._taps.pop(peer, None)

    def describe(self) -> list[dict[str, Any]]:
        """Return what a person wants to see of the taps."""
        return [
            {
                "name": tap.peer,
                "queue": tap.stage,
                "groups": len(tap.buffer),
                "bytes": tap.bytes,
                "dropped": tap.dropped,
            }
            for tap in self._taps.values()
        ]

    def _answer(self, tap: _Tap, *, new: bool = False) -> None:
        assert tap.waiting is not None, "only who asks is answered"
        batch, request = tap.batch(), tap.waiting.message.header
        tap.waiting = None
        body = self._told(tap, len(batch))
        if new or request.body.get("have", 0) == 0:  # the first answer may have come too late for its question
            body |= {"facts": {**asdict(self._facts), "stage": self._stages[tap.stage].to_wire()}}
        frames = tuple(frame for copy in batch for frame in copy.frames)
        self._reply(tap.peer, request, Header("ok", items=tuple(copy.item for copy in batch), body=body), frames)
        if tap.ending and not batch:
            self.forget(tap.peer)

    def _told(self, tap: _Tap, sent: int) -> dict[str, Any]:
        first = tap.buffer[0].number if tap.buffer else tap.next
        return {**self._state(), "first": first, "left": len(tap.buffer) - sent, "dropped": tap.dropped}

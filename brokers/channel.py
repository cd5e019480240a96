"""Requests and their replies. `Channel` is what a worker holds; one kind goes through a socket, the other is in memory.

A request returns a future at once; the caller decides when to wait for it. A reply that reports an error raises it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from brokers.service import Message, Outgoing, Service
from common.clock import Clock
from common.errors import Unreachable, WireError, WorkerError, from_wire
from common.header import Header
from common.section import Buffer


@dataclass(frozen=True, slots=True)
class Reply:
    """A header with the frames that it announces; not yet checked against each other."""

    header: Header
    frames: tuple[Buffer, ...] = ()


Pending: TypeAlias = "Future[Reply]"


STATE = ("state", "reason", "version", "endpoints", "evaluation", "next_seq", "full", "stalled")
"""what the sample broker says of the run in every reply"""


@dataclass(slots=True)
class Pulse:
    """What a heartbeat tells and hears. `progress` is written by the work loop, `state` by the channel."""

    progress: dict[str, Any] = field(default_factory=dict[str, Any])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, **progress: Any) -> None:
        """Add numbers to the next heartbeat."""
        with self.lock:
            self.progress.update(progress)

    def heard(self, body: dict[str, Any]) -> None:
        """Remember the run's state from a reply."""
        if "state" in body:
            with self.lock:
                self.state.update({key: body[key] for key in STATE if key in body})


class Channel(Protocol):
    """A way to a broker. Requests are answered in any order."""

    pulse: Pulse

    def request(self, header: Header, frames: Sequence[Buffer] = (), *, seconds: float | None = None) -> Pending:
        """Send a request. `seconds`: how long to wait for its reply, beyond the deadline in the header."""
        ...

    def close(self, drain_seconds: float) -> int:
        """End the channel; return how many requests were not answered within `drain_seconds`, questions left aside.

        What is still open fails with `Unreachable`.
        """
        ...


def is_question(header: Header, frames: Sequence[Buffer]) -> bool:
    """Whether a request only waits for something to happen: nothing is lost when nobody answers it any more."""
    return header.deadline_s > 0 and not frames


def wait(pending: Pending, seconds: float | None = None) -> Reply:
    """Return the reply; raises what the broker reported, or `Unreachable`."""
    try:
        return pending.result(seconds)
    except FutureTimeout as error:
        raise Unreachable(f"no reply within {seconds:g} s") from error


def settle(pending: Pending, reply: Reply) -> None:
    """Complete a request with a reply or with the error that it reports."""
    if reply.header.verb == "error":
        body = reply.header.body
        pending.set_exception(from_wire(str(body.get("kind")), str(body.get("message"))))
    elif reply.header.verb == "ok":
        pending.set_result(reply)
    else:
        pending.set_exception(WireError(f"a reply has the verb {reply.header.verb!r}"))


class MemoryBroker:
    """A broker in this process: the same services, no sockets. Time passes when `tick` is called or a request comes."""

    def __init__(self, service: Service, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._lock = threading.RLock()
        self._deliver: dict[str, Callable[[Outgoing], None]] = {}

    def connect(self, worker: str, incarnation: str) -> MemoryChannel:
        """Return a channel for a worker."""
        return MemoryChannel(self, worker, incarnation)

    def tick(self) -> None:
        """Let the service notice the time."""
        with self._lock:
            self._dispatch(self._service.tick(self._clock.now()))

    def attach(self, peer: str, deliver: Callable[[Outgoing], None]) -> None:
        """Route what is for `peer` to `deliver`."""
        with self._lock:
            self._deliver[peer] = deliver

    def detach(self, peer: str) -> None:
        """Stop routing to `peer`: what is for it is unroutable from now on."""
        with self._lock:
            self._deliver.pop(peer, None)

    def send(self, peer: str, header: Header, frames: Sequence[Buffer]) -> None:
        """Hand a message to the service."""
        with self._lock:
            message = Message(peer, header, frames, self._clock.now())
            self._dispatch(self._service.handle(message))

    def _dispatch(self, outgoing: list[Outgoing]) -> None:
        for out in outgoing:
            deliver = self._deliver.get(out.peer)
            if deliver is None:
                self._dispatch(self._service.on_unroutable(out.peer, self._clock.now()))
            else:
                deliver(out)


class MemoryChannel:
    """A channel into a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker, worker: str, incarnation: str) -> None:
        self.pulse = Pulse()
        self._broker = broker
        self._worker, self._incarnation = worker, incarnation
        self._peer = f"{worker}#{incarnation}"
        self._pending: dict[int, tuple[Pending, bool]] = {}
        self._last = 0
        self._closed = False
        broker.attach(self._peer, self._deliver)

    def request(self, header: Header, frames: Sequence[Buffer] = (), *, seconds: float | None = None) -> Pending:
        """Send a request; the reply is usually there when this returns."""
        del seconds
        if self._closed:
            raise WorkerError("the channel in memory is closed")
        self._last += 1
        pending: Pending = Future()
        self._pending[self._last] = (pending, is_question(header, frames))
        stamped = replace(header, worker=self._worker, incarnation=self._incarnation, request=self._last)
        self._broker.send(self._peer, stamped, frames)
        return pending

    def beat(self) -> Pending:
        """Give a sign of life."""
        return self.request(Header("beat", body={"progress": dict(self.pulse.progress)}))

    def close(self, drain_seconds: float) -> int:
        """End the channel."""
        del drain_seconds
        self._closed = True
        self._broker.detach(self._peer)
        undelivered = sum(not question for _, question in self._pending.values())
        for pending, _ in self._pending.values():
            pending.set_exception(Unreachable("the channel in memory was closed"))
        self._pending.clear()
        return undelivered

    def _deliver(self, out: Outgoing) -> None:
        if out.header.verb == "ping":
            self._broker.send(self._peer, Header("pong", worker=self._worker, incarnation=self._incarnation), ())
            return
        asked = self._pending.pop(out.header.request, None)
        self.pulse.heard(dict(out.header.body))
        if asked is not None:
            settle(asked[0], Reply(out.header, out.frames))

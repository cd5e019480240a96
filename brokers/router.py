"""The loop of a broker process: one ROUTER socket, one service. Everything it decides, the service decides."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq

from brokers import sockets
from brokers.doorkeeper import Doorkeeper
from brokers.keys import BrokerKey
from brokers.service import Message, Outgoing, Service
from common.clock import Clock
from common.errors import ConfigError, WireError
from common.header import pack, unpack
from common.section import Buffer

TICK_SECONDS = 0.05
"""how often time passes for a service that hears nothing"""
TOGETHER = 64
"""messages whose replies may wait for one another"""
TOGETHER_SECONDS = 0.001
"""how long a reply may wait for the handling of messages that have arrived already"""


def take(service: Service, parts: Sequence[Buffer], now: float) -> bool:
    """Hand a message (sender, header, frames) to a service; False if it cannot be read: it is counted, not answered."""
    peer = bytes(parts[0]).decode("utf-8", "replace")
    try:
        if len(parts) < 2:
            raise WireError(f"message of {len(parts)} frames from {peer!r}")
        header = unpack(parts[1])
    except WireError as error:
        service.on_malformed(error)
        return False
    service.take(Message(peer, header, parts[2:], now))
    return True


class Router:
    """Serves one service on one endpoint. `endpoint` with port 0 takes a free port; `address` says which.

    With a `key` everything is encrypted and only the run's workers can connect.
    """

    def __init__(
        self,
        service: Service,
        endpoint: str,
        clock: Clock,
        high_water_mark: int = 64,
        key: BrokerKey | None = None,
    ) -> None:
        self._service = service
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._door = Doorkeeper(self._socket, key)
        try:
            sockets.prepare(self._socket, high_water_mark)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error, not lost
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer is heard at once
            self.address = sockets.bind(self._socket, endpoint)
        except ConfigError:
            self.close()  # an open socket would keep the process from ending
            raise
        self._unsent: dict[str, list[Outgoing]] = {}

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop()` is true."""
        next_tick = self._clock.now()
        while not stop():
            now = self._clock.now()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._service.on_turned_away(self._door.turned_away())
                self._send(self._service.tick(now))
                self._send([out for queue in self._unsent.values() for out in queue], again=True)
            wait_ms = max(1, int(1000 * (next_tick - now)))
            if self._socket.poll(wait_ms):
                self._receive(next_tick)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)
        self._door.close()
        self._context.term()

    def _receive(self, until: float) -> None:
        """Handle what has arrived: one poll serves many messages, but no longer than `until`, when a tick is due.

        Replies leave together, for up to `TOGETHER` messages that were here already: waking ZeroMQ's own thread costs
        more than handling a header. They wait `TOGETHER_SECONDS` for that, or longer for a journal's commit.
        """
        together, release_at = 0, 0.0
        while (now := self._clock.now()) < until:
            parts = self._next()
            if parts is None:
                break
            if not take(self._service, parts, now):
                continue
            together += 1
            if together == 1:
                release_at = now + TOGETHER_SECONDS
            if together >= TOGETHER or (now >= release_at and not self._service.holding):
                self._send(self._service.release(now))
                together = 0
        if together:
            self._send(self._service.release(self._clock.now()))

    def _next(self) -> list[Buffer] | None:
        """Return the frames of the next message, its sender first, or None when there is none."""
        socket = self._socket
        try:
            parts: list[Buffer] = [socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        more = socket.getsockopt(zmq.RCVMORE)
        while more:
            frame = cast(Any, socket.recv(zmq.NOBLOCK, copy=False))  # without a copy: sections are large
            more = frame.more
            parts.append(frame.buffer)
        return parts

    def _send(self, outgoing: list[Outgoing], *, again: bool = False) -> None:
        if again:
            self._unsent = {}
        for out in outgoing:
            if out.peer in self._unsent:
                self._unsent[out.peer].append(out)
                continue
            message = [out.peer.encode(), pack(out.header), *out.frames]
            try:
                if out.frames:
                    self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
                else:
                    self._socket.send(message[0], zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(message[1], zmq.NOBLOCK)
            except zmq.Again:
                # Its pipe is at the high-water mark: kept in order and sent at the next tick.
                self._unsent[out.peer] = [out]
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._send(self._service.on_unroutable(out.peer, self._clock.now()))

"""The channel through a socket: one I/O thread per worker process owns the DEALER and keeps leases alive.

The work loop never touches the socket. It hands requests over through a deque and wakes the thread through an
in-process pair; replies complete futures. Heartbeats carry the progress that the work loop reported.

What was under way when the connection broke, or when the broker was restarted and calls its workers strangers, may be
lost, done, or done without a reply. The channel then joins again (see `Membership`) and repeats every request without
an answer, in order, under new numbers and with the old ones: each is done once, or its repeat changes nothing.
Messages arrive in order, so what is answered to an old number came before the new hello: it is repeated behind it.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import structlog
import zmq

from brokers import keys, sockets
from brokers.channel import Pending, Pulse, Reply, is_question, settle
from brokers.keys import WorkerKey
from brokers.membership import Membership
from common.errors import ConfigError, Stranger, Unreachable, WireError, WorkerError
from common.header import Header, pack, unpack
from common.section import Buffer

REPLY_SECONDS = 30.0
"""how long a reply may take beyond the deadline that the request itself carries"""


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way. `message`: its frames, the header first."""

    header: Header
    message: tuple[Buffer, ...]
    pending: Pending
    until: float
    seconds: float

    @property
    def is_question(self) -> bool:
        return is_question(self.header, self.message[1:])


class DealerChannel:
    """A channel to the broker at `endpoint`, as `worker#incarnation`; encrypted with the run's `key` if it has one.

    Raises `ConfigError` for an address, a name or a high-water mark that cannot be.
    """

    def __init__(
        self,
        endpoint: str,
        worker: str,
        incarnation: str,
        heartbeat_seconds: float = 1.0,
        high_water_mark: int = 64,
        key: WorkerKey | None = None,
    ) -> None:
        self.pulse = Pulse()
        self.endpoint = sockets.address(endpoint)
        self._names = (worker, incarnation)
        self._key = key
        self._heard = False
        self._stalled = ""
        self._owner = os.getpid()
        self._heartbeat_seconds = heartbeat_seconds
        self._context = zmq.Context()
        self._socket = self._connected(high_water_mark)  # handed over to the I/O thread when that starts
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.set_hwm(1)
        self._wake_in.bind("inproc://wake")
        self._outbox: deque[_Request] = deque()
        self._waiting: dict[int, _Request] = {}
        self._lock = threading.Lock()
        self._last = 0
        self._membership = Membership()
        self._beating = False
        self._closing = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"io {self.endpoint}", daemon=True)
        self._thread.start()

    def request(self, header: Header, frames: Sequence[Buffer] = (), *, seconds: float | None = None) -> Pending:
        """Send a request; its future fails with `Unreachable` when no reply came in time.

        Raises `WireError` for a header that cannot be encoded, and `WorkerError` on a closed channel or in a process
        that inherited this channel by a fork: the socket belongs to its parent.
        """
        if os.getpid() != self._owner:
            raise WorkerError(
                f"this channel to {self.endpoint} belongs to process {self._owner}; a forked child must open its own"
            )
        pending: Pending = Future()
        allowed = header.deadline_s + (REPLY_SECONDS if seconds is None else seconds)
        with self._lock:
            if self._closing:
                raise WorkerError(f"the channel to {self.endpoint} is closed")
            stamped = self._stamped(header)
            message = (pack(stamped), *frames)
            self._outbox.append(_Request(stamped, message, pending, time.monotonic() + allowed, allowed))
        self._wake()
        return pending

    def start_heartbeats(self) -> None:
        """Begin to send heartbeats; after hello."""
        self._beating = True
        self._wake()

    def close(self, drain_seconds: float) -> int:
        """Wait up to `drain_seconds` for replies, then end the thread; return how many requests had none.

        Questions are not waited for. What is still open fails with `Unreachable`.
        """
        with self._lock:
            self._closing = True
            under_way = {*self._outbox, *self._waiting.values()}
            open_requests = [request.pending for request in under_way if not request.is_question]
        until = time.monotonic() + drain_seconds
        for pending in open_requests:
            remaining = until - time.monotonic()
            if remaining > 0 and not pending.done():
                try:
                    pending.exception(remaining)
                except TimeoutError:
                    break
        undelivered = sum(not pending.done() for pending in open_requests)
        if undelivered:
            structlog.get_logger(part="channel").warning("closed", endpoint=self.endpoint, undelivered=undelivered)
        self._stopped = True
        self._wake()
        self._thread.join()
        self._wake_in.close(0)
        self._context.term()
        for request in under_way:
            if not request.pending.done():
                request.pending.set_exception(Unreachable(f"the channel to {self.endpoint} was closed"))
        return undelivered

    def _connected(self, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        try:
            sockets.prepare(socket, high_water_mark)
            socket.setsockopt_string(zmq.IDENTITY, "#".join(self._names))
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            if self._key is not None:
                keys.use(socket, self._key)
            self._handshakes = sockets.Handshakes(socket)
            socket.connect(self.endpoint)
        except (zmq.ZMQError, ConfigError) as error:
            socket.close(0)
            self._context.term()
            raise ConfigError(f"cannot connect {self._names[0]!r} to {self.endpoint}: {error}") from error
        return socket

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(zmq.Again):  # Again: the thread has been woken already
            self._wake_in.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        wake_out = self._context.socket(zmq.PAIR)
        wake_out.set_hwm(1)
        wake_out.connect("inproc://wake")
        socket = self._socket
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake_out, zmq.POLLIN)
        next_beat = time.monotonic()
        while not self._stopped:
            now = time.monotonic()
            if self._beating and now >= next_beat:
                next_beat = now + self._heartbeat_seconds
                self._beat(socket)
            self._send(socket)
            poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            events = dict(poller.poll(50))
            if wake_out in events:
                wake_out.recv()
            if self._handshakes.came_back():  # before any reply that came through the new connection is read
                self._join_again("the connection was lost")
            if socket in events:
                self._receive(socket)
            self._expire()
        wake_out.close(0)
        self._handshakes.close()
        socket.close(0)

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        with self.pulse.lock:
            progress = dict(self.pulse.progress)
        with self._lock:
            header = self._stamped(Header("beat", body={"progress": progress}))
        with contextlib.suppress(zmq.Again):  # no connection, or the pipe is full: the next beat tells the same
            socket.send(pack(header), zmq.NOBLOCK)

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            request = self._outbox[0]
            try:
                socket.send_multipart(request.message, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return  # at the high-water mark: the request stays first in line
            with self._lock:
                self._waiting[request.header.request] = request
                self._outbox.popleft()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = cast(list[Any], socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return
            self._heard = True
            try:
                header = unpack(parts[0].buffer)
            except WireError as error:
                structlog.get_logger(part="channel").error("reply refused", error=str(error))
                continue
            if header.verb == "ping":
                worker, incarnation = self._names
                with contextlib.suppress(zmq.Again):
                    socket.send(pack(Header("pong", worker=worker, incarnation=incarnation)), zmq.NOBLOCK)
                continue
            self.pulse.heard(dict(header.body))
            self._hear_of_stall(str(header.body.get("stalled", "")))
            if header.verb == "error" and header.body.get("kind") == Stranger.__name__ and self._membership.may_join:
                if not self._membership.is_behind(header.request):
                    self._join_again("the broker was restarted")
                continue
            with self._lock:
                request = self._waiting.pop(header.request, None)
            if request is not None:
                self._membership.answered(request.header, header)
                settle(request.pending, Reply(header, tuple(frame.buffer for frame in parts[1:])))

    def _hear_of_stall(self, why: str) -> None:
        """While the broker says why it answers nobody, requests wait on: they are in good hands."""
        if why:
            now = time.monotonic()
            with self._lock:
                for request in (*self._waiting.values(), *self._outbox):
                    request.until = now + request.seconds
        if bool(why) != bool(self._stalled):
            said = f"the broker is {why}" if why else "the broker answers again"
            structlog.get_logger(part="channel").warning(said, endpoint=self.endpoint)
        self._stalled = why

    def _stamped(self, header: Header) -> Header:
        """Return a header with this worker's names and the next number; the lock is held."""
        self._last += 1
        worker, incarnation = self._names
        return replace(header, worker=worker, incarnation=incarnation, request=self._last)

    def _join_again(self, why: str) -> None:
        """Say hello again, unless none may be said, and repeat behind it what has no answer."""
        now = time.monotonic()
        with self._lock:
            lost = sorted(self._waiting.values(), key=lambda one: one.header.request)
            self._waiting.clear()
            again: list[_Request] = []
            if self._membership.may_join:
                hello = self._stamped(self._membership.hello_again())
                self._membership.joining(hello.request)
                lost = [one for one in lost if "holding" not in one.header.body]  # an older hello of this kind
                again.append(_Request(hello, (pack(hello),), Future(), now + REPLY_SECONDS, REPLY_SECONDS))
            for one in lost:
                body = {**one.header.body, "repeats": one.header.body.get("repeats", one.header.request)}
                header = self._stamped(replace(one.header, body=body))
                message = (pack(header), *one.message[1:])
                again.append(_Request(header, message, one.pending, now + one.seconds, one.seconds))
            self._outbox.extendleft(reversed(again))
        log = structlog.get_logger(part="channel")
        log.warning(f"{why}: joining again", endpoint=self.endpoint, repeated=len(lost))

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [request for request in self._waiting.values() if request.until <= now]
            late += [request for request in self._outbox if request.until <= now]
            for request in late:
                self._waiting.pop(request.header.request, None)
                if request in self._outbox:
                    self._outbox.remove(request)
        for request in late:
            silence = f"broker {self.endpoint} did not answer {request.header.verb!r} in {request.seconds:g} s"
            request.pending.set_exception(Unreachable(silence + self._hint()))

    def _hint(self) -> str:
        """What may be wrong when a broker never said anything: it cannot tell whom its handshake turns away."""
        if self._heard:
            return ""
        return "; an encrypted broker needs --key" if self._key is None else "; is --key that of this very run?"

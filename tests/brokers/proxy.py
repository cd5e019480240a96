"""A TCP proxy between workers and a broker that breaks the link where a test says: at a byte or at a message.

Everything happens by events: nothing is timed.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

CHUNK = 1 << 16
UP, DOWN = "up", "down"
"""to the broker, to the worker"""


@dataclass(eq=False)
class _Link:
    """One connection: the worker's socket and the one to the broker. `seen`: bytes per direction so far."""

    ends: dict[str, socket.socket]
    seen: dict[str, int] = field(default_factory=lambda: {UP: 0, DOWN: 0})
    tail: bytes = b""
    pumps: int = 2

    def cut(self) -> None:
        for end in self.ends.values():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Passes bytes between whoever connects to `address` and `upstream`. `broken`: a planned cut has happened."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = threading.Event()
        self.links = 0
        self._flows = {UP: threading.Event(), DOWN: threading.Event()}
        self._open: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._plan: Callable[[_Link, str, bytes], int | None] = lambda _link, _way, _data: None
        self.resume()
        self._start(self._accept)

    def cut_before(self, pattern: bytes) -> None:
        """Cut the link when `pattern` is on its way to the broker, before its last byte has left."""

        def plan(link: _Link, way: str, data: bytes) -> int | None:
            if way != UP:
                return None
            known, link.tail = link.tail, (link.tail + data)[1 - len(pattern) :]
            place = (known + data).find(pattern)
            return None if place < 0 else max(0, place + len(pattern) - 1 - len(known))

        self._arm(plan)

    def cut_reply(self, pattern: bytes) -> None:
        """Let `pattern` and all that follows reach the broker, and cut the link when the first byte comes back."""
        asked: list[_Link] = []

        def plan(link: _Link, way: str, data: bytes) -> int | None:
            if way == UP:
                known, link.tail = link.tail, (link.tail + data)[1 - len(pattern) :]
                if pattern in known + data:
                    asked.append(link)
                return None
            return 0 if link in asked else None

        self._arm(plan)

    def cut_after(self, way: str, num_bytes: int) -> None:
        """Cut the link when `num_bytes` more have passed in one direction."""
        begun: dict[_Link, int] = {}

        def plan(link: _Link, on: str, data: bytes) -> int | None:
            if on != way:
                return None
            left = num_bytes - (link.seen[way] - begun.setdefault(link, link.seen[way]))
            return max(0, left) if len(data) > left else None

        self._arm(plan)

    def stall(self, *ways: str) -> None:
        """Pass nothing more in these directions, both by default; neither side is told."""
        for way in ways or (UP, DOWN):
            self._flows[way].clear()

    def resume(self) -> None:
        """Pass what was held back, and everything after it."""
        for flow in self._flows.values():
            flow.set()

    def cut(self) -> None:
        """Cut all links now."""
        with self._lock:
            for link in self._open:
                link.cut()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.resume()
        self.cut()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()

    def _arm(self, plan: Callable[[_Link, str, bytes], int | None]) -> None:
        with self._lock:
            self.broken.clear()
            self._plan = plan

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._upstream)
            except OSError:  # nobody is there just now
                near.close()
                continue
            link = _Link({UP: far, DOWN: near})
            with self._lock:
                self.links += 1
                self._open.append(link)
            self._start(self._pump, link, UP, near)
            self._start(self._pump, link, DOWN, far)

    def _pump(self, link: _Link, way: str, source: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                self._flows[way].wait()
                with self._lock:
                    place = self._plan(link, way, data)
                    link.seen[way] += len(data)
                    if place is not None:
                        self._plan = lambda _link, _way, _data: None
                link.ends[way].sendall(data if place is None else data[:place])
                if place is not None:
                    link.cut()
                    self.broken.set()
        link.cut()
        with self._lock:
            link.pumps -= 1
            if not link.pumps:
                self._open.remove(link)
                for end in link.ends.values():
                    end.close()

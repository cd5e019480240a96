"""The options that every ZeroMQ socket of this system has, and addresses in the forms people write them."""

import re
from contextlib import suppress
from typing import Any

import zmq
import zmq.utils.monitor as zmq_monitor

from common.errors import ConfigError

_TCP = re.compile(r"^tcp://(?P<host>.+):(?P<port>\d+)$")


def address(text: str) -> str:
    """Return a TCP address in its one spelling, IPv6 hosts in brackets; raises `ConfigError` for anything else.

    An IPv4 address that the system reports as mapped into IPv6 (::ffff:127.0.0.1) is spelled as IPv4.
    Port 0 is allowed where a socket is bound: the system picks a free one.
    """
    match = _TCP.match(text)
    if match is None:
        raise ConfigError(f"address {text!r}: expected tcp://HOST:PORT, for example tcp://127.0.0.1:5600")
    host, port = match["host"].strip("[]").removeprefix("::ffff:"), int(match["port"])
    if port > 65535:
        raise ConfigError(f"address {text!r}: port {port} is above 65535")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def prepare(socket: zmq.Socket[Any], high_water_mark: int) -> None:
    """Set the options that are the same for all sockets. Raises `ConfigError` for a mark of 0, ZeroMQ's "unlimited"."""
    if high_water_mark <= 0:
        raise ConfigError(f"broker.high_water_mark = {high_water_mark}: must be positive, ZeroMQ takes 0 as unlimited")
    socket.set_hwm(high_water_mark)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)  # what must not be lost is drained, with a deadline, before close
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, -1)


def bind(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Bind and return the address with the port that was taken; raises `ConfigError` when it cannot be.

    An address that means all interfaces is refused: it is told to workers, who could not connect to it.
    """
    if any(endpoint.startswith(f"tcp://{host}:") for host in ("0.0.0.0", "[::]", "::", "*")):
        raise ConfigError(f"broker.host of {endpoint} means every interface: name the address that workers shall use")
    try:
        socket.bind(address(endpoint))
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind broker.host/broker.port {endpoint}: {error.strerror or error}") from error
    return address(socket.getsockopt_string(zmq.LAST_ENDPOINT))


class Handshakes:
    """Counts how often a socket that connects has reached its peer. It must be made before the socket connects."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._count = 0

    def came_back(self) -> bool:
        """Whether the connection was made anew since the last call. What it carries cannot be read earlier."""
        before = self._count
        with suppress(zmq.Again):
            while True:
                zmq_monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._count += 1
        return self._count > max(1, before)

    def close(self) -> None:
        """Stop counting; before the socket is closed."""
        self._socket.disable_monitor()
        self._monitor.close(0)

"""Who may connect to a broker: with a key, the run's workers alone; in any case, whoever was turned away is counted."""

from contextlib import suppress
from typing import Any

import zmq
import zmq.utils.monitor as zmq_monitor
from zmq.auth.thread import ThreadAuthenticator

from brokers.keys import BrokerKey

TURNED_AWAY = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""AUTH: not a key of this run's workers; PROTOCOL: another broker's key, plain where encrypted, or the reverse;
NO_DETAIL: the peer hung up first, as one does that expects the other kind and has seen which kind this is"""


class Doorkeeper:
    """Guards one socket. With `key` None it is plain, and peers that encrypt are those that cannot get in."""

    def __init__(self, socket: zmq.Socket[Any], key: BrokerKey | None) -> None:
        """Prepare a socket that is about to be bound; nobody else may monitor it meanwhile."""
        self._key = key
        self._authenticator: ThreadAuthenticator | None = None
        if key is not None:
            socket.curve_server = True
            socket.curve_secretkey = key.secret.encode()
            socket.curve_publickey = key.public.encode()
            self._authenticator = ThreadAuthenticator(socket.context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(TURNED_AWAY)

    def callback(self, _domain: str, public: bytes) -> bool:
        """Say whether a peer with this public key may come in; ZeroMQ asks, in a thread of its own."""
        return self._key is not None and public.decode() == self._key.workers  # Z85, as in the key files

    def turned_away(self) -> int:
        """Return how many handshakes have failed since the last call; a peer that tries again counts again."""
        count = 0
        with suppress(zmq.Again):
            while True:
                zmq_monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
                count += 1
        return count

    def close(self) -> None:
        """Stop watching and end the thread; the guarded socket must be closed already."""
        self._monitor.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()

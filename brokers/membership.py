"""What a worker must tell a broker that was restarted: its last hello, with the leases that are in its hands."""

from dataclasses import replace

from common.header import Header

MAX_JOINS = 10
"""hellos in a row that are repeated although none was accepted"""


class Membership:
    """One worker's side of being known to a broker; one thread calls it."""

    def __init__(self) -> None:
        self._hello: Header | None = None  # the last one that was accepted, until goodbye
        self._joining = 0  # number of the last hello that was repeated
        self._refused = 0  # hellos that were repeated since one was accepted
        self._in_hand: set[int] = set()  # leases

    @property
    def may_join(self) -> bool:
        """Whether a hello can be said again: one was accepted, and its repeats were not refused too often."""
        return self._hello is not None and self._refused < MAX_JOINS

    def is_behind(self, request: int) -> bool:
        """Return whether a request was sent before the hello that is under way: it is repeated behind that one."""
        return request <= self._joining

    def hello_again(self) -> Header:
        """Return the hello to repeat. Raises `ValueError` if none may be."""
        if self._hello is None:
            raise ValueError("this worker said no hello that was accepted")
        return replace(self._hello, body={**self._hello.body, "holding": sorted(self._in_hand)})

    def joining(self, number: int) -> None:
        """Note that a repeated hello is under way, as request `number`."""
        self._joining = number
        self._refused += 1

    def answered(self, request: Header, reply: Header) -> None:
        """Note a reply."""
        if request.request == self._joining and reply.verb != "ok":
            self._hello = None  # its place is taken: what is behind the hello fails as a stranger's
        if reply.verb != "ok":
            return
        if request.verb == "hello":
            self._hello, self._refused = request, 0
        elif request.verb == "bye":
            self._hello = None
        elif request.verb == "lease":
            self._in_hand |= {item.lease for item in reply.items}
        elif request.verb in ("ack", "nack") or (request.verb == "put" and bool(request.body.get("ack"))):
            self._in_hand -= {item.lease for item in request.items}

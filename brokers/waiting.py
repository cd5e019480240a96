"""Requests that cannot be answered yet: each waits, with its deadline, until something changes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from brokers.service import Message
from common.header import Item
from common.section import Section


@dataclass(slots=True)
class Waiting:
    """A request without an answer. `until`: seconds of the broker's clock. `items`: what of it is still to be done."""

    message: Message
    until: float
    items: list[tuple[Item, dict[str, Section]]] = field(default_factory=list[tuple[Item, dict[str, Section]]])


class WaitingRoom:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def peers(self) -> set[str]:
        """Return who waits."""
        return {waiting.message.peer for waiting in self._waiting}

    def add(self, waiting: Waiting) -> None:
        """Let a request wait."""
        self._waiting.append(waiting)

    def serve(self, answered: Callable[[Waiting], bool], *, in_line: bool = False) -> None:
        """Try every request; `in_line`: stop at the first that must go on waiting."""
        kept: list[Waiting] = []
        blocked = False
        for waiting in self._waiting:
            if blocked or not answered(waiting):
                kept.append(waiting)
                blocked = in_line
        self._waiting = kept

    def overdue(self, now: float) -> list[Waiting]:
        """Remove and return the requests whose deadline has passed."""
        over = [waiting for waiting in self._waiting if waiting.until <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting.until > now]
        return over

    def withdraw(self, peer: str) -> list[Waiting]:
        """Remove and return the requests of a peer, because it asks anew."""
        mine = [waiting for waiting in self._waiting if waiting.message.peer == peer]
        self.leave(peer)
        return mine

    def leave(self, peer: str) -> None:
        """Forget the requests of a peer that is gone."""
        self._waiting = [waiting for waiting in self._waiting if waiting.message.peer != peer]

"""Requests that cannot be answered yet: each waits, with its deadline, until something changes."""

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from math import inf

from brokers.service import Message
from common.header import Item
from common.section import Section


@dataclass(slots=True)
class Waiting:
    """A request without an answer. `until`: seconds of the broker's clock. `items`: what of it is still to be done.

    `why`: what it waits for, once people were told, which was at `told`.
    """

    message: Message
    until: float
    items: list[tuple[Item, dict[str, Section]]] = field(default_factory=list[tuple[Item, dict[str, Section]]])
    why: str = ""
    told: float = 0.0

    @property
    def since(self) -> float:
        """When it arrived, in seconds of the broker's clock."""
        return self.message.now


class WaitingRoom:
    """First come, first served. What a message costs here does not depend on how many wait."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}  # by number, in order of arrival
        self._by_peer: dict[str, set[int]] = {}
        self._last = 0
        self._none_before = inf  # no deadline is earlier than this

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[Waiting]:
        """Who waits, in the order in which they came."""
        return self._waiting.values()

    @property
    def peers(self) -> Set[str]:
        """Who waits, each named once."""
        return self._by_peer.keys()

    def add(self, waiting: Waiting) -> None:
        """Let a request wait."""
        self._last += 1
        self._waiting[self._last] = waiting
        self._by_peer.setdefault(waiting.message.peer, set()).add(self._last)
        self._none_before = min(self._none_before, waiting.until)

    def serve(
        self, answered: Callable[[Waiting], bool], *, last_hope: Callable[[Waiting], bool] = lambda _: False
    ) -> None:
        """Try every request. `last_hope`: no request behind one that must go on waiting can be answered either."""
        if not self._waiting:
            return
        done: list[int] = []
        for number, waiting in self._waiting.items():
            if answered(waiting):
                done.append(number)
            elif last_hope(waiting):
                break
        for number in done:
            self._remove(number)

    def overdue(self, now: float) -> list[Waiting]:
        """Remove and return the requests whose deadline has passed."""
        if now < self._none_before:
            return []
        over = [self._remove(number) for number, waiting in list(self._waiting.items()) if waiting.until <= now]
        self._none_before = min((waiting.until for waiting in self._waiting.values()), default=inf)
        return over

    def withdraw(self, peer: str) -> list[Waiting]:
        """Remove and return the requests of a peer, because it asks anew or is gone."""
        return [self._remove(number) for number in sorted(self._by_peer.get(peer, ()))]

    def _remove(self, number: int) -> Waiting:
        waiting = self._waiting.pop(number)
        mine = self._by_peer[waiting.message.peer]
        mine.discard(number)
        if not mine:
            del self._by_peer[waiting.message.peer]
        return waiting

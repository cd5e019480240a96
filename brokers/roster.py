"""Who is connected: one member per name, told apart from its predecessors by an incarnation."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 256
"""requests of one worker; more are never under way at once"""


@dataclass(slots=True)
class Member:
    """A worker that said hello. `peer` names one incarnation of it: `name#incarnation`."""

    name: str
    peer: str
    role: str
    host: str
    pid: int
    joined: float
    seen: float
    version: int = -1
    lost: str = ""
    progress: dict[str, Any] = field(default_factory=dict[str, Any])
    done: OrderedDict[int, list[Any]] = field(default_factory=OrderedDict[int, list[Any]])
    """its latest requests that must not be done twice, by number: what of each failed"""

    def note_done(self, request: int, failed: list[Any]) -> None:
        """Remember that a request was done, should it be repeated because the reply was lost."""
        self.done[request] = failed
        if len(self.done) > REMEMBERED:
            self.done.popitem(last=False)

    def describe(self, now: float) -> dict[str, Any]:
        """Return what a person wants to see of it."""
        return {
            "name": self.name,
            "role": self.role,
            "host": self.host,
            "pid": self.pid,
            "version": self.version,
            "seen_s": round(now - self.seen, 3),
            "lost": self.lost,
            "progress": self.progress,
        }


class Roster:
    """Members by name and by peer."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}
        self._by_peer: dict[str, Member] = {}

    def holder(self, name: str) -> Member | None:
        """Return the member that holds a name and is not lost."""
        member = self._by_name.get(name)
        return member if member is not None and not member.lost else None

    def join(self, member: Member) -> None:
        """Take in a member; it replaces whoever held its name."""
        old = self._by_name.get(member.name)
        if old is not None:
            self._by_peer.pop(old.peer, None)
        self._by_name[member.name] = member
        self._by_peer[member.peer] = member

    def find(self, peer: str) -> Member | None:
        """Return the member behind a peer, lost or not."""
        return self._by_peer.get(peer)

    def members(self) -> list[Member]:
        """Return all members in the order in which they joined."""
        return list(self._by_name.values())

    def heard_since(self, time: float) -> bool:
        """Whether some member that is not lost gave a sign of life after `time`."""
        return any(member.seen > time and not member.lost for member in self._by_name.values())

    def fall_silent(self, since: float) -> list[Member]:
        """Mark and return the members that were not heard since then. They may come back; their leases are over."""
        silent = [member for member in self._by_name.values() if not member.lost and member.seen < since]
        for member in silent:
            member.lost = "silent"
        return silent

    def leave(self, peer: str) -> None:
        """Forget a member that said goodbye."""
        member = self._by_peer.pop(peer, None)
        if member is not None and self._by_name.get(member.name) is member:
            del self._by_name[member.name]

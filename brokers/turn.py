"""Turns for rollout and trainer that share devices (mode `sync`). A pure state machine.

One side holds the turn at a time; all its workers may hold it together. A worker gives the turn up after it freed its
device memory; when the last holder gives it up, it passes to the other side with a higher fencing number. A worker that
dies gives up what it held.
"""

SIDES = ("rollout", "trainer")


class Turn:
    """Starts with the rollout side, which has weights from the beginning."""

    def __init__(self) -> None:
        self.side = SIDES[0]
        self.fence = 1
        self.holders: set[str] = set()

    def take(self, side: str, worker: str) -> int:
        """Return the fencing number if it is this side's turn, else 0."""
        if side != self.side:
            return 0
        self.holders.add(worker)
        return self.fence

    def give(self, worker: str, fence: int) -> bool:
        """Give the turn up; True if it passed to the other side. An outdated fencing number changes nothing."""
        if fence != self.fence or worker not in self.holders:
            return False
        self.holders.remove(worker)
        if self.holders:
            return False
        self.side = SIDES[1 - SIDES.index(self.side)]
        self.fence += 1
        return True

    def lost(self, worker: str) -> None:
        """A worker is gone: nobody waits for it. The side keeps the turn if nobody else holds it."""
        self.holders.discard(worker)

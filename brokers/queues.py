"""The queue of one stage: which groups are ready, in which order, and how many groups and bytes wait or are in work."""

import heapq
import math
from typing import TypeAlias

Order: TypeAlias = tuple[int, ...]
"""the smallest leaves first; all orders of a queue have the same meaning place by place"""
Entry: TypeAlias = tuple[Order, int, str]
"""(order, stamp, group); an entry counts if its stamp is the group's latest"""
SWEEP = 64
"""removed entries beyond the number of ready ones that a heap may hold"""


class StageQueue:
    """A priority queue with removal in O(1): a removed entry is skipped at the front, or swept with many others.

    `lanes`: groups can be pushed into that many separate orders. `patience`: a group that is here for more seconds
    leaves before all others, whatever its order and lane; infinite for a queue whose order is itself fair.
    """

    def __init__(self, lanes: int = 1, patience: float = math.inf) -> None:
        self.groups = 0
        self.bytes = 0
        self.entered: dict[str, tuple[int, float, int]] = {}  # bytes, time, number of the entry
        self.patience = patience
        self._lanes: list[list[Entry]] = [[] for _ in range(lanes)]
        self._by_age: list[Entry] = []
        self._ready: dict[str, int] = {}
        self._stamp = 0
        self._entries = 0

    def enter(self, group: str, num_bytes: int, now: float) -> int:
        """Count a group in: it waits for this stage or is in work there. Return the number of its entry."""
        known = self.entered.get(group)
        if known is not None:
            return known[2]
        self._entries += 1
        self.entered[group] = (num_bytes, now, self._entries)
        self.groups += 1
        self.bytes += num_bytes
        return self._entries

    def leave(self, group: str) -> None:
        """Count a group out, whether it was handled or given up."""
        self.remove(group)
        known = self.entered.pop(group, None)
        if known is not None:
            self.groups -= 1
            self.bytes -= known[0]

    def bound_reached(self, num_bytes: int, max_groups: int, max_bytes: int) -> str | None:
        """Return None if one more group of `num_bytes` fits, else how much of which bound is used."""
        if self.groups >= max_groups:
            return f"{self.groups} of at most {max_groups} groups"
        if self.bytes + num_bytes > max_bytes:
            return f"{self.bytes} of at most {max_bytes} bytes"
        return None

    def push(self, group: str, order: Order, lane: int = 0) -> None:
        """Make a group ready, or change its order or lane. With a finite `patience` it must have entered."""
        self._stamp += 1
        self._ready[group] = self._stamp
        self._lanes[lane] = self._pushed(self._lanes[lane], (order, self._stamp, group))
        if self.patience < math.inf:
            self._by_age = self._pushed(self._by_age, ((self.entered[group][2],), self._stamp, group))

    def remove(self, group: str) -> None:
        """Make a group not ready."""
        self._ready.pop(group, None)

    def head(self, lane: int) -> str | None:
        """Return the first group of one lane, or None."""
        entry = self._front(self._lanes[lane])
        return entry and entry[2]

    def first(self, now: float = 0.0, lane: int | None = None) -> str | None:
        """Return the group that would leave first at `now`, or None. `lane`: others only when that one is empty."""
        if self.patience < math.inf:
            eldest = self._front(self._by_age)
            if eldest is not None and now - self.entered[eldest[2]][1] > self.patience:
                return eldest[2]
        if lane is not None:
            for near in sorted(range(len(self._lanes)), key=lambda other: abs(other - lane)):
                if (group := self.head(near)) is not None:
                    return group
            return None
        if len(self._lanes) == 1:
            return self.head(0)
        return min((entry for heap in self._lanes if (entry := self._front(heap))), default=(None, 0, None))[2]

    def __contains__(self, group: str) -> bool:
        """Whether a group is ready."""
        return group in self._ready

    @property
    def ready(self) -> int:
        """Groups that could be leased."""
        return len(self._ready)

    def oldest(self, now: float) -> float:
        """Seconds since the group that waits longest entered; 0 for an empty queue."""
        first = next(iter(self.entered.values()), None)
        return now - first[1] if first else 0.0

    def _pushed(self, heap: list[Entry], entry: Entry) -> list[Entry]:
        if len(heap) > 2 * len(self._ready) + SWEEP:
            heap = [old for old in heap if self._ready.get(old[2]) == old[1]]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)
        return heap

    def _front(self, heap: list[Entry]) -> Entry | None:
        ready = self._ready
        while heap:
            entry = heap[0]
            if ready.get(entry[2]) == entry[1]:
                return entry
            heapq.heappop(heap)
        return None

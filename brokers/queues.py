"""The queue of one stage: which groups are ready, in which order, and how many groups and bytes wait or are in work."""

import heapq
from dataclasses import dataclass, field
from typing import TypeAlias

Order: TypeAlias = tuple[int, int]
"""(urgency, sequence number); the smallest leaves first"""
SWEEP = 64
"""removed entries beyond the number of ready ones that a queue may hold"""


@dataclass(slots=True)
class StageQueue:
    """A priority queue with removal in O(1): a removed entry is skipped at the front, or swept with many others."""

    groups: int = 0
    bytes: int = 0
    entered: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    _heap: list[tuple[Order, str, int]] = field(default_factory=list[tuple[Order, str, int]])
    _ready: dict[str, int] = field(default_factory=dict[str, int])
    _stamp: int = 0

    def enter(self, group: str, num_bytes: int, now: float) -> None:
        """Count a group in: it waits for this stage or is in work there."""
        if group not in self.entered:
            self.entered[group] = (num_bytes, now)
            self.groups += 1
            self.bytes += num_bytes

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

    def push(self, group: str, order: Order) -> None:
        """Make a group ready, or change its order."""
        if len(self._heap) > 2 * len(self._ready) + SWEEP:
            self._heap = [entry for entry in self._heap if self._ready.get(entry[1]) == entry[2]]
            heapq.heapify(self._heap)
        self._stamp += 1
        self._ready[group] = self._stamp
        heapq.heappush(self._heap, (order, group, self._stamp))

    def remove(self, group: str) -> None:
        """Make a group not ready."""
        self._ready.pop(group, None)

    def first(self) -> str | None:
        """Return the group that would leave first, or None."""
        while self._heap:
            _, group, stamp = self._heap[0]
            if self._ready.get(group) == stamp:
                return group
            heapq.heappop(self._heap)
        return None

    def pop(self) -> str:
        """Remove and return the first group; there must be one."""
        group = self.first()
        assert group is not None, "pop of an empty queue"
        heapq.heappop(self._heap)
        del self._ready[group]
        return group

    @property
    def ready(self) -> int:
        """Groups that could be leased."""
        return len(self._ready)

    def oldest(self, now: float) -> float:
        """Seconds since the group that waits longest entered; 0 for an empty queue."""
        first = next(iter(self.entered.values()), None)
        return now - first[1] if first else 0.0

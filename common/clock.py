"""Time as a value: state machines take `now`, processes take a `Clock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Return seconds since an arbitrary origin; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the seconds it was moved to."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` >= 0 and return the new time."""
        assert seconds >= 0, "a clock never goes back"
        self._now += seconds
        return self._now

"""A reward outside the registry that takes its time until it is told to hurry, so that a run has a middle to act in.

It waits without a CPU, so the middle is as long on a machine that is busy.
"""

import threading
from pathlib import Path

from common.settings import Table
from workers.reward.reward import Response


class Paced:
    """1 for a response that begins with the label, else 0."""

    class Options(Table):
        """`seconds` a sample, as long as there is no file `until` in the working folder."""

        seconds: float = 0.02
        until: str = "hurry"

    def __init__(self, options: Options) -> None:
        self._options = options
        self._never = threading.Event()

    def score(self, response: Response) -> float:
        """Return the score, in time."""
        if not Path(self._options.until).exists():
            self._never.wait(self._options.seconds)
        return float(response.text[:1] == response.label)

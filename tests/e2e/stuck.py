"""An engine outside the registry whose first process hangs in the middle of its work, with its heartbeats going on."""

import threading
from contextlib import suppress
from pathlib import Path

from workers.rollout.engine import Completion
from workers.rollout.engines.fake import FakeEngine


class HangsOnce(FakeEngine):
    """Hangs in its fifth step if it is the first of the run to come so far: it leaves a file in the working folder."""

    class Options(FakeEngine.Options):
        """Those of the engine that it is otherwise."""

    _steps = 0

    def step(self, wait_seconds: float) -> list[Completion]:
        """Step, or never return."""
        self._steps += 1
        if self._steps == 5:
            with suppress(FileExistsError):
                Path("hung").touch(exist_ok=False)
                threading.Event().wait()
        return super().step(wait_seconds)

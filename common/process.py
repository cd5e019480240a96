"""What every process of a run does alike: react to signals, write files whole, turn errors into one line and a code."""

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from common.allocator import keep_freed_memory
from common.errors import RelaxError


class Stop:
    """A flag that SIGTERM and SIGINT set. Every wait looks at it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> "Stop":
        """Let SIGTERM and SIGINT set the flag; a second SIGINT ends the process at once."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        return self

    def set(self) -> None:
        """Ask for an orderly end."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether an orderly end was asked for."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, at most `seconds`; return whether it is."""
        return self._event.wait(seconds)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._event.is_set():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._event.set()


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run an entry point: an error of ours becomes one line on stderr (a line each mistake) and its exit code."""
    keep_freed_memory()
    try:
        code = main() or 0
    except RelaxError as error:
        for line in str(error).splitlines():
            print(f"{type(error).__name__}: {line}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def write_atomically(path: Path, content: Mapping[str, Any] | str) -> None:
    """Write a file so that a reader sees all of it or nothing: temporary file, fsync, rename.

    A failure leaves the old file and no temporary one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

"""A reward process as its parent sees it: start it, give it a chunk, watch it, end it and whatever it started."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import cast

import msgpack

from common.errors import WorkerError, from_wire
from common.settings import Component
from workers.reward.board import SIZE, Board
from workers.reward.reward import Response

END_SECONDS = 5.0
BOOT = """
import sys
pipe, board, parent = map(int, sys.argv[1:4])
sys.path[:] = sys.argv[4:]
from workers.reward.child import main
main(pipe, board, parent)
"""


class RewardProcess:
    """One child in a process group of its own, so that ending it also ends what the reward started.

    `ready`: the reward is built. `chunk`: numbers of the samples in hand, empty when idle. `cursor`: place in `chunk`
    of the first sample that has not ended. `since`: monotonic seconds of its last sign of progress.
    """

    def __init__(self, reward: Component) -> None:
        self.connection, theirs = Pipe()
        with theirs, tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            self._board = Board(file.fileno())
            inherited = (theirs.fileno(), file.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, *map(str, inherited), str(os.getpid()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                process_group=0,
            )
        self.ready = False
        self.chunk: list[int] = []
        self.cursor = 0
        self.since = time.monotonic()
        # A child that is gone already is noticed when its answer is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(cast(bytes, msgpack.packb({"name": reward.name, "options": reward.options})))

    @property
    def idle(self) -> bool:
        """Whether it could take a chunk."""
        return self.ready and not self.chunk

    @property
    def blocking(self) -> bool:
        """Whether samples wait behind the one in hand."""
        return len(self.chunk) > self.cursor + 1

    def give(self, chunk: list[int], responses: Sequence[Response]) -> None:
        """Send the samples with these numbers; raises `OSError` when the process is gone. Only when ready and idle."""
        fields = [
            (r.text, r.finish_reason, r.label, r.prompt_id, r.messages) for r in (responses[number] for number in chunk)
        ]
        self._board.clear(len(chunk))
        self.connection.send_bytes(cast(bytes, msgpack.packb(fields)))
        self.chunk, self.cursor, self.since = chunk, 0, time.monotonic()

    def receive(self) -> dict[int, str]:
        """Read its message: it becomes ready, or says what went wrong in its chunk, by place.

        Raises the error it reports if its reward cannot be built, `EOFError` or `OSError` when the process is gone.
        """
        message = msgpack.unpackb(self.connection.recv_bytes())
        if self.ready:
            self.look()
            return dict(message)
        if message is not None:
            raise from_wire(*message)
        self.ready = True
        return {}

    def look(self) -> bool:
        """Bring `cursor` and `since` up to date; return whether the sample at the cursor has begun."""
        while self.cursor < len(self.chunk) and self._board.ended[self.cursor]:
            self.since = self._board.ended[self.cursor]
            self.cursor += 1
        begun = self._board.started[self.cursor] if self.cursor < len(self.chunk) else 0.0
        self.since = begun or self.since
        return begun > 0

    def result(self, place: int) -> tuple[float, float]:
        """Return (score, seconds it took) of a sample before the cursor; the score is NaN if the reward failed."""
        return self._board.scores[place], self._board.ended[place] - self._board.started[place]

    def recall(self) -> list[int]:
        """Take back the samples behind the one in hand; one that begins just now is scored twice and counted once."""
        kept = self.cursor + 1
        self._board.limit[0] = kept
        taken, self.chunk = self.chunk[kept:], self.chunk[:kept]
        return taken

    def end(self) -> int:
        """Kill it and what it started, free its memory after a last look, and return its exit code.

        Raises `WorkerError` when it outlives SIGKILL.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"reward process {self._process.pid} outlived SIGKILL by {END_SECONDS} s") from error

    def release(self) -> None:
        """Free the board; after `end` and the last look at results."""
        self._board.close()

    def leave(self, deadline: float) -> None:
        """Let an idle process end by itself until `deadline` (monotonic seconds), then end it the hard way."""
        self.connection.close()
        if self.ready and not self.chunk:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        self.end()
        self.release()

"""Scores batches in killable processes: no sample can take longer than its limit, or take another one with it.

A process works through a chunk of samples; how far it is stands on a board in shared memory, so a chunk costs one
message each way and the limit still holds for each sample. Chunks are sized to take `CHUNK_SECONDS`.

What a batch waits for at most: with N processes and H samples that never end, ceil(H / N) times the limit and the start
of a process (a few tenths of a second), beside the time of the samples that do end.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import TracebackType
from typing import Literal, Self, TypeAlias

from common.errors import WorkerError
from common.logs import get
from common.settings import Component
from workers.reward.board import CAPACITY
from workers.reward.process import RewardProcess
from workers.reward.reward import Response

Status: TypeAlias = Literal["ok", "timeout", "failed", "aborted"]

CHUNK_SECONDS = 0.02
FIRST_CHUNK = 8
RECALL_SECONDS = 0.05
START_SECONDS = 60.0
STALL_SECONDS = 30.0
TICK_SECONDS = 0.01
CLOSE_SECONDS = 1.0
SHORTEST_SECONDS = 1e-6
MAX_LOSSES = 3

_log = get("reward")


@dataclass(frozen=True, slots=True)
class Scored:
    """Outcome of one sample. `score` is 0.0 and means nothing unless the status is ok."""

    score: float
    status: Status


@dataclass(slots=True)
class _Batch:
    """One call's samples. `waiting`: numbers of those that no process has. `trouble`: prompt and reason by number."""

    responses: Sequence[Response]
    waiting: deque[int]
    results: dict[int, Scored] = field(default_factory=dict[int, Scored])
    trouble: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def spoil(self, number: int, status: Status, reason: str) -> None:
        self.results[number] = Scored(0.0, status)
        self.trouble.append((self.responses[number].prompt_id, reason))


class RewardPool:
    """`processes` children that each hold one `reward`, and a limit of `timeout_seconds` per sample.

    A limit of 0 allows nothing to run: every sample times out. Construction waits until every child is ready; it raises
    `ConfigError` when the reward is unknown or its options are wrong, `WorkerError` when it cannot be built.
    """

    def __init__(self, reward: Component, processes: int, timeout_seconds: float) -> None:
        self._reward = reward
        self._timeout_seconds = timeout_seconds
        self._seconds_per_sample = CHUNK_SECONDS / FIRST_CHUNK
        self._losses = 0
        self._children: list[RewardProcess] = []
        try:
            for _ in range(processes):
                self._children.append(RewardProcess(reward))
            nothing = _Batch([], deque())
            while not all(child.ready for child in self._children):
                self._turn(nothing)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def score(self, responses: Sequence[Response], ended: Callable[[int], object] = lambda _: None) -> list[Scored]:
        """Return one outcome per response, in their order; meanwhile tell `ended` whenever so many more have one.

        Status `timeout`: the limit passed; `failed`: the reward raised, gave no finite float32, or its process died.
        Raises `WorkerError` when a replacement cannot be started.
        """
        if self._timeout_seconds == 0:
            return [Scored(0.0, "timeout")] * len(responses)
        for child in [child for child in self._children if child.chunk]:
            self._replace(child)  # an exception left it with the samples of an earlier call
        batch = _Batch(responses, deque(range(len(responses))))
        while len(batch.results) < len(responses):
            before = len(batch.results)
            self._hand_out(batch)
            self._turn(batch)
            if len(batch.results) > before:
                ended(len(batch.results) - before)
        if batch.trouble:
            statuses = Counter(scored.status for scored in batch.results.values())
            prompt, reason = batch.trouble[0]
            _log.warning("samples not scored", **statuses, first_prompt=prompt, first_reason=reason)
        return [batch.results[number] for number in range(len(responses))]

    def close(self) -> None:
        """End all children."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._children:
            self._children.pop().leave(deadline)

    def _hand_out(self, batch: _Batch) -> None:
        idle = [child for child in self._children if child.idle]
        if idle and not batch.waiting:
            now = time.monotonic()
            for child in self._children:
                if child.blocking and now >= child.since + RECALL_SECONDS:
                    batch.waiting.extend(child.recall())
        fair = math.ceil(len(batch.waiting) / len(self._children))
        size = min(CAPACITY, max(1, fair), max(1, int(CHUNK_SECONDS / self._seconds_per_sample)))
        for child in idle:
            chunk = [batch.waiting.popleft() for _ in range(min(size, len(batch.waiting)))]
            if not chunk:
                return
            try:
                child.give(chunk, batch.responses)
            except OSError:  # it died while idle: no sample's fault
                batch.waiting.extendleft(reversed(chunk))
                self._replace(child)

    def _turn(self, batch: _Batch) -> None:
        """Wait until a child reports or something is due, then act on it."""
        ready = wait([child.connection for child in self._children], self._patience())
        for child in [child for child in self._children if child.connection in ready]:
            self._receive(child, batch)
        for child in list(self._children):
            self._check(child, batch)

    def _patience(self) -> float:
        """Return seconds until a child has to be looked at again."""
        now = time.monotonic()
        due = [now + STALL_SECONDS]
        idle = any(child.idle for child in self._children)
        for child in self._children:
            if not child.ready:
                due.append(child.since + START_SECONDS)
            if child.chunk:
                # A sample that has not begun yet will be due at the earliest when one that began now would be.
                begun = child.look()
                due.append(max(child.since + self._timeout_seconds, now + (0 if begun else TICK_SECONDS)))
            if idle and child.blocking:
                due.append(child.since + RECALL_SECONDS)
        return max(0.0, min(due) - now)

    def _receive(self, child: RewardProcess, batch: _Batch) -> None:
        try:
            failures = child.receive()
        except (EOFError, OSError):
            self._lose(child, batch, "failed", "its process ended by itself while it ran")
            return
        if child.chunk:
            self._collect(child, batch, failures)
            child.chunk = []

    def _check(self, child: RewardProcess, batch: _Batch) -> None:
        """Lose a child that is over a limit; raises `WorkerError` for one that does not start."""
        begun = child.look()
        seconds = time.monotonic() - child.since
        if begun and seconds >= self._timeout_seconds:
            self._lose(child, batch, "timeout", f"took longer than rewards.timeout_seconds = {self._timeout_seconds}")
        elif child.chunk and not begun and seconds >= STALL_SECONDS:
            self._lose(child, batch, "failed", "")
        elif not child.ready and seconds >= START_SECONDS:
            raise WorkerError(f"reward {self._reward.name!r}: not ready {START_SECONDS} s after its process started")

    def _lose(self, child: RewardProcess, batch: _Batch, status: Status, reason: str) -> None:
        """End a child, keep what it finished, blame the sample that it was in, and queue the others again."""
        code = child.end()
        if not child.ready:
            raise WorkerError(f"reward {self._reward.name!r}: its process ended with code {code} before it was ready")
        begun = child.look()
        self._collect(child, batch, {})
        rest = child.chunk[child.cursor :]
        if begun:
            batch.spoil(rest.pop(0), status, f"{reason} (exit code {code})")
            self._losses = 0
        batch.waiting.extendleft(reversed(rest))
        self._replace(child)

    def _collect(self, child: RewardProcess, batch: _Batch, failures: dict[int, str]) -> None:
        """Take over the results of the samples that ended. `failures`: what their rewards raised, by place."""
        total_seconds = 0.0
        for place, number in enumerate(child.chunk[: child.cursor]):
            score, seconds = child.result(place)
            total_seconds += seconds
            if seconds >= self._timeout_seconds:
                batch.spoil(number, "timeout", f"took {seconds:.3f} s")
            elif math.isnan(score):
                batch.spoil(number, "failed", failures.get(place, "the reward raised"))
            else:
                batch.results[number] = Scored(score, "ok")
        if child.cursor:
            self._seconds_per_sample = max(SHORTEST_SECONDS, total_seconds / child.cursor)
            self._losses = 0

    def _replace(self, child: RewardProcess) -> None:
        """Start another process in place of this one; raises `WorkerError` when that leads nowhere."""
        self._losses += 1
        if self._losses > MAX_LOSSES * len(self._children):
            raise WorkerError(f"reward {self._reward.name!r}: {self._losses} processes ended without touching a sample")
        child.end()
        child.release()
        self._children[self._children.index(child)] = RewardProcess(self._reward)

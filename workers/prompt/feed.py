"""Feeds the rollout queue: train prompts in the order of the schedule, held-out prompts when an evaluation wants them.

The place in the order is the sequence number, and the broker knows how far it has come, so a prompt worker that
restarts goes on exactly where its predecessor stopped.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

import structlog

from brokers.channel import Pending, wait
from brokers.client import SampleClient
from common.errors import ConfigError, Damaged, QueueFull, Reject, WorkerError
from common.group import GroupKey
from common.process import Stop
from common.section import Section
from common.settings import Config
from workers.prompt.schedule import Schedule
from workers.prompt.source import Row, Source

_log = structlog.get_logger(part="prompt")


class Encoder(Protocol):
    """Turns a row into the sections that the prompt stage adds."""

    def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
        """Return the sections; raises `Reject` for a row that cannot be encoded."""
        ...


PROMPTS_AT_ONCE = 16
IDLE_SECONDS = 0.05
"""how long to wait for room in the queue before looking for an evaluation"""
REJECTED_IN_A_ROW = 100
"""rows that may be refused one after the other before the data set is taken to be wrong"""


class Feed:
    """One prompt worker's work; the broker's `next_seq` says where it begins."""

    def __init__(self, config: Config, source: Source, encoder: Encoder, client: SampleClient, stop: Stop) -> None:
        self._config = config
        self._source = source
        self._encoder = encoder
        self._client = client
        self._stop = stop
        self._schedule = Schedule(len(source.train), config.epochs, config.seed)
        self._next = client.next_seq["train"]
        self._heldout = source.heldout[: config.evaluation.prompts]
        if config.evaluation.prompts and not self._heldout:
            raise ConfigError(
                f"setting 'evaluation.prompts' = {config.evaluation.prompts}, but data source {config.data.name!r} has "
                "no held-out rows: give it some, or set evaluation.prompts = 0"
            )
        self._adding: Pending | None = None
        self._held_up = False
        self._data_ended = False
        self._rejected = 0

    def turn(self) -> None:
        """Do what can be done now, else wait a moment for room or for an evaluation."""
        if self._evaluate():
            return
        if self._adding is None:
            self._add()
        if self._adding is None:
            self._stop.wait(IDLE_SECONDS)
            return
        futures.wait([self._adding], IDLE_SECONDS)
        self._tell(self._client.held_up if not self._adding.done() else "")
        if self._adding.done():
            try:
                wait(self._adding)
            except (QueueFull, Damaged):  # what was not taken in is offered again, a repeat is ignored
                self._next = self._client.next_seq["train"]
            self._adding = None

    def _tell(self, held_up: str) -> None:
        """Log once that prompts wait, and for what, and once that they wait no more."""
        if bool(held_up) != self._held_up:
            _log.info("prompts wait: " + held_up if held_up else "prompts are taken in again")
        self._held_up = bool(held_up)

    def _add(self) -> None:
        """Offer the next prompts; at the end of the data, say so."""
        groups: list[tuple[GroupKey, Sequence[Section]]] = []
        while len(groups) < PROMPTS_AT_ONCE and (place := self._schedule.row_of(self._next)) is not None:
            sections = self._encoded(self._source.train[place[1]])
            if sections is not None:
                groups.append((GroupKey(f"train-{self._next}", self._next), sections))
            self._next += 1
        if groups:
            self._adding = self._client.add(groups, self._config.broker.request_seconds)
        elif not self._data_ended:
            self._client.end_of_data()
            self._data_ended = True

    def _evaluate(self) -> bool:
        """Add held-out prompts of an evaluation that was asked for and is not complete; False if there is none.

        An evaluation is a number only if it is over all of its prompts, so none of them is skipped.
        """
        asked, version = self._client.evaluation
        size, first = len(self._heldout), self._client.next_seq["eval"]
        if first >= asked * size:
            return False
        groups: list[tuple[GroupKey, Sequence[Section]]] = []
        sampling = {"temperature": self._config.evaluation.temperature, "num_samples": 1}
        for seq in range(first, min(first + PROMPTS_AT_ONCE, asked * size)):
            min_version = version if seq // size == asked - 1 else 0
            key = GroupKey(f"eval-{seq}", seq, "eval", min_version)
            try:
                groups.append((key, self._encoder.encode(self._heldout[seq % size], sampling, size)))
            except Reject as error:
                raise ConfigError(
                    f"a held-out row of data source {self._config.data.name!r}: {error.reason}"
                ) from error
        wait(self._client.add(groups, self._config.broker.request_seconds))
        return True

    def _encoded(self, row: Row) -> Sequence[Section] | None:
        """Return the sections of a row, or None for one that is skipped because it cannot be encoded."""
        try:
            sections = self._encoder.encode(row, {}, 0)
        except Reject as error:
            self._rejected += 1
            _log.error("row skipped", row=row.id, reason=error.reason)
            if self._rejected >= REJECTED_IN_A_ROW:
                name = self._config.data.name
                raise WorkerError(f"{self._rejected} rows of data source {name!r} in a row: {error}") from error
            return None
        self._rejected = 0
        return sections

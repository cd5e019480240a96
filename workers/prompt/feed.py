"""Feeds the rollout queue: train prompts in the order of the schedule, held-out prompts when an evaluation wants them.

The place in the order is the sequence number, and the broker knows how far it has come, so a prompt worker that
restarts goes on exactly where its predecessor stopped.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import structlog

from brokers.channel import Pending, wait
from brokers.client import SampleClient
from common.config import Config
from common.errors import QueueFull, Reject, WorkerError
from common.group import GroupKey
from common.section import Section
from workers.prompt.schedule import Schedule
from workers.prompt.source import Row, Source

_log = structlog.get_logger(part="prompt")


class Encoder(Protocol):
    """Turns a row into the sections that the prompt stage adds."""

    def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
        """Return the sections; raises `Reject` for a row that cannot be encoded."""
        ...


REJECTED_IN_A_ROW = 100
"""rows that may be refused one after the other before the data set is taken to be wrong"""


class Feed:
    """`next_seq`: first train and first eval prompt that the broker does not know."""

    def __init__(
        self, config: Config, source: Source, encoder: Encoder, client: SampleClient, next_seq: Mapping[str, int]
    ) -> None:
        self._config = config
        self._source = source
        self._encoder = encoder
        self._client = client
        self._schedule = Schedule(len(source.train), config.epochs, config.seed)
        self._next_train, self._next_eval = next_seq["train"], next_seq["eval"]
        self._heldout = source.heldout[: config.evaluation.prompts]
        self._adding: Pending | None = None
        self._data_ended = False
        self._rejected = 0

    def turn(self) -> bool:
        """Do one thing that can be done now; False when there is nothing to do but wait."""
        return self._evaluate() or self._train()

    def _train(self) -> bool:
        if self._adding is not None:
            if not self._adding.done():
                return False
            with suppress(QueueFull):  # rollout is behind: the same prompt is offered again
                wait(self._adding)
                self._next_train += 1
            self._adding = None
        place = self._schedule.row_of(self._next_train)
        if place is None:
            if not self._data_ended:
                self._client.end_of_data()
            self._data_ended = True
            return False
        key = GroupKey(f"train-{self._next_train}", self._next_train)
        sections = self._encoded(self._source.train[place[1]])
        if sections is None:
            self._next_train += 1
            return True
        self._adding = self._client.add(key, sections, self._config.broker.request_seconds)
        return True

    def _evaluate(self) -> bool:
        """Add one held-out prompt of an evaluation that was asked for and is not complete."""
        asked, version = self._client.evaluation
        size = len(self._heldout)
        if self._next_eval >= asked * size:
            return False
        number = self._next_eval % size
        min_version = version if self._next_eval // size == asked - 1 else 0
        key = GroupKey(f"eval-{self._next_eval}", self._next_eval, "eval", min_version)
        sampling = {"temperature": self._config.evaluation.temperature, "num_samples": 1}
        sections = self._encoder.encode(self._heldout[number], sampling, size)
        wait(self._client.add(key, sections, self._config.broker.request_seconds))
        self._next_eval += 1
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

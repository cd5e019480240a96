"""Small parts of a run in memory: settings, prompts, a reward without a process, a backend that takes notes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.columns import SCHEMAS
from common.config import check
from common.errors import Reject
from common.group import Group, concatenate
from common.section import Section, encode
from common.settings import Config
from common.tensor import NamedTensor, from_numpy
from workers import registry
from workers.prompt.schedule import Schedule
from workers.prompt.source import Row

NOWHERE = Path("nowhere")
END = 1
"""the stop id of these runs"""


def config(**settings: Any) -> Config:
    """Four groups of two samples a step, six tokens each, one epoch, no evaluation, on-policy."""
    tree: dict[str, Any] = {
        "name": "run",
        "steps": 3,
        "epochs": 1,
        "groups_per_step": 4,
        "group_size": 2,
        "max_staleness": 0,
        "model": {"path": "none"},
        "data": {"name": "mod10"},
        "sampling": {"max_tokens": 6},
        "evaluation": {"prompts": 0},
        "engine": {"name": "fake", "vocabulary": 18},
        "backend": {"name": "fake"},
        "algorithm": {"name": "grpo"},
        "broker": {"lease_seconds": 1e6},
    }
    return check({**tree, **settings}, registry.options)


class Rows:
    """A data source of `train` and `heldout` rows."""

    def __init__(self, train: int, heldout: int = 0, **sampling: Any) -> None:
        self.train: Sequence[Row] = [row(f"train/{i}", **sampling) for i in range(train)]
        self.heldout: Sequence[Row] = [row(f"heldout/{i}") for i in range(heldout)]


def in_order(settings: Config, rows: Sequence[Row]) -> Rows:
    """A source from which the first epoch draws these rows in this order."""
    schedule, source = Schedule(len(rows), 1, settings.seed), Rows(0)
    places = [schedule.row_of(seq) for seq in range(len(rows))]
    numbers = [place[1] for place in places if place]
    source.train = [rows[numbers.index(number)] for number in range(len(rows))]
    return source


def row(name: str, **sampling: Any) -> Row:
    return Row(name, ({"role": "user", "content": name},), name, sampling=sampling)


class Encoder:
    """A prompt of three tokens, whatever the row. `raw`: text of the column `sampling` by row, instead of its JSON."""

    def __init__(self, raw: Mapping[str, str] | None = None) -> None:
        self.raw = raw or {}
        self.encoded: list[str] = []

    def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
        self.encoded.append(row.id)
        sampling_text = self.raw.get(row.id, json.dumps({**row.sampling, **sampling}))
        prompt: dict[str, Any] = {
            "prompt_id": [row.id],
            "messages": [json.dumps(row.messages)],
            "label": [row.label],
            "source": ["rows"],
            "reward_kind": [row.reward_kind],
            "sampling": [sampling_text],
            "evaluation_size": [evaluation_size],
        }
        inputs = {
            "prompt_ids": concatenate([[3, 4, 5]], "int32"),
            "placeholder_start": concatenate([[]], "int32"),
            "placeholder_length": concatenate([[]], "int32"),
        }
        empty = [encode(name, {column: [] for column in SCHEMAS[name].names}) for name in ("media", "tensors")]
        return [encode("prompt", prompt), encode("inputs", inputs), *empty]


class ByLength:
    """A reward without a process: 0, 1, 2 ... for the samples of a group, shifted by the prompt's number."""

    requires = frozenset({"text", "finish_reason", "label", "reward_kind", "prompt_id", "messages"})
    adds = frozenset({"reward", "reward_status"})

    def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
        return [
            encode(
                "reward",
                {
                    "reward": [float(i + group.key.seq % 3) for i in range(group.num_samples)],
                    "reward_status": ["ok" if r != "abort" else "aborted" for r in group.values("finish_reason")],
                },
            )
            for group in groups
        ]


class Recorder:
    """A training backend that remembers what it was asked for; it refuses the groups in `refused`."""

    def __init__(self, events: list[str], *refused: str) -> None:
        self.events, self.refused, self.pieces, self.updates = events, refused, list[list[str]](), 0

    def prepare_training(self, algorithm: Any, total_steps: int | None) -> None:
        self.events.append("prepare")

    def accumulate(self, groups: Sequence[Group]) -> None:
        names = [group.key.id for group in groups]
        if bad := [name for name in names if name in self.refused]:
            raise Reject(f"{bad[0]} is malformed")
        self.events.append("accumulate")
        self.pieces.append(names)

    def update(self) -> Mapping[str, float]:
        self.events.append("update")
        self.updates += 1
        return {"loss": 0.5}

    def weights(self) -> Iterator[NamedTensor]:
        return iter([from_numpy("w", np.full(2, self.updates, np.float32))])

    def offload(self) -> None:
        self.events.append("offload")

    def reload(self) -> None:
        self.events.append("reload")


class Report:
    """Keeps the rows that a run's report would write."""

    def __init__(self) -> None:
        self.rows = list[Mapping[str, Any]]()

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

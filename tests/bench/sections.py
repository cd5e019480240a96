"""The batches of `workloads` as the sections of groups, and back."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from brokers.record import StageSpec
from common.columns import SCHEMAS
from common.group import Group, Purpose, concatenate
from common.section import Section, encode
from tests.bench.workloads import GROUPS, SAMPLES, Batch, Column

PAYLOAD = {
    "ragged": frozenset({"reference", "advantage", "response"}),
    "images": frozenset({"media", "tokens"}),
    "small": frozenset({"tokens"}),
}
"""the sections that carry each workload"""
BOTH: frozenset[Purpose] = frozenset({"train", "eval"})


def stages(workload: str) -> list[StageSpec]:
    """Rollout adds the payload, reward reads it, the trainer never gets anything."""
    payload, none = PAYLOAD[workload], frozenset[str]()
    return [
        StageSpec("rollout", frozenset({"prompt"}), payload, BOTH),
        StageSpec("reward", payload, none, BOTH),
        StageSpec("trainer", payload | {"reward"}, none, BOTH),
    ]


def empty_prompt() -> Section:
    """A prompt that says nothing."""
    names = ("prompt_id", "messages", "label", "source", "reward_kind")
    return encode("prompt", {**{name: [""] for name in names}, "sampling": ["{}"], "evaluation_size": [0]})


Columns: TypeAlias = dict[str, dict[str, Any]]
"""columns by section, as Arrow has them"""


def columns(batch: Batch) -> list[Columns]:
    """Return the columns of every group: what a worker holds before it puts them."""
    return [_group_columns(batch, group) for group in range(GROUPS)]


def encoded(groups: Sequence[Columns]) -> list[list[Section]]:
    """Return the sections of every group: columns in."""
    return [[encode(name, section) for name, section in group.items()] for group in groups]


def decoded(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the columns of every group, as Arrow has them or as numpy views: columns out."""
    found: list[dict[str, Any]] = []
    for group in groups:
        columns: dict[str, Any] = {}
        if "response" in group.sections:
            columns["text"] = group.column("text")
            columns["fixed"], columns["ragged"] = group.arrays("ref_logprobs"), group.arrays("advantages")
        if "tokens" in group.sections:
            columns["ids"], columns["logprobs"] = group.arrays("response_ids"), group.arrays("logprobs")
        if "media" in group.sections:
            columns["image"] = group.column("media_data")
        found.append(columns)
    return found


def restored(found: Sequence[dict[str, Any]]) -> Batch:
    """Return what was decoded as a batch again, to be compared with the one that was sent."""
    by_sample: dict[str, list[Any]] = {}
    by_group: dict[str, list[Any]] = {}
    for columns in found:
        for name, values in columns.items():
            rows = values.to_pylist() if isinstance(values, pa.Array) else list(values)
            if name == "image":
                by_group.setdefault(name, []).extend(np.frombuffer(row, np.uint8) for row in rows)
            elif name in ("ids", "logprobs"):
                by_sample.setdefault(name, []).extend(rows)
            else:
                for number in range(3):
                    by_sample.setdefault(f"{name}_{number}", []).extend(rows[number * SAMPLES : (number + 1) * SAMPLES])
    return Batch(by_sample, by_group)


def _group_columns(batch: Batch, group: int) -> Columns:
    rows = slice(group * SAMPLES, (group + 1) * SAMPLES)

    def three(name: str) -> list[Any]:
        return [row for number in range(3) for row in batch.by_sample[f"{name}_{number}"][rows]]

    if "text_0" in batch.by_sample:
        text = three("text")
        count = len(text)
        return {
            "reference": {"ref_logprobs": concatenate(three("fixed"), "float32")},
            "advantage": {
                "advantages": concatenate(three("ragged"), "float32"),
                "loss_weight": pa.array(np.zeros(count, np.float32)),
            },
            "response": _arrays("response", text=text, finish_reason=["stop"] * count, num_tokens=[0] * count),
        }
    found = {"tokens": _tokens(batch.by_sample["ids"][rows], batch.by_sample["logprobs"][rows])}
    if "image" in batch.by_group:
        image = memoryview(batch.by_group["image"][group])  # pyright: ignore[reportArgumentType]
        names = {"media_hash": [str(group)], "media_kind": ["image"], "media_format": ["image/png"]}
        found["media"] = _arrays("media", **names, media_data=[image])
    return found


def _arrays(section: str, **values: Any) -> dict[str, Any]:
    """Return columns of a section as Arrow arrays."""
    return {name: pa.array(rows, SCHEMAS[section].field(name).type) for name, rows in values.items()}


def _tokens(ids: Column, logprobs: Column) -> dict[str, Any]:
    return {
        "response_ids": concatenate(ids, "int32"),
        "logprobs": concatenate(logprobs, "float32"),
        "span_start": concatenate([[0]] * SAMPLES, "int32"),
        "span_version": concatenate([[0]] * SAMPLES, "int64"),
        **_arrays("tokens", temperature=[1.0] * SAMPLES, seed=[0] * SAMPLES),
    }

"""Every column that a group can carry, declared once: type, owner, section, unit and meaning.

A section is the set of columns that travel together as one Arrow IPC stream. Sections of one owner differ in who needs
them: the reward stage reads `response` and never receives log-probs, the advantage stage never receives pixels.

Variable-length data is `large_*`: 32-bit offsets overflow at 2 GiB. No column holds nulls.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

Rows = Literal["prompt", "sample", "media", "tensor"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `rows` says what a row is (the prompt itself, one sample, one medium, one tensor)."""

    name: str
    type: pa.DataType
    owner: str
    section: str
    rows: Rows
    meaning: str
    unit: str = ""


_TEXT, _BYTES = pa.large_string(), pa.large_binary()
_IDS, _LONGS, _FLOATS = pa.large_list(pa.int32()), pa.large_list(pa.int64()), pa.large_list(pa.float32())

_DECLARED = (
    Column("prompt_id", _TEXT, "prompt", "prompt", "prompt", "stable name of the row in its source"),
    Column("messages", _TEXT, "prompt", "prompt", "prompt", "chat messages as JSON; media are named by content hash"),
    Column("label", _TEXT, "prompt", "prompt", "prompt", "what a reward compares with"),
    Column("source", _TEXT, "prompt", "prompt", "prompt", "data source the prompt came from"),
    Column("reward_kind", _TEXT, "prompt", "prompt", "prompt", "reward that scores it; empty: the run's own"),
    Column("sampling", _TEXT, "prompt", "prompt", "prompt", "JSON object of settings that override the run's"),
    Column("evaluation_size", pa.int32(), "prompt", "prompt", "prompt", "prompts in its evaluation; 0 in training"),
    Column("prompt_ids", _IDS, "prompt", "inputs", "prompt", "tokens, placeholders expanded", "token ids"),
    Column("placeholder_start", _IDS, "prompt", "inputs", "prompt", "first token of each media run", "token index"),
    Column("placeholder_length", _IDS, "prompt", "inputs", "prompt", "length of each media run", "tokens"),
    Column("media_hash", _TEXT, "prompt", "media", "media", "xxh3-128 of the encoded bytes, hexadecimal"),
    Column("media_kind", _TEXT, "prompt", "media", "media", "image, video or audio"),
    Column("media_format", _TEXT, "prompt", "media", "media", "MIME type of the encoded bytes"),
    Column("media_data", _BYTES, "prompt", "media", "media", "encoded bytes (PNG, JPEG, WAV, MP4 ...)", "bytes"),
    Column("tensor_name", _TEXT, "prompt", "tensors", "tensor", "keyword of the model's forward pass"),
    Column("tensor_dtype", _TEXT, "prompt", "tensors", "tensor", "numpy name, or bfloat16 carried as uint16"),
    Column("tensor_shape", _LONGS, "prompt", "tensors", "tensor", "shape of the processor's output"),
    Column("tensor_per_token", pa.bool_(), "prompt", "tensors", "tensor", "last axis is the prompt; 0 for a response"),
    Column("tensor_data", _BYTES, "prompt", "tensors", "tensor", "little-endian values in C order", "bytes"),
    Column("text", _TEXT, "rollout", "response", "sample", "decoded response without special tokens"),
    Column("finish_reason", _TEXT, "rollout", "response", "sample", "stop, length or abort"),
    Column("num_tokens", pa.int32(), "rollout", "response", "sample", "length of the response", "tokens"),
    Column("response_ids", _IDS, "rollout", "tokens", "sample", "sampled tokens, end mark included", "token ids"),
    Column("logprobs", _FLOATS, "rollout", "tokens", "sample", "behaviour log-prob at `temperature`", "nats"),
    Column("temperature", pa.float32(), "rollout", "tokens", "sample", "divisor of the logits behind `logprobs`"),
    Column("span_start", _IDS, "rollout", "tokens", "sample", "first response token of each span", "token index"),
    Column("span_version", _LONGS, "rollout", "tokens", "sample", "policy version that made the span", "updates"),
    Column("seed", pa.int64(), "rollout", "tokens", "sample", "seed of (run, prompt, sample, attempt)"),
    Column("reward", pa.float32(), "reward", "reward", "sample", "score; meaningless unless the status is ok"),
    Column("reward_status", _TEXT, "reward", "reward", "sample", "ok, timeout, failed or aborted"),
    Column("ref_logprobs", _FLOATS, "reference", "reference", "sample", "reference log-prob at `temperature`", "nats"),
    Column("advantages", _FLOATS, "advantage", "advantage", "sample", "advantage of each response token"),
    Column("loss_weight", pa.float32(), "advantage", "advantage", "sample", "0 keeps a sample out of every sum"),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _DECLARED}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(column.section for column in _DECLARED))
SCHEMAS: dict[str, pa.Schema] = {
    section: pa.schema([pa.field(c.name, c.type, nullable=False) for c in _DECLARED if c.section == section])
    for section in SECTIONS
}


def sections_of(columns: Iterable[str]) -> frozenset[str]:
    """Return the sections that hold these columns; raises `KeyError` for a column nobody declared."""
    return frozenset(COLUMNS[name].section for name in columns)


def columns_of(owner: str) -> frozenset[str]:
    """Return the columns that a stage owns, that is, may add."""
    return frozenset(column.name for column in _DECLARED if column.owner == owner)

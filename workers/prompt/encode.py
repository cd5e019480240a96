"""A row of a data source to the sections of a prompt: chat template, token ids, media and processor outputs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from common.errors import ConfigError, Reject
from common.group import concatenate
from common.section import Section, encode
from common.tensor import NamedTensor
from workers.models.load import load_processor, to_named
from workers.processed import expected_placeholders
from workers.prompt.media import clip_of, image_of, sound_of
from workers.prompt.source import Medium, Row

KINDS = ("image", "video", "audio")


class PromptEncoder:
    """Encodes for the model in `folder`. Not thread-safe, as tokenizers are not: one thread calls it.

    `source`: name of the data source, for the column of that name. Raises `ConfigError` when the folder has no
    processor or tokenizer, or no chat template.
    """

    def __init__(self, folder: Path, source: str = "") -> None:
        self._folder, self._source = folder, source
        self._processor = load_processor(folder)
        self._tokenizer: Any = getattr(self._processor, "tokenizer", None)
        self._takes_media = self._tokenizer is not None
        if not self._takes_media:
            self._tokenizer = self._processor
        if not self._processor.chat_template:
            raise ConfigError(f"setting 'model.path': {folder} has no chat template")
        self._marks: dict[str, str] = {}
        if self._takes_media:
            marks = {kind: getattr(self._processor, f"{kind}_token", None) for kind in KINDS}
            self._marks = {kind: str(mark) for kind, mark in marks.items() if mark}
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self._marks = {kind: mark for kind, mark in self._marks.items() if mark in vocabulary}
        self._mark_ids = {kind: vocabulary[mark] for kind, mark in self._marks.items()}

    def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> list[Section]:
        """Return the sections prompt, inputs, media and tensors.

        `sampling`: settings that override the row's. `evaluation_size`: prompts in its evaluation, 0 in training.

        Raises `Reject` that names the row: its parts and media do not match, its text holds a placeholder of the model,
        a medium cannot be decoded, or the placeholders are not as many as the media features. Raises `ConfigError` when
        the model does not take a kind of media or a decoder is not installed.
        """
        try:
            messages = self._named(row)
            outputs = self._processed(row)
            ids_L = outputs.pop("input_ids")
            self._check(ids_L, outputs)
        except Reject as error:
            raise Reject(f"prompt {row.id!r}: {error.reason}") from error
        starts, lengths = runs_of(ids_L, list(self._mark_ids.values()))
        return [
            encode(
                "prompt",
                {
                    "prompt_id": [row.id],
                    "messages": [messages],
                    "label": [row.label],
                    "source": [self._source],
                    "reward_kind": [row.reward_kind],
                    "sampling": [json.dumps({**row.sampling, **sampling})],
                    "evaluation_size": [evaluation_size],
                },
            ),
            encode(
                "inputs",
                {
                    "prompt_ids": concatenate([ids_L], "int32"),
                    "placeholder_start": concatenate([starts], "int32"),
                    "placeholder_length": concatenate([lengths], "int32"),
                },
            ),
            _media_section(row.media),
            _tensors_section([to_named(name, tensor) for name, tensor in outputs.items()], len(ids_L)),
        ]

    def _named(self, row: Row) -> str:
        """Return the messages as JSON, each media part with the hash of its medium."""
        media = {kind: [m.hash for m in row.media if m.kind == kind] for kind in KINDS}
        used = dict.fromkeys(KINDS, 0)
        named: list[dict[str, Any]] = []
        for message in row.messages:
            content: Any = message["content"]
            if isinstance(content, Sequence) and not isinstance(content, str):
                if not all(isinstance(part, Mapping) for part in content):
                    raise Reject(f"a part of a message is an object, not {content!r}")
                content = [dict(part) for part in content]
                for part in content:
                    kind = part.get("type")
                    if kind in used:
                        part["hash"] = media[kind][used[kind]] if used[kind] < len(media[kind]) else ""
                        used[kind] += 1
            named.append({**message, "content": content})
        for kind in KINDS:
            if used[kind] != len(media[kind]):
                raise Reject(f"its messages hold {used[kind]} parts of type {kind}, its media {len(media[kind])}")
            if media[kind] and kind not in self._marks:
                raise ConfigError(f"prompt {row.id!r} holds {kind}, which the model in {self._folder} does not take")
        text = json.dumps(named, ensure_ascii=False)
        for kind, mark in self._marks.items():
            # As text it would become a placeholder without a medium.
            if mark in text:
                raise Reject(f"its text holds {mark!r}, which stands for {kind} in this model")
        try:
            (text + row.label + row.id).encode()
        except UnicodeEncodeError as error:
            raise Reject(f"its text is not Unicode: {error}") from error
        return text

    def _processed(self, row: Row) -> dict[str, Any]:
        """Return the outputs of the processor: `input_ids` as int64 [L], the others as torch tensors."""
        messages = [dict(message) for message in row.messages]
        try:
            text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise Reject(f"the chat template refuses its messages: {error}") from error
        # The template has written every special token that belongs there.
        if not self._takes_media:
            return {"input_ids": np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)}
        media = self._decoded(row)
        try:
            outputs = self._processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
        except (ValueError, IndexError) as error:
            raise Reject(f"the processor refuses it: {error}") from error
        found = {name: value for name, value in outputs.items() if name != "attention_mask"}
        return {**found, "input_ids": found["input_ids"][0].numpy()}

    def _decoded(self, row: Row) -> dict[str, Any]:
        """Return the media as keywords of the processor."""
        media: dict[str, Any] = {}
        images = [image_of(medium) for medium in row.media if medium.kind == "image"]
        clips = [clip_of(medium) for medium in row.media if medium.kind == "video"]
        if images:
            media["images"] = images
        if clips:
            media["videos"] = [frames for frames, _ in clips]
            media["video_metadata"] = [facts for _, facts in clips]
        if any(medium.kind == "audio" for medium in row.media):
            rate = self._processor.feature_extractor.sampling_rate
            media["audio"] = [sound_of(medium, rate) for medium in row.media if medium.kind == "audio"]
            media["sampling_rate"] = rate
        return media

    def _check(self, ids_L: np.ndarray[Any, Any], outputs: Mapping[str, Any]) -> None:
        for kind, mark_id in self._mark_ids.items():
            grid = outputs.get(f"{kind}_grid_thw")
            if kind == "audio":
                continue  # features have no grid; the processor has matched sounds and placeholders
            merge = getattr(self._processor, f"{kind}_processor").merge_size if grid is not None else 1
            check_placeholders(kind, int((ids_L == mark_id).sum()), [] if grid is None else grid.tolist(), merge)


def _media_section(media: Sequence[Medium]) -> Section:
    columns = {
        "media_hash": [medium.hash for medium in media],
        "media_kind": [medium.kind for medium in media],
        "media_format": [medium.format for medium in media],
        "media_data": [medium.data for medium in media],
    }
    return encode("media", columns)


def _tensors_section(tensors: Sequence[NamedTensor], num_tokens: int) -> Section:
    columns = {
        "tensor_name": [tensor.name for tensor in tensors],
        "tensor_dtype": [tensor.dtype for tensor in tensors],
        "tensor_shape": [list(tensor.shape) for tensor in tensors],
        "tensor_per_token": [is_per_token(tensor, num_tokens) for tensor in tensors],
        "tensor_data": [tensor.data for tensor in tensors],
    }
    return encode("tensors", columns)


def check_placeholders(kind: str, num_found: int, grids: Sequence[Sequence[int]], merge_size: int) -> None:
    """Raise `Reject` unless a prompt holds as many placeholders as media of these grids take."""
    expected = expected_placeholders(grids, merge_size)
    if num_found != expected:
        raise Reject(f"{num_found} {kind} placeholders, but its {kind} features fill {expected}")


def runs_of(ids_L: np.ndarray[Any, Any], mark_ids: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (first token, length) of every run of one and the same placeholder id."""
    none = -1
    marks_L = np.where(np.isin(ids_L, mark_ids), ids_L, none)
    borders = np.concatenate([[0], np.flatnonzero(np.diff(marks_L)) + 1, [len(ids_L)]])
    starts, lengths = borders[:-1], np.diff(borders)
    of_media = marks_L[starts] != none if len(ids_L) else np.zeros(len(starts), bool)
    return starts[of_media], lengths[of_media]


def is_per_token(tensor: NamedTensor, num_tokens: int) -> bool:
    """Whether a processor output says something of each prompt token: integer type ids of shape [1, num_tokens].

    The name is part of the rule: the mask of a sound can be as long as the prompt by chance.
    """
    integer = np.dtype(tensor.dtype).kind in "iu" if tensor.dtype != "bfloat16" else False
    return integer and tensor.shape == (1, num_tokens) and tensor.name.endswith("type_ids")

"""Prompts from JSON Lines files, one object a line, read when they are asked for."""

import json
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from common.errors import ConfigError
from common.settings import Table
from workers.prompt.source import Medium, Row, Rows


class Jsonl:
    """Each object holds chat messages or a plain prompt, a label, and paths of its media relative to its file."""

    class Options(Table):
        """`path`, `heldout_path`: the files; no `heldout_path` means no held-out rows.

        The rest names keys of an object. One of `messages` (list of chat messages) and `prompt` (text of one user
        message) must be there; optional are `label` (text or number), `media` (list of paths), `reward_kind` and `id`
        (text) and `sampling` (settings that override the run's, see `workers.rollout.requests.Overrides`).
        """

        path: str
        heldout_path: str = ""
        messages: str = "messages"
        prompt: str = "prompt"
        label: str = "label"
        media: str = "media"
        reward_kind: str = "reward_kind"
        id: str = "id"
        sampling: str = "sampling"

    def __init__(self, options: Options, seed: int) -> None:
        del seed  # the rows and their numbers are those of the file
        self.train: Sequence[Row] = _Lines(Path(options.path), options, "data.path")
        self.heldout: Sequence[Row] = ()
        if options.heldout_path:
            self.heldout = _Lines(Path(options.heldout_path), options, "data.heldout_path")


class _Lines(Rows):
    """Byte offset and line number of every line that is not blank; the lines stay in the file."""

    def __init__(self, path: Path, options: Jsonl.Options, setting: str) -> None:
        self._path, self._options = path, options
        offsets: list[int] = []
        numbers: list[int] = []
        try:
            with path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        offsets.append(offset)
                        numbers.append(number)
                    offset += len(line)
        except OSError as error:
            raise ConfigError(f"setting {setting!r} = {str(path)!r}: {error.strerror}") from error
        if not offsets:
            raise ConfigError(f"setting {setting!r} = {str(path)!r}: the file holds no line")
        self._offsets, self._numbers = np.asarray(offsets, np.int64), np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> Row:
        """Read a line; raises `ConfigError` that names it when it cannot be a prompt."""
        line = int(self._numbers[number])
        try:
            with self._path.open("rb") as file:
                file.seek(int(self._offsets[number]))
                found: Any = json.loads(file.readline())
            if not isinstance(found, dict):
                raise ValueError(f"an object is expected, not {type(found).__name__}")
            return self._row(line, cast(dict[str, Any], found))
        except OSError as error:
            raise ConfigError(f"{self._path}, line {line}: {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{self._path}, line {line}: {error}") from error

    def _row(self, number: int, found: dict[str, Any]) -> Row:
        """Raises `ValueError` for what cannot be a prompt, `OSError` for a medium that cannot be read."""
        keys = self._options
        media = tuple(self._medium(path) for path in _typed(found, keys.media, list, []))
        label = found.get(keys.label, "")
        if isinstance(label, bool) or not isinstance(label, (str, int, float)):
            raise ValueError(f"key {keys.label!r} must hold text or a number, not {label!r}")
        return Row(
            id=_typed(found, keys.id, str, f"{self._path.stem}/{number}"),
            messages=self._messages(found),
            label=str(label),
            media=media,
            reward_kind=_typed(found, keys.reward_kind, str, ""),
            sampling=_typed(found, keys.sampling, dict, {}),
        )

    def _messages(self, found: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        keys = self._options
        if keys.messages not in found:
            if keys.prompt not in found:
                raise ValueError(f"neither key {keys.messages!r} nor key {keys.prompt!r} is there")
            return ({"role": "user", "content": _typed(found, keys.prompt, str, "")},)
        messages = _typed(found, keys.messages, list, [])
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= set(cast(dict[str, Any], message)):
                raise ValueError(
                    f"key {keys.messages!r}: a message is an object with role and content, not {message!r}"
                )
        if not messages:
            raise ValueError(f"key {keys.messages!r} holds no message")
        return messages

    def _medium(self, name: Any) -> Medium:
        if not isinstance(name, str):
            raise ValueError(f"key {self._options.media!r} must hold paths, not {name!r}")
        mime = mimetypes.guess_type(name)[0] or ""
        kind = mime.partition("/")[0]
        if kind not in ("image", "video", "audio"):
            raise ValueError(f"{name!r}: the ending names no image, video or audio format")
        return Medium(kind, mime, (self._path.parent / name).read_bytes())


def _typed(found: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = found.get(key, default)
    if not isinstance(value, kind):
        raise ValueError(f"key {key!r} must hold {kind.__name__}, not {value!r}")
    return value

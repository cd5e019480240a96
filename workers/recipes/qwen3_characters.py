"""A Qwen3 of random weights with one token per character, for text tasks that are learned from nothing."""

from pathlib import Path
from typing import Any

from pydantic import Field

from common.seeds import seed_of
from common.settings import Table
from workers.prompt.source import Source


class Qwen3Characters:
    """About 0.3 million parameters as it stands."""

    class Options(Table):
        """`characters`: all that texts may hold; the rest of the vocabulary is padding, end and unknown.

        `initializer_range`: standard deviation of the weights; a small model learns several times faster from 0.1.
        """

        characters: str = "0123456789+="
        hidden: int = Field(128, gt=0)
        layers: int = Field(2, gt=0)
        heads: int = Field(4, gt=0)
        kv_heads: int = Field(2, gt=0)
        context: int = Field(128, gt=0)
        initializer_range: float = Field(0.02, gt=0)

    def __init__(self, options: Options) -> None:
        self._options = options

    def make(self, folder: Path, source: Source, seed: int) -> None:
        """Write the model into `folder`."""
        from workers.models.tiny import write_tiny_text  # noqa: PLC0415 - configurations are checked without torch

        del source
        sizes: dict[str, Any] = self._options.model_dump()
        write_tiny_text(folder, **sizes, seed=seed_of(seed, "model") % 2**31)

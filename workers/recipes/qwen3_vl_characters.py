"""A Qwen3-VL of random weights with one token per character, warmed up on a few labelled rows of the run's own data.

Without a warm-up, reward alone finds the way too, in about three times the work.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from common.seeds import seed_of
from common.settings import Table
from workers.prompt.source import Source


class Qwen3VlCharacters:
    """About 0.3 million parameters as it stands."""

    class Options(Table):
        """`layers`, `depth`: layers of the language model and of the vision tower. `initializer_range`: of all weights.

        `warmup_steps`: supervised updates on `warmup_rows` labelled rows each, at `warmup_lr`.
        """

        characters: str = "0123456789LRUDQ:<>. seconds"
        hidden: int = Field(64, gt=0)
        layers: int = Field(2, gt=0)
        depth: int = Field(2, gt=0)
        initializer_range: float = Field(0.02, gt=0)
        warmup_steps: int = Field(0, ge=0)
        warmup_rows: int = Field(32, gt=0)
        warmup_lr: float = Field(1e-3, gt=0)

    def __init__(self, options: Options) -> None:
        self._options = options

    def make(self, folder: Path, source: Source, seed: int) -> None:
        """Write the model into `folder`."""
        from workers.models.tiny import write_tiny_vision  # noqa: PLC0415 - configurations are checked without torch
        from workers.models.warmup import warm_up  # noqa: PLC0415

        options = self._options
        sizes: dict[str, Any] = options.model_dump(exclude={"warmup_steps", "warmup_rows", "warmup_lr"})
        write_tiny_vision(folder, **sizes, seed=seed_of(seed, "model") % 2**31)
        warm_up(folder, source, options.warmup_steps, options.warmup_rows, options.warmup_lr, seed)

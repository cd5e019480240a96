"""Recipes that make an initial model; one file each, the file name is the recipe's name."""

from pathlib import Path
from typing import Protocol

from pydantic import BaseModel

from workers.prompt.source import Source


class Recipe(Protocol):
    """`Recipe(options)`."""

    Options: type[BaseModel]

    def make(self, folder: Path, source: Source, seed: int) -> None:
        """Write a Hugging Face model with tokenizer and processor into `folder`."""
        ...

"""Handwritten digits of scikit-learn: 1,797 real images of 8x8 pixels, asked for as one character."""

import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from common.errors import ConfigError
from common.seeds import seed_of
from common.settings import Table
from workers.prompt.source import Medium, Row, Rows


class Digits:
    """An image and a question; the label is the digit. A random share of the images is held out."""

    class Options(Table):
        """`question`: text after the image. `heldout_share`: share of the images that training never sees."""

        question: str = "Q:"
        heldout_share: float = Field(1 / 6, gt=0, lt=1)

    def __init__(self, options: Options, seed: int) -> None:
        pixels_N88, digits_N = _load()
        num_images = len(digits_N)
        order = np.random.default_rng(seed_of(seed, "digits", "heldout")).permutation(num_images)
        heldout = int(num_images * options.heldout_share)
        self.train: Sequence[Row] = _Images(options.question, pixels_N88, digits_N, order[heldout:])
        self.heldout: Sequence[Row] = _Images(options.question, pixels_N88, digits_N, order[:heldout])


class _Images(Rows):
    """Images by their number in the data set (`numbers_M`), encoded as PNG when they are asked for.

    N: all images, M: the ones of this part. `pixels_N88`: uint8, 0 to 255.
    """

    def __init__(self, question: str, pixels_N88: Any, digits_N: Any, numbers_M: Any) -> None:
        self._question, self._pixels_N88, self._digits_N, self._numbers_M = question, pixels_N88, digits_N, numbers_M

    def __len__(self) -> int:
        return len(self._numbers_M)

    def row(self, number: int) -> Row:
        """Return image and question."""
        image_number = int(self._numbers_M[number])
        content = [{"type": "image"}, {"type": "text", "text": self._question}]
        image = Medium("image", "image/png", _png(self._pixels_N88[image_number]))
        messages = ({"role": "user", "content": content},)
        return Row(f"digits/{image_number}", messages, str(int(self._digits_N[image_number])), (image,))


def _load() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    try:
        datasets: Any = importlib.import_module("sklearn.datasets")
        importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(f"data 'digits' needs {error.name}: pip install 'relaxq[demo,torch]'") from error
    bunch: Any = datasets.load_digits()
    grey_levels = 16
    return (bunch.images / grey_levels * 255).astype(np.uint8), bunch.target


def _png(pixels_88: np.ndarray[Any, Any]) -> bytes:
    images: Any = importlib.import_module("PIL.Image")
    file = io.BytesIO()
    images.fromarray(pixels_88).convert("RGB").save(file, format="PNG")
    return file.getvalue()

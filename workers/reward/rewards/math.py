"""Mathematical equality by the package math-verify: 1/2 is 0.5, sets and matrices are equal in any notation."""

import importlib
import logging
import re
from typing import Any

from pydantic import Field

from common.errors import ConfigError
from common.settings import Table
from workers.reward.reward import Response

_TAGS = re.compile(r"</?answer>")


class Math:
    """1 if the answer that math-verify finds in the response equals the label, else 0.

    The answer is looked for in the last `<answer>` element where there is one, else in the whole text (`\\boxed{}`,
    `####`, the last number). The package's own time limit is off: it would turn a slow proof of equality into a wrong
    answer, where the pool's limit says `timeout`.
    """

    class Options(Table):
        """`digits`: decimal places to which numbers must agree."""

        digits: int = Field(6, ge=0)

    def __init__(self, options: Options) -> None:
        try:
            library: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise ConfigError("reward 'math' needs the package math-verify: pip install 'relaxq[math]'") from error
        # It warns once that its own time limit is off, as it is meant to be.
        logging.getLogger(library.__name__).setLevel(logging.ERROR)
        self._parse, self._verify = library.parse, library.verify
        self._digits = options.digits
        # What the first call imports (0.4 s) must not count against a sample.
        self._verify(self._expressions("$1$"), self._expressions("$1$"), timeout_seconds=None)

    def score(self, response: Response) -> float:
        """Return 0 or 1; raises `ValueError` for a label that is no expression."""
        # In this order: the package compares differently when an answer is given as the gold one.
        gold = self._expressions(response.label)
        if not gold:
            raise ValueError(f"label {response.label!r} is not an expression that math-verify can read")
        answer = self._expressions(_answer_of(response.text))
        return float(self._verify(gold, answer, float_rounding=self._digits, timeout_seconds=None))

    def _expressions(self, text: str) -> list[Any]:
        return self._parse(text, parsing_timeout=None)


def _answer_of(text: str) -> str:
    """Return the content of the last `<answer>` element, else the text; the package reads nothing between such tags."""
    last = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return _TAGS.sub("", last)

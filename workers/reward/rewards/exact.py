"""Compares the response with the label; credit in part gets a policy off the ground that is never right at first."""

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from common.settings import Table
from workers.reward.reward import Response


class Exact:
    """1 if the response is the label, else the sum of the shares it earns, which is 0 by default."""

    class Options(Table):
        """How to compare. The three shares may add up to 1 at most.

        `strip`: leave out white space at both ends of response and label. `require_stop`: a response that was cut off
        is not exact. `character_share`: times the share of the label's characters that are in their place. `form`:
        regular expression that a well-formed answer begins with, worth `form_share`. `stop_share`: for a response that
        has text and ended by itself.
        """

        strip: bool = True
        require_stop: bool = True
        character_share: float = Field(0.0, ge=0, le=1)
        form: str = ""
        form_share: float = Field(0.0, ge=0, le=1)
        stop_share: float = Field(0.0, ge=0, le=1)

        @field_validator("form")
        @classmethod
        def _compiles(cls, form: str) -> str:
            try:
                re.compile(form)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
            return form

        @model_validator(mode="after")
        def _adds_up(self) -> Self:
            shares = self.character_share + self.form_share + self.stop_share
            if shares > 1:
                raise ValueError(f"character_share + form_share + stop_share = {shares}, more than an exact answer's 1")
            return self

    def __init__(self, options: Options) -> None:
        self._options = options
        self._form = re.compile(options.form)

    def score(self, response: Response) -> float:
        """Return a score from 0 to 1."""
        options = self._options
        text, label = response.text, response.label
        if options.strip:
            text, label = text.strip(), label.strip()
        stopped = response.finish_reason == "stop"
        if text == label and (stopped or not options.require_stop):
            return 1.0
        score = 0.0
        if options.character_share and label:
            right = sum(a == b for a, b in zip(text, label, strict=False))
            score += options.character_share * right / len(label)
        if options.form_share and text and self._form.match(text):
            score += options.form_share
        if options.stop_share and text and stopped:
            score += options.stop_share
        return score

"""What a reward is: one function of one response."""

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Response:
    """What a reward may look at. `messages`: the chat as JSON."""

    text: str
    finish_reason: str
    label: str
    prompt_id: str
    messages: str


class Reward(Protocol):
    """`Reward(options)`. It runs in a child process that is killed when a sample takes too long."""

    Options: type[BaseModel]

    def score(self, response: Response) -> float:
        """Return the score. Any exception makes this sample's status `failed`, never a score of 0."""
        ...

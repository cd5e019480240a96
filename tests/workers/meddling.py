"""A reward that tries to change what it was given, for the scenarios."""

import json

from common.settings import Table
from workers.reward.reward import Response


class Meddler:
    """The score is the number of chat messages, to which it then adds one; "write" writes into the response itself."""

    class Options(Table):
        """Nothing."""

    def __init__(self, options: Options) -> None:
        del options

    def score(self, response: Response) -> float:
        messages = json.loads(response.messages)
        messages.append({"role": "user", "content": "more"})
        if response.text == "write":
            response.messages = json.dumps(messages)  # pyright: ignore[reportAttributeAccessIssue]
        return float(len(messages) - 1)

"""A reward that does what the response tells it to, for the tests of the pool."""

import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.settings import Table
from workers.reward.reward import Response


class Obey:
    """Hang, die, raise, or return something odd; a number is returned as it is."""

    class Options(Table):
        factor: float = 1.0

    def __init__(self, options: Options) -> None:
        self._factor = options.factor

    def score(self, response: Response) -> Any:
        odd = {"none": None, "text": "1.0", "nan": float("nan"), "infinite": float("inf"), "huge": 1e39}
        fine = {"true": True, "fraction": Fraction(1, 4), "torch": float("torch" in sys.modules)}
        match response.text.split():
            case ["hang"]:
                while True:
                    pass
            case ["say", word]:
                os.write(1, word.encode())
                while True:
                    pass
            case ["spawn", path]:
                with Path(path).open("wb") as pipe:
                    return subprocess.run(["sleep", "60"], stdout=pipe, check=True).returncode
            case ["spend", seconds]:
                end = time.monotonic() + float(seconds)
                while time.monotonic() < end:
                    pass
                return 1.0
            case ["exit"]:
                os._exit(7)
            case ["leave"]:
                sys.exit(3)
            case ["crash"]:
                os.kill(os.getpid(), signal.SIGSEGV)
                raise AssertionError("survived")
            case ["raise"]:
                raise ValueError("no such verifier")
            case ["pid"]:
                return float(os.getpid())
            case [word] if word in odd:
                return odd[word]
            case [word] if word in fine:
                return fine[word]
            case [number]:
                return float(number) * self._factor
            case _:
                raise AssertionError(response.text)


class Broken:
    """Cannot be built."""

    class Options(Table):
        pass

    def __init__(self, options: Options) -> None:
        raise FileNotFoundError("the answer key is not there")


class Dying:
    """Takes its process with it while it is being built."""

    class Options(Table):
        pass

    def __init__(self, options: Options) -> None:
        os._exit(9)

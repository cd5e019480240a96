"""The reward process: one `Reward`, chunks of samples in, scores onto the board, until the pipe closes.

Everything runs in the main thread, so a reward may use signals. Messages are msgpack; no torch is imported.
"""

import ctypes
import math
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import msgpack
from pydantic import ValidationError

from common.errors import RelaxError
from common.settings import Component
from workers.registry import create
from workers.reward.board import Board
from workers.reward.reward import Response, Reward

LARGEST = (2 - 2**-23) * 2.0**127
"""Largest finite float32, the type of the reward column."""

MESSAGE_CHARACTERS = 300


def main(pipe: int, board: int, parent: int) -> None:
    """Serve the parent over the two inherited descriptors `pipe` and `board`.

    First message in: {name, options} of the reward; out: None, or [kind of error, message] if it cannot be built. Then
    [fields of `Response`, ...] in and [[index, what went wrong], ...] out, a pair per chunk.
    """
    _die_with(parent)
    with Connection(pipe) as connection:
        try:
            first = msgpack.unpackb(connection.recv_bytes())
            reward, trouble = _build(Component(name=first["name"], **first["options"]))
            connection.send_bytes(cast(bytes, msgpack.packb(trouble)))
            if reward is not None:
                _serve(connection, Board(board), reward)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _build(component: Component) -> tuple[Reward | None, list[str] | None]:
    try:
        return create("reward", component), None
    except RelaxError as error:
        return None, [type(error).__name__, str(error)]
    except ValidationError as error:
        places = "; ".join(f"'reward.{'.'.join(map(str, e['loc']))}': {e['msg']}" for e in error.errors())
        return None, ["ConfigError", f"reward {component.name!r}, setting {places}"]
    except Exception as error:  # noqa: BLE001 - a reward is foreign code; the parent reports what it raised
        return None, ["WorkerError", f"reward {component.name!r} cannot be built: {_told(error)}"]


def _serve(connection: Connection, board: Board, reward: Reward) -> None:
    while True:
        failures: list[tuple[int, str]] = []
        for index, fields in enumerate(msgpack.unpackb(connection.recv_bytes())):
            if index >= board.limit[0]:
                break
            board.started[index] = time.monotonic()
            try:
                board.scores[index] = _finite(reward.score(Response(*fields)))
            except Exception as error:  # noqa: BLE001 - a reward is foreign code; its error is this sample's status
                failures.append((index, _told(error)))
                board.scores[index] = math.nan
            board.ended[index] = time.monotonic()
        connection.send_bytes(cast(bytes, msgpack.packb(failures)))


def _finite(score: Any) -> float:
    """Return the score; raises for what a float32 column cannot hold as a finite number."""
    if isinstance(score, (str, bytes)):
        raise TypeError(f"score {score!r} is not a number")
    number = float(score)
    if not abs(number) <= LARGEST:
        raise ValueError(f"score {number} is not a finite float32")
    return number


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


def _die_with(parent: int) -> None:
    """Make the kernel end this process with its parent, even in the middle of a sample (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()

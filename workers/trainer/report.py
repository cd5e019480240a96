"""What one step looked like: rewards, staleness and where the time went, from the groups that were trained."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brokers.client import Leased
from common.metrics import MetricsFile, spread


class StepReport:
    """Gathers the groups of one step. `version`: the trainer's version while it consumes them."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._started = time.monotonic()
        self._waited = 0.0
        self._leases: list[Leased] = []

    def waited(self, seconds: float) -> None:
        """The trainer had nothing to do for `seconds`."""
        self._waited += seconds

    def add(self, leases: Sequence[Leased]) -> None:
        """These groups are part of the step."""
        self._leases += leases

    def row(self, update: Mapping[str, float]) -> dict[str, Any]:
        """Return the step's row. Staleness counts updates, from the oldest span of each group; times are seconds."""
        rewards, spreadless, statuses, lengths = list[float](), 0, Counter[str](), list[float]()
        truncated = 0
        for leased in self._leases:
            group = leased.group
            status = group.values("reward_status")
            scored = [reward for reward, s in zip(group.values("reward"), status, strict=True) if s == "ok"]
            rewards += scored
            spreadless += len(set(scored)) <= 1
            statuses.update(status)
            lengths += group.values("num_tokens")
            truncated += group.values("finish_reason").count("length")
        seconds = time.monotonic() - self._started
        samples = len(lengths)
        return {
            "kind": "step",
            "step": self._version + 1,
            "version": self._version + 1,
            "groups": len(self._leases),
            "samples": samples,
            "reward": float(np.mean(rewards)) if rewards else float("nan"),
            "reward_std": float(np.std(rewards)) if rewards else float("nan"),
            "rewards_failed": samples - statuses["ok"],
            "zero_spread_groups": spreadless,
            "truncated": truncated / max(1, samples),
            **spread("length", lengths),
            **spread("staleness", [self._version - leased.version_min for leased in self._leases]),
            **spread("generation_s", [leased.generation_s for leased in self._leases]),
            **spread("queue_s", [leased.queue_s for leased in self._leases]),
            **update,
            "wait_s": self._waited,
            "step_s": seconds,
            "samples_per_s": samples / seconds,
        }


class RunReport:
    """Rows to `metrics.jsonl` and, where TensorBoard is installed, to its event files."""

    def __init__(self, folder: Path) -> None:
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional: relaxq[plots]

            self._board = SummaryWriter(str(folder / "tensorboard"))
        except ImportError:
            pass  # the metrics file is complete without it

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row; numbers go to TensorBoard under the row's kind."""
        self._file.write({"time": time.time(), **row})
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, int | float) and name != "version":
                    self._board.add_scalar(f"{row['kind']}/{name}", value, int(row["version"]))

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()

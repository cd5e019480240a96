"""Collects the answers to held-out prompts into one number per evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from brokers.client import Leased


@dataclass(slots=True)
class _Answers:
    rewards: list[float] = field(default_factory=list[float])
    failed: int = 0
    versions: set[int] = field(default_factory=set[int])


class Evaluations:
    """Groups belong to the evaluation number `seq // evaluation_size`; each counts once."""

    def __init__(self, solved_at: float) -> None:
        self._solved_at = solved_at
        self._open: dict[int, _Answers] = {}
        self.done = 0

    def collect(self, leases: Sequence[Leased]) -> Iterator[dict[str, Any]]:
        """Take in evaluated groups; yield the result of every evaluation that is complete with them."""
        for leased in leases:
            group = leased.group
            size = group.value("evaluation_size")
            number = group.key.seq // size
            answers = self._open.setdefault(number, _Answers())
            answers.versions.add(leased.version_min)
            for reward, status in zip(group.values("reward"), group.values("reward_status"), strict=True):
                if status == "ok":
                    answers.rewards.append(reward)
                else:
                    answers.failed += 1
            if len(answers.rewards) + answers.failed == size:
                self.done += 1
                yield self._result(self._open.pop(number), size)

    def _result(self, answers: _Answers, size: int) -> dict[str, Any]:
        rewards = np.asarray(answers.rewards, dtype=np.float64)
        return {
            "kind": "evaluation",
            "version": min(answers.versions),
            "version_max": max(answers.versions),
            "prompts": size,
            "failed": answers.failed,
            "heldout": float((rewards >= self._solved_at).sum() / size),
            "heldout_reward": float(rewards.mean()) if len(rewards) else float("nan"),
        }

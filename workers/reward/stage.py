"""The reward stage: responses in, a score and a status per sample out."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from common.errors import ConfigError, WorkerError
from common.group import Group
from common.logs import get
from common.section import Section, encode
from common.settings import Component, Rewards
from workers.registry import find
from workers.reward.pool import RewardPool, Scored
from workers.reward.reward import Response

_log = get("reward")

_ABORTED = Scored(0.0, "aborted")
_FAILED = Scored(0.0, "failed")


class RewardStage:
    """Scores with the run's `reward`, or with the registered one that a prompt names as its `reward_kind`.

    A prompt names rewards of the registry only: code outside it is named by the configuration, not by data. A kind that
    cannot be had gives its samples the status `failed`.
    """

    requires: ClassVar[frozenset[str]] = frozenset(
        {"text", "finish_reason", "label", "reward_kind", "prompt_id", "messages"}
    )
    adds: ClassVar[frozenset[str]] = frozenset({"reward", "reward_status"})

    def __init__(self, reward: Component, limits: Rewards, report: Callable[[int], object] = lambda _: None) -> None:
        """Prepare the run's reward. `report`: told how many samples have an outcome so far, while it scores."""
        self._limits = limits
        self._report = report
        self._samples = 0
        self._pools: dict[str, RewardPool | None] = {"": self._pool(reward)}

    def handle(self, groups: Sequence[Group]) -> list[Section]:
        """Return one `reward` section per group. Rows whose status is not ok hold 0.0, which means nothing."""
        outcomes = [[_ABORTED] * group.num_samples for group in groups]
        tasks: dict[str, list[tuple[int, int, Response]]] = {}
        for number, group in enumerate(groups):
            kind = group.value("reward_kind")
            shared = (group.value("label"), group.value("prompt_id"), group.value("messages"))
            pairs = zip(group.values("text"), group.values("finish_reason"), strict=True)
            for sample, (text, finish_reason) in enumerate(pairs):
                if finish_reason != "abort":
                    response = Response(text, finish_reason, *shared)
                    tasks.setdefault(kind, []).append((number, sample, response))
        for kind, of_kind in tasks.items():
            pool = self._pool_of(kind)
            responses = [response for _, _, response in of_kind]
            scores = pool.score(responses, self._ended) if pool else [_FAILED] * len(responses)
            for (number, sample, _), scored in zip(of_kind, scores, strict=True):
                outcomes[number][sample] = scored
        return [
            encode("reward", {"reward": [s.score for s in samples], "reward_status": [s.status for s in samples]})
            for samples in outcomes
        ]

    def _ended(self, samples: int) -> None:
        self._samples += samples
        self._report(self._samples)

    def close(self) -> None:
        """End all reward processes."""
        for pool in self._pools.values():
            if pool:
                pool.close()

    def _pool(self, reward: Component) -> RewardPool:
        return RewardPool(reward, self._limits.processes, self._limits.timeout_seconds)

    def _pool_of(self, kind: str) -> RewardPool | None:
        """Return the kind's pool, made when it is first asked for; None, said once, if it cannot be had."""
        if kind not in self._pools:
            try:
                if ":" in kind:
                    raise ConfigError(f"reward_kind {kind!r} names code outside the registry; data may not")
                find("reward", kind)
                self._pools[kind] = self._pool(Component(name=kind))
            except (ConfigError, WorkerError) as error:
                _log.error("reward kind not available, its samples fail", kind=kind, reason=str(error))
                self._pools[kind] = None
        return self._pools[kind]

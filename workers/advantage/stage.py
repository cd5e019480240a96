"""The advantage stage: the first half of the algorithm, as a stage of its own."""

from collections.abc import Sequence
from typing import ClassVar

from common.group import Group
from common.section import Section
from common.settings import Config
from workers import registry
from workers.trainer.algorithm import Algorithm


class AdvantageStage:
    """Turns the rewards of a group into advantages of its tokens."""

    requires: ClassVar[frozenset[str]] = frozenset(
        {"reward", "reward_status"}
    )  # and what the algorithm reads; see wiring
    adds: ClassVar[frozenset[str]] = frozenset({"advantages", "loss_weight"})

    def __init__(self, config: Config) -> None:
        self._algorithm: Algorithm = registry.create("algorithm", config.algorithm)

    def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
        """Return one `advantage` section per group."""
        return self._algorithm.advantage(groups)

"""Which stages a configuration needs and what each requires and adds; the order follows, it is not written down."""

from collections.abc import Sequence
from dataclasses import dataclass

from brokers.record import StageSpec
from common.columns import COLUMNS, columns_of, sections_of
from common.errors import ConfigError
from common.group import Purpose
from common.settings import Config
from workers import registry
from workers.reward.stage import RewardStage
from workers.trainer.algorithm import Algorithm

BOTH: frozenset[Purpose] = frozenset({"train", "eval"})
TRAIN: frozenset[Purpose] = frozenset({"train"})
EVAL: frozenset[Purpose] = frozenset({"eval"})
REPORTED = frozenset({"reward", "reward_status", "num_tokens", "finish_reason"})
"""columns that the trainer reads for the step's report"""


@dataclass(frozen=True, slots=True)
class StageColumns:
    """A stage in terms of columns. `purposes`: which groups pass through it."""

    name: str
    requires: frozenset[str]
    adds: frozenset[str]
    purposes: frozenset[Purpose]

    def spec(self) -> StageSpec:
        """Return the same in terms of sections, as the broker sees it."""
        return StageSpec(self.name, sections_of(self.requires), sections_of(self.adds), self.purposes)


def stages_of(config: Config) -> list[StageColumns]:
    """Return the stages of a run, without the prompt worker, which starts groups rather than serving a queue."""
    engine, backend = registry.find("engine", config.engine.name), registry.find("backend", config.backend.name)
    algorithm: Algorithm = registry.create("algorithm", config.algorithm)
    trained: frozenset[str] = backend.requires | algorithm.loss_requires
    stages = [
        StageColumns("rollout", frozenset({"prompt_id", "sampling"}) | engine.requires, columns_of("rollout"), BOTH),
        StageColumns("reward", RewardStage.requires, RewardStage.adds, BOTH),
        StageColumns("advantage", algorithm.advantage_requires, columns_of("advantage"), TRAIN),
        StageColumns("trainer", trained | REPORTED | {"span_start", "span_version"}, frozenset(), TRAIN),
        StageColumns("evaluate", frozenset({"evaluation_size", "reward", "reward_status"}), frozenset(), EVAL),
    ]
    if "ref_logprobs" in trained:
        scored = backend.requires - columns_of("advantage") | {"prompt_ids", "response_ids", "temperature"}
        stages.insert(2, StageColumns("reference", scored, columns_of("reference"), TRAIN))
    return stages


def check(stages: Sequence[StageColumns], running: frozenset[str]) -> None:
    """Refuse a wiring in which a stage can never become ready.

    `running`: stages that some process serves. Raises `ConfigError` naming the stage, the column and who would add it.
    """
    mistakes: list[str] = []
    for stage in stages:
        unknown = sorted(stage.requires - COLUMNS.keys())
        mistakes += [f"stage {stage.name!r} requires column {name!r}, which nobody declares" for name in unknown]
        if stage.name not in running:
            waiting = [f"{other.name!r}" for other in stages if other.requires & stage.adds]
            missing = frozenset[str]().union(*(other.requires & stage.adds for other in stages))
            mistakes.append(
                f"stage {stage.name!r} has no worker: set workers.{stage.name} to 1 or more, or nobody adds "
                f"{', '.join(f'{name!r}' for name in sorted(missing))} for {', '.join(waiting)}"
            )
    # What a stage without a worker would add is taken to be here: its absence has been told.
    here, left = columns_of("prompt"), list(stages)
    while ready := [stage for stage in left if stage.requires <= here]:
        here |= frozenset[str]().union(*(stage.adds for stage in ready))
        left = [stage for stage in left if stage not in ready]
    for stage in left:
        for name in sorted(stage.requires - here):
            if name in COLUMNS:
                mistakes.append(
                    f"stage {stage.name!r} requires column {name!r}, which can never arrive: its owner "
                    f"{COLUMNS[name].owner!r} is not part of this run or waits for {stage.name!r} itself"
                )
    if mistakes:
        raise ConfigError("\n".join(mistakes))

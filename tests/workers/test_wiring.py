"""Which stages a configuration needs, in which order they follow, and which wirings are refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.columns import COLUMNS, columns_of
from common.config import load
from common.errors import ConfigError
from launch import plan
from pipeline_parts import config
from workers import registry
from workers.advantage.stage import AdvantageStage
from workers.reference.stage import ReferenceStage
from workers.reward.stage import RewardStage
from workers.wiring import BOTH, EVAL, TRAIN, StageColumns, check, stages_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
ALL = frozenset({"rollout", "reward", "reference", "advantage", "trainer", "evaluate"})


def wired(**settings: Any) -> dict[str, StageColumns]:
    return {stage.name: stage for stage in stages_of(config(backend={"name": "torch"}, **settings))}


def order(stages: Sequence[StageColumns]) -> list[set[str]]:
    """Names of the stages, wave by wave: each wave needs what the earlier ones add, and the prompt."""
    here, left, waves = columns_of("prompt"), list(stages), list[set[str]]()
    while ready := [stage for stage in left if stage.requires <= here]:
        waves.append({stage.name for stage in ready})
        here |= frozenset[str]().union(*(stage.adds for stage in ready))
        left = [stage for stage in left if stage not in ready]
    assert not left
    return waves


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_is_read_and_laid_out(path: Path) -> None:
    made = plan.make(plan.read(path, []), Path("/somewhere"))
    roles = {process.role for process in made.processes}
    served = {stage.name for stage in made.stages} - {"evaluate"}
    inline = {"reference", "advantage"} if made.config.mode == "hybrid" else set()
    assert served - inline <= roles
    check(stages_of(made.config), ALL)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize("mode", ["sync", "async", "hybrid"])
def test_every_shipped_configuration_can_be_laid_out_in_every_mode(path: Path, mode: str) -> None:
    made = plan.make(load(path, [f"mode={mode}"], registry.options), Path("/somewhere"))
    roles = [process.role for process in made.processes]
    assert ("reference" in roles or "advantage" in roles) == (mode != "hybrid")


def test_the_shipped_quickstarts_have_a_reference_for_their_penalty() -> None:
    assert len(CONFIGS) >= 2
    for name in ("quickstart-text", "quickstart-image"):
        stages = stages_of(plan.read(ROOT / "configs" / f"{name}.toml", []))
        assert [stage.name for stage in stages] == sorted(ALL, key=[stage.name for stage in stages].index)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_reference_is_part_of_the_run_only_under_a_penalty(kl: float) -> None:
    stages = wired(algorithm={"name": "grpo", "kl": kl})
    assert ("reference" in stages) == (kl > 0)
    assert ("ref_logprobs" in stages["trainer"].requires) == (kl > 0)
    check(list(stages.values()), ALL - ({"reference"} if kl == 0 else set()))


def test_a_run_without_a_penalty_starts_no_reference_worker() -> None:
    made = plan.make(config(), Path("/somewhere"))
    assert "reference" not in {process.role for process in made.processes}


def test_the_order_of_the_stages_follows_from_what_they_require_and_add() -> None:
    waves = order(list(wired(algorithm={"name": "grpo", "kl": 0.1}).values()))
    assert waves == [{"rollout"}, {"reward", "reference"}, {"advantage", "evaluate"}, {"trainer"}]
    waves = order(list(wired().values()))
    assert waves == [{"rollout"}, {"reward"}, {"advantage", "evaluate"}, {"trainer"}]


def test_it_does_not_depend_on_the_order_in_which_they_are_written_down() -> None:
    stages = list(wired(algorithm={"name": "grpo", "kl": 0.1}).values())
    assert order(stages[::-1]) == order(stages)
    check(stages[::-1], ALL)


def test_a_stage_receives_only_the_sections_it_needs() -> None:
    specs = {name: stage.spec() for name, stage in wired(algorithm={"name": "grpo", "kl": 0.1}).items()}
    assert specs["reward"].requires == {"prompt", "response"}  # no log-probs
    assert specs["advantage"].requires == {"response", "reward"}  # no pixels
    assert specs["evaluate"].requires == {"prompt", "reward"}
    assert specs["reference"].requires == {"inputs", "tensors", "tokens"}
    assert specs["trainer"].requires == {
        "inputs",
        "tensors",
        "tokens",
        "response",
        "reward",
        "reference",
        "advantage",
    }
    assert {name: spec.adds for name, spec in specs.items() if not spec.adds} == {"trainer": set(), "evaluate": set()}


def test_held_out_groups_pass_rollout_and_reward_alone() -> None:
    purposes = {name: stage.purposes for name, stage in wired(algorithm={"name": "grpo", "kl": 0.1}).items()}
    assert purposes == {
        "rollout": BOTH,
        "reward": BOTH,
        "reference": TRAIN,
        "advantage": TRAIN,
        "trainer": TRAIN,
        "evaluate": EVAL,
    }


def test_what_a_stage_class_declares_is_what_it_is_wired_for() -> None:
    stages = wired(algorithm={"name": "grpo", "kl": 0.1})
    for name, cls in (("reward", RewardStage), ("reference", ReferenceStage), ("advantage", AdvantageStage)):
        assert cls.requires <= stages[name].requires
        assert cls.adds == stages[name].adds == columns_of(name)


def refusal(stages: Sequence[StageColumns], running: frozenset[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(stages, running)
    return str(caught.value).splitlines()


def test_a_penalty_without_a_reference_worker_names_setting_column_and_who_waits() -> None:
    (line,) = refusal(list(wired(algorithm={"name": "grpo", "kl": 0.1}).values()), ALL - {"reference"})
    words = ("stage 'reference' has no worker", "workers.reference to 1", "'ref_logprobs'", "'trainer'")
    assert all(word in line for word in words), line
    with pytest.raises(ConfigError, match=r"set workers.reference to 1 or more"):
        plan.make(config(algorithm={"name": "grpo", "kl": 0.1}, workers={"reference": 0}), Path("/somewhere"))


@pytest.mark.parametrize(
    ("role", "waiting"),
    [
        ("rollout", {"reward", "advantage", "trainer"}),
        ("reward", {"advantage", "trainer", "evaluate"}),
        ("advantage", {"trainer"}),
    ],
)
def test_a_role_without_a_worker_is_named_with_everybody_who_waits_for_it(role: str, waiting: set[str]) -> None:
    told = "\n".join(refusal(list(wired().values()), ALL - {role}))
    assert f"stage {role!r} has no worker: set workers.{role} to 1 or more" in told
    assert all(f"{stage!r}" in told for stage in waiting)
    assert any(f"{column!r}" in told for column in columns_of(role))


def test_stages_that_wait_for_each_other_are_refused_with_both_columns() -> None:
    stages = wired()
    loop = [
        replace(stages["reward"], requires=stages["reward"].requires | {"advantages"}),
        *(stage for name, stage in stages.items() if name != "reward"),
    ]
    lines = refusal(loop, ALL)
    assert any("stage 'reward' requires column 'advantages'" in line for line in lines)
    assert any("stage 'advantage' requires column 'reward'" in line for line in lines)


def test_a_stage_that_requires_what_it_adds_itself_can_never_begin() -> None:
    stages = wired()
    selfish = replace(stages["reward"], requires=stages["reward"].requires | {"reward"})
    lines = refusal([selfish, *(stage for name, stage in stages.items() if name != "reward")], ALL)
    assert "stage 'reward' requires column 'reward'" in lines[0]


def test_a_column_that_nobody_declares_is_named() -> None:
    stages = wired()
    wrong = replace(stages["advantage"], requires=stages["advantage"].requires | {"rewards"})
    lines = refusal([wrong, *(stage for name, stage in stages.items() if name != "advantage")], ALL)
    assert lines[0] == "stage 'advantage' requires column 'rewards', which nobody declares"
    assert "rewards" not in COLUMNS

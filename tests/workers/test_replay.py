"""A replay in memory: what the worker is handed, when it ends, what is said of it."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from brokers.channel import MemoryBroker
from brokers.client import Result, SampleClient
from brokers.record import StageSpec
from brokers.recording import Recorded, Recording, RunFacts, load
from common.clock import ManualClock
from common.config import to_json
from common.group import GroupKey, concatenate
from common.section import Section, encode
from common.settings import Config
from pipeline_parts import config
from workers import wiring
from workers.replay.material import Material, behind
from workers.replay.outcome import Account, Difference, compare
from workers.replay.service import ReplayService

pytestmark = pytest.mark.unit
BOTH = frozenset({"train", "eval"})
SPECS = {
    "reward": StageSpec("reward", frozenset({"response"}), frozenset({"reward"}), BOTH),
    "rollout": StageSpec("rollout", frozenset({"response"}), frozenset({"reward"}), BOTH),
    "trainer": StageSpec("trainer", frozenset({"response"}), frozenset(), frozenset({"train"})),
}


def response(text: str) -> Section:
    return encode("response", {"text": [text], "finish_reason": ["stop"], "num_tokens": [1]})


def reward(*scores: float) -> Section:
    return encode("reward", {"reward": list(scores), "reward_status": ["ok"] * len(scores)})


def recorded(seq: int, step: int = -1, score: float | None = None, **key: Any) -> Recorded:
    """A group with a response and, where there is a score, what the reward stage had added."""
    group = Recorded(
        GroupKey(f"g{seq}", seq, **key), {"response": response(f"r{seq}")}, step=step, versions=(step, step)
    )
    if score is not None:
        group.added["reward"] = {"reward": reward(score)}
    return group


class World:
    """A worker of `role` and what it was given to replay."""

    def __init__(self, role: str, groups: Sequence[Recorded], settings: Config | None = None) -> None:
        self.settings = settings or config()
        facts = RunFacts("run", json.loads(to_json(self.settings)), Path("/nowhere"))
        order, later = ["rollout", "reward", "advantage", "trainer"], frozenset({"advantage", "trainer"})
        self.material = Material(
            role, Recording(Path("/nowhere")), facts, self.settings, SPECS[role], groups, order, later, Counter()
        )
        self.clock = ManualClock()
        self.service = ReplayService(self.material, "/nowhere", self.clock)
        self.client = SampleClient(MemoryBroker(self.service, self.clock).connect(role, "1"), role)
        self.client.hello(role, "here", 1)
        self.role = role

    def lease(self, want: int = 100, version: int | None = None) -> list[Any]:
        return list(self.client.lease(self.role, want, 0.0, version).leases)

    def put(self, leases: Sequence[Any], *scores: float) -> None:
        results = [Result(leased, [reward(score)]) for leased, score in zip(leases, scores, strict=True)]
        assert self.client.confirm(self.client.put(results), results) == []

    def text(self) -> str:
        return Account(self.material, self.service.outcomes).text(Path("/nowhere"))

    def train(self, version: int) -> list[str]:
        """Make one update of what may be trained at this version; return the groups."""
        batch = self.lease(self.settings.groups_per_step, version)
        self.client.ack(batch, step=version)
        self.client.advance(version + 1)
        self.client.commit(version + 1)
        return [leased.group.key.id for leased in batch]


def test_a_stage_is_handed_every_group_once_and_the_run_ends_with_the_last() -> None:
    world = World("reward", [recorded(3), recorded(5), recorded(0, purpose="eval", min_version=7)])
    leases = world.lease()
    assert sorted((leased.group.key.id, leased.group.value("text")) for leased in leases) == [
        ("g0", "r0"),
        ("g3", "r3"),
        ("g5", "r5"),
    ]
    world.put(leases[:2], 1.0, 1.0)
    assert not world.client.lease("reward", 1, 0.0).ended
    world.put(leases[2:], 1.0)
    assert world.client.lease("reward", 1, 0.0).ended
    assert {outcome.end for outcome in world.service.outcomes.values()} == {"handled"}


def test_rollout_may_start_everything_at_version_0() -> None:
    """9 groups where a run of 4 a step and staleness 0 would let 4 start; held-out ones want no later version."""
    groups = [recorded(seq) for seq in range(8)] + [recorded(8, purpose="eval", min_version=7)]
    assert len(World("rollout", groups).lease(100, 0)) == 9


def test_the_account_says_what_was_added_and_how_it_compares() -> None:
    """Scores 1 and 0.25 against recorded 1 and 1: the second differs by 0.75. Both took 2 s."""
    world = World("reward", [recorded(0, score=1.0), recorded(1, score=1.0)])
    leases = world.lease()
    world.clock.advance(2.0)
    world.put(leases, 1.0, 0.25)
    lines = [line.split() for line in world.text().splitlines()]
    assert lines[1] == ["g0", "2.000", "handled", "reward", "1.0000,", "ok", "1", "equal"]
    assert lines[2] == ["g1", "2.000", "handled", "reward", "0.2500,", "ok", "1", *["reward", "differs", "by", "0.75"]]
    assert "column 'reward': equal in 1 of 2 groups; largest difference 0.75" in world.text()
    assert "column 'reward_status': equal in 2 of 2 groups" in world.text()
    assert world.text().endswith("2 groups: 2 handled")


def test_a_group_that_is_given_back_too_often_is_dead_and_says_why_each_time() -> None:
    world = World("reward", [recorded(0), recorded(1)])
    for attempt in (1, 2, 3):
        bad = [leased for leased in world.lease() if leased.group.key.id == "g0"]
        world.client.nack(bad, f"reason {attempt}")
    account = Account(world.material, world.service.outcomes)
    assert account.ends == {"dead": 1, "not handled": 1}
    assert "reason 1; reason 2; reason 3" in world.text()


def test_what_a_given_back_group_had_been_put_is_forgotten() -> None:
    world = World("reward", [recorded(0)])
    (leased,) = world.lease()
    world.client.confirm(world.client.put([Result(leased, [reward(0.5)])], ack=False), [], ack=False)
    world.client.nack([leased], "no")
    assert world.service.outcomes["g0"].added == {}
    world.put(world.lease(), 0.75)
    assert "reward 0.7500" in world.text()


def test_the_trainer_is_given_the_steps_of_the_run_in_their_order() -> None:
    """Steps 5 and 6 of the record are steps 0 and 1 here, whatever the order of the prompts; the rest comes behind."""
    groups = [recorded(seq, step) for seq, step in ((6, 5), (1, 5), (0, 6), (3, 6), (2, -1))]
    world = World("trainer", groups, config(groups_per_step=2))
    assert [world.train(version) for version in range(3)] == [["g6", "g1"], ["g0", "g3"], ["g2"]]
    assert world.client.lease("trainer", 2, 0.0, 3).starved == "no more groups"
    assert not world.client.ended


def test_staleness_is_that_of_the_run() -> None:
    """Made by version 4 and trained in step 5: one update old, at version 0 of the replay too."""
    group = recorded(0, 5)
    group.versions = (4, 5)
    (leased,) = World("trainer", [group], config(groups_per_step=1)).lease(1, 0)
    assert 0 - leased.version_min == 1


def test_a_dead_group_leaves_its_place_to_the_next() -> None:
    world = World("trainer", [recorded(seq, seq // 2) for seq in range(4)], config(groups_per_step=2))
    for _ in range(3):
        leases = world.lease(2, 0)
        world.client.nack([leased for leased in leases if leased.group.key.id == "g0"], "no")
        world.client.nack([leased for leased in leases if leased.group.key.id != "g0"], "wait", fault=False)
    assert [world.train(version) for version in range(2)] == [["g1", "g2"], ["g3"]]


def test_results_are_a_recording_without_what_was_made_of_the_old_ones(tmp_path: Path) -> None:
    """The advantage was made of the recorded reward; the response was not."""
    group = recorded(0, 2, score=1.0)
    group.added["rollout"] = {"response": response("r")}
    advantage = {"advantages": concatenate([[1.0]], "float32"), "loss_weight": [1.0]}
    group.added["advantage"] = {"advantage": encode("advantage", advantage)}
    world = World("reward", [group])
    world.put(world.lease(), 0.5)
    assert Account(world.material, world.service.outcomes).write(tmp_path) > 0
    back = load(tmp_path).groups["g0"]
    assert {stage: list(sections) for stage, sections in back.added.items()} == {
        "rollout": ["response"],
        "reward": ["reward"],
    }
    assert back.step == 2
    assert compare(back.added["reward"]["reward"], reward(0.5))["reward"].equal


def logprobs(*rows: Sequence[float]) -> Section:
    return encode("reference", {"ref_logprobs": concatenate(rows, "float32")})


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        (logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.0, -2.0], [-3.0]), Difference(equal=True)),
        (logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.0, -2.5], [-3.0]), Difference(equal=False, largest=0.5)),
        (logprobs([-1.0, -2.0], [-3.0]), logprobs([-1.0], [-2.0, -3.0]), Difference(equal=False)),
        (logprobs([float("nan")]), logprobs([float("nan")]), Difference(equal=True, largest=0.0)),
        (logprobs([float("nan")]), logprobs([1.0]), Difference(equal=False, largest=float("inf"))),
        (logprobs([float("-inf")]), logprobs([float("-inf")]), Difference(equal=True)),
    ],
)
def test_columns_compare_by_value_and_shape(new: Section, old: Section, expected: Difference) -> None:
    assert compare(new, old)["ref_logprobs"] == expected


def test_texts_are_equal_or_different() -> None:
    assert compare(response("a"), response("b"))["text"] == Difference(equal=False)
    assert str(compare(response("a"), response("a"))["text"]) == "equal"


def test_what_stands_behind_a_stage_follows_from_the_wiring() -> None:
    stages = wiring.stages_of(config(algorithm={"name": "grpo", "kl": 0.1}))
    assert behind(stages, "rollout") == {"reward", "reference", "advantage", "trainer", "evaluate"}
    assert behind(stages, "reward") == {"advantage", "trainer", "evaluate"}
    assert behind(stages, "reference") == {"trainer"}
    assert behind(stages, "trainer") == frozenset()

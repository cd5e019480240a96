"""What is told of a step and of an evaluation."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from brokers.client import Leased
from common.group import Group, GroupKey
from common.section import encode
from workers.trainer.evaluation import Evaluations
from workers.trainer.report import RunReport, StepReport

pytestmark = pytest.mark.unit


def leased(
    rewards: Sequence[float],
    lengths: Sequence[int] = (),
    *,
    seq: int = 0,
    status: Sequence[str] = (),
    reasons: Sequence[str] = (),
    size: int = 0,
    **facts: Any,
) -> Leased:
    """A group as the trainer gets it; samples are scored, of one token and ended by a stop id unless told otherwise."""
    count = len(rewards)
    prompt = {name: ["p"] for name in ("prompt_id", "messages", "label", "source", "reward_kind", "sampling")}
    sections = [
        encode("prompt", {**prompt, "evaluation_size": [size]}),
        encode("reward", {"reward": list(rewards), "reward_status": list(status or ["ok"] * count)}),
        encode(
            "response",
            {
                "text": [""] * count,
                "finish_reason": list(reasons or ["stop"] * count),
                "num_tokens": list(lengths or [1] * count),
            },
        ),
    ]
    return Leased(seq, Group(GroupKey(f"g{seq}", seq), 1, {section.name: section for section in sections}), **facts)


def row(version: int, *leases: Leased, **update: float) -> dict[str, Any]:
    report = StepReport(version)
    report.add(leases)
    report.waited(0.25)
    report.waited(0.5)
    return report.row(update)


def test_staleness_counts_updates_since_the_oldest_span_of_each_group() -> None:
    # Trained at version 7: oldest spans 7, 6, 4 and 7 -> 0, 1, 3, 0. Mean 4 / 4 = 1; the newest spans do not matter.
    # 95th percentile of [0, 0, 1, 3], linear: place 0.95 * 3 = 2.85 -> 1 + 0.85 * 2 = 2.7.
    versions = [(7, 7), (6, 7), (4, 7), (7, 7)]
    found = row(7, *(leased([1, 0], version_min=oldest, version_max=newest) for oldest, newest in versions))
    assert (found["staleness_min"], found["staleness_mean"], found["staleness_max"]) == (0, 1, 3)
    assert found["staleness_p95"] == pytest.approx(2.7)
    assert (found["step"], found["version"]) == (8, 8)


def test_rewards_that_could_not_be_scored_are_counted_and_in_no_mean() -> None:
    # Scored: 1, 0, 1 and 0.5, 0.5 -> mean 3 / 5; two of seven failed; the second group has one value only.
    found = row(
        0,
        leased([1, 0, 9, 1], status=["ok", "ok", "failed", "ok"]),
        leased([0.5, 9, 0.5], status=["ok", "timeout", "ok"]),
    )
    assert found["reward"] == pytest.approx(0.6)
    assert (found["samples"], found["rewards_failed"], found["zero_spread_groups"]) == (7, 2, 1)
    # Deviation from 0.6: 0.4, -0.6, 0.4, -0.1, -0.1; squares 0.16 + 0.36 + 0.16 + 0.01 + 0.01 = 0.70; / 5 = 0.14.
    assert found["reward_std"] == pytest.approx(math.sqrt(0.14))


def test_lengths_and_truncation_are_over_samples() -> None:
    found = row(
        0, leased([1, 0], [2, 8], reasons=["stop", "length"]), leased([1, 0], [4, 2], reasons=["abort", "length"])
    )
    assert (found["length_min"], found["length_mean"], found["length_max"]) == (2, 4, 8)
    assert found["truncated"] == 0.5


def test_time_is_split_into_generation_queues_and_waiting_of_the_trainer() -> None:
    found = row(0, leased([1], generation_s=3.0, queue_s=1.0), leased([1], generation_s=1.0, queue_s=2.0), loss=0.5)
    assert (found["generation_s_mean"], found["queue_s_mean"], found["wait_s"]) == (2.0, 1.5, 0.75)
    assert found["step_s"] >= 0
    assert found["samples_per_s"] == pytest.approx(2 / found["step_s"])
    assert found["loss"] == 0.5


def test_a_step_in_which_nothing_was_scored_has_no_reward_rather_than_a_zero() -> None:
    found = row(0, leased([0, 0], status=["failed", "aborted"]))
    assert math.isnan(found["reward"])
    assert found["rewards_failed"] == 2


def test_without_tensorboard_rows_are_still_written_one_a_line_and_what_is_not_finite_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    report = RunReport(tmp_path)
    for version in (1, 2):
        report.write({"kind": "step", "version": version, "reward": math.nan})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["version"], line["reward"]) for line in lines] == [(1, None), (2, None)]
    report.close()


def answer(seq: int, reward: float, size: int = 3, status: str = "ok", version: int = 0) -> Leased:
    return leased([reward], seq=seq, size=size, status=[status], version_min=version, version_max=version)


def test_an_evaluation_is_complete_with_its_last_answer() -> None:
    evaluations = Evaluations(solved_at=1.0)
    assert list(evaluations.collect([answer(0, 1.0), answer(1, 0.5)])) == []
    assert evaluations.done == 0
    (found,) = evaluations.collect([answer(2, 1.0)])
    assert evaluations.done == 1
    # Two of three reach 1.0; the mean is 2.5 / 3.
    assert found["heldout"] == pytest.approx(2 / 3)
    assert found["heldout_reward"] == pytest.approx(2.5 / 3)
    assert (found["prompts"], found["failed"], found["version"], found["version_max"]) == (3, 0, 0, 0)


def test_answers_of_two_evaluations_may_come_mixed_and_in_any_order() -> None:
    evaluations = Evaluations(solved_at=1.0)
    later = [answer(seq, 1.0, version=4) for seq in (5, 3)]
    early = [answer(seq, 0.0, version=1) for seq in (2, 0)]
    assert list(evaluations.collect([*later, *early])) == []
    first, second = evaluations.collect([answer(4, 0.0, version=5), answer(1, 0.0, version=0)])
    assert (first["version"], first["version_max"], first["heldout"]) == (4, 5, pytest.approx(2 / 3))
    assert (second["version"], second["version_max"], second["heldout"]) == (0, 1, 0.0)


def test_an_answer_that_could_not_be_scored_is_not_solved_and_said_to_have_failed() -> None:
    (found,) = Evaluations(solved_at=0.5).collect(
        [answer(0, 1.0), answer(1, 1.0, status="timeout"), answer(2, 0.0, status="failed")]
    )
    assert (found["heldout"], found["failed"], found["heldout_reward"]) == (pytest.approx(1 / 3), 2, 1.0)


def test_an_evaluation_without_any_score_has_no_mean() -> None:
    (found,) = Evaluations(solved_at=0.5).collect([answer(i, 0.0, status="failed") for i in range(3)])
    assert found["heldout"] == 0.0
    assert math.isnan(found["heldout_reward"])

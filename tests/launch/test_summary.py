"""Every number of a summary, by hand, from rows as the trainer writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.metrics import MetricsFile
from launch import summary
from statuses import config, status

pytestmark = pytest.mark.unit


def step(number: int, reward: float, *, time: float, **facts: Any) -> dict[str, Any]:
    row = {"kind": "step", "step": number, "version": number, "time": time, "samples": 32, "step_s": 0.5}
    return {**row, "reward": reward, "staleness_max": 1.0, "staleness_mean": 0.5, **facts}


def evaluation(version: int, heldout: float) -> dict[str, Any]:
    return {"kind": "evaluation", "version": version, "heldout": heldout, "time": 0.0}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    file = MetricsFile(folder / summary.METRICS)
    for row in rows:
        file.write(row)
    file.close()
    return folder


def summarise(folder: Path, **facts: Any) -> dict[str, Any]:
    return summary.summarise(folder, config(seed=3), {**status(), **facts}, 83.2, "finished")


def test_a_summary_holds_first_and_last_values_speed_and_counts(tmp_path: Path) -> None:
    steps = [step(k, k / 16, time=100.0 + k) for k in range(1, 13)]
    steps[4]["staleness_max"] = 2.0
    written(tmp_path, evaluation(0, 0.125), *steps[:6], evaluation(6, 0.25), *steps[6:], evaluation(12, 0.5))
    assert summarise(tmp_path) == {
        "name": "mod10",
        "run": "mod10-3fa2c9d1",
        "mode": "async",
        "seed": 3,
        "state": "finished",
        "reason": "",
        "steps": 12,
        "wall_s": 83.2,
        "samples_per_s": pytest.approx(12 * 32 / 11.5),  # 11 s between first and last row, 0.5 s of the first step
        "reward_first": 0.0625,
        "reward_last": 0.46875,  # steps 3 to 12: mean 7.5 / 16
        "heldout_first": 0.125,
        "heldout_last": 0.5,
        "staleness_max": 2.0,
        "max_staleness": 1,
        "groups": {"started": 115, "trained": 96, "dropped": 3, "dead": 1},
        "folder": str(tmp_path),
    }


def test_groups_that_were_dropped_are_summed_over_their_reasons(tmp_path: Path) -> None:
    counts = {"started": 9, "trained": 2, "dropped": {"stale": 3, "malformed": 1}, "dead": {"a": 1, "b": 2}}
    assert summarise(tmp_path, counts=counts)["groups"] == {"started": 9, "trained": 2, "dropped": 4, "dead": 3}


@pytest.mark.parametrize("rows", [[], [evaluation(0, 0.125)]])
def test_a_run_that_failed_before_its_first_step_has_a_summary_without_numbers(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    if rows:
        written(tmp_path, *rows)
    made = summary.summarise(tmp_path, config(), {"reason": "trainer-0 exited 5"}, 1.0, "failed")
    assert made["steps"] == 0
    names = ("run", "samples_per_s", "reward_first", "reward_last", "staleness_max")
    assert [made[name] for name in names] == [None] * 5
    assert made["heldout_first"] == (0.125 if rows else None)
    assert made["groups"] == {"started": 0, "trained": 0, "dropped": 0, "dead": 0}
    assert "mod10 failed (trainer-0 exited 5): 0 steps in 0 min 1 s" in summary.text(made)
    summary.write(tmp_path, made)
    assert json.loads((tmp_path / "summary.json").read_text()) == made


def test_a_step_without_a_reward_is_no_reward_of_zero(tmp_path: Path) -> None:
    written(tmp_path, step(1, float("nan"), time=1.0), step(2, 0.5, time=2.0), step(3, 0.75, time=3.0))
    made = summarise(tmp_path)
    assert made["reward_first"] is None
    assert made["reward_last"] == 0.625  # (0.5 + 0.75) / 2


def test_steps_that_a_returned_trainer_made_again_count_once(tmp_path: Path) -> None:
    abandoned = [evaluation(0, 0.1), step(1, 0.1, time=1.0), step(2, 0.2, time=2.0), evaluation(2, 0.9)]
    again = [evaluation(0, 0.2), step(1, 0.3, time=3.0)]
    rows = summary.rows_of(written(tmp_path, *abandoned, *again))
    assert [(row["kind"], row["version"]) for row in rows] == [("evaluation", 0), ("step", 1)]
    assert summarise(tmp_path)["reward_first"] == 0.3
    assert summarise(tmp_path)["heldout_last"] == 0.2


def test_the_closing_lines_name_the_files_that_are_there(tmp_path: Path) -> None:
    written(tmp_path, evaluation(0, 0.125), step(1, 0.25, time=1.0))
    (tmp_path / "checkpoint").mkdir()
    lines = summary.text(summarise(tmp_path)).splitlines()
    assert lines[0] == "mod10 finished: 1 steps in 1 min 23 s"
    assert "  reward     0.250 at first, 0.250 over the last" in lines
    assert "  held-out   0.125 at first, 0.125 at last" in lines
    assert "  speed      64.0 samples/s, mode async, seed 3" in lines  # 32 samples in 0.5 s
    assert "  staleness  1 of at most 1" in lines
    assert lines[-2:] == [f"  checkpoint {tmp_path / 'checkpoint'}", f"  metrics    {tmp_path / 'metrics.jsonl'}"]
    (tmp_path / "tensorboard").mkdir()
    assert summary.text(summarise(tmp_path)).endswith(f"tensorboard --logdir {tmp_path / 'tensorboard'}")


def test_a_plot_is_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert not summary.plot(tmp_path, [])
    assert not (tmp_path / summary.PLOT).exists()
    rows = [evaluation(0, 0.1), *(step(k, k / 20, time=float(k)) for k in range(1, 13)), evaluation(12, 0.6)]
    assert summary.plot(tmp_path, rows)
    assert (tmp_path / summary.PLOT).read_bytes().startswith(b"\x89PNG")


def test_the_running_mean_looks_back_over_ten_steps() -> None:
    means = summary.running_mean([float(k) for k in range(1, 13)])
    assert means[:3] == [1.0, 1.5, 2.0]
    assert means[-1] == 7.5  # 3 to 12

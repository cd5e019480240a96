"""The metrics file: one writer, every row that was written is there."""

import json
from pathlib import Path

import pytest

from common.metrics import MetricsFile, read, spread

pytestmark = pytest.mark.unit


def test_rows_between_two_steps_are_all_there_before_the_file_is_closed(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.write({"step": 1})
    for number in range(3):
        file.write({"watchdog": number})
    file.write({"step": 2})
    rows = read(tmp_path / "run" / "metrics.jsonl")
    file.close()
    assert rows == [{"step": 1}, {"watchdog": 0}, {"watchdog": 1}, {"watchdog": 2}, {"step": 2}]


def test_a_torn_last_line_is_left_out_and_does_not_swallow_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew', encoding="utf-8")
    assert read(path) == [{"step": 1}]
    file = MetricsFile(path)
    file.write({"step": 3})
    file.close()
    assert read(path) == [{"step": 1}, {"step": 3}]


def test_what_json_cannot_hold_is_null_at_any_depth(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    nan, inf = float("nan"), float("inf")
    file.write({"loss": nan, "kl": -inf, "per_group": [1.0, nan], "by_kind": {"math": inf}, "fine": 0.5})
    file.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "m.jsonl").read_text(encoding="utf-8"), parse_constant=refuse)
    assert row == {"loss": None, "kl": None, "per_group": [1.0, None], "by_kind": {"math": None}, "fine": 0.5}


def test_a_spread_is_min_mean_p95_and_max() -> None:
    # 95 % of the way over 21 values 0, 1, ..., 20 is place 19.
    assert spread("age", list(range(21))) == {"age_min": 0, "age_mean": 10, "age_p95": 19, "age_max": 20}
    assert spread("age", []) == {}

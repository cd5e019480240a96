"""The promise of the README: on two cores, from random weights, within minutes, text and image are learned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("task", "first", "last"), [("text", 0.1, 0.8), ("image", 0.45, 0.7)])
def test_held_out_answers_get_right(task: str, first: float, last: float, tmp_path: Path) -> None:
    config = ROOT / "configs" / f"quickstart-{task}.toml"
    command = [sys.executable, "-m", "launch", "up", str(config)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / f"quickstart-{task}"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["heldout_first"] < first
    assert summary["heldout_last"] > last
    assert (summary["mode"], summary["state"]) == ("async", "finished")
    assert summary["staleness_max"] <= summary["max_staleness"] == 1
    groups = summary["groups"]
    assert groups["started"] == groups["trained"] + groups["dropped"] + groups["dead"]

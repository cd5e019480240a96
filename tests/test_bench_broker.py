"""The benchmark of the sample broker runs, and says something about everything that it promises to measure."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMISED = (
    "headers: slowest of these",
    "headers: slowest below fastest",
    "headers: memory of a queued group",
    "media: bytes moved by rollout, which requires media",
    "media: bytes moved by reward, which does not",
    "ragged: TCP over pyzmq",
    "images: TCP over pyzmq",
    "small: TCP, journal over TCP",
    "small: TCP, journal with fsync over TCP",
    "small: TCP, encrypted over TCP",
    "ragged: memcpy",
)


@pytest.mark.e2e
def test_the_benchmark_of_the_broker_prints_every_row_that_it_promises(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    script = ROOT / "tests/bench/broker.py"
    command = [sys.executable, str(script), "--quick", "--json", str(found)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = {row["name"]: row["value"] for row in json.loads(found.read_text())}
    assert set(PROMISED) <= set(rows)
    assert all(math.isfinite(value) and value > 0 for value in rows.values())
    assert all(name in ran.stdout for name in rows)

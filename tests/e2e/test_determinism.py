"""`deterministic = true`: the same numbers to the last bit, run after run and in every mode."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runs import Run, started, with_model

pytestmark = pytest.mark.e2e

MODES = ("sync", "async", "hybrid")
NUMBERS = ("loss", "grad_norm", "reward", "kl", "reference_kl", "entropy", "tokens", "length_mean")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, Run]]:
    """The same run in every mode, side by side, without staleness; at temperature 1 and with a reference."""
    shared = ("deterministic=true", "max_staleness=0", "reward.stop_share=0.2")
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for mode in MODES:
            cwd = tmp_path_factory.mktemp("deterministic")
            runs[mode] = stack.enter_context(started(cwd, with_model(model), *shared, f"mode={mode}"))
        for run in runs.values():
            run.end()
        yield runs


@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_well_in_every_mode(mode: str, runs: dict[str, Run]) -> None:
    run = runs[mode]
    assert (run.up.returncode, run.stderr) == (0, ""), run.stdout
    assert run.summary["mode"] == mode
    assert run.summary["groups"] == {"started": 32, "trained": 32, "dropped": 0, "dead": 0}
    assert all(row["staleness_max"] == 0 for row in run.rows())
    assert run.left() == []
    assert "Traceback" not in "".join(run.logs().values())


def test_hybrid_has_no_processes_for_reference_and_advantage(runs: dict[str, Run]) -> None:
    assert {"reference-0", "advantage-0"} == runs["sync"].groups.keys() - runs["hybrid"].groups.keys()


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_run_without_staleness_repeats_the_synchronous_one_bit_for_bit(mode: str, runs: dict[str, Run]) -> None:
    expected, found = ([[row[n] for n in NUMBERS] for row in runs[one].rows()] for one in ("sync", mode))
    assert len(expected) == 8
    assert found == expected
    assert len({row["loss"] for row in runs[mode].rows()}) > 4, "something is learned, or equality would say little"


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_weights_at_the_end_are_the_same_bytes(mode: str, runs: dict[str, Run]) -> None:
    expected, found = ((runs[one].folder / "checkpoint/model.safetensors").read_bytes() for one in ("sync", mode))
    assert found == expected

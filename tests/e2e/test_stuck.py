"""A worker hangs while its heartbeats go on: the run heals, or ends with one clear line, as it was told to."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.errors import WorkerError
from runs import PACED, Run, accounted, started, with_model

pytestmark = pytest.mark.e2e

HANGING = ('engine={name="stuck:HangsOnce", tokens_per_step=1}', 'backend={name="fake"}', PACED)
# A worker may warm up four times as long: enough for its imports on a machine that is busy.
WATCHED = ("watchdog.seconds=10", "rewards.timeout_seconds=1", "evaluation.prompts=0", "supervisor.grace_seconds=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, Run]]:
    """Two runs side by side, each has ended."""
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for action, workers in (("expire", 2), ("end", 1)):
            settings = (*WATCHED, f"watchdog.action={action}", f"workers.rollout={workers}", "broker.max_attempts=10")
            cwd = tmp_path_factory.mktemp(action)
            runs[action] = stack.enter_context(started(cwd, with_model(model), *HANGING, *settings, "algorithm.kl=0.0"))
        for run in runs.values():
            run.end()
        yield runs


def test_a_run_that_expires_what_is_stuck_goes_on_with_another_worker_and_loses_nothing(runs: dict[str, Run]) -> None:
    """8 steps of 4 groups: 32 started, 32 trained."""
    run = runs["expire"]
    assert run.up.returncode == 0, run.stdout + run.stderr
    assert run.summary["groups"] == {"started": 32, "trained": 32, "dropped": 0, "dead": 0}
    assert (run.cwd / "hung").exists()
    said = [line for line in run.logs()["samples"].splitlines() if "] stuck " in line and "stage=rollout" in line]
    assert len(said) == 1
    assert "action=expire" in said[0]
    assert "of which none gets on" in said[0]
    assert run.left() == []


def test_a_run_that_ends_with_what_is_stuck_ends_with_code_5_and_one_line(runs: dict[str, Run]) -> None:
    run = runs["end"]
    assert run.up.returncode == WorkerError.exit_code
    assert run.summary["state"] == "failed"
    reason = run.summary["reason"]
    assert reason.startswith("watchdog.seconds = 10: rollout-0 is heard and holds ")
    assert "of which none gets on (stage rollout, group train-" in reason
    assert len([line for line in run.stdout.splitlines() if f"tiny failed ({reason}): " in line]) == 1
    assert accounted(run.summary["groups"])
    assert "Traceback" not in run.stdout + run.stderr + "".join(run.logs().values())
    assert run.left() == []

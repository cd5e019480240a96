"""The sample broker is killed in the middle of a run, twice, and comes back: nothing is lost, nothing is done twice."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from common.errors import RelaxError
from runs import FAKE, PACED, Run, Status, accounted, started, until, with_model

pytestmark = pytest.mark.e2e
STEPS = 40


def restarted(run: Run) -> None:
    """Kill the broker and wait until another one announced itself at the same address."""
    told = dict(run.announcement or {})
    run.groups["samples"] = told["pid"]
    run.kill("samples")
    until(lambda: (run.announcement or {})["pid"] != told["pid"], "another broker")
    again = run.announcement or {}
    assert again["address"] == told["address"]
    run.groups["samples"] = again["pid"]


def goes_on(run: Run, version: int) -> Status:
    """Return the status once the trainer is at this version; a question may be lost with a broker."""

    def look() -> Status | None:
        with suppress(RelaxError):
            told = run.status()
            return told if told["version"] >= version else None
        return None

    return until(look, f"version {version}")


@pytest.fixture(scope="module", params=["async", "sync"])
def survivor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Run]:
    cwd = tmp_path_factory.mktemp("restart")
    settings = (f"steps={STEPS}", "evaluation.prompts=0", "broker.journal=true", f"mode={request.param}")
    with started(cwd, with_model(model), *FAKE, PACED, *settings) as run:
        told = run.at_step(2)
        for _ in range(2):
            restarted(run)
            told = goes_on(run, told["version"] + 4)
        run.hurry()
        run.end()
        yield run


def test_a_run_goes_on_when_its_broker_is_killed(survivor: Run) -> None:
    run = survivor
    assert run.up.returncode == 0, run.stdout + run.stderr
    assert run.summary["state"] == "finished"
    assert (run.stdout + run.stderr).count("process=samples") >= 2
    assert run.logs()["samples"].count("recovered") == 2
    assert "Traceback" not in run.stdout + run.stderr + "".join(run.logs().values())
    assert run.left() == []


def test_every_step_trained_its_groups_and_every_group_has_one_end(survivor: Run) -> None:
    """40 steps of 4 groups: 160 started, 160 trained."""
    run = survivor
    assert run.summary["groups"] == {"started": 160, "trained": 160, "dropped": 0, "dead": 0}
    assert accounted(run.summary["groups"])
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    assert all(row["groups"] == 4 and row["rewards_failed"] == 0 for row in run.rows())
    assert all(row["staleness_max"] <= 1 for row in run.rows())


def test_only_the_broker_died(survivor: Run) -> None:
    """Workers outlived it: each joined it again, and none was started twice."""
    joined = [name for name, text in survivor.logs().items() if "joining again" in text]
    assert {"prompt-0", "rollout-0", "reward-0", "advantage-0", "trainer-0", "weights"} <= set(joined)
    assert "process died" not in "".join(
        line for line in (survivor.stdout + survivor.stderr).splitlines() if "process=samples" not in line
    )

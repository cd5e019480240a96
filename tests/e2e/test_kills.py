"""Processes die, leave and come in the middle of a run: what is lost is nothing, or the run, with its reason."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import ConfigError, WireError, WorkerError
from runs import FAKE, PACED, TINY, Run, Status, accounted, alive, python, started, until, with_model, worker

pytestmark = pytest.mark.e2e

REPLACED = ("rollout-0", "reward-0", "reference-0", "advantage-0", "prompt-0")
ENDINGS = {
    "trainer-0": (signal.SIGKILL, "failed", "trainer-0 was ended by SIGKILL"),
    "samples": (signal.SIGKILL, "failed", "samples was ended by SIGKILL"),
    "trainer-0, asked": (signal.SIGTERM, "stopped", "trainer-0 was asked to stop"),
}


def generated(told: Status, name: str) -> bool:
    """Whether a rollout worker has generated anything."""
    return worker(told, name).get("progress", {}).get("tokens", 0) > 0


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Run, dict[str, tuple[int, int]]]]:
    """A run in which one process of each role was killed, and their ids before and after."""
    with started(
        tmp_path_factory.mktemp("survivor"), with_model(model), *FAKE, PACED, "steps=60", "evaluation.prompts=0"
    ) as run:
        ids: dict[str, tuple[int, int]] = {}
        run.at_step(2)
        for name in REPLACED:
            old = run.kill(name)
            run.at_step(
                run.another(name, old)["version"] + 2
            )  # more than may have been under way: the new one takes part
            ids[name] = (old, run.pid(name))
        run.hurry()
        run.end()
        yield run, ids


@pytest.mark.parametrize("name", REPLACED)
def test_a_worker_that_is_killed_is_replaced(name: str, survivor: tuple[Run, dict[str, tuple[int, int]]]) -> None:
    run, ids = survivor
    old, new = ids[name]
    assert old != new
    assert f"process={name}" in run.stdout + run.stderr


def test_no_group_is_lost_with_the_workers_that_are_killed(survivor: tuple[Run, dict[str, tuple[int, int]]]) -> None:
    run, _ = survivor
    assert run.up.returncode == 0, run.stdout + run.stderr
    assert run.summary["groups"] == {"started": 240, "trained": 240, "dropped": 0, "dead": 0}
    assert [row["step"] for row in run.rows()] == list(range(1, 61))
    assert all(row["groups"] == 4 and row["rewards_failed"] == 0 for row in run.rows())
    assert all(row["staleness_max"] <= 1 for row in run.rows())
    assert run.left() == []


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, Run]]:
    """Runs side by side that lost a process nobody can replace; each has ended."""
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for place in ENDINGS:
            cwd = tmp_path_factory.mktemp("ending")
            runs[place] = stack.enter_context(
                started(cwd, with_model(model), *FAKE, PACED, "steps=1000", "algorithm.kl=0.0")
            )
        for place, run in runs.items():
            run.at_step(2)
            run.kill(place.partition(",")[0], ENDINGS[place][0])
        for run in runs.values():
            run.end()
        yield runs


@pytest.mark.parametrize("place", ENDINGS)
def test_a_run_that_cannot_go_on_ends_with_its_reason_in_one_line(place: str, ending: dict[str, Run]) -> None:
    run, (_, state, reason) = ending[place], ENDINGS[place]
    assert run.up.returncode == WorkerError.exit_code
    summary = run.summary
    assert (summary["state"], summary["reason"]) == (state, reason)
    assert len([line for line in run.stdout.splitlines() if f"tiny {state} ({reason}): " in line]) == 1
    assert summary["steps"] >= 1  # the row of the second may have been on its way
    assert "Traceback" not in run.stdout + run.stderr + "".join(run.logs().values())
    assert run.left() == []


@pytest.mark.parametrize("place", [place for place in ENDINGS if place != "samples"])
def test_the_groups_of_a_run_that_cannot_go_on_are_accounted(place: str, ending: dict[str, Run]) -> None:
    groups = ending[place].summary["groups"]
    assert groups["trained"] >= 4
    assert accounted(groups)


def test_workers_come_and_go_by_hand_and_a_run_goes_on_without_its_supervisor(model: Path, tmp_path: Path) -> None:
    with (
        started(tmp_path, with_model(model), *FAKE, PACED, "steps=300", "evaluation.prompts=0") as run,
        ExitStack() as stack,
    ):
        run.at_step(1)

        def join(role: str, name: str) -> subprocess.Popen[str]:
            arguments = ("-m", f"workers.{role}", "--broker", run.address, "--name", name)
            process = stack.enter_context(python(*arguments, cwd=tmp_path))
            stack.callback(process.kill)
            return process

        leaving, staying = join("rollout", "leaving"), join("rollout", "staying")
        run.when(lambda told: generated(told, "leaving") and generated(told, "staying"), "tokens of both")
        # SIGTERM: it leaves with code 0 and gives back what it holds, without fault, before a lease could run out.
        leaving.terminate()
        assert leaving.wait(30) == 0, leaving.communicate()
        told = run.at_step(run.status()["version"] + 2)
        assert not worker(told, "leaving")
        assert (told["counts"]["expired"], told["counts"]["unroutable"]) == (0, 0)
        # Nobody restarts what dies now; a worker that is started by hand takes over the name and the groups.
        run.up.kill()
        run.up.wait()
        old = run.kill("reward-0")
        again = join("reward", "reward-0")
        run.another("reward-0", old)
        run.hurry()
        told = run.when(lambda told: told["state"] == "finished", "the end of the run")
        counts = told["counts"]
        assert (counts["started"], counts["trained"], counts["dropped"], counts["dead"]) == (1200, 1200, {}, {})
        assert staying.wait(30) == 0, staying.communicate()
        assert again.wait(30) == 0, again.communicate()
        assert "Traceback" not in staying.communicate()[1] + leaving.communicate()[1] + "".join(run.logs().values())
        until(
            lambda: not any(alive(run.pid(name)) for name in run.groups if name != "samples"), "the end of the workers"
        )
        run.kill("samples", signal.SIGTERM)
        assert run.left() == []


@dataclass
class Interrupted:
    """A run that was interrupted, and what was refused while it lived: exit code and stderr by what was tried."""

    run: Run
    id: str
    refused: dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Interrupted]:
    cwd = tmp_path_factory.mktemp("interrupted")
    with started(cwd, with_model(model), *FAKE, PACED, "steps=1000", "algorithm.kl=0.0") as run:
        told = run.at_step(2)
        tries = {
            "second run": ("launch", "up", str(TINY)),
            "other run": ("workers.advantage", "--broker", run.address, "--run", "other"),
            "same name": ("workers.advantage", "--broker", run.address, "--name", "advantage-0"),
        }
        processes = {name: python("-m", *arguments, cwd=cwd) for name, arguments in tries.items()}
        refused: dict[str, tuple[int, str]] = {}
        for name, process in processes.items():
            _, stderr = process.communicate(timeout=60)
            refused[name] = (process.returncode, stderr)
        run.at_step(run.status()["version"] + 2)  # it goes on undisturbed
        os.kill(run.up.pid, signal.SIGINT)
        run.end()
        yield Interrupted(run, told["run"], refused)


def test_an_interrupt_stops_a_run_in_order(interrupted: Interrupted) -> None:
    run = interrupted.run
    assert run.up.returncode == WorkerError.exit_code
    assert (run.summary["state"], run.summary["reason"]) == ("stopped", "asked to stop")
    assert "tiny stopped (asked to stop): " in run.stdout
    assert accounted(run.summary["groups"])
    assert run.left() == []
    assert "Traceback" not in run.stdout + run.stderr + "".join(run.logs().values())


def test_a_second_run_in_the_folder_of_a_live_one_is_refused(interrupted: Interrupted) -> None:
    code, stderr = interrupted.refused["second run"]
    assert code == ConfigError.exit_code
    assert stderr.startswith(f"ConfigError: run {interrupted.id} is alive in {interrupted.run.folder}")
    assert len(stderr.splitlines()) == 1


def test_a_worker_of_another_run_is_refused_with_both_names(interrupted: Interrupted) -> None:
    code, stderr = interrupted.refused["other run"]
    assert code == WireError.exit_code
    assert "'other'" in stderr
    assert f"'{interrupted.id}'" in stderr
    assert len(stderr.splitlines()) == 1


def test_a_second_worker_of_one_name_is_told_who_holds_it(interrupted: Interrupted) -> None:
    code, stderr = interrupted.refused["same name"]
    assert code == WireError.exit_code
    assert f"'advantage-0' is held by process {interrupted.run.pid('advantage-0')}" in stderr
    assert len(stderr.splitlines()) == 1

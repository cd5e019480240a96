"""What a task learns from SLURM's environment and from scontrol, and what `relaxq slurm` would submit."""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.errors import ConfigError
from launch import plan, slurm
from launch.slurm import SlurmJob

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
TASK = {
    "SLURM_JOB_ID": "41",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_SUBMIT_DIR": "/shared/home",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NTASKS_PER_NODE": "1",
}
NODE = "NodeName=n1 Arch=x86_64 NodeAddr={} NodeHostName=host Version=22.05.8\n"


def answers(names: str, node_address: str = "10.0.0.7"):
    """A `scontrol` that expands every list to `names` and knows every node under one address."""

    def command(line: Sequence[str]) -> str:
        if "hostnames" in line:
            return names
        assert line[-1] == names.split(maxsplit=1)[0], "the first host is asked about"
        return NODE.format(node_address)

    return command


def test_a_task_knows_its_place_in_the_job() -> None:
    assert slurm.read(TASK) == SlurmJob("41", 0, 3, 1, "n[1-3]", Path("/shared/home"))


def test_all_nodes_give_a_run_the_same_id_and_a_requeued_job_another_one() -> None:
    ids = {slurm.read({**TASK, "SLURM_NODEID": node}).run_of("tiny") for node in "012"}
    assert ids == {"tiny-41"}
    assert slurm.read({**TASK, "SLURM_RESTART_COUNT": "2"}).run_of("tiny") == "tiny-41-2"


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_NODELIST"])
def test_outside_of_a_job_the_error_names_what_is_missing_and_the_command_to_use(missing: str) -> None:
    environ = {name: value for name, value in TASK.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"{missing} is not set.*sbatch launch/async\.slurm"):
        slurm.read(environ)


@pytest.mark.parametrize("text", ["", "three", "-1"])
def test_a_count_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_NNODES"):
        slurm.read({**TASK, "SLURM_NNODES": text})


def test_more_than_one_task_a_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS_PER_NODE = 8.*--ntasks-per-node=1"):
        slurm.read({**TASK, "SLURM_NTASKS_PER_NODE": "8"})


@pytest.mark.parametrize("tasks", ["1", "6"])
def test_a_step_that_is_not_one_task_on_every_node_is_refused(tasks: str) -> None:
    with pytest.raises(ConfigError, match=f"{tasks} tasks on the 3 nodes"):
        slurm.read({**TASK, "SLURM_STEP_NUM_TASKS": tasks})


def test_the_run_meets_at_the_first_host_of_the_list_and_not_where_srun_runs() -> None:
    job = slurm.read({**TASK, "SLURM_LAUNCH_NODE_IPADDR": "192.168.99.1"})
    assert slurm.head_address(job, answers("n1\nn2\nn3\n")) == "10.0.0.7"


def test_an_ipv6_address_of_a_node_is_kept() -> None:
    assert slurm.head_address(slurm.read(TASK), answers("n1\nn2\nn3\n", "fd00::7")) == "fd00::7"


def test_a_host_name_that_means_only_this_machine_is_refused_where_other_nodes_must_reach_it() -> None:
    with pytest.raises(ConfigError, match=r"localhost of node n1 is .* cannot reach; give --host"):
        slurm.head_address(slurm.read(TASK), answers("n1\nn2\nn3\n", "localhost"))


def test_a_host_name_becomes_an_address_that_a_broker_can_bind() -> None:
    alone = slurm.read({**TASK, "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"})
    assert slurm.head_address(alone, answers("n1\n", "localhost")) in ("127.0.0.1", "::1")


def test_a_host_name_that_does_not_resolve_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"no-such-node\.invalid of node n1 does not resolve.*--host"):
        slurm.head_address(slurm.read(TASK), answers("n1\nn2\nn3\n", "no-such-node.invalid"))


@pytest.mark.parametrize("names", ["", "n1\n"])
def test_a_node_list_that_expands_to_another_number_of_hosts_is_refused(names: str) -> None:
    """`scontrol show hostnames` ends with code 0 even if it could not read the list."""
    with pytest.raises(ConfigError, match="SLURM_NNODES = 3"):
        slurm.hosts(slurm.read(TASK), lambda _line: names)


def test_a_node_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="no NodeAddr of node n1"):
        slurm.head_address(slurm.read(TASK), lambda line: "n1\nn2\nn3" if "hostnames" in line else "NodeName=n1")


def script(folder: Path, text: str) -> Path:
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def start_node(folder: Path, path: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CONFIG"))}
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
    command = [sys.executable, "-m", "launch", "node", *words]
    environ |= job | {"SLURM_SUBMIT_DIR": str(folder), "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, "cannot run scontrol"),
        ("echo controller is down >&2; exit 1", "ended with code 1: controller is down"),
        ("exit 0", "expands 'n[1-2]' to 0 names"),
    ],
)
def test_without_a_scontrol_that_answers_a_job_of_two_nodes_ends_and_does_not_fall_back_to_localhost(
    program: str | None, words: str, tmp_path: Path
) -> None:
    if program is not None:
        script(tmp_path, program)
    done = start_node(tmp_path, str(tmp_path), str(ROOT / "tests/e2e/tiny.toml"))
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.startswith("ConfigError: ")
    assert words in done.stderr
    assert "give --host ADDRESS" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_configuration_may_be_named_in_the_environment_and_has_to_be_named(tmp_path: Path) -> None:
    done = start_node(tmp_path, str(tmp_path))
    assert done.returncode == ConfigError.exit_code
    assert "no configuration" in done.stderr


def test_every_node_but_the_first_gets_the_configured_number_of_rollout_workers() -> None:
    config = plan.read(ROOT / "tests/e2e/tiny.toml", ["workers.rollout=2"])
    made = plan.make(config, Path("/shared"), run="tiny-41", nodes=3, host="10.0.0.7")
    names = {node: [process.name for process in made.on(node)] for node in (1, 2)}
    # 2 workers on each of nodes 1 and 2 are 4; they are dealt out in turn
    assert names == {1: ["rollout-0", "rollout-2"], 2: ["rollout-1", "rollout-3"]}
    assert {process.role for process in made.on(0)} >= {"samples", "weights", "trainer", "prompt", "reward"}
    assert [process.role for process in plan.make(config, Path("/shared")).on(0)].count("rollout") == 2


def test_brokers_bind_the_address_of_the_head() -> None:
    made = plan.make(plan.read(ROOT / "tests/e2e/tiny.toml", []), Path("/shared"), nodes=3, host="10.0.0.7")
    brokers = [process.command for process in made.on(0) if process.role in ("samples", "weights")]
    assert [command[command.index("--host") + 1] for command in brokers] == ["10.0.0.7", "10.0.0.7"]


def render(folder: Path, config: str) -> str:
    command = [sys.executable, "-m", "launch", "slurm", config, "--set", "steps=3", "--dry-run"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_is_the_same_whatever_folder_it_is_rendered_in(tmp_path: Path) -> None:
    there = render(tmp_path, str(ROOT / "tests/e2e/tiny.toml"))
    here = render(ROOT / "tests", "e2e/tiny.toml")
    assert there == here
    command = there.splitlines()[0].split()
    assert command[:2] == ["sbatch", "--nodes=3"]
    assert f"--chdir={ROOT}" in command
    assert command[-5:] == [
        f"{ROOT}/launch/async.slurm",
        f"{ROOT}/tests/e2e/tiny.toml",
        f"--root={ROOT}",
        "--set",
        "steps=3",
    ]
    assert "on_every_node" in there


def test_the_mode_of_a_configuration_chooses_the_batch_script(tmp_path: Path) -> None:
    config = tmp_path / "sync.toml"
    config.write_text(
        (ROOT / "tests/e2e/tiny.toml").read_text().replace('name = "tiny"', 'name = "tiny"\nmode = "sync"')
    )
    assert f"{ROOT}/launch/sync.slurm {config}" in render(tmp_path, "sync.toml")


def test_a_mistake_in_the_configuration_is_told_before_anything_is_submitted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch", "slurm", str(ROOT / "tests/e2e/tiny.toml"), "--set", "stepps=3"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "did you mean 'steps'" in done.stderr


@pytest.mark.parametrize("name", ["async", "sync", "hybrid"])
def test_a_batch_script_sets_its_mode_first_so_that_the_user_has_the_last_word(name: str) -> None:
    text = (ROOT / "launch" / f"{name}.slurm").read_text()
    assert text.rstrip().endswith(f'-m launch node --set mode={name} "$@"')

"""Every command of the README is run: it is the first thing that a newcomer types."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
PORT = "5600"


def of_kind(first: str, *, with_port: bool = False) -> list[str]:
    return [line for line in COMMANDS if shlex.split(line)[0] == first and (PORT in line) == with_port]


LIVE = of_kind(".venv/bin/relaxq", with_port=True) + of_kind(".venv/bin/python", with_port=True)

REPLAYS = of_kind(".venv/bin/python")


def test_every_command_belongs_to_a_test() -> None:
    known = [*of_kind("make"), *of_kind("sbatch"), *of_kind(".venv/bin/relaxq"), *LIVE, *REPLAYS]
    assert sorted(known) == sorted(COMMANDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a checkout with an environment, and the files that the README shows."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, text in re.findall(r"```python\n# file: (\S+)\n(.*?)```", TEXT, re.S):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("command", of_kind("make"))
def test_a_target_of_make_exists(command: str) -> None:
    """What the targets do is run elsewhere: quickstart by test_quickstart, test by whoever runs this."""
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", of_kind("sbatch"))
def test_a_batch_script_is_one_that_test_slurm_submits(command: str) -> None:
    script = shlex.split(command)[1]
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    assert Path(script).name in (ROOT / "tests/e2e/test_slurm.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", of_kind(".venv/bin/relaxq"))
def test_a_command_that_ends_by_itself_succeeds(command: str, folder: Path) -> None:
    done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_attaches_to_a_live_run_by_its_address_and_what_a_queue_carries_is_replayed(folder: Path) -> None:
    """The README's port may be taken on this machine, so a free one stands in for it; 40 steps are enough."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    up, status, attach, tap = (shlex.split(line.replace(PORT, port)) for line in LIVE)
    run = subprocess.Popen(
        [*up, "--set", "steps=40", "--set", "broker.journal=true"], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    tapping = subprocess.Popen(tap, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        attached = subprocess.run(attach, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert attached.returncode == 0, attached.stderr
        assert run.wait(60) == 0
        recorded, _ = tapping.communicate(timeout=30)
        assert recorded.startswith("recorded 8 groups of queue 'reward'")
    finally:
        for process in (run, tapping):
            process.terminate()
            process.communicate(timeout=30)
    late = subprocess.run([*status, "--deadline", "0.5"], cwd=folder, capture_output=True, text=True, check=False)
    assert late.returncode == 4, "the run is over, so nobody answers"
    for line in REPLAYS:
        command = shlex.split(line.replace("NAME", "quickstart-image"))
        replayed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert re.search(r"^\d+ groups: \d+ handled$", replayed.stdout, re.M), replayed.stdout

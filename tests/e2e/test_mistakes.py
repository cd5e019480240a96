"""A mistake of the user is one line that names the setting, a documented exit code, and no waiting."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from runs import DEADLINE, TINY, python

pytestmark = pytest.mark.e2e

CPU_SECONDS = 1.0
"""of one process and what it started; its wall time would depend on who else uses the machine"""
CONFIG, WIRE, BROKER = 2, 3, 4
"""exit codes of `ConfigError`, `WireError` and `BrokerError`"""

ROLES = ("prompt", "rollout", "reward", "reference", "advantage", "trainer")
SETTINGS = {
    "max_stalness=2": ["'max_stalness'", "did you mean 'max_staleness'"],
    "broker.prot=5600": ["'broker.prot'", "did you mean 'broker.port'"],
    "backend.learning_rate=1": ["'backend.learning_rate'", "lr"],
    "max_staleness": ["--set", "expected name=value"],
    "steps.more=1": ["steps"],
    "steps=-3": ["'steps' = -3", "greater than 0"],
    "steps=many": ["'steps' = 'many'"],
    "mode=fast": ["'mode' = 'fast'", "sync", "async", "hybrid"],
    "broker.high_water_mark=0": ["'broker.high_water_mark' = 0"],
    "broker.port=65536": ["'broker.port' = 65536"],
    "reward.name=exakt": ["'reward.name' = 'exakt'", "known: exact, math"],
    "reward.name=nowhere:Nothing": ["'reward.name' = 'nowhere:Nothing'", "No module named 'nowhere'"],
    "algorithm.name=grop": ["'algorithm.name' = 'grop'", "grpo"],
    "engine.name=vllmm": ["'engine.name' = 'vllmm'", "torch"],
    "backend.name=tensorflow": ["'backend.name' = 'tensorflow'", "torch"],
    "data.name=mod11": ["'data.name' = 'mod11'", "mod10"],
    "model.recipe.name=qwen": ["'model.recipe.name' = 'qwen'", "qwen3_characters"],
    'model={path="nowhere"}': ["'model.path' = 'nowhere'", "config.json"],
    'model.path="both"': ["model.path", "model.recipe"],
    "workers.reference=0": ["'reference'", "workers.reference", "'ref_logprobs'"],
    "workers.rollout=0": ["'rollout'", "workers.rollout", "'response_ids'"],
    "deterministic=true": ["deterministic", "max_staleness", "1"],
    "broker.max_queue_groups=7": ["broker.max_queue_groups = 7", "8 groups", "max_staleness = 1"],
}
PROGRAMS = [
    ("launch",),
    *[("launch", command) for command in ("up", "plan", "status", "doctor")],
    *[("brokers", kind) for kind in ("samples", "weights")],
    *[(f"workers.{role}",) for role in (*ROLES, "prepare")],
]
MEMBERS = [("launch", "status"), ("brokers", "weights"), *[(f"workers.{role}",) for role in ROLES]]
ADDRESSES = ["localhost", "localhost:5600", "tcp://localhost", "tcp://localhost:99999"]
PLANNED = [("brokers", "samples"), ("workers.prepare",)]


@dataclass(frozen=True)
class Ended:
    """How a command ended. `cpu`: seconds of user and system time. `left`: what it made in its folder."""

    code: int
    lines: list[str]
    stdout: str
    cpu: float
    left: list[str]


def ended(arguments: tuple[str, ...], cwd: Path) -> Ended:
    """Run a command that says little; the system counts its CPU time, children included."""
    before = set(cwd.iterdir())
    process = python(*arguments, cwd=cwd)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    stdout, stderr = process.communicate(timeout=DEADLINE)
    left = [path.name for path in set(cwd.iterdir()) - before]
    return Ended(process.returncode, stderr.splitlines(), stdout, usage.ru_utime + usage.ru_stime, left)


class Commands:
    """Commands of this module, each run once in an empty folder, as many side by side as there are cores."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool
        self._ended: dict[tuple[str, ...], Future[Ended]] = {}

    def start(self, *arguments: str) -> Future[Ended]:
        if arguments not in self._ended:
            cwd = self._folder / str(len(self._ended))
            cwd.mkdir()
            self._ended[arguments] = self._pool.submit(ended, arguments, cwd)
        return self._ended[arguments]

    def __call__(self, *arguments: str) -> Ended:
        return self.start(*arguments).result()


def up(override: str) -> tuple[str, ...]:
    return ("-m", "launch", "up", str(TINY), "--set", override)


def absent(member: tuple[str, ...]) -> tuple[str, ...]:
    return ("-m", *member, "--broker", "tcp://127.0.0.1:1", "--deadline", "0.5")


def help_of(program: tuple[str, ...]) -> tuple[str, ...]:
    """With every import on stderr."""
    return ("-X", "importtime", "-m", *program, "--help")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = Commands(tmp_path_factory.mktemp("errors"), pool)
        for arguments in [*map(up, SETTINGS), *map(absent, MEMBERS), *map(help_of, PROGRAMS)]:
            commands.start(*arguments)
        yield commands


@pytest.mark.parametrize("override", SETTINGS)
def test_a_wrong_setting_is_one_line_that_says_what_to_write_instead(override: str, run: Commands) -> None:
    told = run(*up(override))
    assert told.code == CONFIG
    assert len(told.lines) == 1, told.lines
    assert told.lines[0].startswith("ConfigError: ")
    assert [word for word in SETTINGS[override] if word not in told.lines[0]] == [], told.lines
    assert told.cpu < CPU_SECONDS
    assert told.left == []


def test_every_mistake_has_a_line_of_its_own(run: Commands) -> None:
    told = run(*up("max_stalness=2"), "--set", "reward.strips=true", "--set", "steps=0")
    assert told.code == CONFIG
    for setting in ("max_stalness", "reward.strips", "steps"):
        assert len([line for line in told.lines if f"'{setting}'" in line]) == 1, told.lines
    assert len(told.lines) == 3


@pytest.mark.parametrize(
    ("text", "words"), [(None, ["cannot read", "mine.toml"]), ("name = = 1", ["mine.toml", "not TOML", "line 1"])]
)
def test_a_file_that_is_no_configuration_is_named(text: str | None, words: list[str], tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    told = ended(("-m", "launch", "up", "mine.toml"), tmp_path)
    assert (told.code, len(told.lines), told.left) == (CONFIG, 1, [])
    assert [word for word in words if word not in told.lines[0]] == []
    assert told.cpu < CPU_SECONDS


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_told_before_anything_is_made(taken: int, run: Commands) -> None:
    told = run(*up(f"broker.port={taken}"))
    assert (told.code, len(told.lines), told.left) == (CONFIG, 1, [])
    assert "broker.port" in told.lines[0]
    assert f":{taken}" in told.lines[0]
    assert told.cpu < CPU_SECONDS


def test_a_data_file_that_is_missing_is_named_and_nothing_is_left_running(run: Commands) -> None:
    told = run(*up('data={name="jsonl", path="rows.jsonl"}'))
    assert (told.code, len(told.lines)) == (CONFIG, 1)
    assert "'data.path' = 'rows.jsonl'" in told.lines[0]
    assert told.cpu < 2 * CPU_SECONDS


@pytest.mark.parametrize("member", MEMBERS, ids=" ".join)
def test_a_broker_that_is_not_there_ends_a_process_at_its_deadline(member: tuple[str, ...], run: Commands) -> None:
    told = run(*absent(member))
    assert (told.code, len(told.lines)) == (BROKER, 1)
    assert told.lines[0].startswith("Unreachable: ")
    assert "tcp://127.0.0.1:1" in told.lines[0]
    assert "0.5 s" in told.lines[0]
    assert told.cpu < CPU_SECONDS


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_is_none_is_told_with_an_example(address: str, run: Commands) -> None:
    told = run("-m", "workers.rollout", "--broker", address)
    assert (told.code, len(told.lines)) == (CONFIG, 1)
    assert repr(address) in told.lines[0]


@pytest.mark.parametrize("member", PLANNED, ids=" ".join)
@pytest.mark.parametrize("text", [None, "no JSON"])
def test_a_plan_that_cannot_be_read_is_named(member: tuple[str, ...], text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    told = ended(("-m", *member, "--plan", "plan.json"), tmp_path)
    assert (told.code, len(told.lines)) == (CONFIG, 1)
    assert "--plan plan.json" in told.lines[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
def test_help_takes_less_than_a_second_and_no_torch(program: tuple[str, ...], run: Commands) -> None:
    told = run(*help_of(program))
    assert told.code == 0
    assert told.stdout.startswith("usage: ")
    assert told.cpu < CPU_SECONDS
    imported = {line.rsplit("|", 1)[-1].strip().partition(".")[0] for line in told.lines}
    assert "argparse" in imported
    assert not imported & {"torch", "transformers", "torchvision"}


def test_the_command_of_the_package_is_the_launcher(run: Commands) -> None:
    relaxq = Path(sys.executable).with_name("relaxq")
    done = subprocess.run([relaxq, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == run(*help_of(("launch",))).stdout

"""When a run is encrypted, who is told where its keys lie, and how a broker that announced itself is reached."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brokers import keys
from brokers.conduct import Facts
from brokers.record import ROLLOUT, TRAINER, Limits, StageSpec
from brokers.router import Router
from brokers.samples import SampleService
from common import config as settings
from common.clock import SystemClock
from common.errors import ConfigError
from common.settings import Config
from launch import plan
from launch.plan import KEY, Plan
from launch.run import announcement, answers, clear
from launch.supervisor import NodeSupervisor
from workers import registry

STAGES = [StageSpec(name, frozenset(), frozenset(), frozenset()) for name in (ROLLOUT, TRAINER)]
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart-text.toml"
FOLDER = "/somewhere/runs/quickstart-text"


def config(*overrides: str) -> Config:
    return settings.load(CONFIG, overrides, registry.options)


def made(*overrides: str, host: str = "") -> Plan:
    return plan.make(config(*overrides), Path("/somewhere"), host=host)


def options(made: Plan, name: str) -> dict[str, str]:
    """The options of a process's command line that concern keys."""
    command = next(process.command for process in made.processes if process.name == name)
    return {part: command[place + 1] for place, part in enumerate(command) if part in {"--key", "--worker-key"}}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("overrides", "host", "encrypted"),
    [
        ((), "", False),
        ((), "127.0.0.2", False),
        ((), "::1", False),
        ((), "[::1]", False),
        (("broker.host=localhost",), "", False),
        (("broker.host=10.0.0.1",), "", True),
        (("broker.host=127.0.0.1",), "10.0.0.1", True),  # a given host is what is bound
        ((), "fe80::1%eth0", True),
        ((), "eth0", True),
        (("broker.encrypt=true",), "", True),
        (("broker.encrypt=false",), "10.0.0.1", False),
    ],
)
def test_a_run_is_encrypted_when_other_machines_can_reach_its_brokers_or_as_told(
    overrides: tuple[str, ...], host: str, encrypted: bool
) -> None:
    assert made(*overrides, host=host).encrypted == encrypted


@pytest.mark.unit
def test_what_encrypt_may_be_is_told() -> None:
    with pytest.raises(ConfigError, match=r"'broker\.encrypt' = 'yes': Input should be 'auto', True or False"):
        config("broker.encrypt=yes")


@pytest.mark.unit
def test_brokers_of_an_encrypted_run_have_their_key_and_the_weight_broker_that_of_workers_too() -> None:
    broker, worker = f"{FOLDER}/keys/broker.key", f"{FOLDER}/keys/worker.key"
    encrypted = made("broker.encrypt=true")
    assert options(encrypted, "samples") == {"--key": broker}
    assert options(encrypted, "weights") == {"--key": broker, "--worker-key": worker}
    assert options(made(), "samples") == options(made(), "weights") == {}


@pytest.mark.unit
@pytest.mark.parametrize(("key", "told"), [(Path("/k/worker.key"), ["--key", "/k/worker.key"]), (None, [])])
def test_workers_are_started_with_the_key_that_was_announced(tmp_path: Path, key: Path | None, told: list[str]) -> None:
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    command = (plan.sys.executable, "-c", program, "--broker", plan.ADDRESS, KEY, "--name", "w")
    supervisor = NodeSupervisor(config().supervisor, tmp_path, {})
    supervisor.start([plan.Process("w", "rollout", 0, command, restart=False)], "tcp://h:1", key)
    popen = supervisor.children[0].popen
    assert popen is not None
    assert popen.wait(60) == 0
    words = json.loads((tmp_path / "logs" / "w.log").read_text())
    assert words == ["--broker", "tcp://h:1", *told, "--name", "w"]


@contextmanager
def alive(folder: Path, *, encrypted: bool) -> Generator[None]:
    """A run in `folder` whose broker is up and has announced itself."""
    key = keys.read_broker_key(keys.create(folder / plan.KEYS)[0]) if encrypted else None
    folder.mkdir(exist_ok=True)
    router = Router(
        SampleService(Facts("r", "{}", "/r"), STAGES, Limits(1)), "tcp://127.0.0.1:0", SystemClock(), key=key
    )
    told = {"address": router.address, "run": "r", "pid": 1, "encrypted": encrypted}
    (folder / plan.ANNOUNCEMENT).write_text(json.dumps(told))
    stop = threading.Event()
    thread = threading.Thread(target=router.run, args=(stop.is_set,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20.0)
        router.close()


@pytest.mark.contract
@pytest.mark.parametrize("encrypted", [False, True])
def test_the_folder_of_a_live_run_is_left_alone_and_that_of_a_dead_one_moved(tmp_path: Path, encrypted: bool) -> None:
    folder = tmp_path / "run"
    with alive(folder, encrypted=encrypted):
        assert answers(announcement(folder))
        with pytest.raises(ConfigError, match="run r is alive"):
            clear(folder)
    clear(folder)
    assert not folder.exists()
    assert (tmp_path / "run.1" / plan.ANNOUNCEMENT).exists()


@pytest.mark.unit
def test_a_run_whose_key_is_gone_is_taken_for_dead_since_nobody_can_ask_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    told = {"address": "tcp://127.0.0.1:9", "run": "r", "pid": 1, "encrypted": True}
    (folder / plan.ANNOUNCEMENT).write_text(json.dumps(told))
    clear(folder)
    assert (tmp_path / "run.1").exists()

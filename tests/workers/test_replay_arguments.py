"""What a worker says of a replay that cannot be: one line that names what is wrong and what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from brokers.recording import RunFacts, Writer
from common.config import to_json
from common.errors import ConfigError
from pipeline_parts import config
from workers.replay.material import prepare
from workers.session import parse

pytestmark = pytest.mark.unit


def refusal(role: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as refused:
        prepare(role, parse(role, argv, ""))
    return str(refused.value)


def test_exactly_one_of_broker_and_replay_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--broker", "tcp://a:1", "--replay", "b"]):
        with pytest.raises(SystemExit) as ended:
            parse("reward", argv, "")
        assert ended.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "--broker" in said
        assert "--replay" in said


@pytest.mark.parametrize("option", [("--limit", "1"), ("--set", "seed=1"), ("--out", "x"), ("--config", "x")])
def test_what_only_a_replay_has_is_refused_in_a_run(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("reward", ["--broker", "tcp://a:1", *option], "")
    assert f"{option[0]} goes with --replay" in capsys.readouterr().err


def test_the_prompt_worker_has_nothing_to_replay_and_says_who_has(tmp_path: Path) -> None:
    assert "workers.rollout --replay" in refusal("prompt", "--replay", str(tmp_path))


def test_a_stage_that_the_configuration_does_not_have_is_named_with_those_it_has(tmp_path: Path) -> None:
    """Without a KL term nobody asks for reference log-probs."""
    settings = json.loads(to_json(config(algorithm={"name": "grpo", "kl": 0.0})))
    Writer(tmp_path, RunFacts("r", settings, tmp_path), "reward").write([])
    said = refusal("reference", "--replay", str(tmp_path), "--set", "model.path=m")
    assert "no model in m" in said
    (tmp_path / "config.json").touch()
    said = refusal("reference", "--replay", str(tmp_path), "--set", f"model.path={tmp_path}")
    assert "no stage 'reference'; it has rollout, reward, advantage, trainer" in said


def test_a_recording_without_a_group_says_so(tmp_path: Path) -> None:
    Writer(tmp_path, RunFacts("r", json.loads(to_json(config())), tmp_path), "reward").write([])
    assert "no group that stage 'reward' could be given" in refusal("reward", "--replay", str(tmp_path))


def test_a_setting_that_does_not_exist_is_refused_as_in_a_run(tmp_path: Path) -> None:
    Writer(tmp_path, RunFacts("r", json.loads(to_json(config())), tmp_path), "reward").write([])
    assert "unknown setting 'sed'" in refusal("reward", "--replay", str(tmp_path), "--set", "sed=1")


def test_help_needs_no_torch() -> None:
    script = (
        "import sys, contextlib, workers.reward.__main__ as m\n"
        "with contextlib.suppress(SystemExit):\n"
        "    m.main(['--help'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not [name for name in sys.modules if name.startswith('workers.replay')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)

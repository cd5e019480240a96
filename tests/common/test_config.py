"""The configuration: every mistake at once, with the setting to change; nothing a user set is replaced."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from common.config import check, from_json, load, to_json
from common.errors import ConfigError
from common.settings import Config, Table

pytestmark = pytest.mark.unit

TOML = """
name = "mod10"
groups_per_step = 8
group_size = 4
steps = 10
model.path = "models/tiny"
data.name = "mod10"
"""


class DataOptions(Table):
    seed: int = 3
    lower: int = 0


class NoOptions(Table):
    pass


def options(kind: str, name: str) -> type[BaseModel]:
    if name == "nothing":
        raise ConfigError(f"setting '{kind}.name' = 'nothing' is unknown; known: mod10, torch")
    return DataOptions if kind == "data" else NoOptions


def read(tmp_path: Path, text: str = "", *overrides: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(TOML + text, encoding="utf-8")
    return load(path, overrides, options)


def mistakes(tmp_path: Path, text: str = "", *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text, *overrides)
    return str(refused.value).splitlines()


def test_defaults_are_filled_in_those_of_components_too(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.mode, config.max_staleness, config.groups_per_step) == ("async", 1, 8)
    assert config.data.options == {"seed": 3, "lower": 0}
    assert config.run_folder == Path("runs/mod10")


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = """
max_stalness = 2
[broker]
lease_seconds = -1
prot = 5600
[sampling]
max_tokens = "long"
[engine]
name = "nothing"
[data.nested]
x = 1
"""
    found = mistakes(tmp_path, text, "group_size=0")
    assert len(found) == 7
    assert all(any(name in line for line in found) for name in (
        "max_stalness", "broker.lease_seconds", "broker.prot", "sampling.max_tokens", "engine.name", "data.nested",
        "group_size",
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("max_stalness", "max_staleness"),
        ("group_per_step", "groups_per_step"),
        ("broker.lease_second", "broker.lease_seconds"),
        ("lease_seconds", "broker.lease_seconds"),
        ("broker.max_tokens", "sampling.max_tokens"),
        ("data.sed", "data.seed"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest_one(tmp_path: Path, wrong: str, meant: str) -> None:
    assert mistakes(tmp_path, "", f"{wrong}=2") == [f"unknown setting {wrong!r}; did you mean {meant!r}?"]
    table, _, name = wrong.rpartition(".")
    if table != "data":  # which the file above holds already
        text = f"[{table}]\n{name} = 2\n" if table else f"{name} = 2\n"
        assert mistakes(tmp_path, text) == [f"unknown setting {wrong!r}; did you mean {meant!r}?"]


def test_a_setting_that_several_tables_know_is_answered_with_all_of_them(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, "", "temperature=1.0")
    assert found.endswith("did you mean 'evaluation.temperature' or 'sampling.temperature'?")


def test_a_setting_like_no_other_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, "", "data.zzz=2")
    assert found == "unknown setting 'data.zzz'; known here: data.lower, data.seed"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        check({"name": "x", "model": {}}, options)
    lines = str(refused.value).splitlines()
    assert [f"setting {name!r} is missing" for name in ("groups_per_step", "group_size", "data")] == lines


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("max_staleness=3", 3),
        ("deterministic=true", True),
        ("sampling.temperature=0.5", 0.5),
        ("folder=somewhere/else", "somewhere/else"),
        ("folder='quoted'", "quoted"),
        ("folder=a=b", "a=b"),
        ("data.lower=7", 7),
        ("rewards.timeout_seconds=0", 0.0),
        ("folder=", ""),
    ],
)
def test_set_takes_toml_values_and_plain_words(tmp_path: Path, override: str, value: Any) -> None:
    extra = ("max_staleness=0",) if override == "deterministic=true" else ()
    config = read(tmp_path, "", override, *extra)
    at: Any = config.model_dump()
    for name in override.partition("=")[0].split("."):
        at = at[name]
    assert at == value


def test_set_makes_tables_that_the_file_does_not_have_and_the_last_one_wins(tmp_path: Path) -> None:
    config = read(tmp_path, "", "supervisor.max_restarts=1", "supervisor.max_restarts=2")
    assert config.supervisor.max_restarts == 2


@pytest.mark.parametrize("override", ["max_staleness", "=3", ""])
def test_set_without_name_or_value_is_refused_with_the_form(tmp_path: Path, override: str) -> None:
    assert "expected name=value" in mistakes(tmp_path, "", override)[0]


def test_set_below_a_value_is_refused(tmp_path: Path) -> None:
    assert "'steps' is a value, not a table" in mistakes(tmp_path, "", "steps.more=1")[0]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("mode=sync", "max_staleness=2"), ("mode = 'sync'", "max_staleness", "2")),
        (("deterministic=true", "max_staleness=1"), ("deterministic = true", "max_staleness", "1")),
        (
            ("deterministic=true", "max_staleness=0", "staleness.policy=drop"),
            ("deterministic = true", "staleness.policy must be 'wait', not 'drop'"),
        ),
        (
            ("deterministic=true", "max_staleness=0", "broker.order=short_first"),
            ("deterministic = true", "broker.order must be 'oldest_version', not 'short_first'"),
        ),
        (
            ("deterministic=true", "max_staleness=0", "broker.lanes=[8]"),
            ("deterministic = true", "broker.lanes must be [], not [8]"),
        ),
        (("broker.max_queue_groups=8", "max_staleness=1"), ("max_queue_groups = 8", "16", "max_staleness = 1")),
        (("model.recipe.name=tiny",), ("model.path", "model.recipe")),
        (("broker.max_bytes=10", "broker.max_queue_bytes=11"), ("broker.max_bytes = 10", "max_queue_bytes = 11")),
        (("broker.journal_keep=true",), ("broker.journal_keep = true", "broker.journal = true")),
        (("watchdog.seconds=5",), ("watchdog.seconds = 5", "rewards.timeout_seconds = 10")),
        (
            ("watchdog.seconds=2", "rewards.timeout_seconds=1", "broker.heartbeat_seconds=2"),
            ("watchdog.seconds = 2", "broker.heartbeat_seconds = 2"),
        ),
        (("mode=hybrid", "workers.reference=2"), ("mode = 'hybrid'", "workers.reference = 2")),
        (("mode=hybrid", "workers.advantage=3"), ("mode = 'hybrid'", "workers.advantage = 3")),
    ],
)
def test_settings_that_contradict_are_both_named(
    tmp_path: Path, overrides: tuple[str, ...], named: tuple[str, ...]
) -> None:
    (found,) = mistakes(tmp_path, "", *overrides)
    assert all(name in found for name in named)


def test_several_contradictions_are_reported_at_once(tmp_path: Path) -> None:
    assert len(mistakes(tmp_path, "", "mode=sync", "max_staleness=2", "deterministic=true")) == 2


def test_a_run_without_an_end_or_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        check({"name": "x", "groups_per_step": 1, "group_size": 1, "data": {"name": "a"}, "model": {}}, options)
    assert "steps, epochs or both" in str(refused.value)
    assert "model.path" in str(refused.value)


def test_a_window_that_just_fits_the_queue_is_fine(tmp_path: Path) -> None:
    # (1 + 1) x 8 = 16
    assert read(tmp_path, "", "broker.max_queue_groups=16", "max_staleness=1").broker.max_queue_groups == 16


def test_a_bound_on_all_bytes_may_be_below_the_queues_default(tmp_path: Path) -> None:
    assert read(tmp_path, "", "broker.max_bytes=10").broker.max_bytes == 10


BOUNDS = ("max_queue_groups", "max_queue_bytes", "max_bytes", "memory_bytes", "high_water_mark")


@pytest.mark.parametrize("setting", [f"broker.{name}" for name in BOUNDS])
@pytest.mark.parametrize("value", [0, -1])
def test_a_bound_of_zero_is_refused_with_the_reason(tmp_path: Path, setting: str, value: int) -> None:
    (found,) = mistakes(tmp_path, "", f"{setting}={value}")
    assert f"setting '{setting}' = {value}" in found
    assert "in ZeroMQ 0 would mean unlimited" in found


@pytest.mark.parametrize("value", ["[0, 5]", "[5, 5]", "[9, 5]", "[-1]"])
def test_lanes_that_do_not_ascend_are_refused(tmp_path: Path, value: str) -> None:
    (found,) = mistakes(tmp_path, "", f"broker.lanes={value}")
    assert "broker.lanes" in found
    assert "ascending, for example [256, 1024]" in found
    assert read(tmp_path, "", "broker.lanes=[256, 1024]").broker.lanes == (256, 1024)


@pytest.mark.parametrize("setting", ["staleness.factor=1", "staleness.factor=0", "staleness.straggler_seconds=0"])
def test_a_policy_that_could_do_nothing_is_refused(tmp_path: Path, setting: str) -> None:
    (found,) = mistakes(tmp_path, "", setting)
    assert setting.partition("=")[0] in found


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("setting", ["broker.lease_seconds", "rewards.timeout_seconds", "sampling.temperature"])
def test_a_number_without_an_end_is_refused(tmp_path: Path, setting: str, value: str) -> None:
    (found,) = mistakes(tmp_path, "", f"{setting}={value}")
    assert setting in found


def test_zero_stays_zero_and_a_path_stays_as_written(tmp_path: Path) -> None:
    text = "seed = 0\n[rewards]\ntimeout_seconds = 0\n[evaluation]\nprompts = 0\n[workers]\nreference = 0\n"
    config = read(tmp_path, text, "folder=./a/../b/", "data.seed=0")
    assert (config.seed, config.rewards.timeout_seconds, config.evaluation.prompts) == (0, 0.0, 0)
    assert (config.workers.reference, config.folder, config.data.options["seed"]) == (0, "./a/../b/", 0)


def test_sync_takes_no_staleness_by_default_and_keeps_what_was_set(tmp_path: Path) -> None:
    assert read(tmp_path, "", "mode=sync").max_staleness == 0
    assert read(tmp_path, "", "mode=sync", "max_staleness=0").max_staleness == 0


def test_the_settings_that_were_passed_are_not_touched() -> None:
    tree: dict[str, Any] = {
        "name": "x", "mode": "sync", "groups_per_step": 1, "group_size": 1, "steps": 1,
        "data": {"name": "a", "wrong": 1}, "model": {"path": "m"},
    }  # fmt: skip
    with pytest.raises(ConfigError):
        check(tree, options)
    assert tree["data"] == {"name": "a", "wrong": 1}
    assert "max_staleness" not in tree
    assert "engine" not in tree


def test_a_configuration_never_changes_after_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        read(tmp_path).max_staleness = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_resolved_configuration_survives_json(tmp_path: Path) -> None:
    config = read(tmp_path, "", "data.seed=11", "broker.max_queue_groups=99", "sampling.temperature=0.7")
    assert from_json(to_json(config)) == config


def test_json_of_another_release_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'staleness_max'"):
        from_json('{"name": "x", "groups_per_step": 1, "group_size": 1, "model": {}, "data": {"name": "a"}, '
                  '"staleness_max": 3}')  # fmt: skip


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml: No such file"):
        load(tmp_path / "absent.toml", (), options)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path, (), options)
    (tmp_path / "broken.toml").write_text("name = ", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.toml: not TOML"):
        load(tmp_path / "broken.toml", (), options)
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml: not TOML"):
        load(tmp_path / "latin.toml", (), options)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "two words"])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert "setting 'name'" in mistakes(tmp_path, "", f"name='{name}'")[0]

"""The configuration: TOML in, one frozen tree out, every mistake reported at once.

The tables are in `common.settings`. The caller of `load` says where the options of a component are declared.
"""

import copy
import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ValidationError

from common.errors import ConfigError
from common.settings import Config

COMPONENTS = ("data", "engine", "reward", "algorithm", "backend", "model.recipe")

TypeOfOptions: TypeAlias = Callable[[str, str], type[BaseModel]]
"""(kind of component, name) -> its options; raises `ConfigError` for an unknown name."""


def load(path: Path, overrides: Sequence[str], options: TypeOfOptions) -> Config:
    """Read a TOML file, apply `a.b=c` overrides, fill in defaults and check everything.

    Raises one `ConfigError` that lists every mistake, a line each, with the nearest valid setting.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return changed(tree, overrides, options)


def changed(tree: dict[str, Any], overrides: Sequence[str], options: TypeOfOptions) -> Config:
    """Apply `a.b=c` overrides to a tree of settings and check it; raises `ConfigError` as `load` does."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        _override(tree, override)
    return check(tree, options)


def check(tree: dict[str, Any], options: TypeOfOptions) -> Config:
    """Validate a tree of settings; raises `ConfigError` as `load` does."""
    tree = copy.deepcopy(tree)
    if tree.get("mode") == "sync":
        tree.setdefault("max_staleness", 0)
    mistakes = [mistake for place in COMPONENTS for mistake in _complete(tree, place, options)]
    config = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += list(_explain(error, Config, ""))
    mistakes += [] if config is None else _contradictions(config)
    if mistakes or config is None:
        raise ConfigError("\n".join(mistakes))
    return config


def to_json(config: Config) -> str:
    """Return the resolved configuration, defaults included, as JSON."""
    return json.dumps(config.model_dump(mode="json"), indent=2)


def from_json(text: str) -> Config:
    """Read back what `to_json` wrote; raises `ConfigError` for what this release does not know."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, Config, ""))) from error


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {override!r}: expected name=value, for example --set max_staleness=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = path.split(".")
    for name in tables:
        node = tree.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {name!r} is a value, not a table")
        tree = cast(dict[str, Any], node)
    tree[last] = value


def _complete(tree: dict[str, Any], place: str, options: TypeOfOptions) -> list[str]:
    """Replace a component's options in `tree` by the checked ones with defaults; return the mistakes."""
    node: Any = tree
    *tables, last = place.split(".")
    for name in tables:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return []
    parent = cast(dict[str, Any], node)
    table = parent.get(last)
    if table is None and place in Config.model_fields and not Config.model_fields[place].is_required():
        table = {"name": Config.model_fields[place].default.name}
    if not isinstance(table, dict) or not isinstance(cast(dict[str, Any], table).get("name"), str):
        return []
    given = dict(cast(dict[str, Any], table))
    name = given.pop("name")
    try:
        kind = options(place, name)
        parent[last] = {"name": name, **kind.model_validate(given).model_dump(mode="json")}
    except ConfigError as error:
        return [str(error)]
    except ValidationError as error:
        parent[last] = {"name": name}
        return list(_explain(error, options(place, name), f"{place}."))
    return []


def _explain(error: ValidationError, model: type[BaseModel], prefix: str) -> Iterator[str]:
    for mistake in error.errors(include_url=False):
        setting = prefix + ".".join(map(str, mistake["loc"]))
        if mistake["type"] == "extra_forbidden":
            known, last = sorted(prefix + name for name in _settings(model)), setting.rsplit(".", 1)[-1]
            near = [name for name in known if f".{name}".endswith(f".{last}")]
            near = near or difflib.get_close_matches(setting, known, n=1)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known here: {', '.join(known)}"
            yield f"unknown setting {setting!r}; {hint}"
        elif mistake["type"] == "missing":
            yield f"setting {setting!r} is missing"
        else:
            yield f"setting {setting!r} = {mistake['input']!r}: {mistake['msg']}"


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _settings(info.annotation, f"{prefix}{name}.")


def _contradictions(config: Config) -> Iterator[str]:
    if config.mode == "sync" and config.max_staleness != 0:
        yield f"mode = 'sync' takes turns, so max_staleness must be 0, not {config.max_staleness}"
    if config.deterministic and config.max_staleness != 0:
        reason = "otherwise the version that makes a token depends on timing"
        yield f"deterministic = true needs max_staleness = 0, not {config.max_staleness}: {reason}"
    for name, value, only in (
        ("staleness.policy", config.staleness.policy, "wait"),
        ("broker.order", config.broker.order, "oldest_version"),
        ("broker.lanes", list(config.broker.lanes), []),
    ):
        if config.deterministic and value != only:
            yield f"deterministic = true hands groups out by prompt alone, so {name} must be {only!r}, not {value!r}"
    if (config.model.path is None) == (config.model.recipe is None):
        yield "set exactly one of model.path (a Hugging Face folder) and model.recipe.name (a model made here)"
    if config.steps is None and config.epochs is None:
        yield "set steps, epochs or both: without them the run has no end"
    window = (config.max_staleness + 1) * config.groups_per_step
    if config.broker.max_queue_groups is not None and config.broker.max_queue_groups < window:
        yield (
            f"broker.max_queue_groups = {config.broker.max_queue_groups} is less than the {window} groups that "
            f"max_staleness = {config.max_staleness} and groups_per_step = {config.groups_per_step} keep under way"
        )
    yield from _contradictions_of_bounds(config)
    for role, count in (("reference", config.workers.reference), ("advantage", config.workers.advantage)):
        if config.mode == "hybrid" and count > 1:
            yield f"mode = 'hybrid' runs {role} inside the trainer, so workers.{role} = {count} cannot be"


def _contradictions_of_bounds(config: Config) -> Iterator[str]:
    broker, both = config.broker, {"max_bytes", "max_queue_bytes"}
    if both <= broker.model_fields_set and broker.max_bytes is not None and broker.max_bytes < broker.max_queue_bytes:
        yield (
            f"broker.max_bytes = {broker.max_bytes} bounds all queues together, so "
            f"broker.max_queue_bytes = {broker.max_queue_bytes} could never be reached"
        )
    if broker.journal_keep and not broker.journal:
        yield "broker.journal_keep = true needs broker.journal = true: there is nothing to keep"
    watch = config.watchdog.seconds
    for name, seconds, why in (
        ("rewards.timeout_seconds", config.rewards.timeout_seconds, "a sample may take that long to be scored"),
        ("broker.heartbeat_seconds", config.broker.heartbeat_seconds, "progress is told so often"),
    ):
        if watch <= seconds:
            yield f"watchdog.seconds = {watch:g} must be above {name} = {seconds:g}: {why}"

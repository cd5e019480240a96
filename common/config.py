"""The configuration: TOML in, one frozen tree out, every mistake reported at once.

A component (engine, backend, reward, algorithm, data source, model recipe) keeps its options next to its code; the
tables here only hold its name, and the caller of `load` says where its options are declared.
"""

import copy
import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from common.errors import ConfigError


class Table(BaseModel):
    """A group of settings. Unknown settings are errors, numbers are finite, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Component(BaseModel):
    """Names one implementation; everything beside `name` is its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The settings beside the name."""
        return dict(self.model_extra or {})


class Model(Table):
    """Where the initial weights come from: a Hugging Face folder, or a recipe that makes one."""

    path: str | None = None
    recipe: Component | None = None


class Sampling(Table):
    """How responses are drawn. `max_tokens`: longest response."""

    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(256, gt=0)


class Evaluation(Table):
    """Held-out prompts, answered once each at the first and last version and every `every` updates.

    `temperature` 0 is greedy. An answer counts as solved when its reward is at least `solved_at`.
    """

    prompts: int = Field(128, ge=0)
    solved_at: float = 1.0
    every: int = Field(0, ge=0)
    temperature: float = Field(0.0, ge=0)
    deadline_seconds: float = Field(300.0, gt=0)


class Rewards(Table):
    """Limits of the reward stage. `processes` score samples side by side; one sample may take `timeout_seconds`."""

    processes: int = Field(1, gt=0)
    timeout_seconds: float = Field(10.0, ge=0)


class Workers(Table):
    """How many processes each role gets. In hybrid mode reference and advantage run inside the trainer.

    `rollout`: on each node that generates, which are all but the first of a run on several nodes.
    """

    rollout: int = Field(1, ge=0)
    reward: int = Field(1, ge=0)
    reference: int = Field(1, ge=0)
    advantage: int = Field(1, ge=0)


class Broker(Table):
    """The sample broker. `max_queue_groups`: prompts waiting for rollout, by default twice what may be under way."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    encrypt: Literal["auto", True, False] = "auto"  # auto: if other machines can reach `host`
    lease_seconds: float = Field(30.0, gt=0)
    heartbeat_seconds: float = Field(1.0, gt=0)
    request_seconds: float = Field(60.0, gt=0)
    max_attempts: int = Field(3, gt=0)
    max_queue_groups: int | None = None
    max_queue_bytes: int = 4 << 30
    high_water_mark: int = 64

    @field_validator("max_queue_groups", "max_queue_bytes", "high_water_mark")
    @classmethod
    def _is_a_bound(cls, value: int | None) -> int | None:
        if value is not None and value <= 0:
            raise ValueError("a bound must be at least 1; in ZeroMQ 0 would mean unlimited, and memory has an end")
        return value


class Weights(Table):
    """The weight plane. `in_flight`: what becomes of running generations when a version arrives."""

    in_flight: Literal["finish", "continue"] = "continue"
    chunk_bytes: int = Field(4 << 20, gt=0)
    keep_versions: int = Field(2, gt=0)


class Supervisor(Table):
    """How processes are kept alive. After `max_restarts` of one process the run ends as failed."""

    max_restarts: int = Field(5, ge=0)
    grace_seconds: float = Field(10.0, gt=0)
    start_seconds: float = Field(60.0, gt=0)


class Config(Table):
    """Everything about one run.

    `micro_steps`: pieces in which the trainer takes a step's groups as they arrive; 1 waits for the closed batch.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    folder: str = "runs"
    mode: Literal["sync", "async", "hybrid"] = "async"
    seed: int = 0
    steps: int | None = Field(None, gt=0)
    epochs: int | None = Field(None, gt=0)
    deterministic: bool = False
    max_staleness: int = Field(1, ge=0)
    groups_per_step: int = Field(gt=0)
    group_size: int = Field(gt=0)
    micro_steps: int = Field(4, gt=0)
    model: Model
    data: Component
    sampling: Sampling = Sampling.model_validate({})
    evaluation: Evaluation = Evaluation.model_validate({})
    engine: Component = Component(name="torch")
    reward: Component = Component(name="exact")
    rewards: Rewards = Rewards.model_validate({})
    algorithm: Component = Component(name="grpo")
    backend: Component = Component(name="torch")
    workers: Workers = Workers.model_validate({})
    broker: Broker = Broker.model_validate({})
    weights: Weights = Weights.model_validate({})
    supervisor: Supervisor = Supervisor.model_validate({})

    @property
    def run_folder(self) -> Path:
        """Folder of this run's logs, results and checkpoint."""
        return Path(self.folder) / self.name


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
    for override in overrides:
        _override(tree, override)
    return check(tree, options)


def check(tree: dict[str, Any], options: TypeOfOptions) -> Config:
    """Validate a tree of settings; raises `ConfigError` as `load` does."""
    tree = copy.deepcopy(tree)
    if tree.get("mode") == "sync":
        tree.setdefault("max_staleness", 0)
    mistakes: list[str] = []
    for place in COMPONENTS:
        mistakes += _complete(tree, place, options)
    config = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += list(_explain(error, Config, ""))
    if config is not None:
        mistakes += list(_contradictions(config))
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
        yield (
            f"deterministic = true needs max_staleness = 0, not {config.max_staleness}: "
            "otherwise the version that makes a token depends on timing"
        )
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
    for role, count in (("reference", config.workers.reference), ("advantage", config.workers.advantage)):
        if config.mode == "hybrid" and count > 1:
            yield f"mode = 'hybrid' runs {role} inside the trainer, so workers.{role} = {count} cannot be"

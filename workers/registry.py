"""The folder is the registry: component `name` is the one public class of `<folder>/<name>.py`.

`package.module:Class` names a class outside this repository. Every component class has a nested `Options` table, and
its module imports neither torch nor transformers at the top, so that a configuration is checked in milliseconds.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from pydantic import BaseModel

from common.errors import ConfigError
from common.settings import Component

HOMES = {
    "data": "workers.prompt.sources",
    "engine": "workers.rollout.engines",
    "reward": "workers.reward.rewards",
    "algorithm": "workers.algorithms",
    "backend": "workers.trainer.backends",
    "model.recipe": "workers.recipes",
}


def known(kind: str) -> list[str]:
    """Return the names that exist for a kind of component."""
    home = importlib.import_module(HOMES[kind])
    return sorted(module.name for module in pkgutil.iter_modules(home.__path__) if not module.name.startswith("_"))


@cache
def find(kind: str, name: str) -> Any:
    """Return the class behind `name`; raises `ConfigError` that lists the known names."""
    if ":" in name:
        return _outside(kind, name)
    if name not in known(kind):
        raise ConfigError(f"setting '{kind}.name' = {name!r} is unknown; known: {', '.join(known(kind))}")
    module = importlib.import_module(f"{HOMES[kind]}.{name}")
    classes = [value for value in vars(module).values() if _is_component(value, module.__name__)]
    assert len(classes) == 1, f"{module.__name__} must hold exactly one class with Options, found {classes}"
    return classes[0]


def options(kind: str, name: str) -> type[BaseModel]:
    """Return the options table of a component; raises `ConfigError` for an unknown name."""
    return find(kind, name).Options


def create(kind: str, component: Component, *args: Any) -> Any:
    """Build a component from its table: `Class(Options, *args)`."""
    cls = find(kind, component.name)
    return cls(cls.Options.model_validate(component.options), *args)


def _is_component(value: Any, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and "Options" in vars(value)


def _outside(kind: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"setting '{kind}.name' = {name!r}: {error}") from error
    if not (isinstance(value, type) and "Options" in vars(value)):
        raise ConfigError(f"setting '{kind}.name' = {name!r}: not a class with nested Options")
    return value

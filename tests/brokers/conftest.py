"""Worlds for the contract suite."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brokers.record import Limits
from contract import EncryptedWorld, MemoryWorld, TcpWorld, World

Build = Callable[..., World]


@pytest.fixture(params=[MemoryWorld, TcpWorld, EncryptedWorld], ids=["memory", "tcp", "encrypted"])
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    """Makes a world: `build(groups_per_step, max_staleness, **limits)`."""
    worlds: list[World] = []

    def make(groups_per_step: int = 100, max_staleness: int = 0, **limits: Any) -> World:
        worlds.append(request.param(Limits(groups_per_step, max_staleness, **limits)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(build: Build) -> World:
    """A world whose window never matters."""
    return build()

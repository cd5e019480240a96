"""Worlds for the contract suite: every transport, with and without what makes a broker durable."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from brokers.conduct import Facts
from brokers.durable import DurableService
from brokers.journal import Journal
from brokers.record import Limits
from brokers.samples import SampleService
from brokers.spill import SpillStore
from brokers.store import MemoryStore
from contract import STAGES, Build, EncryptedWorld, MakeService, MemoryWorld, TcpWorld, World, plain

TRANSPORTS: dict[str, Callable[[Limits, MakeService], World]] = {
    "memory": MemoryWorld,
    "tcp": TcpWorld,
    "encrypted": EncryptedWorld,
}
SERVICES = ("plain", "journal")
WORLDS = [(transport, service) for transport in TRANSPORTS for service in SERVICES]
WORLDS += [("memory", "spill"), ("encrypted", "spill")]


def journaled(folder: Path) -> MakeService:
    """Brokers whose journals are in folders of their own."""

    def make(facts: Facts, limits: Limits) -> SampleService:
        journal = Journal(folder / str(len(list(folder.iterdir()))), 100_000, fsync=False)
        return DurableService(facts, STAGES, limits, journal, 0.0)

    return make


def spilling(folder: Path) -> MakeService:
    """Brokers that have no memory for anything."""

    def make(facts: Facts, limits: Limits) -> SampleService:
        place = folder / str(len(list(folder.iterdir())))
        place.mkdir()
        return SampleService(facts, STAGES, limits, SpillStore(MemoryStore(), place, 1, 0))

    return make


@pytest.fixture(params=WORLDS, ids="-".join)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Build]:
    """Makes a world: `build(groups_per_step, max_staleness, **limits)`."""
    worlds: list[World] = []
    transport, service = request.param

    def make(groups_per_step: int = 100, max_staleness: int = 0, **limits: Any) -> World:
        limits_of_run = Limits(groups_per_step, max_staleness, **limits)
        services = {"plain": plain, "journal": journaled(tmp_path), "spill": spilling(tmp_path)}
        worlds.append(TRANSPORTS[transport](limits_of_run, services[service]))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
        world.samples.close()


@pytest.fixture
def world(build: Build) -> World:
    """A world whose window never matters."""
    return build()

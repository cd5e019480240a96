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
from contract import STAGES, Build, EncryptedWorld, MakeService, MemoryWorld, TcpWorld, World, plain

TRANSPORTS: dict[str, Callable[[Limits, MakeService], World]] = {
    "memory": MemoryWorld,
    "tcp": TcpWorld,
    "encrypted": EncryptedWorld,
}
SERVICES = ("plain", "journal")


def journaled(folder: Path) -> MakeService:
    """Brokers whose journals are in folders of their own."""

    def make(facts: Facts, limits: Limits) -> SampleService:
        journal = Journal(folder / str(len(list(folder.iterdir()))), 100_000, fsync=False)
        return DurableService(facts, STAGES, limits, journal, 0.0)

    return make


@pytest.fixture(
    params=[(transport, service) for transport in TRANSPORTS for service in SERVICES],
    ids="-".join,
)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Build]:
    """Makes a world: `build(groups_per_step, max_staleness, **limits)`."""
    worlds: list[World] = []
    transport, service = request.param

    def make(groups_per_step: int = 100, max_staleness: int = 0, **limits: Any) -> World:
        limits_of_run = Limits(groups_per_step, max_staleness, **limits)
        service_of_run = journaled(tmp_path) if service == "journal" else plain
        worlds.append(TRANSPORTS[transport](limits_of_run, service_of_run))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
        world.samples.close()


@pytest.fixture
def world(build: Build) -> World:
    """A world whose window never matters."""
    return build()

"""What the tests with real processes share: one run that ended well, and the model that it began with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import Run, started


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run in mode async that has ended by itself."""
    with started(tmp_path_factory.mktemp("finished")) as run:
        run.end()
        yield run


@pytest.fixture(scope="session")
def model(finished: Run) -> Path:
    """A model to begin with, so that a run need not make one."""
    return finished.folder / "model"

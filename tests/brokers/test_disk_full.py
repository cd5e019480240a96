"""A journal on a disk that is really full: everybody is told and waits, nothing confirmed is lost, and it goes on."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from brokers.channel import wait
from brokers.conduct import Facts
from brokers.durable import DurableService
from brokers.journal import Journal, segments
from brokers.record import Limits
from common.config import to_json
from common.header import Header
from contract import CONFIG, SECONDS, STAGES, Worker, answer
from small_disk import small_disk
from test_rejoin import Mortal

pytestmark = pytest.mark.contract
PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 64 * PAGE) as folder:
        yield folder


@pytest.fixture
def mortal(disk: Path) -> Iterator[Mortal]:
    broker = Mortal(disk / "journal")
    yield broker
    broker.close()


def fill(disk: Path) -> Path:
    """Leave no byte on the disk; return the file whose end gives it back."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(PAGE)) == PAGE:
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC, error  # noqa: PT017
    return ballast


def beat(worker: Worker) -> None:
    wait(worker.channel.request(Header("beat")), SECONDS)


def as_if_killed(mortal: Mortal, copy: Path) -> DurableService:
    """Return the broker that a restart at this moment would give."""
    shutil.copytree(mortal.folder, copy)
    facts = Facts("run-a", to_json(CONFIG), "/runs/a")
    return DurableService(facts, STAGES, Limits(100, 0), Journal(copy, 10_000, fsync=False), 0.0)


def test_on_a_full_disk_everybody_is_told_and_waits_and_goes_on_when_there_is_room(
    mortal: Mortal, disk: Path, tmp_path: Path
) -> None:
    feeder, worker = mortal.join("prompt-0"), mortal.join("rollout-0")
    wait(feeder.offer(0), SECONDS)
    in_hand = worker.get("rollout", 1, 0)
    ballast = fill(disk)

    offered = feeder.offer(1, media=bytes(5_000), seconds=1000.0)
    beat(feeder)  # is answered behind the offer: the disk is known to be full, and smaller things do not slip in before
    results = [answer("rollout", in_hand[0])]
    put = worker.put(results)
    for _ in range(10):  # 100 s, more than three times what a lease lasts
        mortal.clock.advance(10.0)
        beat(worker)
        beat(feeder)
    assert not offered.done()
    assert not put.done()
    told = f"waiting for room on the disk of {mortal.folder}"
    assert (feeder.held_up, worker.held_up) == (told, told)
    assert feeder.next_seq["train"] == 1  # prompt 1 is not confirmed, and may still be forgotten
    status = feeder.status(SECONDS)
    assert (status["counts"]["expired"], status["stalled"]) == (0, told)

    successor = as_if_killed(mortal, tmp_path / "copy")
    assert list(successor.ledger.books.records) == ["train-0"]
    assert [lease.worker for lease in successor.ledger.books.leases.values()] == ["rollout-0#1"]

    ballast.unlink()
    mortal.clock.advance(1.0)
    wait(offered, SECONDS)
    assert worker.confirm(put, results) == []
    assert (feeder.held_up, feeder.next_seq["train"]) == ("", 2)
    mortal.kill()
    mortal.start()
    assert list(mortal.service.ledger.books.records) == ["train-0", "train-1"]
    assert worker.finish("reward", worker.get("reward", 1)) == []


def test_a_request_waits_longer_than_it_would_while_the_broker_says_what_for(mortal: Mortal, disk: Path) -> None:
    worker = mortal.join("w")
    ballast = fill(disk)
    worker.offer(0, media=bytes(5_000), seconds=1000.0)
    asked = worker.channel.request(Header("end_of_data", run="run-a"), seconds=0.3)
    with pytest.raises(TimeoutError):
        asked.result(1.0)
    ballast.unlink()
    mortal.clock.advance(1.0)
    asked.result(SECONDS)
    assert mortal.service.ledger.data_ended


def test_a_segment_that_cannot_be_begun_is_begun_later_and_old_ones_go_then(mortal: Mortal, disk: Path) -> None:
    """A segment ends above 10,000 bytes: the group of 10,000 ends the one in use, and by then the disk is full."""
    worker = mortal.join("w")
    wait(worker.offer(0), SECONDS)
    before, journal = segments(mortal.folder), mortal.service.journal
    written = journal._write  # pyright: ignore[reportPrivateUsage]

    def full_from_now_on(data: pa.Buffer) -> None:
        written(data)
        journal._write = written  # pyright: ignore[reportPrivateUsage]
        fill(disk)

    journal._write = full_from_now_on  # pyright: ignore[reportPrivateUsage]
    wait(worker.offer(1, media=bytes(10_000)), SECONDS)
    waiting = worker.offer(2)
    beat(worker)
    assert not waiting.done()
    assert segments(mortal.folder) == before
    (disk / "ballast").unlink()
    mortal.clock.advance(1.0)
    wait(waiting, SECONDS)
    worker.drop([f"train-{seq}" for seq in range(3)], "filtered")
    wait(worker.offer(3, media=bytes(10_000)), SECONDS)
    assert not set(before) & set(segments(mortal.folder))
    mortal.kill()
    mortal.start()
    assert list(mortal.service.ledger.books.records) == ["train-3"]

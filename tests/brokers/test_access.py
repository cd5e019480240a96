"""Who gets past the handshake of a broker, and what the others are told. Key files: whose, and who may read them."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from brokers import keys
from brokers.client import SampleClient
from brokers.conduct import Facts
from brokers.dealer import DealerChannel
from brokers.keys import BrokerKey, WorkerKey
from brokers.record import Limits
from brokers.router import Router
from brokers.samples import SampleService
from brokers.service import Service
from common.clock import SystemClock
from common.errors import ConfigError, Unreachable
from contract import SECONDS, STAGES, new_keys

OURS = new_keys()
BROKER, WORKER = OURS
FOREIGN = new_keys()[1]
IMPOSTOR = WorkerKey(FOREIGN.public, FOREIGN.secret, WORKER.broker)
"""knows the broker's public key, which is no secret, and has no pair of this run"""


@contextmanager
def served(key: BrokerKey | None) -> Generator[str]:
    """The address of a sample broker."""
    service = SampleService(Facts("r", "{}", "/r"), STAGES, Limits(1))
    router, stop = Router(service, "tcp://127.0.0.1:0", SystemClock(), key=key), threading.Event()
    thread = threading.Thread(target=router.run, args=(stop.is_set,))
    thread.start()
    try:
        yield router.address
    finally:
        stop.set()
        thread.join(SECONDS)
        router.close()


def turned_away(address: str, key: WorkerKey | None) -> int:
    """What the broker's status says, asked by one who may."""
    channel = DealerChannel(address, "status", "1", key=key)
    try:
        return SampleClient(channel, "status").status(SECONDS)["counts"]["turned_away"]
    finally:
        channel.close(0.0)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("broker", "welcome", "stranger", "hint"),
    [
        (BROKER, WORKER, None, "; an encrypted broker needs --key"),
        (BROKER, WORKER, FOREIGN, "; is --key that of this very run?"),
        (BROKER, WORKER, IMPOSTOR, "; is --key that of this very run?"),
        (None, None, WORKER, "; is --key that of this very run?"),
    ],
    ids=["plain", "foreign", "impostor", "encrypted-to-plain"],
)
def test_a_peer_without_the_runs_key_is_told_at_its_deadline_and_counted(
    broker: BrokerKey | None, welcome: WorkerKey | None, stranger: WorkerKey | None, hint: str
) -> None:
    with served(broker) as address:
        channel = DealerChannel(address, "rollout-0", "1", key=stranger)
        began = time.monotonic()
        with pytest.raises(Unreachable) as told:
            SampleClient(channel, "rollout-0").hello("rollout", "host", 1, seconds=0.5)
        assert 0.5 <= time.monotonic() - began < SECONDS
        channel.close(0.0)
        assert str(told.value) == f"broker {address} did not answer 'hello' in 0.5 s{hint}"
        until = time.monotonic() + SECONDS
        while not turned_away(address, welcome):
            assert time.monotonic() < until
        channel = DealerChannel(address, "rollout-0", "2", key=welcome)
        assert [worker["name"] for worker in SampleClient(channel, "rollout-0").status(SECONDS)["workers"]] == []
        channel.close(0.0)


@pytest.mark.contract
def test_who_has_the_key_is_not_counted() -> None:
    with served(BROKER) as address:
        assert [turned_away(address, WORKER) for _ in range(3)] == [0, 0, 0]


@pytest.mark.contract
def test_a_broker_that_has_answered_once_is_not_suspected_of_another_key() -> None:
    with served(BROKER) as address:
        channel = DealerChannel(address, "person", "1", key=WORKER)
        SampleClient(channel, "person").status(SECONDS)
    with pytest.raises(Unreachable, match=r"in 0\.05 s$"):
        SampleClient(channel, "person").status(0.05)
    channel.close(0.0)


@pytest.mark.unit
def test_the_log_names_every_doubling_of_those_turned_away() -> None:
    service = Service("r", "samples")
    with structlog.testing.capture_logs() as logs:
        for count in (0, 1, 0, 1, 1, 5, 7):  # in all 0, 1, 1, 2, 3, 8, 15
            service.on_turned_away(count)
    assert [line["n"] for line in logs] == [1, 2, 8]
    assert service.turned_away == 15


@pytest.mark.unit
def test_keys_of_two_runs_differ_and_are_for_their_owner_alone(tmp_path: Path) -> None:
    files = [*keys.create(tmp_path / "a" / "keys"), *keys.create(tmp_path / "b" / "keys")]
    assert len({file.read_text() for file in files}) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert (tmp_path / "a" / "keys").stat().st_mode & 0o777 == 0o700
    broker, worker = keys.read_broker_key(files[0]), keys.read_worker_key(files[1])
    assert (broker.workers, broker.public) == (worker.public, worker.broker)
    assert broker.secret not in files[1].read_text()


@pytest.mark.unit
def test_a_key_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    broker, worker = keys.create(tmp_path)
    for file in (broker, worker):
        file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"--key {worker}: others may read it; chmod 600 {worker}"):
        keys.read_worker_key(worker)
    with pytest.raises(ConfigError, match="others may read it"):
        keys.read_broker_key(broker)


@pytest.mark.unit
def test_the_other_kinds_file_is_refused_naming_both(tmp_path: Path) -> None:
    broker, worker = keys.create(tmp_path)
    with pytest.raises(ConfigError, match=r"not a key of this kind; brokers take broker\.key, others worker\.key"):
        keys.read_worker_key(broker)
    with pytest.raises(ConfigError, match="not a key of this kind"):
        keys.read_broker_key(worker)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1, 2]", "not a key of this kind"),
        (b'{"public": "", "secret": "", "broker": ""}', "is damaged"),
        (b'{"public": 1, "secret": null, "broker": []}', "is damaged"),
    ],
)
def test_a_broken_key_file_is_a_config_error(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "worker.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=f"--key {file}: .*{said}"):
        keys.read_worker_key(file)


@pytest.mark.unit
def test_a_pair_that_does_not_belong_together_and_a_file_that_is_not_there_are_config_errors(tmp_path: Path) -> None:
    _, worker = keys.create(tmp_path)
    ours = keys.read_worker_key(worker)
    worker.write_text(worker.read_text().replace(ours.public, FOREIGN.public))
    with pytest.raises(ConfigError, match="is damaged"):
        keys.read_worker_key(worker)
    with pytest.raises(ConfigError, match="cannot be read"):
        keys.read_worker_key(tmp_path / "nowhere.key")

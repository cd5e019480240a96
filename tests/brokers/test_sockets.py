"""What only sockets can get wrong: addresses, marks, strangers, forks, and peers that are not there."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import zmq

from brokers import sockets
from brokers.channel import wait
from brokers.client import SampleClient
from brokers.conduct import Facts
from brokers.dealer import DealerChannel
from brokers.record import Limits
from brokers.router import Router
from brokers.samples import SampleService
from common.clock import ManualClock
from common.errors import ConfigError, Unreachable, WireError, WorkerError
from common.group import GroupKey
from common.header import Header, pack
from contract import SECONDS, STAGES, TcpWorld, prompt

pytestmark = pytest.mark.contract


@pytest.fixture
def world() -> Iterator[TcpWorld]:
    world = TcpWorld(Limits(100))
    yield world
    world.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that is taken and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def router(endpoint: str, mark: int = 64) -> Router:
    return Router(SampleService(Facts("r", "{}", "/r"), STAGES, Limits(1)), endpoint, ManualClock(), mark)


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:5600"),
        ("tcp://node-1.cluster:5600", "tcp://node-1.cluster:5600"),
        ("tcp://::1:5600", "tcp://[::1]:5600"),
        ("tcp://[::1]:5600", "tcp://[::1]:5600"),
        ("tcp://[fe80::1%eth0]:5600", "tcp://[fe80::1%eth0]:5600"),
        ("tcp://[::ffff:127.0.0.1]:5600", "tcp://127.0.0.1:5600"),
        ("tcp://0.0.0.0:0", "tcp://0.0.0.0:0"),
    ],
)
def test_an_address_has_one_spelling(written: str, spelled: str) -> None:
    assert sockets.address(written) == spelled


@pytest.mark.parametrize("text", ["", "head", "head:5600", "tcp://head", "tcp://:5600", "ipc:///tmp/x", "tcp://h:p"])
def test_what_is_no_address_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT"):
        sockets.address(text)


def test_a_port_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="port 70000 is above 65535"):
        sockets.address("tcp://head:70000")


@pytest.mark.parametrize("mark", [0, -1])
def test_a_mark_of_zero_is_refused_by_every_socket_with_the_reason(nobody: str, mark: int) -> None:
    with pytest.raises(ConfigError, match="ZeroMQ takes 0 as unlimited"):
        router("tcp://127.0.0.1:0", mark)
    with pytest.raises(ConfigError, match="ZeroMQ takes 0 as unlimited"):
        DealerChannel(nobody, "w", "1", high_water_mark=mark)


def test_no_socket_of_ours_is_without_a_bound(world: TcpWorld) -> None:
    """In ZeroMQ a mark of 0 means unlimited. Monitors count too: whoever connects again and again fills them."""
    channel = world.join("rollout-0").channel
    assert isinstance(channel, DealerChannel)
    ours = [*vars(channel).values(), *vars(channel._handshakes).values()]  # pyright: ignore[reportPrivateUsage]
    for served in world._routers.values():  # pyright: ignore[reportPrivateUsage]
        ours += [*vars(served).values(), *vars(served._door).values()]  # pyright: ignore[reportPrivateUsage]
    found = [each for each in ours if isinstance(each, zmq.Socket) and not each.closed]
    assert len(found) >= 4
    assert all(each.getsockopt(mark) > 0 for each in found for mark in (zmq.SNDHWM, zmq.RCVHWM))


@pytest.mark.parametrize("name", ["", "w" * 300])
def test_a_name_that_no_socket_can_have_is_refused(nobody: str, name: str) -> None:
    if not name:
        assert DealerChannel(nobody, name, "1").close(0.0) == 0  # `#1` is a name
        return
    with pytest.raises(ConfigError, match="cannot connect"):
        DealerChannel(nobody, name, "1")


def test_twenty_brokers_that_start_at_once_have_twenty_addresses() -> None:
    routers = [router("tcp://127.0.0.1:0") for _ in range(20)]
    assert len({each.address for each in routers}) == 20
    assert not any(each.address.endswith(":0") for each in routers)
    for each in routers:
        each.close()


def test_an_address_that_is_taken_is_a_config_error(nobody: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot bind broker\.host/broker\.port .*: Address already in use"):
        router(nobody)


@pytest.mark.parametrize("written", ["tcp://::1:0", "tcp://[::1]:0"])
def test_ipv6_is_bound_printed_with_brackets_and_connected_to(written: str) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    served, stop = router(written), threading.Event()
    assert served.address.startswith("tcp://[::1]:")
    thread = threading.Thread(target=served.run, args=(stop.is_set,))
    thread.start()
    for address in (served.address, served.address.replace("[", "").replace("]", "")):
        channel = DealerChannel(address, "person", "1")
        assert SampleClient(channel, "person").status(SECONDS)["run"] == "r"
        channel.close(0.0)
    stop.set()
    thread.join(SECONDS)
    served.close()


def test_closing_without_a_peer_takes_its_drain_time_and_tells_how_many_were_not_delivered(nobody: str) -> None:
    channel = DealerChannel(nobody, "prompt-0", "1", high_water_mark=2)
    client = SampleClient(channel, "prompt-0", "r")
    puts = [client.add([(GroupKey(f"g{seq}", seq), prompt(seq))], 100.0) for seq in range(7)]
    client.request_lease("rollout", 1, 100.0)
    began = time.monotonic()
    with structlog.testing.capture_logs() as logs:
        assert channel.close(0.3) == 7
    assert 0.2 < time.monotonic() - began < SECONDS
    assert [(line["event"], line["undelivered"]) for line in logs] == [("closed", 7)]
    assert all(isinstance(put.exception(0), Unreachable) for put in puts)
    with pytest.raises(WorkerError, match="is closed"):
        client.status()


def test_closing_does_not_wait_for_questions(world: TcpWorld) -> None:
    worker = world.join("rollout-0")
    worker.ask("rollout")
    worker.status(SECONDS)
    began = time.monotonic()
    assert worker.channel.close(SECONDS) == 0
    assert time.monotonic() - began < SECONDS / 2


def test_no_answer_names_endpoint_verb_and_seconds(nobody: str) -> None:
    channel = DealerChannel(nobody, "w", "1")
    with pytest.raises(Unreachable, match=rf"broker {nobody} did not answer 'status' in 0\.05 s"):
        SampleClient(channel, "w").status(0.05)
    assert channel.close(0.0) == 0  # it was told already


def test_a_header_that_cannot_be_encoded_fails_its_caller_and_nobody_else(world: TcpWorld) -> None:
    worker = world.join("rollout-0")
    with pytest.raises(WireError, match="cannot be encoded"):
        worker.channel.request(Header("lease", run="run-a", body={"want": 2**65}))
    assert worker.status(SECONDS)["run"] == "run-a"


def test_a_forked_child_is_told_that_the_socket_is_its_parents(world: TcpWorld) -> None:
    worker = world.join("rollout-0")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing"
        try:
            worker.status(1.0)
        except WorkerError as error:
            told = str(error)
        finally:
            os.write(write_end, told.encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert f"belongs to process {os.getpid()}; a forked child must open its own" in told
    assert worker.status(SECONDS)["run"] == "run-a"


def test_noise_from_a_stranger_is_counted_and_hurts_nobody(world: TcpWorld) -> None:
    worker = world.join("rollout-0")
    context = zmq.Context()
    stranger: Any = context.socket(zmq.DEALER)
    sockets.prepare(stranger, 10)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(worker.channel.endpoint)  # pyright: ignore[reportAttributeAccessIssue]
    other = json.dumps({"protocol": 2}).encode()
    for message in ([b""], [b"\xff" * 50], [other], [b"", b"", b""], [pack(Header("hello", run="run-b"))]):
        stranger.send_multipart(message)
    refused = stranger.poll(1000 * SECONDS) and stranger.recv_multipart()  # the only one that could be answered
    stranger.close(0)
    context.term()
    assert b"'run-b' reached the broker of run 'run-a'" in refused[0]
    assert worker.status(SECONDS)["counts"]["refused"] == {"WireError": 5}


def test_heartbeats_keep_leases_and_carry_progress(world: TcpWorld) -> None:
    worker = world.join("rollout-0")
    wait(worker.offer(0), SECONDS)
    leases = worker.get("rollout")
    world.let_pass(29.0)
    assert isinstance(worker.channel, DealerChannel)
    worker.channel.pulse.report(tokens=5)
    worker.channel.start_heartbeats()
    until = time.monotonic() + SECONDS
    while worker.status(SECONDS)["workers"][0]["progress"] != {"tokens": 5}:
        assert time.monotonic() < until
    world.let_pass(29.0)  # 58 s since the lease, 29 since the last sign of life at most
    world.flush()
    assert worker.finish("rollout", leases) == []

"""The network between a worker and the broker breaks, at every verb: nothing is lost, nothing is done twice."""

import itertools
from collections.abc import Generator, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from brokers.channel import Channel, wait
from brokers.dealer import DealerChannel
from brokers.record import Limits
from brokers.service import Service
from conftest import journaled
from contract import SECONDS, MakeService, Mangling, TcpWorld, Worker, plain
from lifecycle import VERBS, assert_balance, live
from proxy import DOWN, UP, Proxy

pytestmark = pytest.mark.contract


def beginning(verb: str) -> bytes:
    """How the header of a request begins on the wire: a list of 10, protocol 1, the verb."""
    return b"\x9a\x01" + msgpack.packb(verb)


class FarWorld(TcpWorld):
    """Workers whose names begin with `far` reach the broker through a proxy."""

    proxy: Proxy | None = None

    def open(self, service: Service, name: str, incarnation: str) -> DealerChannel:
        if not name.startswith("far") or service is not self.samples:
            return super().open(service, name, incarnation)
        if self.proxy is None:
            near = super().open(service, "near", "0")
            self.proxy = Proxy(near.endpoint)
        self._channels.append(DealerChannel(self.proxy.address, name, incarnation, high_water_mark=10))
        return self._channels[-1]

    def far(self, name: str = "far-0") -> tuple[Worker, Proxy]:
        worker = self.join(name)
        assert self.proxy is not None
        return worker, self.proxy

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.close()


@pytest.fixture(params=["plain", "journal"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> MakeService:
    return plain if request.param == "plain" else journaled(tmp_path)


@contextmanager
def far_world(limits: Limits, service: MakeService) -> Generator[FarWorld]:
    world = FarWorld(limits, service)
    try:
        yield world
    finally:
        world.close()
        world.samples.close()


@pytest.fixture
def far(service: MakeService) -> Iterator[FarWorld]:
    with far_world(Limits(2), service) as world:
        yield world


def mangled(world: FarWorld) -> tuple[Worker, Mangling, Proxy]:
    world.wrap = Mangling
    worker, proxy = world.far()
    channel: Channel = worker.channel
    assert isinstance(channel, Mangling)
    return worker, channel, proxy


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_that_never_left_is_sent_again_when_the_connection_is_back(far: FarWorld, verb: str) -> None:
    worker, channel, proxy = mangled(far)
    proxy.cut_before(beginning(verb))
    assert sorted(live(worker, channel)) == ["train-0", "train-1"]
    assert proxy.broken.is_set()
    assert proxy.links == 2
    assert_balance(far.samples)


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_whose_reply_was_lost_is_done_once(far: FarWorld, verb: str) -> None:
    worker, channel, proxy = mangled(far)
    proxy.cut_reply(beginning(verb))
    assert sorted(live(worker, channel)) == ["train-0", "train-1"]
    assert proxy.broken.is_set()
    assert proxy.links == 2
    assert_balance(far.samples)
    assert far.samples.refused["LeaseLost"] == (verb == "nack")  # which changes nothing and is not told to the worker


@pytest.mark.parametrize("num_bytes", [1, 70, 5_000, 300_000])
@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_message_that_was_cut_in_the_middle_is_never_half_accepted(far: FarWorld, way: str, num_bytes: int) -> None:
    worker, proxy = far.far()
    medium = bytes(range(256)) * 2_000  # 512 kB
    if way == DOWN:
        wait(worker.offer(0, media=medium), SECONDS)
    proxy.cut_after(way, num_bytes)
    if way == UP:
        wait(worker.offer(0, media=medium), SECONDS)
    (leased,) = worker.get("rollout", 1, 0)
    assert proxy.broken.is_set()
    assert leased.group.value("media_data") == medium
    assert leased.group.attempt == 1
    assert worker.finish("rollout", [leased]) == []
    counts = worker.status(SECONDS)["counts"]
    assert (counts["started"], counts["expired"], counts["refused"]) == (1, 0, {})


def test_a_question_that_waits_at_the_broker_outlives_its_connection(far: FarWorld) -> None:
    worker, proxy = far.far()
    feeder = far.join("near-0")
    question = worker.ask("rollout")
    worker.status(SECONDS)
    proxy.cut()
    worker.status(SECONDS)
    wait(feeder.offer(0), SECONDS)
    (leased,) = worker.take(wait(question, SECONDS)).leases
    assert worker.finish("rollout", [leased]) == []
    assert feeder.status(SECONDS)["queues"]["rollout"]["waiting_workers"] == 0


def test_what_a_worker_had_in_hand_when_the_connection_broke_it_still_has(far: FarWorld) -> None:
    worker, proxy = far.far()
    wait(worker.offer(0, 1), SECONDS)
    leases = worker.get("rollout", 2, 0)
    for _ in range(3):
        proxy.cut()
        worker.status(SECONDS)
    assert worker.finish("rollout", leases) == []
    assert worker.status(SECONDS)["counts"]["restarted"] == 0


def test_a_link_that_carries_nothing_costs_the_worker_its_lease_and_what_comes_late_is_refused(far: FarWorld) -> None:
    worker, proxy = far.far()
    other = far.join("near-0")
    wait(worker.offer(0, 1), SECONDS)
    (slow,) = worker.get("rollout", 1, 0)
    proxy.stall()
    late = worker.put([])  # on its way, and not there
    far.let_pass(30.0)
    (again,) = other.get("rollout", 1, 0)
    assert (again.group.key.id, again.group.attempt) == (slow.group.key.id, 2)
    assert other.finish("rollout", [again]) == []
    proxy.resume()
    wait(late, SECONDS)
    assert worker.finish("rollout", [slow]) == ["train-0"]
    (fresh,) = worker.get("rollout", 1, 0)  # and goes on
    assert worker.finish("rollout", [fresh]) == []
    counts = other.status(SECONDS)["counts"]
    assert (counts["started"], counts["expired"], counts["refused"]) == (2, 1, {"LeaseLost": 1})


def test_groups_for_a_reader_behind_a_stalled_link_all_arrive_and_their_producer_waits_meanwhile() -> None:
    """500 groups of 200 kB, high-water marks of 10, room for 20 groups."""
    with far_world(Limits(500, max_queue_groups=20), plain) as world:
        reader, proxy = world.far()
        feeder, medium = world.join("near-0"), bytes(200_000)
        offers = [feeder.offer(*range(seq, seq + 20), media=medium, seconds=1000.0) for seq in range(0, 500, 20)]
        proxy.stall(DOWN)
        asked = reader.ask("rollout", 20)
        futures.wait(offers, SECONDS, futures.FIRST_COMPLETED)
        feeder.status(SECONDS)
        assert not any(offer.done() for offer in offers[3:])
        proxy.resume()
        arrived: list[int] = []
        while len(arrived) < 500:
            leases = reader.take(wait(asked, SECONDS)).leases
            asked = reader.ask("rollout", 20)
            assert reader.finish("rollout", leases) == []
            arrived += [leased.group.key.seq for leased in leases]
        assert arrived == list(range(500))
        assert all(offer.exception(SECONDS) is None for offer in offers)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_over_links_that_break_all_the_time_trains_every_group_once(service: MakeService, seed: int) -> None:
    """Two workers and a trainer share 5 steps of 2 groups; a link breaks at every fifth thing that is asked."""
    with far_world(Limits(2, 5), service) as world:
        trainer, proxy = world.far("far-trainer")
        workers = [world.far(f"far-{number}")[0] for number in range(2)]
        wait(trainer.offer(*range(10)), SECONDS)
        trained, asked = list[str](), itertools.count(seed)

        def shake() -> None:
            number = next(asked)
            if number % 5 == 0:
                cut = proxy.cut_reply if number % 2 else proxy.cut_before
                cut(beginning(("lease", "put", "ack")[number % 3]))

        for version in range(5):
            for worker in workers:
                shake()
                assert worker.finish("rollout", worker.get("rollout", 1, version)) == []
                shake()
                assert worker.finish("reward", worker.get("reward", 1)) == []
            shake()
            batch = trainer.get("trainer", 2, version)
            shake()
            trainer.ack(batch, version)
            trainer.advance(version + 1)
            trainer.commit(version + 1)
            trained += [leased.group.key.id for leased in batch]
        assert sorted(trained) == sorted(f"train-{seq}" for seq in range(10))
        counts = world.samples.ledger.counts
        assert (counts.started, counts.trained, counts.expired) == (10, 10, 0)
        assert world.samples.store.bytes == 0
        assert proxy.links >= 3 + 4  # the first three, and those after a cut

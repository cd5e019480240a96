"""The weight broker: immutable versions, whole or not at all, alike in memory and through sockets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brokers.channel import wait
from brokers.manifest import Manifest, cut, join
from brokers.weight_client import Follower, WeightClient
from common.errors import Damaged, WireError
from common.header import Header
from common.tensor import NamedTensor, from_numpy
from contract import SECONDS, Mangling, World

pytestmark = pytest.mark.contract


def tensors(value: float = 1.0) -> list[NamedTensor]:
    """40 + 6 = 46 bytes."""
    bits = np.full(3, int(value) + 0x3F80, dtype=np.uint16)
    return [from_numpy("embed", np.full((2, 5), value, dtype=np.float32)), from_numpy("norm", bits, "bfloat16")]


def values(found: Sequence[NamedTensor]) -> list[tuple[str, str, list[Any]]]:
    return [(tensor.name, tensor.dtype, tensor.numpy().tolist()) for tensor in found]


def fetch(follower: Follower) -> tuple[int, list[NamedTensor]]:
    found = follower.fetch(SECONDS)
    assert found is not None
    return found


def send(client: WeightClient, verb: str, frames: Sequence[bytes] = (), **body: Any) -> dict[str, Any]:
    return dict(wait(client.channel.request(Header(verb, run="run-a", body=body), frames), SECONDS).header.body)


@pytest.mark.parametrize("chunk_bytes", [7, 46, 1000])
def test_a_published_version_arrives_as_it_was(world: World, chunk_bytes: int) -> None:
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    assert trainer.publish(1, tensors(), chunk_bytes) == 46
    version, found = fetch(Follower(worker, 0))
    assert version == 1
    assert values(found) == values(tensors())


def test_a_follower_is_told_as_soon_as_a_newer_version_is_whole(world: World) -> None:
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    follower = Follower(worker, 0, wait_seconds=1000.0)
    assert follower.poll() is None
    trainer.publish(1, tensors(1), 20)
    assert fetch(follower)[0] == 1
    trainer.publish(2, tensors(2), 20)
    trainer.publish(3, tensors(3), 20)
    version, found = fetch(follower)  # the one that was newest when it asked; it may skip
    assert version in (2, 3)
    assert values(found) == values(tensors(version))
    assert not follower.staged


def test_the_same_version_again_changes_nothing_and_other_bytes_are_refused(world: World) -> None:
    trainer = world.publisher("trainer-0")
    trainer.publish(1, tensors(1), 20)
    assert trainer.publish(1, tensors(1), 20) == 46
    with pytest.raises(WireError, match="version 1 is published with other contents; versions never change"):
        trainer.publish(1, tensors(2), 20)
    trainer.publish(2, tensors(2), 20)
    trainer.publish(3, tensors(3), 20)
    with pytest.raises(WireError, match="version 1 is older than the published version 3"):
        trainer.publish(1, tensors(1), 20)  # which is no longer kept
    assert values(fetch(Follower(trainer, 0))[1]) == values(tensors(3))


def test_a_version_is_invisible_until_its_last_chunk_is_here(world: World) -> None:
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    trainer.publish(1, tensors(1), 20)
    manifest, chunks = cut(tensors(2), 2, 20)
    send(trainer, "publish", manifest=manifest.to_wire())
    for index in (2, 0):
        assert send(trainer, "chunk", [bytes(chunks[index])], version=2, index=index)["latest"] == 1
    assert fetch(Follower(worker, 0))[0] == 1
    with pytest.raises(WireError, match="version 2 is no longer kept; the latest is 1"):
        send(worker, "pull", version=2, index=0)
    assert send(trainer, "chunk", [bytes(chunks[1])], version=2, index=1)["latest"] == 2
    assert fetch(Follower(worker, 1))[0] == 2


def test_what_a_publisher_left_behind_when_it_died_is_never_seen(world: World) -> None:
    dying, worker = world.publisher("trainer-0", "1"), world.publisher("rollout-0")
    dying.publish(1, tensors(1), 20)
    manifest, chunks = cut(tensors(2), 2, 20)
    send(dying, "publish", manifest=manifest.to_wire())
    send(dying, "chunk", [bytes(chunks[0])], version=2, index=0)
    follower = Follower(worker, 1, wait_seconds=1000.0)
    world.kill(dying)
    again = world.publisher("trainer-0", "2")
    with pytest.raises(WireError, match="chunk 1 of version 2, which trainer-0#2 is not publishing"):
        send(again, "chunk", [bytes(chunks[1])], version=2, index=1)
    assert follower.poll() is None
    again.publish(2, tensors(7), 20)
    assert values(fetch(follower)[1]) == values(tensors(7))


def test_a_chunk_damaged_on_the_way_is_pulled_or_sent_again(world: World) -> None:
    world.wrap = Mangling
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    assert isinstance(trainer.channel, Mangling)
    assert isinstance(worker.channel, Mangling)
    trainer.channel.requests = {"chunk": 2}
    worker.channel.replies = {"pull": 2}
    trainer.publish(1, tensors(), 46)
    version, found = fetch(Follower(worker, 0))
    assert (version, values(found)) == (1, values(tensors()))
    trainer.channel.requests = {"chunk": 99}
    with pytest.raises(Damaged):
        trainer.publish(2, tensors(2), 46)
    assert send(worker, "status")["status"]["versions"] == [1]


def test_a_version_that_stays_damaged_is_given_up_and_the_one_before_goes_on(world: World) -> None:
    world.wrap = Mangling
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    assert isinstance(worker.channel, Mangling)
    trainer.publish(1, tensors(1), 46)
    follower = Follower(worker, 0)
    _, before = fetch(follower)
    kept = values(before)
    worker.channel.replies = {"pull": 3}  # three tries, all damaged
    trainer.publish(2, tensors(2), 46)
    seen: list[int] = []
    while worker.channel.replies["pull"]:
        follower.pending()[0].exception(SECONDS)
        found = follower.poll()
        seen += [] if found is None else [found[0]]
    assert seen == []  # no version was handed over
    assert values(before) == kept
    assert fetch(follower)[0] == 2  # it asks anew, and now it works


def test_a_version_that_goes_away_while_it_is_pulled_is_given_up_for_a_newer_one(world: World) -> None:
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    trainer.publish(1, tensors(1), 20)
    follower = Follower(worker, 0)
    follower.pending()[0].exception(SECONDS)
    for version in (2, 3):  # two are kept, so version 1 is gone before it is pulled
        trainer.publish(version, tensors(version), 20)
    assert fetch(follower)[0] == 3


def wrong(manifest: Manifest, what: str) -> Manifest:
    (name, _, shape), norm = manifest.tensors
    (length, checksum), *rest = manifest.chunks
    return {
        "shape": replace(manifest, tensors=((name, "float32", (2, 6)), norm)),
        "dtype": replace(manifest, tensors=((name, "float99", shape), norm)),
        "layout": replace(manifest, tensors=((name, "float32", shape), (name, "bfloat16", (3,)))),
        "checksum": replace(manifest, chunks=((length, checksum ^ 1), *rest)),
        "version": replace(manifest, version=0),
        "empty": replace(manifest, tensors=(), chunks=()),
        "negative": replace(manifest, tensors=((name, "float32", (-2, -5)), norm)),
    }[what]


REFUSALS = {
    "shape": "chunks hold 46 bytes, its tensors need 54",
    "dtype": "unknown dtype 'float99'",
    "layout": "names a tensor twice",
    "checksum": "chunk 0: length or checksum differs",
    "version": "version 0 is older than the published version 1",
    "empty": "version 2 has no tensors",
    "negative": "announces a negative size",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_every_wrong_manifest_has_a_refusal_of_its_own_and_the_served_weights_stay(world: World, what: str) -> None:
    trainer, worker = world.publisher("trainer-0"), world.publisher("rollout-0")
    trainer.publish(1, tensors(1), 46)
    manifest, chunks = cut(tensors(2), 2, 46)

    def publish() -> None:
        send(trainer, "publish", manifest=wrong(manifest, what).to_wire())
        send(trainer, "chunk", [bytes(chunks[0])], version=2, index=0)

    with pytest.raises(WireError, match=REFUSALS[what]):
        publish()
    assert len(set(REFUSALS.values())) == len(REFUSALS)
    version, found = fetch(Follower(worker, 0))
    assert (version, values(found)) == (1, values(tensors(1)))


@pytest.mark.parametrize(
    "body",
    [None, 3, {}, {"version": 1, "tensors": 3, "chunks": []}, {"version": 1, "tensors": [["w"]], "chunks": []},
     {"version": float("inf"), "tensors": [], "chunks": []}, {"version": "x", "tensors": [], "chunks": []}],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(world: World, body: Any) -> None:
    with pytest.raises(WireError, match="not a manifest"):
        send(world.publisher("trainer-0"), "publish", manifest=body)


def test_a_chunk_out_of_range_or_from_somebody_else_is_refused(world: World) -> None:
    trainer = world.publisher("trainer-0")
    manifest, chunks = cut(tensors(), 1, 46)
    send(trainer, "publish", manifest=manifest.to_wire())
    with pytest.raises(WireError, match="chunk 0 of version 1, which rollout-0#1 is not publishing"):
        send(world.publisher("rollout-0"), "chunk", [bytes(chunks[0])], version=1, index=0)
    for index in (1, -1):
        with pytest.raises(WireError, match=f"has 1 chunks, not one numbered {index}"):
            send(trainer, "chunk", [bytes(chunks[0])], version=1, index=index)
    trainer.publish(1, tensors(), 46)
    with pytest.raises(WireError, match="has 1 chunks, not one numbered 1"):
        send(trainer, "pull", version=1, index=1)


def test_asking_for_a_version_that_does_not_come_ends_at_its_deadline(world: World) -> None:
    worker = world.publisher("rollout-0")
    pending = worker.ask(0, 5.0)
    send(worker, "status")
    world.let_pass(5.0)
    assert "manifest" not in wait(pending, SECONDS).header.body


def test_the_weight_broker_of_another_run_is_refused(world: World) -> None:
    client = world.publisher("rollout-0")
    client.run = "run-b"
    with pytest.raises(WireError, match=r"'run-b' reached the broker of run 'run-a'"):
        wait(client.ask(0, 0.0), SECONDS)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), chunk_bytes=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_any_cut_joins_to_the_same_tensors(sizes: list[int], chunk_bytes: int) -> None:
    whole = [from_numpy(f"t{i}", np.arange(size, dtype=np.int16)) for i, size in enumerate(sizes)]
    manifest, chunks = cut(whole, 3, chunk_bytes)
    assert all(0 < memoryview(chunk).nbytes <= chunk_bytes for chunk in chunks)
    assert Manifest.from_wire(manifest.to_wire()) == manifest
    assert values(list(join(manifest, chunks))) == values(whole)

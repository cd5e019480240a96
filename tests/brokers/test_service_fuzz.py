"""No message that a peer can send ends a broker, or leaves its books out of balance."""

from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from brokers.conduct import Facts
from brokers.record import Limits
from brokers.samples import SampleService
from brokers.service import Message, Service
from brokers.weights import WeightService
from common.config import to_json
from common.header import Header, Item
from common.section import SectionInfo
from contract import CONFIG, STAGES, prompt

pytestmark = pytest.mark.unit

_NUMBER = st.integers(-2, 4)
_ANY = st.one_of(st.none(), st.booleans(), st.floats(), _NUMBER, st.text(max_size=3), st.lists(_NUMBER, max_size=2))
_NUMBERS = ("version", "want", "at_least", "step", "give", "pid", "index", "newer_than")
_NAMES = (*_NUMBERS, "reason", "fault", "ack", "progress", "role", "endpoint", "state", "manifest")
_BODY = st.dictionaries(st.sampled_from(_NAMES), st.one_of(_NUMBER, _ANY), max_size=4)
_INFO = st.builds(SectionInfo, st.sampled_from(["prompt", "media", "response", "reward", "x"]), _NUMBER, st.just(0),
                  st.just(0x2D06800538D394C2))  # fmt: skip
_ITEM = st.builds(
    Item, st.sampled_from(["a", "b", "c"]), seq=_NUMBER, purpose=st.sampled_from(["train", "eval", "test"]),
    min_version=_NUMBER, lease=st.integers(0, 6), version_min=_NUMBER, version_max=_NUMBER,
    sections=st.lists(_INFO, max_size=2).map(tuple),
)  # fmt: skip


def headers(verbs: list[str]) -> st.SearchStrategy[Header]:
    return st.builds(
        Header, st.sampled_from([*verbs, "nonsense"]), run=st.sampled_from(["run-a", "", "run-b"]),
        worker=st.sampled_from(["w", "v"]), stage=st.sampled_from([spec.name for spec in STAGES] + ["", "judge"]),
        deadline_s=st.sampled_from([0.0, -1.0, 2.0]), items=st.lists(_ITEM, max_size=2).map(tuple), body=_BODY,
    )  # fmt: skip


def feed(service: Service, messages: list[tuple[str, Header, bool]]) -> None:
    now = 0.0
    for peer, header, matching in messages:
        now += 0.6
        frames = [b""] * sum(len(item.sections) for item in header.items) if matching else [b"abc"]
        service.handle(Message(peer, header, frames, now))
        service.tick(now)
    service.on_unroutable("w#1", now)


def hello(service: Service) -> None:
    service.handle(Message("w#1", Header("hello", worker="w"), (), 0.0))
    service.handle(Message("v#1", Header("hello", worker="v"), (), 0.0))


@pytest.fixture(autouse=True)
def silence() -> Any:
    with structlog.testing.capture_logs():
        yield


_PEERS = st.sampled_from(["w#1", "w#2", "v#1", "x#1"])
_VERBS = list(SampleService(Facts("run-a", "{}", "/r"), STAGES, Limits(1)).verbs)


@given(messages=st.lists(st.tuples(_PEERS, headers(_VERBS), st.booleans()), max_size=15))
@settings(max_examples=60, deadline=None)
def test_the_sample_broker_survives_any_messages_with_its_books_in_balance(messages: list[Any]) -> None:
    service = SampleService(Facts("run-a", to_json(CONFIG), "/r"), STAGES, Limits(1, 1, max_queue_groups=3))
    hello(service)
    sections = prompt(0)
    item = Item("a", sections=tuple(section.info for section in sections))
    add = Header("add", worker="w", items=(item,))
    service.handle(Message("w#1", add, [section.data for section in sections], 0.0))
    feed(service, messages)
    ledger, counts = service.ledger, service.ledger.counts
    kept = {(r.key.id, name) for r in ledger.books.records.values() for name in r.sections}
    kept |= {(lease.group, name) for lease in ledger.books.leases.values() for name in lease.staged}
    assert len(service.store) == len(kept)
    ledger.end("finished", "")
    assert (service.store.bytes, len(service.store), ledger.window.outstanding) == (0, 0, 0)
    assert counts.started == counts.trained + counts.dropped.total() + counts.dead.total()


@given(messages=st.lists(st.tuples(_PEERS, headers(list(WeightService("run-a", 2).verbs)), st.booleans()), max_size=12))
@settings(max_examples=30, deadline=None)
def test_the_weight_broker_survives_any_messages(messages: list[Any]) -> None:
    service = WeightService("run-a", 2)
    hello(service)
    feed(service, messages)


def test_a_wrong_claim_on_a_name_is_refused_when_its_holder_is_gone() -> None:
    service = SampleService(Facts("run-a", to_json(CONFIG), "/r"), STAGES, Limits(1))
    hello(service)
    claim = Header("hello", worker="w", request=7, body={"role": 3})
    (ping,) = service.handle(Message("w#2", claim, (), 1.0))
    assert (ping.peer, ping.header.verb) == ("w#1", "ping")
    (refused,) = service.tick(2.0)
    assert (refused.peer, refused.header.request, refused.header.body["kind"]) == ("w#2", 7, "WireError")

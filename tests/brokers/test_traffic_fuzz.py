"""Spoilt messages of a recorded run never end a broker, never become a group, and leave nothing behind.

`python tests/brokers/fuzz.py` feeds as many as one likes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from brokers.router import take
from brokers.samples import SampleService
from common.header import Header, Item, pack, unpack
from contract import prompt
from fuzz import Tally, check_books, deliver, end, journaled, journaled_session, plain, resident, session
from traffic import SPOILS, Parts, recorded

pytestmark = pytest.mark.unit

MIB = 1 << 20


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module")
def messages() -> list[Parts]:
    with structlog.testing.capture_logs():
        return recorded()


def test_the_recorded_run_uses_every_verb_and_does_the_same_when_it_is_played_again(messages: list[Parts]) -> None:
    service = plain()
    assert {unpack(parts[1]).verb for parts in messages} == set(service.verbs)
    tally = Tally()
    for number, parts in enumerate(messages):
        deliver(service, parts, 0.01 * number, tally)
        check_books(service)
    counts = service.ledger.counts
    assert (tally.unreadable, service.refused) == (0, {"damaged": 1})  # the bytes that were fetched again
    assert (counts.trained, counts.evaluated, dict(counts.dropped)) == (2, 1, {"filtered": 1, "run ended": 1})
    end(service)


def test_no_mutant_gets_through_and_nothing_is_left_of_any(messages: list[Parts]) -> None:
    tally = Tally()
    for seed in range(5):
        end(session(messages, plain, -1 - seed, Tally()))  # what is made once is made
    before = resident()
    for seed in range(40):
        end(session(messages, plain, seed, tally))
    assert tally.mutants > 3000
    assert set(tally.kinds) == {spoil.__name__ for spoil in SPOILS}
    assert {"WireError", "Damaged", "LeaseLost", "Stranger"} <= set(tally.refused)
    assert tally.unreadable > 1000
    assert resident() - before < 16 * MIB


def test_a_journal_that_was_written_meanwhile_can_be_read_and_tells_the_same(
    messages: list[Parts], tmp_path: Path
) -> None:
    tally = Tally()
    for seed in range(10):
        end(journaled_session(messages, tmp_path / str(seed), 1000 + seed, tally))
    assert tally.mutants > 700


def fed(service: SampleService, *headers: Header) -> list[Any]:
    """Answer messages of one worker; the sections of a prompt come with each that announces them."""
    frames = [bytes(section.data) for section in prompt(0)]
    replies: list[Any] = []
    for number, header in enumerate(headers):
        stamped = replace(header, worker="w", incarnation="1", request=number)
        take(service, [b"w#1", pack(stamped), *(frames if header.verb == "add" else [])], 0.1 * number)
        for out in service.release(0.1 * number):
            replies.append(unpack(pack(out.header)))
    return replies


PROMPT = tuple(section.info for section in prompt(0))


def test_sections_of_a_lease_are_fetched_for_its_own_group_only() -> None:
    fetch = Header("fetch", items=(Item("other", lease=1, sections=PROMPT),))
    lease = Header("lease", stage="rollout", body={"version": 0})
    *_, refused = fed(plain(), Header("hello"), Header("add", items=(Item("g", sections=PROMPT),)), lease, fetch)
    assert refused.body["message"] == "lease 1 is of group g, not of other"


@pytest.mark.parametrize("seq", [2**63, 2**64 - 1])
def test_a_number_that_nobody_could_count_on_from_is_refused(seq: int) -> None:
    service = plain()
    assert [
        reply.verb for reply in fed(service, Header("hello"), Header("add", items=(Item("g", seq, sections=PROMPT),)))
    ] == ["ok"]
    assert (service.refused, service.ledger.next_seq) == ({"WireError": 1}, {"train": 0, "eval": 0})
    fed(service, Header("add", items=(Item("g", 2**63 - 1, sections=PROMPT),)))
    assert service.ledger.next_seq["train"] == 2**63


def test_a_number_of_rows_that_no_journal_holds_is_refused_before_it_is_noted(tmp_path: Path) -> None:
    service = journaled(tmp_path)
    odd = (replace(PROMPT[0], rows=2**63), *PROMPT[1:])
    fed(service, Header("hello"), Header("add", items=(Item("g", sections=odd),)))
    assert (service.refused, len(service.store)) == ({"WireError": 1}, 0)
    end(service)

"""Feed spoilt messages to the sample broker: `python tests/brokers/fuzz.py --mutants 100000` prints what they did.

They take the way that messages from a socket take, from their bytes to their replies' bytes, without the socket.
"""

import argparse
import gc
import json
import logging
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from brokers.conduct import Facts
from brokers.durable import DurableService
from brokers.journal import Journal
from brokers.router import take
from brokers.samples import SampleService
from common.config import to_json
from common.header import pack
from common.section import check
from contract import CONFIG, STAGES
from traffic import LIMITS, SPOILS, Parts, recorded

PER_MESSAGE = 3
"""mutants of each message, before it comes itself"""
FACTS = Facts("run-a", to_json(CONFIG), "/runs/a")


@dataclass
class Tally:
    """What became of the mutants."""

    mutants: int = 0
    unreadable: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    kinds: Counter[str] = field(default_factory=Counter[str])
    replies: int = 0


def plain() -> SampleService:
    return SampleService(FACTS, STAGES, LIMITS)


def journaled(folder: Path) -> SampleService:
    return DurableService(FACTS, STAGES, LIMITS, Journal(folder, 20_000, fsync=False), 0.0)


def session(messages: list[Parts], make: Callable[[], SampleService], seed: int, tally: Tally) -> SampleService:
    """Play a run to a fresh broker, with mutants of each message before it; the books are checked all the time."""
    chance, service, now = random.Random(seed), make(), 0.0
    for number, original in enumerate(messages):
        for _ in range(PER_MESSAGE):
            now += 0.01
            spoil = chance.choice(SPOILS)
            try:
                deliver(service, spoil(original, messages, chance), now, tally)
            except Exception as error:
                raise AssertionError(f"seed {seed}, message {number}, {spoil.__name__}: {error!r}") from error
            tally.mutants += 1
            tally.kinds[spoil.__name__] += 1
        check_books(service)
        if service.ledger.ended:
            break
        deliver(service, original, now, tally)
    tally.refused += service.refused
    return service


def journaled_session(messages: list[Parts], folder: Path, seed: int, tally: Tally) -> SampleService:
    """Play to a broker with a journal; one that is started on what it wrote must have the same groups and leases."""
    service = session(messages, lambda: journaled(folder), seed, tally)
    service.close()
    again = journaled(folder)
    for name in ("records", "leases"):
        assert getattr(again.ledger.books, name).keys() == getattr(service.ledger.books, name).keys(), (seed, name)
    assert again.ledger.next_seq == service.ledger.next_seq
    assert again.ledger.counts.started == service.ledger.counts.started
    check_books(again)
    return again


def deliver(service: SampleService, parts: Parts, now: float, tally: Tally) -> None:
    tally.unreadable += not take(service, parts, now)
    for out in [*service.release(now), *service.tick(now)]:
        pack(out.header)
        tally.replies += 1


def check_books(service: SampleService) -> None:
    """Every section that belongs to a group is what it was announced to be; nothing else is kept; credits balance."""
    books, counts = service.ledger.books, service.ledger.counts
    kept = 0
    for group, sections in (
        *((record.key.id, record.sections) for record in books.records.values()),
        *((lease.group, lease.staged) for lease in books.leases.values()),
    ):
        for info in sections.values():
            check(info, service.store.read(group, info))
            kept += 1
    assert len(service.store) == kept
    ends = counts.trained + counts.dropped.total() + counts.dead.total()
    assert service.ledger.ended or counts.started == ends + service.ledger.window.outstanding
    assert service.ledger.window.outstanding >= 0


def end(service: SampleService) -> None:
    """Drop what is left: nothing remains."""
    service.ledger.end("finished", "")
    assert (service.store.bytes, len(service.store), service.ledger.window.outstanding) == (0, 0, 0)
    assert (service.ledger.books.records, service.ledger.books.leases) == ({}, {})
    counts = service.ledger.counts
    assert counts.started == counts.trained + counts.dropped.total() + counts.dead.total()
    service.close()


def resident() -> int:
    """Bytes of memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", action="store_true", help="a broker with a journal; what it wrote is read again")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    messages, tally, seed = recorded(), Tally(), args.seed
    for warm in range(20):
        end(session(messages, plain, -1 - warm, Tally()))
    before, began = resident(), time.perf_counter()
    while tally.mutants < args.mutants:
        if args.journal:
            with tempfile.TemporaryDirectory() as folder:
                end(journaled_session(messages, Path(folder), seed, tally))
        else:
            end(session(messages, plain, seed, tally))
        seed += 1
    seconds = time.perf_counter() - began
    told = {
        "mutants": tally.mutants,
        "sessions": seed - args.seed,
        "per_s": round(tally.mutants / seconds),
        "unreadable": tally.unreadable,
        "refused": dict(tally.refused.most_common()),
        "kinds": dict(tally.kinds.most_common()),
        "replies": tally.replies,
        "rss_mib_before": round(before / 2**20, 1),
        "rss_mib_after": round(resident() / 2**20, 1),
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()

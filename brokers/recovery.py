"""From a journal back to a ledger and its bytes: what was noted happens again, in the same order, to a fresh one.

Leases go on as well: the worker that holds one says so when it joins again (see `brokers.durable`), and one whose
worker does not come back runs out as always. So no generation is thrown away, no credit moves, and a trainer is
never handed a group that it already has in hand.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from brokers.journal import Event, segments
from brokers.noted import NotedLedger
from brokers.playback import Recovery, recover
from brokers.record import Counts
from brokers.store import Store
from common.group import GroupKey


@dataclass(slots=True)
class Recovered:
    """What a journal held beside the ledger. `began`: live groups by the segment in which they were added."""

    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    began: dict[str, int] = field(default_factory=dict[str, int])
    events: int = 0


def state_of(ledger: NotedLedger) -> dict[str, Any]:
    """Return what a reader must know of a ledger that does not follow from the groups that are still alive."""
    return {
        "version": ledger.window.version,
        "reached": ledger.window.reached,
        "committed": ledger.committed,
        "trained": ledger.window.trained,
        "counts": ledger.counts.to_wire(),
        "next_seq": dict(ledger.next_seq),
        "data_ended": ledger.data_ended,
        "ended": ledger.ended,
        "last_lease": ledger.books.last_lease,
        "acked": list(ledger.acked),
    }


def set_state(ledger: NotedLedger, state: Mapping[str, Any]) -> None:
    """Set what `state_of` told."""
    ledger.window.version, ledger.window.trained = state["version"], state["trained"]
    ledger.window.reached, ledger.committed = state["reached"], state["committed"]
    counts = Counts(**state["counts"])
    counts.dropped, counts.dead = Counter(counts.dropped), Counter(counts.dead)
    ledger.counts = counts
    ledger.next_seq = dict(state["next_seq"])
    ledger.data_ended = state["data_ended"]
    ledger.ended = tuple(state["ended"]) if state["ended"] else None
    ledger.books.last_lease = max(ledger.books.last_lease, state["last_lease"])
    ledger.acked.clear()
    ledger.acked.extend(state["acked"])


def clear_other_runs(folder: Path, run: str) -> None:
    """Delete the journal of another run that had the same folder."""
    first = next((event for _, event in _first(folder)), None)
    if first is None or first.body.get("run") == run:
        return
    for path in [*segments(folder), *folder.glob("segment-*.lost")]:
        path.unlink()


def _first(folder: Path) -> list[tuple[int, Event]]:
    """Return the first event of a journal with its segment, if it can be read."""
    for found in recover(folder, Recovery()):
        return [found]
    return []


def replay(folder: Path, ledger: NotedLedger, store: Store, now: float) -> Recovered:
    """Let everything that `folder` tells happen to a fresh ledger and an empty store; log what was found."""
    began, found, recovered = time.perf_counter(), Recovery(), Recovered()
    for number, event in recover(folder, found):
        if event.kind in ("state", "run"):
            recovered.run = event.body.get("service", {})
        if event.kind == "add":
            recovered.began[event.group] = number
        happen(ledger, store, event, now)
    recovered.began = {group: recovered.began[group] for group in ledger.books.records}
    recovered.events = found.events
    if found.events:
        structlog.get_logger(part="journal").info(
            "recovered",
            groups=len(ledger.books.records),
            leases=len(ledger.books.leases),
            bytes=store.bytes,
            events=found.events,
            seconds=round(time.perf_counter() - began, 3),
            **({"torn": found.torn} if found.torn else {}),
        )
    return recovered


def happen(ledger: NotedLedger, store: Store, event: Event, now: float) -> None:
    """Let one event happen again. Groups and leases that are not here belong to segments that were dropped."""
    body, group = event.body, event.group
    infos = [section.info for section in event.sections]
    match event.kind:
        case "state":
            set_state(ledger, body)
        case "add":
            key = GroupKey(group, body["seq"], body["purpose"], body["min_version"], body["length"])
            ledger.add(key, infos, now)
            for section in event.sections:
                store.adopt(group, section)
        case "lease" if group in ledger.books.records:
            ledger.books.last_lease = body["lease"] - 1
            ledger.grant(event.stage, body["worker"], group, now, body["deadline"])
        case "put" if body["lease"] in ledger.books.leases:
            oldest, newest = body["versions"]
            ledger.put(body["lease"], body["worker"], infos, (oldest, newest), body["tokens"])
            for section in event.sections:
                store.adopt(group, section)
        case "ack" if body["lease"] in ledger.books.leases:
            ledger.ack(body["lease"], body["worker"], now, body["step"])
        case "back" if body["lease"] in ledger.books.leases:
            ledger.give_back(ledger.books.leases[body["lease"]], body["reason"], now, fault=body["fault"])
        case "finish" | "regenerate" | "postpone" if group in ledger.books.records:
            _happen_to_group(ledger, event, now)
        case _:
            _happen_to_run(ledger, event, now)


def _happen_to_group(ledger: NotedLedger, event: Event, now: float) -> None:
    body, record = event.body, ledger.books.records[event.group]
    match event.kind:
        case "finish":
            ledger.finish(record, body["end"], body["reason"])
        case "regenerate":
            ledger.regenerate(record, body["reason"], now)
        case _:
            ledger.postpone(record, body["due"], now)


def _happen_to_run(ledger: NotedLedger, event: Event, now: float) -> None:
    body = event.body
    match event.kind:
        case "advance":
            ledger.advance(body["version"])
        case "commit":
            ledger.commit(body["version"])
        case "rewind":
            ledger.rewind(body["version"], now)
        case "data_end":
            ledger.end_of_data()
        case "run_end":
            ledger.end(body["state"], body["reason"])
        case _:
            pass

"""What the sample broker tells about a lease and about the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brokers.record import Grant
from common.header import Item

if TYPE_CHECKING:
    from brokers.samples import SampleService


def describe(service: SampleService, now: float) -> dict[str, Any]:
    """Return the state of the run for people: queues (groups, bytes, seconds), workers, counts."""
    ledger = service.ledger
    queues = {
        name: {
            "groups": queue.groups,
            "ready": queue.ready,
            "bytes": queue.bytes,
            "oldest_s": round(queue.oldest(now), 3),
            "waiting_workers": len(service.leasing[name]),
        }
        for name, queue in ledger.books.queues.items()
    }
    return {
        **service.state(),
        "run": service.run,
        "outstanding": ledger.window.outstanding,
        "late": ledger.window.late,
        "bytes": service.store.bytes,
        "store": service.store.describe(),
        "waiting_producers": [
            {"worker": waiting.message.peer, "seconds": round(now - waiting.since, 3), "why": waiting.why}
            for waiting in service.adding.waiting
        ],
        "queues": queues,
        "counts": {
            **ledger.counts.to_wire(),
            "refused": dict(service.refused),
            "unroutable": service.unroutable,
            "turned_away": service.turned_away,
        },
        "dead_letters": [{"group": group, "history": history} for group, history in list(ledger.dead_letters)[-20:]],
        "workers": [member.describe(now) for member in service.roster.members()],
        "stuck": [stuck.describe(now) for stuck in service.watchdog.stuck.values()],
        "turn": {"side": service.turn.side, "fence": service.turn.fence},
        "taps": service.taps.describe(),
    }


def item_of(grant: Grant, now: float) -> Item:
    """Return what a worker is told with a lease; seconds are those of the broker's clock at `now`."""
    lease, record, key = grant.lease, grant.record, grant.record.key
    started = record.started or record.created
    generated = record.generated or now
    facts = {
        "deadline": -1 if record.deadline is None else record.deadline,
        "generation_s": generated - started,
        "queue_s": now - generated,
        "weight": record.weight,
    }
    versions = (record.version_min, record.version_max)
    place = (key.id, key.seq, key.purpose, key.min_version)
    return Item(*place, lease.attempt, lease.id, record.tokens, *versions, grant.sections, facts)

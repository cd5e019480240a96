"""The whole life of two groups, in the hands of one worker that does everybody's part, verb by verb."""

from brokers.channel import wait
from brokers.samples import SampleService
from contract import SECONDS, Mangling, Worker

VERBS = ("add", "lease", "nack", "put", "fetch", "ack", "advance", "evaluate", "commit", "end_of_data")
"""in the order in which `live` comes to them"""


def live(worker: Worker, channel: Mangling) -> list[str]:
    """Let two groups live from the prompt to the checkpoint; return those that were trained, as often as they were.

    Every verb of `VERBS` is used; what the worker does with one of them need not know what befalls the message.
    """
    wait(worker.offer(0, 1), SECONDS)
    first, second = worker.get("rollout", 2, 0)
    worker.nack([second], "not today", fault=False)
    (again,) = worker.get("rollout", 2, 0)
    assert again.group.key.id == second.group.key.id
    assert worker.finish("rollout", [first, again]) == []
    channel.replies = {"lease": 1}  # damaged, so the sections are fetched again
    assert worker.finish("reward", worker.get("reward", 2)) == []
    batch = worker.get("trainer", 2, 0)
    worker.ack(batch, 0)
    worker.advance(1)
    worker.evaluate(1)
    worker.commit(1)
    worker.end_of_data()
    return [leased.group.key.id for leased in batch]


def assert_balance(service: SampleService) -> None:
    """Two groups were started and trained, once each, and nothing of them is left."""
    ledger, counts = service.ledger, service.ledger.counts
    assert (counts.started, counts.trained, counts.dropped, counts.dead) == (2, 2, {}, {})
    assert counts.expired == 0
    assert (ledger.next_seq, service.evaluation) == ({"train": 2, "eval": 0}, (1, 1))
    assert (ledger.window.version, ledger.window.outstanding, ledger.data_ended) == (1, 0, True)
    assert (ledger.books.records, ledger.books.leases) == ({}, {})
    assert (service.store.bytes, len(service.store)) == (0, 0)


def assert_trained(service: SampleService, *groups: str) -> None:
    """Exactly these groups were trained and committed; what else there is, is neither lost nor leased."""
    ledger, counts = service.ledger, service.ledger.counts
    assert counts.trained == len(groups)
    assert not set(groups) & ledger.books.records.keys()
    assert (counts.dropped, counts.dead, ledger.books.leases) == ({}, {}, {})
    kept = {(record.key.id, name) for record in ledger.books.records.values() for name in record.sections}
    assert len(service.store) == len(kept)

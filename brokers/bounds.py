"""The bound on all bytes of a run: when a new group has to wait for room, and whom it waits for.

Only new groups are held up. Results of work in progress always go in: they are what makes room. And the groups that the
trainer's next update needs always come in, however full it is: else trained groups, whose bytes go at a checkpoint that
is updates away, would keep out the groups without which no further update can be. So no bound can bring a run to rest,
and beyond the bound lie at most the groups of one step and what stages add to the groups under way.
"""

from collections.abc import Sequence

from brokers.ledger import Ledger
from brokers.record import ROLLOUT
from common.group import GroupKey
from common.section import SectionInfo


def fits(ledger: Ledger, held: int, key: GroupKey, sections: Sequence[SectionInfo]) -> bool:
    """Whether a new group may come in while all sections together hold `held` bytes. A repeat takes no room."""
    bound = ledger.limits.max_bytes
    if bound is None or key.purpose == "eval" or key.seq < ledger.next_seq["train"]:
        return True
    needed = ledger.books.stages[ROLLOUT].requires
    size = sum(info.length for info in sections if info.name in needed)
    under_way = ledger.window.outstanding + ledger.books.queues[ROLLOUT].ready
    return held + size <= bound or under_way < ledger.limits.groups_per_step


def holder(ledger: Ledger, held: int) -> str:
    """Return who has to get on before there is room: the stage whose groups hold most, or the checkpoint."""
    books, bound = ledger.books, ledger.limits.max_bytes
    trained = [record for record in books.records.values() if record.trained_step is not None]
    at_rest = sum(record.bytes_for(record.sections) for record in trained)
    stage = max(books.queues, key=lambda name: books.queues[name].bytes)
    total = f"of {held} bytes; at most {bound} may be held (broker.max_bytes)"
    if at_rest > books.queues[stage].bytes:
        return f"waiting for the trainer's next checkpoint: {len(trained)} trained groups hold {at_rest} {total}"
    return f"waiting for stage {stage!r}, which holds {books.queues[stage].bytes} {total}"

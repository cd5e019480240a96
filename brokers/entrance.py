"""How new groups come in: in order, within the bounds of queues and bytes, and who waits is told for what."""

from collections.abc import Callable, Iterable
from typing import Any

from brokers import bounds, refusals
from brokers.conduct import Facts, RunService
from brokers.ledger import Ledger
from brokers.record import Limits, StageSpec
from brokers.service import Message
from brokers.store import Store
from brokers.waiting import Waiting, WaitingRoom
from common.errors import QueueFull, RelaxError, WireError
from common.group import GroupKey
from common.header import Header, Item, attach

TOLD_AFTER_S = 1.0
"""a producer that waits longer is told why, and told anew as often"""


class Entrance(RunService):
    """The verb `add`, and the producers that wait for room."""

    def __init__(
        self, facts: Facts, stages: Iterable[StageSpec], limits: Limits, store: Store, kind_of_ledger: type[Ledger]
    ) -> None:
        super().__init__(facts, stages, limits, store, kind_of_ledger)
        self.adding = WaitingRoom()
        self.verbs["add"] = self._add

    def state(self) -> dict[str, Any]:
        """Return how far the run is, and why producers wait, if they do."""
        return {**super().state(), "full": next((waiting.why for waiting in self.adding.waiting if waiting.why), "")}

    def on_time(self, now: float) -> None:
        """Tell producers why they wait, and those that waited too long that there is no room."""
        super().on_time(now)
        for waiting in self.adding.waiting:
            self._tell(waiting, now)
        for waiting in self.adding.overdue(now):
            group, seconds = waiting.items[0][0].group, waiting.message.header.deadline_s
            error = QueueFull(f"group {group} waited {seconds:g} s: {self._why_no_room(waiting)}")
            self.reply(waiting.message.peer, waiting.message.header, self.refuse(error))

    def let_in(self, now: float) -> None:
        """Let waiting groups in, in their order, as far as there is room."""
        if self.adding:
            self.adding.serve(lambda waiting: self.answered(self._try_add, waiting, now), last_hope=lambda _: True)

    def answered(self, attempt: Callable[[Waiting, float], bool], waiting: Waiting, now: float) -> bool:
        """Return whether a waiting request has its answer now, if only a refusal."""
        try:
            return attempt(waiting, now)
        except RelaxError as error:
            self.reply(waiting.message.peer, waiting.message.header, self.refuse(error))
            return True

    def _add(self, message: Message) -> None:
        items = attach(message.header, message.frames)
        for item, _ in items:
            refusals.new_group(self.ledger.books, _key(item), item.sections)
        waiting = Waiting(message, message.now + message.header.deadline_s, items)
        behind_others = len(self.adding) > 0 and any(item.purpose == "train" for item, _ in items)
        if behind_others or not self._try_add(waiting, message.now):
            self.adding.add(waiting)

    def _try_add(self, waiting: Waiting, now: float) -> bool:
        while waiting.items:
            item, sections = waiting.items[0]
            if self._full_queue(item) or not bounds.fits(self.ledger, self.store.bytes, _key(item), item.sections):
                return False
            if self.ledger.add(_key(item), item.sections, now):
                record = self.ledger.books.records[item.group]
                for name in record.sections:
                    self.store.keep(item.group, sections[name])
            waiting.items.pop(0)
        if waiting.why:
            self.log.info("producer goes on", worker=waiting.message.peer, waited_s=round(now - waiting.since, 1))
            waiting.why = ""
        self.reply(waiting.message.peer, waiting.message.header, Header("ok", body=self.state()))
        return True

    def _full_queue(self, item: Item) -> str | None:
        return self.ledger.room_for(_key(item), item.sections)

    def _why_no_room(self, waiting: Waiting) -> str:
        item, held = waiting.items[0][0], self.store.bytes
        if not bounds.fits(self.ledger, held, _key(item), item.sections):
            return bounds.holder(self.ledger, held)
        return self._full_queue(item) or "waiting behind other producers"

    def _tell(self, waiting: Waiting, now: float) -> None:
        """Note why a producer waits, for whoever asks, and log it once."""
        if now - max(waiting.since, waiting.told) < TOLD_AFTER_S:
            return
        first, waiting.told, waiting.why = not waiting.why, now, self._why_no_room(waiting)
        if first:
            self.log.info("producer waits", worker=waiting.message.peer, why=waiting.why)


def _key(item: Item) -> GroupKey:
    length = item.facts.get("length", 0)
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise WireError(f"group {item.group}: predicted length is {length!r}, expected tokens, or 0 if unknown")
    return GroupKey(item.group, item.seq, item.purpose, item.min_version, length)  # pyright: ignore[reportArgumentType]

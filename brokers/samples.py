"""The sample broker: verbs over the ledger, bytes over the store, and requests that wait."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from brokers.conduct import Facts
from brokers.entrance import Entrance
from brokers.ledger import Ledger
from brokers.record import ROLLOUT, TRAINER, Grant, Lease, Limits, Record, StageSpec
from brokers.report import describe, item_of
from brokers.roster import Member
from brokers.service import Message, Outgoing, refusal
from brokers.store import MemoryStore, Store
from brokers.tapping import Taps
from brokers.waiting import Waiting, WaitingRoom
from brokers.watchdog import TURN, Stuck, Watchdog
from common.errors import BrokerError, RelaxError, WireError
from common.header import Header, Item, attach
from common.section import Section


class SampleService(Entrance):
    """One run's groups. See `brokers.ledger` for what the verbs mean."""

    def __init__(
        self,
        facts: Facts,
        stages: Iterable[StageSpec],
        limits: Limits,
        store: Store | None = None,
        kind_of_ledger: type[Ledger] = Ledger,
    ) -> None:
        super().__init__(facts, stages, limits, MemoryStore() if store is None else store, kind_of_ledger)
        self.leasing = {name: WaitingRoom() for name in self.ledger.books.stages}
        self.taps = Taps(facts, self.ledger.books.stages, self.state, self.reply)
        self.open_verbs.add("tap")
        self.watchdog = Watchdog(self.ledger, self.roster, self.turn)
        self.once |= {"put", "ack"}
        self.verbs |= {
            "tap": self.taps.ask,
            "lease": self._lease,
            "put": self._put,
            "ack": self._ack,
            "nack": self._nack,
            "fetch": self._fetch,
            "drop": self._drop,
            "status": self._status,
        }

    def welcome(self, member: Member, message: Message) -> dict[str, Any]:
        """Let a member that comes back keep the leases it knows of, and no other; what it asked, it asks again."""
        if "holding" in message.body:
            holding, now = message.body["holding"], message.now
            if not isinstance(holding, list):
                raise WireError(f"hello: argument 'holding' is {holding!r}, expected a list of leases")
            for lease in self.ledger.books.held_by(member.peer):
                if lease.id not in holding:
                    self.ledger.nack(lease.id, member.peer, "its grant never arrived", now, fault=False)
            for room in (*self.leasing.values(), self.adding, self.turning):
                room.withdraw(member.peer)
            self.ledger.extend(member.peer, now)
        return super().welcome(member, message)

    def on_beat(self, message: Message) -> None:
        """Leases of a worker that lives run anew."""
        self.ledger.extend(message.peer, message.now)

    def on_lost(self, member: Member, now: float) -> None:
        """Its groups are ready again; a goodbye is no fault of theirs."""
        if member.lost:
            self.ledger.lost(member.peer, member.lost, now)
        else:
            for lease in self.ledger.books.held_by(member.peer):
                self.ledger.nack(lease.id, member.peer, "worker left", now, fault=False)
        self.turn.lost(member.peer)
        gone = BrokerError(f"{member.peer} has left")
        for room in (*self.leasing.values(), self.adding, self.turning):
            for waiting in room.withdraw(member.peer):
                if not member.lost:  # it said goodbye and may still listen
                    self.reply(member.peer, waiting.message.header, refusal(gone))

    def on_time(self, now: float) -> None:
        """Expire leases; tell requests that waited too long what they waited for."""
        for lease in self.ledger.expire(now):
            self.log.warning("lease expired", group=lease.group, stage=lease.stage, worker=lease.worker)
            self.turn.lost(lease.worker)
        super().on_time(now)
        for room in self.leasing.values():
            for waiting in room.overdue(now):
                self.reply(waiting.message.peer, waiting.message.header, self._nothing(waiting.message))
        self.taps.on_time(now, self.ledger.limits.lease_seconds)
        if self.watchdog.is_due(now):
            self._watch(now)

    def on_unroutable(self, peer: str, now: float) -> list[Outgoing]:
        """A tap may be gone, too."""
        self.taps.forget(peer)
        return super().on_unroutable(peer, now)

    def serve(self, now: float) -> None:
        """Answer waiting requests for which something changed; prompts that find room now can be leased at once."""
        self.let_in(now)
        changed = self.ledger.books.changed
        while changed:
            room = self.leasing[changed.pop()]
            room.serve(lambda waiting: self.answered(self._try_lease, waiting, now), last_hope=self._nobody_can)
        super().serve(now)
        self.taps.serve(ended=self.ledger.ended is not None)

    def _nobody_can(self, waiting: Waiting) -> bool:
        """Whether, when this request for a lease finds nothing, those behind it find nothing either.

        Only rollout workers with newer weights and trainers with other wishes could be luckier.
        """
        stage = waiting.message.header.stage
        if stage == ROLLOUT:
            return waiting.message.integer("version", 0) >= self.ledger.window.version
        return stage != TRAINER

    def _watch(self, now: float) -> None:
        """Say once who does not get on, and once that it is over; do about it what the run's settings say."""
        waiting = {name: room.peers for name, room in self.leasing.items()}
        begun, over = self.watchdog.look(now, {**waiting, TURN: self.turning.peers})
        for stuck in over:
            self.log.info("no longer stuck", **stuck.describe(now))
        limits = self.ledger.limits
        for stuck in begun:
            self.log.warning("stuck", **stuck.describe(now), action=limits.watchdog_action)
            if limits.watchdog_action == "end":
                group = f", group {stuck.group}" if stuck.group else ""
                where = f"stage {stuck.stage}{group}, {now - stuck.since:.0f} s"
                self.ledger.end("failed", f"watchdog.seconds = {limits.watchdog_seconds:g}: {stuck.why} ({where})")
            elif limits.watchdog_action == "expire" and stuck.peer:
                self._take_away(stuck, now)

    def _take_away(self, stuck: Stuck, now: float) -> None:
        """Give the groups and the turn of a worker that does not get on to others, and nothing more to it meanwhile."""
        self.ledger.lost(stuck.peer, f"no progress for {now - stuck.since:.0f} s", now)
        self.turn.lost(stuck.peer)
        for room in self.leasing.values():
            for waiting in room.withdraw(stuck.peer):
                self.reply(stuck.peer, waiting.message.header, self._nothing(waiting.message))

    def _lease(self, message: Message) -> Header | None:
        header = message.header
        if header.stage not in self.leasing:
            raise WireError(f"unknown stage {header.stage!r}; known: {', '.join(self.leasing)}")
        for older in self.leasing[header.stage].withdraw(message.peer):
            self.reply(message.peer, older.message.header, self._nothing(older.message))
        self.watchdog.asked(header.stage, message.peer, message.now)
        waiting = Waiting(message, message.now + header.deadline_s)
        if self._try_lease(waiting, message.now):
            return None
        if header.deadline_s <= 0:
            return self._nothing(message)
        self.leasing[header.stage].add(waiting)
        return None

    def _try_lease(self, waiting: Waiting, now: float) -> bool:
        """Answer if there is something to hand out, or if nothing will come any more."""
        message, stage = waiting.message, waiting.message.header.stage
        version, want = message.integer("version", 0), message.integer("want", 1)
        if "version" in message.header.body:
            self.member(message.peer).version = version
        at_least = message.integer("at_least", 1)
        lane = message.integer("lane") if "lane" in message.header.body else None
        granted = self.ledger.lease(stage, message.peer, want, now, version=version, at_least=at_least, lane=lane)
        if granted:
            self.watchdog.granted(stage, now)
            items = tuple(item_of(grant, now) for grant in granted)
            frames = tuple(self.store.read(g.lease.group, info) for g in granted for info in g.sections)
            self.reply(message.peer, message.header, Header("ok", items=items, body=self.state()), frames)
            self.taps.granted(stage, items, frames, self.ledger.window.version)
            return True
        if self.ledger.ended or (stage == TRAINER and self.ledger.exhausted):
            self.reply(message.peer, message.header, self._nothing(message))
            return True
        return False

    def _nothing(self, message: Message) -> Header:
        starved = self.ledger.starved(message.header.stage, message.integer("version", 0))
        return Header("ok", body={**self.state(), "starved": starved})

    def _put(self, message: Message) -> Header:
        def put(item: Item, sections: dict[str, Section]) -> None:
            self._lease_of(item, message.peer)
            versions = (item.version_min, item.version_max)
            for name in self.ledger.put(item.lease, message.peer, item.sections, versions, item.tokens):
                self.store.keep(item.group, sections[name])
            if message.header.body.get("ack"):
                self.ledger.ack(item.lease, message.peer, message.now)

        return self._each(attach(message.header, message.frames), put)

    def _lease_of(self, item: Item, peer: str) -> tuple[Lease, Record]:
        """Return a lease and its record. Raises `LeaseLost`, or `WireError` if it is of another group."""
        lease, record = self.ledger.books.held(item.lease, peer)
        if record.key.id != item.group:
            raise WireError(f"lease {item.lease} is of group {record.key.id}, not of {item.group}")
        return lease, record

    def _ack(self, message: Message) -> Header:
        step = message.integer("step", -1)

        def ack(item: Item, _sections: dict[str, Section]) -> None:
            self.ledger.ack(item.lease, message.peer, message.now, step)
            record = self.ledger.books.records.get(item.group)
            if record is not None and record.trained_step is not None:
                self.store.retire(item.group, record.sections)

        return self._each([(item, {}) for item in message.header.items], ack)

    def _nack(self, message: Message) -> Header:
        reason, fault = message.text("reason", "no reason given"), bool(message.header.body.get("fault", True))
        return self._each(
            [(item, {}) for item in message.header.items],
            lambda item, _: self.ledger.nack(item.lease, message.peer, reason, message.now, fault=fault),
        )

    def _each(
        self, items: Sequence[tuple[Item, dict[str, Section]]], act: Callable[[Item, dict[str, Section]], None]
    ) -> Header:
        """Do the same for every item; one that fails does not stop the others. Failures are reported by group."""
        failed: list[list[str]] = []
        for item, sections in items:
            try:
                act(item, sections)
            except RelaxError as error:
                self.refuse(error)
                failed.append([item.group, type(error).__name__, str(error)])
        return Header("ok", body={**self.state(), "failed": failed})

    def _fetch(self, message: Message) -> Header | None:
        """Send the sections of a lease again: they arrived damaged."""
        if len(message.header.items) != 1:
            raise WireError(f"fetch: {len(message.header.items)} groups, expected one")
        item = message.header.items[0]
        lease, record = self._lease_of(item, message.peer)
        known = self.ledger.books.stages[lease.stage].requires & record.sections.keys()
        foreign = {info.name for info in item.sections} - known
        if foreign:
            raise WireError(f"fetch: stage {lease.stage!r} was not given sections {sorted(foreign)}")
        grant = Grant(lease, record, tuple(record.sections[info.name] for info in item.sections))
        frames = tuple(self.store.read(item.group, info) for info in grant.sections)
        self.refused["damaged"] += 1
        self.reply(
            message.peer, message.header, Header("ok", items=(item_of(grant, message.now),), body=self.state()), frames
        )
        return None

    def _drop(self, message: Message) -> Header:
        for item in message.header.items:
            self.ledger.drop(item.group, message.text("reason", "dropped"))
        return Header("ok", body=self.state())

    def _status(self, message: Message) -> Header:
        return Header("ok", body={"status": describe(self, message.now)})

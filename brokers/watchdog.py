"""Who lives and does not get on. A pure state machine over the ledger, the members and the turn; time is passed in.

A worker that is silent loses its leases; this is about those that are heard and yet do nothing, and names them:

* a worker that holds groups or the turn while nothing that it reports has moved for `watchdog_seconds`. To wait at the
  broker is no fault: for the turn, for the rest of a batch (trainer), or, empty-handed, for anything;
* a stage with groups to be had and nobody in work, because no worker serves it or none asks;
* a trainer that waits while no worker has groups and nothing moves: then what the stages before it lack is named
  (see `brokers.lack`).

A worker that has not asked for its first group, or added its first prompt, warms up, which may take `WARM_UP` times as
long. If the broker itself did not look for a while, as on a suspended machine, everything begins anew: it would take
its own sleep for theirs.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from brokers import lack
from brokers.ledger import Ledger
from brokers.record import ROLLOUT, TRAINER, Lease
from brokers.roster import Member, Roster
from brokers.turn import Turn

LOOKS = 10
"""how often it looks within the time that it allows"""
LONGEST_LOOK_SECONDS = 1.0
WARM_UP = 4
TURN = "turn"
"""stands for a stage where a request waits for the turn"""
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Stuck:
    """What does not get on, and `since` when (broker's clock). `worker`, `peer`: empty where a stage is meant."""

    stage: str
    why: str
    since: float
    group: str = ""
    worker: str = ""
    peer: str = ""

    def describe(self, now: float) -> dict[str, Any]:
        """Return what a person wants to know of it."""
        seconds = round(now - self.since, 1)
        return {"stage": self.stage, "worker": self.worker, "group": self.group, "seconds": seconds, "why": self.why}


@dataclass(frozen=True, slots=True)
class _Known:
    """A worker at the last look. `lease`: its oldest, 0 without one; `moved`: when it got on, or had nothing to do."""

    told: Mapping[str, Any]
    lease: int
    moved: float


class Watchdog:
    """Looks now and then; `stuck` is what it found at the last look. Somebody else acts on it."""

    def __init__(self, ledger: Ledger, roster: Roster, turn: Turn) -> None:
        self._ledger, self._roster, self._turn = ledger, roster, turn
        self._seconds = ledger.limits.watchdog_seconds
        self._asked: dict[str, dict[str, float]] = {}  # by stage and peer: when
        self._granted: dict[str, float] = {}  # by stage: when
        self._next_seq = dict(ledger.next_seq)
        self._added = _NEVER  # when prompts came
        self._looked = _NEVER
        self._forget(_NEVER)

    def asked(self, stage: str, peer: str, now: float) -> None:
        """Note that a worker asks for groups of a stage."""
        self._asked.setdefault(stage, {})[peer] = now

    def granted(self, stage: str, now: float) -> None:
        """Note that groups of a stage were handed out."""
        self._granted[stage] = now

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return now >= self._looked + min(LONGEST_LOOK_SECONDS, self._seconds / LOOKS)

    def look(self, now: float, waiting: Mapping[str, Set[str]]) -> tuple[list[Stuck], list[Stuck]]:
        """Return what is stuck since this look, and what is so no longer.

        `waiting`: peers whose requests wait at the broker, by stage; those for the turn under `TURN`.
        """
        if now - self._looked > self._seconds / 2:
            self._forget(now)
        before, self.stuck = self.stuck, {} if self._ledger.ended else self._find(now, waiting)
        self._looked = now
        begun = [each for key, each in self.stuck.items() if key not in before]
        return begun, [each for key, each in before.items() if key not in self.stuck]

    def _forget(self, now: float) -> None:
        self.stuck: dict[tuple[str, str], Stuck] = {}
        self._known: dict[str, _Known] = {}
        self._idle: dict[str, float] = {}  # by stage: when it last had nothing to be had, or somebody in work
        self._worked = now  # when anything in the run got on, or the trainer did not wait

    def _find(self, now: float, waiting: Mapping[str, Set[str]]) -> dict[tuple[str, str], Stuck]:
        known, self._known = self._known, {}
        if self._next_seq != self._ledger.next_seq:
            self._added = now
        if self._added == now or max(self._granted.values(), default=_NEVER) >= self._looked:
            self._next_seq, self._worked = dict(self._ledger.next_seq), now
        found: dict[tuple[str, str], Stuck] = {}
        members = [member for member in self._roster.members() if not member.lost]
        peers, busy = {member.peer for member in members}, set[str]()
        for asked in self._asked.values():
            for gone in asked.keys() - peers:
                del asked[gone]
        for member in members:
            lease = self._ledger.books.oldest_held_by(member.peer)
            if lease is not None:
                busy.add(lease.stage)
            stuck = self._worker(member, lease, known.get(member.peer), now, waiting)
            if stuck is not None:
                found[stuck.stage, stuck.peer] = stuck
        for name in self._ledger.books.stages:
            stuck = self._stage(name, members, now, waiting, is_busy=name in busy)
            if stuck is not None:
                found[name, ""] = stuck
        starved = self._run(members, now, waiting, is_busy=bool(busy - {TRAINER}))
        return found if found or starved is None else {("", ""): starved}

    def _worker(
        self, member: Member, lease: Lease | None, known: _Known | None, now: float, waiting: Mapping[str, Set[str]]
    ) -> Stuck | None:
        """Look at one worker that is heard."""
        peer, told, has_turn = member.peer, dict(member.progress), member.peer in self._turn.holders
        got_on = known is None or told != known.told or (known.lease > 0 and (lease is None or lease.id != known.lease))
        if got_on and self._has_asked(peer):
            self._worked = now
        is_trainer = peer in self._asked.get(TRAINER, ()) and not self._ledger.exhausted
        has_work = lease is not None or has_turn or is_trainer
        may_wait = self._waits(peer, waiting, (TRAINER, TURN) if lease is not None else None)
        moved = now if known is None or got_on or may_wait or not has_work else known.moved
        self._known[peer] = _Known(told, 0 if lease is None else lease.id, moved)
        if now - moved < self._seconds:
            return None
        hint = f"; it waits for {told['waits_for']}" if told.get("waits_for") else ""
        if lease is not None:
            count = len(self._ledger.books.held_by(peer))
            why = f"{member.name} is heard and holds {count} groups, of which none gets on{hint}"
            return Stuck(lease.stage, why, moved, lease.group, member.name, peer)
        holds = f"holds the turn of side {self._turn.side}" if has_turn else "asks for no groups"
        why = f"{member.name} is heard, {holds} and does not get on{hint}"
        return Stuck(self._turn.side if has_turn else TRAINER, why, moved, "", member.name, peer)

    def _stage(
        self, name: str, members: Iterable[Member], now: float, waiting: Mapping[str, Set[str]], *, is_busy: bool
    ) -> Stuck | None:
        """Look at one stage: whether there are groups to be had while nobody has any in work."""
        queue = self._ledger.books.queues[name]
        group = self._to_be_had(name, waiting)
        warming = any(self._is_warming(member, now) for member in members if member.role in (name, TRAINER))
        if group is None or warming or is_busy or queue.groups > queue.ready:
            self._idle[name] = now
            return None
        since = max(self._idle.setdefault(name, now), self._granted.get(name, _NEVER))
        if now - since < self._seconds:
            return None
        asking = self._asked.get(name, {})
        serving = [member for member in members if member.role == name or member.peer in asking]
        return Stuck(name, lack.of_workers(self._ledger.window.version, serving, members), since, group)

    def _run(
        self, members: Iterable[Member], now: float, waiting: Mapping[str, Set[str]], *, is_busy: bool
    ) -> Stuck | None:
        """Look at the trainer: whether it waits although no worker has anything in hand that could reach it."""
        waits = any(self._waits(member.peer, waiting, (TRAINER,)) for member in members)
        warming = any(self._is_warming(member, now) for member in members)
        if not waits or is_busy or warming or self._ledger.exhausted:
            self._worked = now
        if now - self._worked < self._seconds:
            return None
        stage, group, why = lack.of_groups(self._ledger, self._turn, members)
        return Stuck(stage, f"the trainer waits for groups, and nothing moves: {why}", self._worked, group)

    def _to_be_had(self, name: str, waiting: Mapping[str, Set[str]]) -> str | None:
        """Return a group that a worker would get if it asked now; None also where it is for others to move first."""
        books, window = self._ledger.books, self._ledger.window
        if name == TRAINER:
            served = bool(self._asked.get(TRAINER) or waiting.get(TRAINER) or waiting.get(TURN))
            return books.queues[name].first() if window.slots > 0 and not served else None  # else see `_worker`, `_run`
        if name != ROLLOUT:
            return books.queues[name].first()
        if self._turn.side == TRAINER:
            return None
        evaluation = books.evaluation.first()
        if evaluation is not None and books.records[evaluation].key.min_version <= window.version:
            return evaluation
        return books.queues[name].first() if window.credits(window.version) else None

    def _waits(self, peer: str, waiting: Mapping[str, Set[str]], stages: Iterable[str] | None) -> bool:
        """Whether a worker waits at the broker, or has asked since the last look, for one of the stages (None: any)."""
        chosen = {*waiting, *self._asked} if stages is None else stages
        return any(
            peer in waiting.get(stage, ()) or self._asked.get(stage, {}).get(peer, _NEVER) >= self._looked
            for stage in chosen
        )

    def _has_asked(self, peer: str) -> bool:
        return any(peer in asked for asked in self._asked.values())

    def _is_warming(self, member: Member, now: float) -> bool:
        if member.role == "prompt":
            is_new = self._added < member.joined
        else:
            is_new = member.role in self._ledger.books.stages and not self._has_asked(member.peer)
        return is_new and now - member.joined < WARM_UP * self._seconds

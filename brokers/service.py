"""What both brokers share: who is connected, which verb does what, and how a refusal is told. Knows no socket.

A message goes in, messages come out, so the in-memory channel and the socket run the same code.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import structlog

from brokers.roster import Member, Roster
from common.errors import LeaseLost, RelaxError, Stranger, WireError
from common.header import Header
from common.section import Buffer


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for a peer."""

    peer: str
    header: Header
    frames: tuple[Buffer, ...] = ()
    verb: str = ""
    """of the request that it answers"""


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a peer, with the time it arrived at."""

    peer: str
    header: Header
    frames: Sequence[Buffer]
    now: float

    @property
    def body(self) -> dict[str, Any]:
        """The verb's own arguments."""
        return dict(self.header.body)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer argument; raises `WireError` when it is missing or something else."""
        value = self.header.body.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise WireError(f"{self.header.verb}: argument {name!r} is {value!r}, expected an integer")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return a text argument; raises `WireError` when it is something else."""
        value = self.header.body.get(name, default)
        if not isinstance(value, str):
            raise WireError(f"{self.header.verb}: argument {name!r} is {value!r}, expected a text")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Return an argument that is a map, empty by default; raises `WireError` when it is something else."""
        value = self.header.body.get(name, {})
        if not isinstance(value, dict):
            raise WireError(f"{self.header.verb}: argument {name!r} is {value!r}, expected a map")
        return cast(dict[str, Any], value)


Verb: TypeAlias = Callable[[Message], Header | None]
"""Answers a message, or returns None when the answer comes later."""

PROBE_SECONDS = 1.0
"""how long a live worker has to answer when another one claims its name"""


def refusal(error: RelaxError) -> Header:
    """Return the reply that reports an error to the peer that caused it."""
    return Header("error", body={"kind": type(error).__name__, "message": str(error)})


class Service:
    """Membership and dispatch. A subclass adds verbs and says what changes when a member comes or goes."""

    def __init__(self, run: str, part: str) -> None:
        self.run = run
        self.roster = Roster()
        self.refused: Counter[str] = Counter()
        self.unroutable = 0
        self.turned_away = 0
        self.log = structlog.get_logger(part=part)
        self.verbs: dict[str, Verb] = {"hello": self._hello, "beat": self._beat, "pong": self._pong, "bye": self._bye}
        self.open_verbs = {"hello", "status"}  # allowed to peers that are not members
        self.once = set[str]()  # verbs that a repeat must not do again, and that are answered at once
        self._claims: dict[str, tuple[Message, float]] = {}
        self._out: list[Outgoing] = []

    @property
    def holding(self) -> bool:
        """Whether replies wait for something that is done once for many of them: handle more before `release`."""
        return False

    def handle(self, message: Message) -> list[Outgoing]:
        """Answer one message and return what is to be sent."""
        self.take(message)
        return self.release(message.now)

    def take(self, message: Message) -> None:
        """Answer one message; nothing of a refused message is kept. What is to be sent waits for `release`."""
        try:
            reply = self._dispatch(message)
        except RelaxError as error:
            reply = self.refuse(error)
        if reply is not None:
            self.reply(message.peer, message.header, reply)
        self.serve(message.now)

    def release(self, now: float) -> list[Outgoing]:
        """Return what may be sent by now."""
        del now
        return self.flush()

    def tick(self, now: float) -> list[Outgoing]:
        """Do what is due: let time pass for waiting requests and for claims on names."""
        for name, (claim, until) in list(self._claims.items()):
            if until <= now:
                self._settle(name, claim, "it did not answer")
        self.on_time(now)
        self.serve(now)
        return self.release(now)

    def on_unroutable(self, peer: str, now: float) -> list[Outgoing]:
        """A peer is gone: what it held is free at once."""
        self.unroutable += 1
        self.lose(peer, "its connection is gone", now)
        for name, (claim, _) in list(self._claims.items()):
            if self.roster.holder(name) is None:
                self._settle(name, claim, "its connection is gone")
        self.serve(now)
        return self.release(now)

    def on_malformed(self, error: RelaxError) -> None:
        """A message came that has no readable header; it cannot be answered."""
        self.refuse(error)

    def on_turned_away(self, count: int) -> None:
        """So many peers were not let in. They try again and again, so every doubling of the total is logged."""
        before, self.turned_away = self.turned_away, self.turned_away + count
        if self.turned_away.bit_length() > before.bit_length():
            self.log.warning("turned away: without this run's key, or encrypted to a plain broker", n=self.turned_away)

    def close(self) -> None:
        """Let go of what outlives the process."""

    def serve(self, now: float) -> None:
        """Answer requests that waited for something that has happened."""

    def on_time(self, now: float) -> None:
        """Expire what is due."""

    def on_lost(self, member: Member, now: float) -> None:
        """A member is gone or was replaced."""

    def welcome(self, member: Member, message: Message) -> dict[str, Any]:
        """Return what a new member is told."""
        del member, message
        return self.state()

    def state(self) -> dict[str, Any]:
        """Return what every reply carries."""
        return {}

    def on_beat(self, message: Message) -> None:
        """A member gave a sign of life."""

    def reply(self, peer: str, request: Header, reply: Header, frames: tuple[Buffer, ...] = ()) -> None:
        """Queue the answer to a request."""
        header = replace(reply, run=self.run, request=request.request, stage=request.stage)
        self._out.append(Outgoing(peer, header, frames, request.verb))

    def refuse(self, error: RelaxError) -> Header:
        """Count an error and return the reply that reports it."""
        self.refused[type(error).__name__] += 1
        self.log.warning("refused", kind=type(error).__name__, error=str(error))
        return refusal(error)

    def flush(self) -> list[Outgoing]:
        """Return what is to be sent, and forget it."""
        out, self._out = self._out, []
        return out

    def lose(self, peer: str, reason: str, now: float) -> None:
        """Mark a member as lost."""
        member = self.roster.find(peer)
        if member is not None and not member.lost:
            member.lost = reason
            self.log.warning("worker lost", worker=peer, reason=reason)
            self.on_lost(member, now)

    def member(self, peer: str) -> Member:
        """Return the member behind a peer; dispatch has checked that there is one."""
        member = self.roster.find(peer)
        assert member is not None, f"{peer} is not a member"
        return member

    def _dispatch(self, message: Message) -> Header | None:
        header = message.header
        verb = self.verbs.get(header.verb)
        if verb is None:
            raise WireError(f"unknown verb {header.verb!r}; known: {', '.join(self.verbs)}")
        if header.run not in ("", self.run):
            raise WireError(f"a message of run {header.run!r} reached the broker of run {self.run!r}")
        member = self.roster.find(message.peer)
        if member is None and header.verb not in self.open_verbs:
            holder = self.roster.holder(header.worker)
            if holder is not None:
                raise LeaseLost(f"{message.peer} was replaced by {holder.peer}; its leases have ended")
            raise Stranger(f"unknown worker {message.peer!r}: say hello first")
        if member is None:
            return verb(message)
        member.seen = message.now
        number = message.integer("repeats", header.request)
        if header.verb in self.once and number in member.done:
            return Header("ok", body={**self.state(), "failed": member.done[number]})
        reply = verb(message)
        if header.verb in self.once and reply is not None:
            member.note_done(number, reply.body.get("failed", []))
        return reply

    def _hello(self, message: Message) -> Header | None:
        holder = self.roster.holder(message.header.worker)
        if holder is None or holder.peer == message.peer:
            return self._admit(message)
        older = self._claims.pop(message.header.worker, None)
        if older is not None:
            error = WireError(f"the name {message.header.worker!r} is claimed by a later worker, {message.peer}")
            self.reply(older[0].peer, older[0].header, self.refuse(error))
        self._claims[message.header.worker] = (message, message.now + PROBE_SECONDS)
        self._out.append(Outgoing(holder.peer, Header("ping", run=self.run)))
        return None

    def _admit(self, message: Message) -> Header:
        header, now = message.header, message.now
        old = self.roster.holder(header.worker)
        if old is not None and old.peer != message.peer:
            self.lose(old.peer, "replaced by a new incarnation", now)
        role, host, pid = message.text("role"), message.text("host"), message.integer("pid", 0)
        member = Member(header.worker, message.peer, role, host, pid, now, now)
        known = self.roster.find(message.peer)
        if known is not None:  # it comes back after its connection was lost
            member.version, member.progress, member.done = known.version, known.progress, known.done
        self.roster.join(member)
        self.log.info("worker joined", worker=member.peer, at=role, host=member.host)
        return Header("ok", body=self.welcome(member, message))

    def _settle(self, name: str, claim: Message, why: str) -> None:
        del self._claims[name]
        self.log.info("name passes on", worker=name, why=why)
        try:
            reply = self._admit(claim)
        except RelaxError as error:
            reply = self.refuse(error)
        self.reply(claim.peer, claim.header, reply)

    def _pong(self, message: Message) -> Header | None:
        member = self.member(message.peer)
        claim = self._claims.pop(member.name, None)
        if claim is not None:
            error = WireError(
                f"the name {member.name!r} is held by process {member.pid} on {member.host}, which answers; "
                "start this worker under another --name"
            )
            self.reply(claim[0].peer, claim[0].header, self.refuse(error))
        return None

    def _beat(self, message: Message) -> Header:
        member = self.member(message.peer)
        member.lost = ""
        member.progress.update(message.table("progress"))
        self.on_beat(message)
        return Header("ok", body=self.state())

    def _bye(self, message: Message) -> Header:
        member = self.member(message.peer)
        self.on_lost(member, message.now)
        self.roster.leave(message.peer)
        return Header("ok", body=self.state())

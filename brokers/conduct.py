"""How a run as a whole proceeds: its version, its end, whose turn it is, what is evaluated, who else serves it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from brokers.ledger import Ledger
from brokers.record import Limits, StageSpec
from brokers.roster import Member
from brokers.service import Message, Service
from brokers.store import Store
from brokers.turn import Turn
from brokers.waiting import Waiting, WaitingRoom
from common.header import Header


@dataclass(frozen=True, slots=True)
class Facts:
    """What HELLO tells a worker: the run, its resolved configuration (JSON) and its folder (absolute path)."""

    run: str
    config: str
    folder: str


class RunService(Service):
    """The verbs that concern the run, not single groups. See `brokers.ledger` for what they mean."""

    def __init__(
        self,
        facts: Facts,
        stages: Iterable[StageSpec],
        limits: Limits,
        store: Store,
        kind_of_ledger: type[Ledger],
    ) -> None:
        super().__init__(facts.run, "samples")
        self.facts = facts
        self.store = store
        self.ledger = kind_of_ledger(stages, limits, store.free)
        self.turn = Turn()
        self.endpoints: dict[str, str] = {}
        self.turning = WaitingRoom()
        self.evaluation = (0, 0)  # how many were asked for, version of the last
        self.verbs |= {
            "advance": self._advance,
            "commit": self._commit,
            "resume": self._resume,
            "turn": self._turn,
            "evaluate": self._evaluate,
            "end_of_data": self._end_of_data,
            "end": self._end,
        }

    def state(self) -> dict[str, Any]:
        """Return how far the run is; every reply carries it."""
        ended = self.ledger.ended
        state, reason = ended or ("running", "")
        return {
            "state": state,
            "reason": reason,
            "version": self.ledger.window.version,
            "endpoints": dict(self.endpoints),
            "evaluation": list(self.evaluation),
            "next_seq": dict(self.ledger.next_seq),
        }

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def welcome(self, member: Member, message: Message) -> dict[str, Any]:
        """Return the run's configuration; a member with an endpoint is told to everybody from now on."""
        endpoint = message.text("endpoint")
        if endpoint:
            self.endpoints[member.role] = endpoint
        facts = {"run": self.facts.run, "config": self.facts.config, "folder": self.facts.folder}
        return {**facts, **self.state()}

    def on_time(self, now: float) -> None:
        """A worker that is silent loses its turn; who waited too long for one is told."""
        for member in self.roster.fall_silent(now - self.ledger.limits.lease_seconds):
            self.turn.lost(member.peer)
        for waiting in self.turning.overdue(now):
            reply = Header("ok", body={**self.state(), "fence": 0})
            self.reply(waiting.message.peer, waiting.message.header, reply)

    def serve(self, now: float) -> None:
        """Give the turn to those who wait for it."""
        del now
        self.turning.serve(self._try_turn)

    def _advance(self, message: Message) -> Header:
        self.ledger.advance(message.integer("version"))
        return Header("ok", body=self.state())

    def _commit(self, message: Message) -> Header:
        self.ledger.commit(message.integer("version"))
        return Header("ok", body=self.state())

    def _resume(self, message: Message) -> Header:
        self.ledger.resume(message.integer("version"), message.now)
        return Header("ok", body=self.state())

    def _turn(self, message: Message) -> Header | None:
        fence = message.integer("give", 0)
        if fence:
            self.turn.give(message.peer, fence)
            return Header("ok", body=self.state())
        waiting = Waiting(message, message.now + message.header.deadline_s)
        if not self._try_turn(waiting):
            self.turning.add(waiting)
        return None

    def _try_turn(self, waiting: Waiting) -> bool:
        message = waiting.message
        fence = self.turn.take(message.header.stage, message.peer)
        if fence or self.ledger.ended:
            self.reply(message.peer, message.header, Header("ok", body={**self.state(), "fence": fence}))
        return bool(fence or self.ledger.ended)

    def _evaluate(self, message: Message) -> Header:
        number = message.integer("number", self.evaluation[0] + 1)
        if number == self.evaluation[0] + 1:  # else it is repeated, because its reply was lost
            self.evaluation = (number, message.integer("version"))
        return Header("ok", body=self.state())

    def _end_of_data(self, _message: Message) -> Header:
        self.ledger.end_of_data()
        return Header("ok", body=self.state())

    def _end(self, message: Message) -> Header:
        self.ledger.end(message.text("state", "finished"), message.text("reason"))
        return Header("ok", body=self.state())

"""The verbs of the sample broker, typed, over any channel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from brokers.channel import Channel, Pending, Reply, wait
from common.config import from_json
from common.errors import Damaged, LeaseLost
from common.group import Group, GroupKey, PolicyVersion, Purpose
from common.header import Header, Item, attach
from common.section import Section
from common.settings import Config

TRIES = 3
"""how often bytes that arrived damaged are asked for or sent again"""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a broker told a new worker. `folder`: the run's, an absolute path."""

    run: str
    config: Config
    folder: str
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Leased:
    """A group in this worker's hands. `deadline`: last version that may train it; seconds are the broker's."""

    id: int
    group: Group
    tokens: int = 0
    version_min: PolicyVersion = -1
    version_max: PolicyVersion = -1
    deadline: PolicyVersion = -1
    generation_s: float = 0.0
    queue_s: float = 0.0

    @property
    def weight(self) -> float:
        """By how much the group's loss counts: less than 1 when it came after its deadline, see `brokers.gates`."""
        return self.group.weight


@dataclass(frozen=True, slots=True)
class Batch:
    """The answer to a lease request. `starved`: why it is empty. `ended`: the run is over."""

    leases: Sequence[Leased] = ()
    starved: str = ""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What a stage adds to a leased group. Versions and tokens come from rollout only."""

    lease: Leased
    sections: Sequence[Section]
    version_min: PolicyVersion = -1
    version_max: PolicyVersion = -1
    tokens: int = 0


@dataclass(slots=True)
class SampleClient:
    """One worker's view of the sample broker. `run` is learnt from hello and stamped on every message after it."""

    channel: Channel
    worker: str
    run: str = ""
    _log: Any = field(default_factory=lambda: structlog.get_logger(part="client"))

    def hello(self, role: str, host: str, pid: int, *, endpoint: str = "", seconds: float = 30.0) -> Welcome:
        """Join the run; raises `Unreachable` after `seconds`, `WireError` when the broker belongs to another run."""
        body = {"role": role, "host": host, "pid": pid, "endpoint": endpoint}
        header = Header("hello", run=self.run, worker=self.worker, body=body)
        told = wait(self.channel.request(header, seconds=seconds)).header.body
        self.run = told["run"]
        return Welcome(self.run, from_json(told["config"]), told["folder"], told["version"])

    def add(self, groups: Sequence[tuple[GroupKey, Sequence[Section]]], wait_seconds: float) -> Pending:
        """Put new groups, in this order, into the rollout queue.

        Fails with `QueueFull` after `wait_seconds` without room; `next_seq` then says which were taken in.
        """
        items = tuple(
            Item(
                key.id,
                key.seq,
                key.purpose,
                key.min_version,
                sections=tuple(section.info for section in sections),
                facts={"length": key.length} if key.length else {},
            )
            for key, sections in groups
        )
        frames = [section.data for _, sections in groups for section in sections]
        return self.channel.request(Header("add", run=self.run, deadline_s=wait_seconds, items=items), frames)

    def request_lease(
        self,
        stage: str,
        want: int,
        wait_seconds: float,
        version: PolicyVersion | None = None,
        *,
        at_least: int = 1,
        lane: int | None = None,
    ) -> Pending:
        """Ask for up to `want` groups; pass the reply to `take`.

        `at_least`: for the trainer, see the ledger. `lane`: for rollout, the number of the lane in `broker.lanes` whose
        groups are wanted first.
        """
        body: dict[str, Any] = {"want": want, "at_least": at_least}
        if version is not None:
            body["version"] = version
        if lane is not None:
            body["lane"] = lane
        return self.channel.request(Header("lease", run=self.run, stage=stage, deadline_s=wait_seconds, body=body))

    def take(self, reply: Reply) -> Batch:
        """Check and unpack the reply to a lease request; damaged groups are fetched again, or left if lost by then."""
        frames, leases, place = reply.frames, list[Leased](), 0
        for item in reply.header.items:
            mine = frames[place : place + len(item.sections)]
            place += len(item.sections)
            try:
                leases.append(self._leased(item, self._intact(item, mine)))
            except LeaseLost as error:
                self._log.warning("lease lost before its group arrived whole", group=item.group, error=str(error))
        body = reply.header.body
        return Batch(leases, str(body.get("starved", "")), body.get("state") != "running")

    def lease(
        self, stage: str, want: int, wait_seconds: float, version: PolicyVersion | None = None, *, at_least: int = 1
    ) -> Batch:
        """Wait for up to `want` groups, at most `wait_seconds`."""
        return self.take(wait(self.request_lease(stage, want, wait_seconds, version, at_least=at_least)))

    def put(self, results: Sequence[Result], *, ack: bool = True) -> Pending:
        """Push the sections of leased groups and, after them, acknowledge; pass both to `confirm`."""
        items = tuple(
            Item(
                r.lease.group.key.id,
                lease=r.lease.id,
                tokens=r.tokens,
                version_min=r.version_min,
                version_max=r.version_max,
                sections=tuple(section.info for section in r.sections),
            )
            for r in results
        )
        frames = [section.data for r in results for section in r.sections]
        return self.channel.request(Header("put", run=self.run, items=items, body={"ack": ack}), frames)

    def confirm(self, pending: Pending, results: Sequence[Result], *, ack: bool = True) -> list[str]:
        """Wait for the reply to `put`, sending again what was damaged; return the groups whose lease was lost."""
        for attempt in range(1, TRIES + 1):
            try:
                return self._failed(wait(pending))
            except Damaged as error:
                if attempt == TRIES:
                    raise
                self._log.warning("damaged under way, sending again", error=str(error), attempt=attempt)
                pending = self.put(results, ack=ack)
        raise AssertionError("the last attempt returns or raises")

    def ack(self, leases: Sequence[Leased], step: PolicyVersion = -1) -> None:
        """Acknowledge without adding anything. `step`: version that was updated. Raises `LeaseLost`."""
        lost = self._failed(wait(self._leases("ack", leases, {"step": step})))
        if lost:
            raise LeaseLost(f"groups {', '.join(lost)} of step {step} were given to another worker")

    def nack(self, leases: Sequence[Leased], reason: str, *, fault: bool = True) -> None:
        """Give groups back; with `fault` it counts as an attempt. Leases that are lost already stay lost."""
        self._failed(wait(self._leases("nack", leases, {"reason": reason, "fault": fault})))

    def drop(self, groups: Sequence[str], reason: str) -> None:
        """End groups without training them; their credit returns."""
        items = tuple(Item(group) for group in groups)
        wait(self.channel.request(Header("drop", run=self.run, items=items, body={"reason": reason})))

    def advance(self, version: PolicyVersion) -> None:
        """The trainer made an update and is at `version` now."""
        self._call("advance", {"version": version})

    def commit(self, version: PolicyVersion) -> None:
        """The checkpoint of `version` is on disk."""
        self._call("commit", {"version": version})

    def resume(self, version: PolicyVersion) -> None:
        """The trainer came back from the checkpoint of `version`: what it trained since is handed to it again.

        Raises `WireError` for a version before the last commit or beyond what was reached.
        """
        self._call("resume", {"version": version})

    def take_turn(self, side: str, wait_seconds: float) -> int:
        """Wait for this side's turn; return its fencing number, or 0 when it did not come in time."""
        header = Header("turn", run=self.run, stage=side, deadline_s=wait_seconds)
        return int(wait(self.channel.request(header)).header.body["fence"])

    def give_turn(self, side: str, fence: int) -> None:
        """Give the turn up."""
        self._call("turn", {"give": fence}, stage=side)

    def end_of_data(self) -> None:
        """No further train group will be added."""
        self._call("end_of_data", {})

    def end(self, state: str, reason: str = "") -> None:
        """End the run as `finished` or `failed`."""
        self._call("end", {"state": state, "reason": reason})

    def status(self, seconds: float = 10.0) -> dict[str, Any]:
        """Return what the broker knows about the run."""
        return wait(self.channel.request(Header("status"), seconds=seconds)).header.body["status"]

    def leave(self, seconds: float) -> None:
        """Say goodbye: what is still leased is ready for others at once. Raises `Unreachable` after `seconds`."""
        wait(self.channel.request(Header("bye", run=self.run), seconds=seconds))

    def evaluate(self, version: PolicyVersion) -> None:
        """Ask the prompt worker for held-out prompts, to be answered by weights of at least `version`."""
        self._call("evaluate", {"version": version, "number": self.evaluation[0] + 1})

    @property
    def next_seq(self) -> Mapping[str, int]:
        """First prompt of each purpose that the broker does not know, as last heard."""
        return self.channel.pulse.state.get("next_seq", {"train": 0, "eval": 0})

    @property
    def evaluation(self) -> tuple[int, PolicyVersion]:
        """(how many evaluations were asked for, version of the last one), as last heard."""
        number, version = self.channel.pulse.state.get("evaluation", (0, 0))
        return int(number), int(version)

    @property
    def ended(self) -> bool:
        """Whether the broker has said that the run is over."""
        return self.channel.pulse.state.get("state", "running") != "running"

    @property
    def held_up(self) -> str:
        """What the broker waits for before it takes more groups in, as last heard; empty if it takes them."""
        state = self.channel.pulse.state
        return str(state.get("stalled") or state.get("full") or "")

    @property
    def version(self) -> PolicyVersion:
        """The trainer's version, as last heard."""
        return int(self.channel.pulse.state.get("version", 0))

    def _call(self, verb: str, body: dict[str, Any], stage: str = "") -> Mapping[str, Any]:
        return wait(self.channel.request(Header(verb, run=self.run, stage=stage, body=body))).header.body

    def _leases(self, verb: str, leases: Sequence[Leased], body: dict[str, Any]) -> Pending:
        items = tuple(Item(leased.group.key.id, lease=leased.id) for leased in leases)
        return self.channel.request(Header(verb, run=self.run, items=items, body=body))

    def _failed(self, reply: Reply) -> list[str]:
        failed = reply.header.body.get("failed", [])
        for group, kind, message in failed:
            self._log.warning("refused", group=group, kind=kind, error=message)
        return [group for group, _, _ in failed]

    def _intact(self, item: Item, frames: Sequence[Any]) -> dict[str, Section]:
        for attempt in range(1, TRIES + 1):
            try:
                return attach(Header("", items=(item,)), frames)[0][1]
            except Damaged as error:
                if attempt == TRIES:
                    raise
                self._log.warning("damaged under way, fetching again", error=str(error), attempt=attempt)
                reply = wait(self.channel.request(Header("fetch", run=self.run, items=(item,))))
                frames = reply.frames
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _leased(item: Item, sections: dict[str, Section]) -> Leased:
        purpose: Purpose = "eval" if item.purpose == "eval" else "train"
        key = GroupKey(item.group, item.seq, purpose, item.min_version)
        facts = item.facts
        return Leased(
            item.lease,
            Group(key, item.attempt, sections, float(facts["weight"])),
            item.tokens,
            item.version_min,
            item.version_max,
            int(facts["deadline"]),
            float(facts["generation_s"]),
            float(facts["queue_s"]),
        )

"""A run in memory: both brokers, and workers that take turns whenever one of them has to wait. No sockets, no threads.

Time is a manual clock. A request of a `Patient` channel that cannot be answered lets the other workers do their turns;
when none of them has anything to do, its deadline passes.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from brokers.__main__ import limits_of
from brokers.channel import MemoryBroker, MemoryChannel, Pending
from brokers.client import Leased, SampleClient
from brokers.conduct import Facts
from brokers.samples import SampleService
from brokers.weight_client import Follower, WeightClient
from brokers.weights import WeightService
from common.clock import Clock, ManualClock
from common.config import to_json
from common.header import Header
from common.process import Stop
from common.section import Buffer
from common.settings import Config
from common.tensor import from_numpy
from pipeline_parts import END, NOWHERE, ByLength, Encoder, Report
from workers import stage, wiring
from workers.advantage.stage import AdvantageStage
from workers.prompt.feed import Feed
from workers.rollout.engine import Engine
from workers.rollout.engines.fake import FakeEngine
from workers.rollout.loop import Rollout
from workers.trainer.loop import Trainer


class Patient(MemoryChannel):
    """A channel whose owner waits for every reply; what it asked for goes to the world's `events`, in order."""

    def __init__(self, world: "World", broker: MemoryBroker, worker: str) -> None:
        super().__init__(broker, worker, "1")
        self._world = world

    def request(self, header: Header, frames: Sequence[Buffer] = (), *, seconds: float | None = None) -> Pending:
        self._world.events.append(f"{header.verb} {header.stage}".strip())
        pending = super().request(header, frames, seconds=seconds)
        self._world.pass_time(pending, header.deadline_s)
        return pending


class World:
    """`turns`: what the other workers do while a patient one waits; each says whether it did anything."""

    def __init__(
        self, settings: Config, stages: Sequence[wiring.StageColumns] | None = None, clock: Clock | None = None
    ) -> None:
        self.config, self.clock, self.events = settings, ManualClock(), list[str]()
        self.turns: list[Callable[[], bool]] = []
        specs = [columns.spec() for columns in stages or wiring.stages_of(settings)]
        self.service = SampleService(Facts("run", to_json(settings), "/nowhere"), specs, limits_of(settings))
        self.samples = MemoryBroker(self.service, clock or self.clock)
        self.weight_service = WeightService("run", settings.weights.keep_versions)
        self.weights = MemoryBroker(self.weight_service, clock or self.clock)
        self._members = list[MemoryChannel]()
        self._numbers = itertools.count()
        self._waiting = False

    @property
    def counts(self) -> dict[str, Any]:
        return self.service.ledger.counts.to_wire()

    def client(self, role: str, *, patient: bool = False) -> SampleClient:
        """A worker that has said hello."""
        name = f"{role}-{next(self._numbers)}"
        channel = Patient(self, self.samples, name) if patient else self.samples.connect(name, "1")
        client = SampleClient(channel, name)
        client.hello(role, "here", 1)
        self._members.append(channel)
        return client

    def weight_client(self, role: str, *, patient: bool = False) -> WeightClient:
        name = f"{role}-{next(self._numbers)}"
        channel = Patient(self, self.weights, name) if patient else self.weights.connect(name, "1")
        client = WeightClient(channel, name, "run")
        client.hello(role, "here", 1)
        return client

    def pass_time(self, pending: Pending, seconds: float) -> None:
        """Let the others work until the reply is here; if they cannot help, let `seconds` pass."""
        while not pending.done() and not self._waiting:
            self._waiting = True
            try:
                is_busy = [turn() for turn in self.turns]
            finally:
                self._waiting = False
            if not any(is_busy):
                break
        if not pending.done():
            self.tick(seconds)

    def beat(self) -> None:
        """Every worker gives a sign of life and hears how far the run is."""
        for channel in self._members:
            channel.beat()

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.samples.tick()
        self.weights.tick()

    def feed(self, source: Any, encoder: Any = None) -> Feed:
        """A prompt worker that never waits: it was told to stop and asks for turns all the same."""
        stop = Stop()
        stop.set()
        return Feed(self.config, source, encoder or Encoder(), self.client("prompt"), stop)

    def feeding(self, feed: Feed) -> Callable[[], bool]:
        """A turn of a prompt worker: it works while the rollout queue has no backlog."""

        def turn() -> bool:
            ledger, before = self.service.ledger, dict(self.service.ledger.next_seq)
            self.beat()
            if ledger.books.queues["rollout"].groups < 2 * self.config.groups_per_step or self.service.evaluation[0]:
                feed.turn()
            return before != ledger.next_seq

        return turn

    def rollout(self, engine: Engine | None = None) -> tuple[Rollout, Engine]:
        """A rollout worker that follows the weights of this world."""
        made = engine or FakeEngine(FakeEngine.Options(**self.config.engine.options), NOWHERE, False)
        follower = Follower(self.weight_client("rollout"), made.version)
        return Rollout(self.config, made, self.client("rollout"), follower, str, (END,), ()), made

    def generating(self, rollout: Rollout, engine: Engine) -> Callable[[], bool]:
        """A turn of a rollout worker: everything but the wait of an idle one."""
        leases = self.service.ledger.books.leases

        def turn() -> bool:
            before = (engine.version, set(leases))
            rollout.follow_weights()
            rollout.lease()
            running = bool(engine.running())
            rollout.push(engine.step(0.0))
            return running or before != (engine.version, set(leases))

        return turn

    def serving(self, name: str, served: stage.Stage) -> Callable[[], bool]:
        """A turn of a stage's worker."""
        client = self.client(name)

        def turn() -> bool:
            leases = client.lease(name, 16, 0.0).leases
            results = stage.answer(served, leases, client)
            if results:
                client.confirm(client.put(results), results)
            return bool(leases)

        return turn

    def staff(
        self,
        source: Any,
        *,
        served: Sequence[str] = ("reward", "advantage"),
        reward: stage.Stage | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Employ everybody but the trainer."""
        stages = {"reward": reward or ByLength(), "advantage": AdvantageStage(self.config)}
        self.turns += [self.feeding(self.feed(source)), self.generating(*self.rollout(engine))]
        self.turns += [self.serving(name, stages[name]) for name in served]

    def train(self, trainer: SampleClient, publisher: WeightClient, version: int, **shapes: int) -> list[Leased]:
        """Make the update `version` -> `version + 1` of what is ready, as a trainer does; return its groups."""
        batch = list(trainer.lease("trainer", self.config.groups_per_step, 0.0, version).leases)
        trainer.ack(batch, step=version)
        trainer.advance(version + 1)
        shapes = shapes or {"w": 2}
        weights = [from_numpy(name, np.full(size, version + 1, np.float32)) for name, size in shapes.items()]
        publisher.publish(version + 1, weights, 1 << 20)
        return batch

    def trainer(self, backend: Any, inline: Sequence[tuple[str, stage.Stage]] = ()) -> tuple[Trainer, Report]:
        """A trainer that waits for every reply while the others work."""
        client, weights = self.client("trainer", patient=True), self.weight_client("trainer", patient=True)
        report: Any = Report()
        return Trainer(self.config, backend, client, weights, report, inline), report

    def work(self) -> None:
        """Let everybody work until nobody has anything to do."""
        for _ in range(10_000):
            if not any([turn() for turn in self.turns]):
                return
        raise AssertionError("somebody is never done")

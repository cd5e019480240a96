"""Mode `sync`: both sides in threads of their own, over brokers in memory, on the machine's clock."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from brokers.weight_client import Follower
from common.clock import SystemClock
from common.process import Stop
from pipeline_parts import END, NOWHERE, ByLength, Encoder, Recorder, Report, Rows, config
from pipeline_world import World
from workers import stage
from workers.advantage.stage import AdvantageStage
from workers.prompt.feed import Feed
from workers.rollout.engine import Completion
from workers.rollout.engines.fake import FakeEngine
from workers.rollout.loop import Rollout
from workers.trainer.loop import Trainer

pytestmark = pytest.mark.unit


class Device:
    """Who holds the memory of the device that both sides share; written down by both."""

    def __init__(self) -> None:
        self.events = list[str]()

    def holders(self) -> Iterator[tuple[str, str]]:
        """(event, who holds the device when it happens); fails when one side takes what the other still holds."""
        holder = ""
        takes, frees = {"wake": "rollout", "reload": "trainer"}, {"sleep": "rollout", "offload": "trainer"}
        for event in self.events:
            if event in takes:
                assert holder in ("", takes[event]), f"{takes[event]} takes the device while {holder} holds it"
                holder = takes[event]
            elif frees.get(event) == holder:
                holder = ""
            yield event, holder


class Shared(FakeEngine):
    """A fake engine that tells when it holds the device."""

    def __init__(self, options: FakeEngine.Options, device: Device) -> None:
        super().__init__(options, NOWHERE, False)
        self._device = device

    def step(self, wait_seconds: float) -> list[Completion]:
        self._device.events.append("generate")
        return super().step(wait_seconds)

    def sleep(self) -> None:
        super().sleep()
        self._device.events.append("sleep")

    def wake(self) -> None:
        super().wake()
        self._device.events.append("wake")


def in_threads(world: World, source: Any, engine: FakeEngine, backend: Recorder) -> Report:
    """Run every worker in a thread of its own, on the machine's clock, until the trainer is done."""
    done, report, stop = threading.Event(), Report(), Stop()
    client, feeder = world.client("rollout"), world.client("prompt")
    follower = Follower(world.weight_client("rollout"), engine.version, 0.05)
    rollout = Rollout(world.config, engine, client, follower, str, (END,), ())
    kept: Any = report
    trainer = Trainer(world.config, backend, world.client("trainer"), world.weight_client("trainer"), kept)  # pyright: ignore[reportArgumentType]
    feed = Feed(world.config, source, Encoder(), feeder, stop)

    def over() -> bool:
        return done.is_set()

    def tick() -> None:
        while not done.wait(0.002):
            world.samples.tick()
            world.weights.tick()
            world.beat()

    def feeding() -> None:
        while not over():
            feed.turn()

    def training() -> None:
        try:
            assert trainer.run(lambda: False) == "finished"
        finally:
            done.set()
            stop.set()
            world.client("ender").end("finished")

    stages: list[tuple[str, stage.Stage]] = [("reward", ByLength()), ("advantage", AdvantageStage(world.config))]
    work: list[Callable[[], object]] = [tick, feeding, training, lambda: rollout.run(over)]
    for name, served in stages:
        server = world.client(name)
        work.append(lambda name=name, served=served, server=server: stage.run(name, served, server, over, 8))
    with ThreadPoolExecutor(len(work)) as pool:
        for worker in [pool.submit(one) for one in work]:
            worker.result(30)
    return report


@pytest.mark.parametrize("evaluated", [0, 3])
def test_in_sync_mode_turns_alternate_and_each_side_frees_the_device_before_it_gives_its_turn(evaluated: int) -> None:
    settings = config(mode="sync", steps=3, evaluation={"prompts": evaluated})
    world, device = World(settings, clock=SystemClock()), Device()
    engine = Shared(FakeEngine.Options(vocabulary=18, tokens_per_step=2), device)
    report = in_threads(world, Rows(30, heldout=3), engine, Recorder(device.events))
    assert [(row["groups"], row["staleness_max"]) for row in report.of("step")] == [(4, 0)] * 3
    at_work = {"generate": "rollout", "accumulate": "trainer", "update": "trainer"}
    seen = list(device.holders())
    assert all(at_work[event] == holder for event, holder in seen if event in at_work)
    sides = [at_work[event] for event, _ in seen if event in at_work]
    turns = [side for place, side in enumerate(sides) if place == 0 or side != sides[place - 1]]
    assert turns[:6] == ["rollout", "trainer"] * 3
    # Nobody keeps what it took to start: the first turn is somebody else's, or not yet taken.
    assert next(event for event in device.events if event in ("sleep", "wake")) == "sleep"
    assert next(event for event in device.events if event in ("offload", "reload")) == "offload"
    assert len(report.of("evaluation")) == (2 if evaluated else 0)

"""Who is heard and does not get on is named once, with stage, group, seconds and what it lacks; long work is not."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from brokers.channel import MemoryChannel
from brokers.client import Leased
from brokers.record import Limits
from common.errors import LeaseLost
from common.header import Header
from contract import MemoryWorld, Worker

pytestmark = pytest.mark.unit

SECONDS = 10.0
STEP = 0.5
"""seconds between two heartbeats"""


class Watched(MemoryWorld):
    """A run in which time passes heartbeat by heartbeat; a watchdog allows 10 s. `lines`: what it logged."""

    def __init__(self, groups_per_step: int = 100, max_staleness: int = 0, **limits: Any) -> None:
        with structlog.testing.capture_logs() as self.lines:
            super().__init__(Limits(groups_per_step, max_staleness, watchdog_seconds=SECONDS, **limits))

    def let_live(self, seconds: float, *workers: Worker, moving: tuple[Worker, ...] = ()) -> None:
        """Time passes; all these workers are heard, and of those `moving` the reports move."""
        for _ in range(round(seconds / STEP)):
            self.let_pass(STEP)
            for worker in (*workers, *moving):
                assert isinstance(worker.channel, MemoryChannel)
                if worker in moving:
                    worker.channel.pulse.report(tokens=worker.channel.pulse.progress.get("tokens", 0) + 1)
                worker.channel.beat().result(0.0)

    @property
    def stuck(self) -> list[dict[str, Any]]:
        return self.stranger("person").status(0.0)["stuck"]

    def one(self) -> dict[str, Any]:
        (stuck,) = self.stuck
        return stuck


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def told(logs: list[Any], event: str) -> list[tuple[str, float]]:
    return [(line["stage"], line["seconds"]) for line in logs if line["event"] == event]


def at_work(world: MemoryWorld, worker: Worker, groups: int = 1) -> list[Leased]:
    worker.offer(*range(groups)).result(0.0)
    return worker.get("rollout", groups, 0)


# workers


def test_a_worker_that_holds_groups_and_reports_nothing_new_is_named_once_and_once_when_it_is_over(
    logs: list[Any],
) -> None:
    world = Watched()
    worker = world.join("rollout-0")
    leases = at_work(world, worker, 2)
    world.let_live(9.5, worker)
    assert world.stuck == []
    world.let_live(20.5, worker)
    why = "rollout-0 is heard and holds 2 groups, of which none gets on"
    stuck = world.one()
    # seen first at 0.5 s, it is looked at every second, and asked about at 30 s
    assert stuck == {"stage": "rollout", "worker": "rollout-0", "group": "train-0", "seconds": 29.5, "why": why}
    worker.finish("rollout", leases)
    world.let_live(1.0, worker)
    assert world.stuck == []
    assert told(logs, "stuck") == [("rollout", 10.0)]
    assert told(logs, "no longer stuck") == [("rollout", 30.0)]


def test_reports_that_move_are_progress_however_long_the_groups_take() -> None:
    world = Watched()
    worker = world.join("rollout-0")
    leases = at_work(world, worker)
    world.let_live(100.0, moving=(worker,))
    assert world.stuck == []
    assert worker.finish("rollout", leases) == []


def test_who_asks_for_more_without_getting_on_with_what_it_has_is_stuck_all_the_same() -> None:
    world = Watched()
    worker = world.join("rollout-0")
    at_work(world, worker)
    for _ in range(12):
        worker.ask("rollout", 1, 1.0)
        world.let_live(1.0, worker)
    assert world.one()["worker"] == "rollout-0"


def test_a_group_that_is_handed_in_is_progress() -> None:
    world = Watched()
    worker = world.join("rollout-0")
    for leased in at_work(world, worker, 4):
        world.let_live(8.0, worker)
        assert [one for one in world.stuck if one["worker"]] == []
        worker.finish("rollout", [leased])


def test_the_clock_of_a_worker_that_had_nothing_begins_with_its_next_group() -> None:
    world = Watched()
    worker = world.join("rollout-0")
    worker.finish("rollout", at_work(world, worker))
    world.let_live(50.0, worker)
    worker.offer(1).result(0.0)
    worker.get("rollout", 1, 0)
    world.let_live(9.0, worker)
    assert [stuck for stuck in world.stuck if stuck["worker"]] == []


def test_a_silent_worker_loses_its_leases_and_is_no_case_for_the_watchdog(logs: list[Any]) -> None:
    world = Watched(lease_seconds=5.0)
    silent, other = world.join("rollout-0"), world.join("rollout-1")
    at_work(world, silent)
    world.let_live(9.0, other)
    assert other.get("rollout", 1, 0)[0].group.attempt == 2
    assert [line["event"] for line in logs if line["event"] in {"stuck", "lease expired"}] == ["lease expired"]


def test_a_trainer_with_a_part_of_its_batch_may_wait_for_the_rest_as_long_as_the_run_gets_on() -> None:
    world = Watched(2)
    worker, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    first, second = at_work(world, worker, 2)
    worker.finish("rollout", [first])
    worker.finish("reward", worker.get("reward"))
    assert len(trainer.get("trainer", 2, 0)) == 1
    trainer.request_lease("trainer", 1, 1000.0, 0)
    world.let_live(60.0, trainer, moving=(worker,))
    assert world.stuck == []
    worker.finish("rollout", [second])


def test_a_trainer_that_neither_asks_nor_gets_on_is_named_with_what_it_says_it_waits_for() -> None:
    world = Watched(1, 1)
    worker, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    at_work(world, worker)
    assert trainer.get("trainer", 1, 0) == []  # its warm-up is over
    trainer.channel.pulse.report(waits_for="weight broker")
    world.let_live(13.0, trainer, moving=(worker,))
    why = "trainer-0 is heard, asks for no groups and does not get on; it waits for weight broker"
    assert (world.one()["stage"], world.one()["worker"], world.one()["why"]) == ("trainer", "trainer-0", why)


def test_a_trainer_that_is_in_an_evaluation_asks_and_is_not_stuck() -> None:
    world = Watched(1)
    trainer, worker = world.join("trainer-0", "trainer"), world.join("rollout-0")
    trainer.get("trainer", 1, 0)
    for _ in range(30):
        trainer.lease("evaluate", 0, 0.0)
        world.let_live(1.0, trainer, moving=(worker,))
    assert world.stuck == []


def test_a_trainer_that_is_done_may_take_its_time_to_save() -> None:
    world = Watched(1, total_groups=1)
    worker, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    worker.finish("rollout", at_work(world, worker))
    worker.serve("reward")
    trainer.ack(trainer.get("trainer", 1, 0), 0)
    trainer.advance(1)
    world.let_live(60.0, trainer, worker)
    assert world.stuck == []


def test_the_holder_of_the_turn_must_get_on_unless_it_waits_for_groups_with_empty_hands() -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    rollout.take_turn("rollout", 0.0)
    trainer.channel.request(Header("turn", run="run-a", stage="trainer", deadline_s=1000.0))
    for _ in range(15):
        rollout.ask("rollout", 1, 0.4)
        world.let_live(1.0, rollout, trainer)
    assert world.stuck == []
    world.let_live(10.5, rollout, trainer)
    stuck = world.one()
    why = "rollout-0 is heard, holds the turn of side rollout and does not get on"
    assert (stuck["stage"], stuck["worker"], stuck["group"], stuck["why"]) == ("rollout", "rollout-0", "", why)


# stages


def test_a_stage_that_no_worker_serves_is_named() -> None:
    world = Watched()
    worker = world.join("rollout-0")
    worker.finish("rollout", at_work(world, worker, 3))
    world.let_live(9.5, worker)
    assert world.stuck == []
    world.let_live(1.0, worker)
    stuck = world.one()
    assert (stuck["stage"], stuck["group"], stuck["worker"]) == ("reward", "train-0", "")
    assert stuck["why"] == "no worker serves it"


def test_a_stage_whose_workers_are_there_and_ask_for_nothing_is_named_with_them() -> None:
    world = Watched()
    worker, idle = world.join("rollout-0"), world.join("reward-0", "reward")
    idle.get("reward")
    worker.finish("rollout", at_work(world, worker, 3))
    world.let_live(10.5, worker, idle)
    assert world.one()["why"] == "reward-0 is heard and asks for none"


def test_a_stage_with_a_long_queue_is_served_as_long_as_somebody_gets_on_with_a_part_of_it() -> None:
    world = Watched()
    worker, busy = world.join("rollout-0"), world.join("reward-0", "reward")
    worker.finish("rollout", at_work(world, worker, 50))
    busy.get("reward", 1)
    world.let_live(60.0, worker, moving=(busy,))
    assert world.stuck == []


def test_a_stage_that_is_quick_is_served_although_nobody_is_ever_seen_at_work() -> None:
    world = Watched()
    worker, quick = world.join("rollout-0"), world.join("reward-0", "reward")
    worker.finish("rollout", at_work(world, worker, 50))
    for _ in range(30):
        quick.finish("reward", quick.get("reward", 1))
        world.let_live(1.0, worker, quick)
    assert [one for one in world.stuck if one["stage"] == "reward"] == []


def test_a_worker_warms_up_four_times_as_long_before_its_stage_is_named() -> None:
    world = Watched()
    worker, new = world.join("rollout-0"), world.join("reward-0", "reward")
    worker.finish("rollout", at_work(world, worker))
    world.let_live(40.0, worker, new)
    assert world.stuck == []
    world.let_live(10.5, worker, new)
    assert world.one()["why"] == "reward-0 is heard and asks for none"


def test_prompts_that_wait_for_credit_are_in_order_and_with_credit_they_are_not() -> None:
    world = Watched(1)
    worker, idle = world.join("rollout-0"), world.join("rollout-1")
    idle.get("rollout", 1, 0)
    worker.offer(*range(5)).result(0.0)
    (leased,) = worker.get("rollout", 5, 0)  # 1 credit
    world.let_live(30.0, idle, moving=(worker,))
    assert world.stuck == []
    worker.drop([leased.group.key.id], "filtered")  # its credit returns
    world.let_live(10.5, idle, moving=(worker,))
    stuck = world.one()
    assert (stuck["stage"], stuck["group"]) == ("rollout", "train-1")
    assert stuck["why"] == "rollout-0, rollout-1 is heard and asks for none"


@pytest.mark.parametrize(("weights", "said"), [((), "no weight broker is here"), (("weights",), "weights serves them")])
def test_a_rollout_worker_that_waits_for_a_version_is_named_with_both_versions(
    weights: tuple[str, ...], said: str
) -> None:
    """Bound 0, a group a step: at version 1 a worker that has loaded 0 gets nothing, whatever it asks."""
    world = Watched(1)
    worker, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    there = [world.join(name, "weights") for name in weights]
    worker.finish("rollout", at_work(world, worker, 2))
    worker.serve("reward")
    trainer.ack(trainer.get("trainer", 1, 0), 0)
    trainer.advance(1)
    trainer.request_lease("trainer", 1, 1000.0, 1)
    for _ in range(11):
        worker.request_lease("rollout", 1, 1.0, 0)
        world.let_live(1.0, worker, trainer, *there)
    stuck = world.one()
    assert (stuck["stage"], stuck["group"]) == ("rollout", "train-1")
    assert stuck["why"] == f"rollout-0 is at version 0 and waits for 1: {said}"


def test_held_out_groups_that_nobody_generates_are_named_too() -> None:
    world = Watched()
    worker, feeder = world.join("rollout-0"), world.join("prompt-0", "prompt")
    worker.get("rollout", 1, 0)
    feeder.offer(0, purpose="eval").result(0.0)
    world.let_live(10.5, worker, feeder)
    assert (world.one()["stage"], world.one()["group"]) == ("rollout", "eval-0")


def test_in_the_trainers_turn_nobody_expects_rollout_to_ask() -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    rollout.offer(0).result(0.0)
    rollout.get("rollout", 0, 0)
    rollout.give_turn("rollout", rollout.take_turn("rollout", 0.0))
    assert trainer.take_turn("trainer", 0.0) == 2
    rollout.channel.request(Header("turn", run="run-a", stage="rollout", deadline_s=1000.0))
    world.let_live(30.0, rollout, moving=(trainer,))
    assert world.stuck == []


# a run in which everybody waits


def waiting_trainer(world: Watched) -> Worker:
    trainer = world.join("trainer-0", "trainer")
    trainer.request_lease("trainer", 1, 1000.0, 0)
    return trainer


@pytest.mark.parametrize(
    ("feeders", "said"), [((), "no prompt worker is here"), (("prompt-0",), "prompt-0 is heard and adds none")]
)
def test_a_trainer_that_waits_because_there_are_no_prompts_is_told_so(feeders: tuple[str, ...], said: str) -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), waiting_trainer(world)
    there = [world.join(name, "prompt") for name in feeders]
    rollout.ask("rollout")
    if there:  # whoever has added nothing yet warms up
        world.let_live(39.0, rollout, trainer, *there)
        assert world.stuck == []
    world.let_live(11.0, rollout, trainer, *there)
    stuck = world.one()
    assert (stuck["stage"], stuck["worker"]) == ("rollout", "")
    assert stuck["why"] == f"the trainer waits for groups, and nothing moves: rollout waits for prompts: {said}"


def test_a_trainer_may_wait_for_a_worker_that_has_its_groups_from_before_a_restart_of_the_broker() -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), waiting_trainer(world)
    rollout.offer(0).result(0.0)
    world.samples.ledger.lease("rollout", "rollout-0#1", 1, world.clock.now())  # it asked another broker for it
    world.let_live(100.0, trainer, moving=(rollout,))
    assert world.stuck == []


def test_prompts_that_come_are_progress() -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), waiting_trainer(world)
    for seq in range(5):
        rollout.finish("rollout", at_work_on(rollout, seq))
        rollout.finish("reward", rollout.get("reward"))
        world.let_live(8.0, rollout, trainer)
    assert [one for one in world.stuck if one["stage"] == "rollout"] == []


def at_work_on(worker: Worker, seq: int) -> list[Leased]:
    worker.offer(seq).result(0.0)
    return worker.get("rollout", 1, 0)


def test_a_trainer_that_waits_for_credit_which_it_has_itself_is_told_so() -> None:
    """Bound 0, a group a step: the group is acknowledged and no update follows, so no other can start."""
    world = Watched(1)
    rollout, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    rollout.finish("rollout", at_work(world, rollout, 2))
    rollout.serve("reward")
    trainer.ack(trainer.get("trainer", 1, 0), 0)
    trainer.request_lease("trainer", 1, 1000.0, 0)
    rollout.ask("rollout")
    world.let_live(11.0, rollout, trainer)
    assert world.one()["why"].endswith("rollout waits for credit: 1 groups are started and untrained")


def test_a_trainer_that_waits_while_it_holds_the_turn_is_told_so() -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), world.join("trainer-0", "trainer")
    rollout.offer(0).result(0.0)
    rollout.get("rollout", 0, 0)
    rollout.give_turn("rollout", rollout.take_turn("rollout", 0.0))
    trainer.take_turn("trainer", 0.0)
    trainer.request_lease("trainer", 1, 1000.0, 0)
    rollout.channel.request(Header("turn", run="run-a", stage="rollout", deadline_s=1000.0))
    world.let_live(11.0, rollout, trainer)
    assert world.one()["why"].endswith("rollout waits for the turn, which trainer-0#1 of the trainer has")


def test_nothing_is_stuck_while_a_worker_warms_up_or_when_no_group_is_to_come() -> None:
    world = Watched()
    rollout, trainer = world.join("rollout-0"), waiting_trainer(world)
    world.let_live(39.0, rollout, trainer)  # rollout-0 has asked for nothing yet
    assert world.stuck == []
    rollout.end_of_data()
    world.let_live(30.0, rollout, trainer)
    assert world.stuck == []


# what is done about it


def test_a_broker_that_slept_takes_nobody_for_stuck() -> None:
    world = Watched()
    worker, other = world.join("rollout-0"), world.join("reward-0", "reward")
    other.get("reward")
    first, _ = at_work(world, worker, 2)
    worker.finish("rollout", [first])
    world.let_live(5.0, worker, other)
    world.let_pass(6.0)  # less than a lease, more than half of what the watchdog allows
    world.let_live(4.0, worker, other)
    assert world.stuck == []
    world.let_pass(3600.0)
    assert world.stuck == []


def test_expire_takes_the_groups_from_who_is_stuck_and_refuses_what_it_still_hands_in(logs: list[Any]) -> None:
    world = Watched(watchdog_action="expire")
    hung, other = world.join("rollout-0"), world.join("rollout-1")
    leases = at_work(world, hung)
    hung.take_turn("rollout", 0.0)
    waiting = hung.ask("rollout")
    pending = other.ask("rollout")
    world.let_live(10.5, hung, other)
    (given,) = other.take(pending.result(0.0)).leases
    assert (given.group.key.id, given.group.attempt) == ("train-0", 2)
    assert hung.take(waiting.result(0.0)).leases == []  # it would hang on to what it is given
    assert world.samples.turn.holders == set()
    assert hung.finish("rollout", leases) == ["train-0"]
    with pytest.raises(LeaseLost):
        hung.ack(leases)
    assert other.finish("rollout", [given]) == []
    world.let_live(1.0, hung, other)
    assert [one for one in world.stuck if one["worker"]] == []
    assert told(logs, "stuck") == [("rollout", 10.0)]
    assert world.samples.ledger.counts.started == 1


def test_a_group_that_hangs_every_worker_is_dead_after_its_attempts_with_that_history() -> None:
    world = Watched(watchdog_action="expire", max_attempts=2)
    worker = world.join("rollout-0")
    at_work(world, worker)
    world.let_live(10.5, worker)
    worker.get("rollout", 1, 0)
    world.let_live(12.0, worker)
    (dead,) = worker.status(0.0)["dead_letters"]
    assert dead["history"] == [
        "rollout, attempt 1, rollout-0#1: no progress for 10 s",
        "rollout, attempt 2, rollout-0#1: no progress for 10 s",
    ]


def test_end_ends_the_run_as_failed_with_all_that_is_known() -> None:
    world = Watched(watchdog_action="end")
    worker = world.join("rollout-0")
    at_work(world, worker)
    world.let_live(20.0, worker)
    status = worker.status(0.0)
    assert (status["state"], status["stuck"]) == ("failed", [])
    assert status["reason"] == (
        "watchdog.seconds = 10: rollout-0 is heard and holds 1 groups, of which none gets on "
        "(stage rollout, group train-0, 10 s)"
    )

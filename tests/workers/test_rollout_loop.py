"""The rollout loop over a broker in memory and the fake engine, one step at a time."""

from typing import Any

import pytest

from brokers.client import Leased
from pipeline_parts import NOWHERE, Encoder, Rows, config, in_order, row
from pipeline_world import World
from workers.rollout.engine import Engine
from workers.rollout.engines.fake import FakeEngine
from workers.rollout.loop import Rollout

pytestmark = pytest.mark.unit


def fake(**options: Any) -> FakeEngine:
    """One token a step."""
    return FakeEngine(FakeEngine.Options(vocabulary=18, tokens_per_step=1, **options), NOWHERE, False)


def begin(world: World, source: Any, encoder: Any = None, **options: Any) -> tuple[Rollout, FakeEngine]:
    """A world whose prompts are in the queue and whose stages behind rollout take their turns in `world.turns`."""
    engine = fake(**options)
    rollout, _ = world.rollout(engine)
    feed = world.feeding(world.feed(source, encoder))
    while feed():
        pass
    world.staff(Rows(1))
    del world.turns[:2]  # prompts and rollout are driven by the test
    return rollout, engine


def step(rollout: Rollout, engine: Engine, times: int = 1) -> None:
    """Turns of the loop; what the first one asks for runs from the second one on."""
    for _ in range(times):
        rollout.follow_weights()
        rollout.lease()
        rollout.push(engine.step(0.0))


def spans(leased: Leased) -> list[tuple[list[int], list[int]]]:
    """(first tokens, versions) of every sample."""
    pairs = zip(leased.group.arrays("span_start"), leased.group.arrays("span_version"), strict=True)
    return [(starts.tolist(), versions.tolist()) for starts, versions in pairs]


def held(world: World) -> int:
    """Groups in the hands of rollout workers."""
    return sum(lease.stage == "rollout" for lease in world.service.ledger.books.leases.values())


def test_never_more_groups_are_leased_than_the_engine_has_room_for() -> None:
    world = World(config(groups_per_step=8))
    rollout, engine = begin(world, Rows(8), max_running_groups=3)
    most = 0
    for _ in range(30):
        step(rollout, engine)
        most = max(most, held(world), len(engine.running()))
    assert most == 3
    assert world.service.ledger.books.queues["reward"].ready == 8


def test_a_finished_group_carries_tokens_spans_seeds_and_text() -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(2))
    step(rollout, engine, 7)
    world.work()
    leases = world.client("trainer").lease("trainer", 2, 0.0, 0).leases
    assert [leased.group.key.id for leased in leases] == ["train-0", "train-1"]
    for leased in leases:
        assert leased.group.values("num_tokens") == [6, 6]
        assert leased.group.values("finish_reason") == ["length", "length"]
        assert [len(ids) for ids in leased.group.arrays("response_ids")] == [6, 6]
        assert [len(logprobs) for logprobs in leased.group.arrays("logprobs")] == [6, 6]
        assert spans(leased) == [([0], [0]), ([0], [0])]
        assert (leased.tokens, leased.version_min, leased.version_max) == (12, 0, 0)
    seeds = [seed for leased in leases for seed in leased.group.values("seed")]
    assert len(set(seeds)) == 4


def test_a_new_version_is_told_to_the_broker_which_then_hands_out_groups() -> None:
    # Bound 0, 2 groups a step: a worker at version 0 may start 2 groups; the next 2 only when it has loaded version 1.
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(6))
    trainer, publisher = world.client("trainer"), world.weight_client("trainer")
    step(rollout, engine, 8)
    world.work()
    assert (world.counts["started"], held(world)) == (2, 0)
    world.train(trainer, publisher, 0)
    rollout.lease()
    assert held(world) == 0  # the trainer is at 1, this worker still at 0
    step(rollout, engine)
    assert (engine.version, held(world), world.counts["started"]) == (1, 2, 4)
    step(rollout, engine, 6)
    world.work()
    assert {leased.version_min for leased in world.train(trainer, publisher, 1)} == {1}


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_what_runs_when_a_version_arrives_ends_under_the_old_one_or_goes_on_in_a_new_span(in_flight: str) -> None:
    """Groups 0 and 1 have 2 tokens, group 2 has 6. Version 1 arrives when group 2 has 2 tokens; 3 and 4 come then."""
    settings = config(groups_per_step=2, max_staleness=2, weights={"in_flight": in_flight})
    world = World(settings)
    rows = [row(f"{i}", max_tokens=n) for i, n in enumerate((2, 2, 6))]
    rollout, engine = begin(world, in_order(settings, rows))
    trainer, publisher = world.client("trainer"), world.weight_client("trainer")
    step(rollout, engine, 3)
    world.work()
    world.train(trainer, publisher, 0)
    world.feed(Rows(5, max_tokens=2)).turn()  # the broker knows prompts 0 to 2 already
    step(rollout, engine)
    finishes = in_flight == "finish"
    assert engine.version == (0 if finishes else 1)
    assert set(engine.running()) == ({"train-2"} if finishes else {"train-2", "train-3", "train-4"})
    step(rollout, engine, 3)  # the last of the 6 tokens of group 2
    assert "train-2" not in engine.running()
    step(rollout, engine, 3)
    assert engine.version == 1
    world.work()
    first, second = world.train(trainer, publisher, 1)
    (third,) = trainer.lease("trainer", 1, 0.0, 2).leases
    found = {leased.group.key.id: spans(leased) for leased in (first, second, third)}
    boundary = ([0], [0]) if finishes else ([0, 2], [0, 1])
    assert found == {"train-2": [boundary] * 2, "train-3": [([0], [1])] * 2, "train-4": [([0], [1])] * 2}
    assert (first.version_min, first.version_max) == (0, 0 if finishes else 1)


def test_groups_that_were_leased_before_the_switch_start_after_it() -> None:
    """`finish`: the reply to an open lease request may come while the old version's groups end."""
    settings = config(groups_per_step=2, max_staleness=2, weights={"in_flight": "finish"})
    world = World(settings)
    rows = [row(f"{i}", max_tokens=n) for i, n in enumerate((1, 1, 4))]
    rollout, engine = begin(world, in_order(settings, rows))
    step(rollout, engine, 2)  # 1 token each; the next groups are asked for
    rollout.lease()
    world.work()
    world.train(world.client("trainer"), world.weight_client("trainer"), 0)
    world.feed(Rows(5)).turn()
    assert held(world) == 3  # 3 and 4 were granted to the request that was open
    for _ in range(3):  # tokens 2 to 4 of group 2
        assert (engine.version, list(engine.running())) == (0, ["train-2"])
        step(rollout, engine)
    assert (engine.version, list(engine.running())) == (0, [])
    step(rollout, engine)
    assert (engine.version, sorted(engine.running())) == (1, ["train-3", "train-4"])


@pytest.mark.parametrize("flawed", [{"w": 3}, {"v": 2}, {"w": 2, "v": 2}])
def test_c3_weights_that_do_not_fit_leave_version_and_service_as_they_were(flawed: dict[str, int]) -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(8))
    trainer, publisher = world.client("trainer"), world.weight_client("trainer")
    step(rollout, engine, 8)
    world.work()
    world.train(trainer, publisher, 0, w=2)
    step(rollout, engine, 8)
    world.work()
    world.train(trainer, publisher, 1, **flawed)
    step(rollout, engine, 3)
    assert engine.version == 1
    assert not engine.running()  # at version 1 of 2 and bound 0 there is no prompt for it
    status = world.client("panel").status()
    assert next(worker["version"] for worker in status["workers"] if worker["role"] == "rollout") == 1


def test_draining_gives_groups_back_without_fault_and_another_worker_draws_the_same_seeds() -> None:
    """D12: a restart repeats neither an attempt nor a seed."""
    world = World(config(groups_per_step=4))
    rollout, engine = begin(world, Rows(4), max_running_groups=3)
    step(rollout, engine, 2)
    assert held(world) == 3
    rollout.drain()
    assert (held(world), world.service.ledger.window.outstanding) == (0, 0)
    assert world.counts["restarted"] == 3
    assert not engine.running()
    other, another = world.rollout(fake())
    other.lease()
    other.lease()
    assert set(another.running()) == {f"train-{i}" for i in range(4)}
    for lease in world.service.ledger.books.leases.values():
        assert lease.attempt == 1
        assert world.service.ledger.books.records[lease.group].history == []


def test_draining_gives_back_what_was_granted_and_never_begun_too() -> None:
    world = World(config(groups_per_step=4))
    rollout, engine = begin(world, Rows(4))
    rollout.lease()  # granted at once; the reply is looked at in the next turn
    assert (held(world), len(engine.running())) == (4, 0)
    rollout.drain()
    assert held(world) == 0
    assert world.service.ledger.books.queues["rollout"].ready == 4


def test_draining_finishes_what_was_pushed() -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(4))
    step(rollout, engine, 8)
    rollout.drain()
    assert world.service.ledger.books.queues["reward"].ready == 2


def test_run_works_until_it_is_told_to_stop_and_then_drains() -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(2))
    looks = iter([False] * 4 + [True])
    rollout.run(lambda: next(looks))
    assert held(world) == 0
    assert world.counts["restarted"] == 2
    assert not engine.running()


def test_a_long_response_is_progress_that_the_broker_hears_of_before_it_is_finished() -> None:
    """One group of 2 samples, a token a step each: the first turn only asks."""
    world = World(config(groups_per_step=2))
    rollout, _ = begin(world, Rows(1))
    pulse, turns, told = rollout._client.channel.pulse, iter(range(5)), list[int]()  # pyright: ignore[reportPrivateUsage]

    def over() -> bool:
        told.append(pulse.progress.get("tokens", 0))
        return next(turns, None) is None

    rollout.run(over)
    assert told == [0, 0, 2, 4, 6, 8]
    assert pulse.progress["running"] == 1


def test_b14_an_abort_before_the_first_token_leaves_no_tokens_and_a_version() -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(2))
    rollout.lease()
    rollout.lease()
    rollout.push(engine.abort(["train-0"]))
    rollout.push(engine.step(0.0))
    rollout.push(engine.abort(["train-1"]))
    world.work()
    first, second = world.client("trainer").lease("trainer", 2, 0.0, 0).leases
    assert (first.tokens, first.version_min, first.version_max) == (0, 0, 0)
    assert first.group.values("num_tokens") == [0, 0]
    assert first.group.values("finish_reason") == ["abort", "abort"]
    assert spans(first) == [([0], [0]), ([0], [0])]
    assert second.group.values("num_tokens") == [1, 1]
    for leased in (first, second):
        assert leased.group.values("reward_status") == ["aborted", "aborted"]
        assert leased.group.values("loss_weight") == [0.0, 0.0]


@pytest.mark.parametrize(
    "sampling",
    [
        '{"top_k": 5}',
        '{"temperature": -1}',
        '{"temperature": "warm"}',
        '{"temperature": Infinity}',
        '{"temperature": NaN}',
        '{"temperature": null}',
        '{"max_tokens": 0}',
        '{"max_tokens": 1.5}',
        '{"max_tokens": [1, 2, 3]}',
        '{"num_samples": 0}',
        '{"num_samples": -2}',
        '["temperature"]',
        "5",
        "null",
        "",
        "{",
    ],
)
def test_a_sampling_setting_that_cannot_be_is_the_fault_of_its_group_alone(sampling: str) -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(4), Encoder({"train/1": sampling, "train/0": sampling}))
    step(rollout, engine, 12)
    assert sum(world.counts["dead"].values()) == 2
    assert all("sampling settings" in reason or "max_tokens" in reason for reason in world.counts["dead"])
    assert world.service.ledger.books.queues["reward"].ready == 2


def test_g7_a_prompt_token_outside_the_vocabulary_is_refused_with_its_id_and_never_replaced() -> None:
    world = World(config(groups_per_step=2))
    engine = FakeEngine(FakeEngine.Options(vocabulary=5), NOWHERE, False)  # the prompts hold 3, 4 and 5
    rollout, _ = world.rollout(engine)
    world.feed(Rows(1)).turn()
    step(rollout, engine, 6)
    assert world.counts["dead"] == {"rollout: group train-0: token id 5 is outside the vocabulary of 5": 1}


def test_a_worker_that_was_silent_for_too_long_begins_its_groups_anew_when_it_gets_them_again() -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(2))
    step(rollout, engine, 3)
    world.tick(2e6)  # the broker heard nothing for so long that it took the groups back
    step(rollout, engine, 9)
    rollout.drain()
    assert world.service.ledger.books.queues["reward"].ready == 2
    assert world.counts["dead"] == {}
    assert world.counts["expired"] == 2


def test_a_group_that_another_worker_got_in_the_meantime_counts_once() -> None:
    world = World(config(groups_per_step=2))
    rollout, engine = begin(world, Rows(2))
    step(rollout, engine, 3)
    other, another = world.rollout(fake())
    other.lease()
    world.tick(2e6)
    other.lease()
    step(rollout, engine, 6)
    step(other, another, 8)
    rollout.drain()  # confirms its puts: refused, logged, no reason to stop
    other.drain()
    assert world.service.ledger.books.queues["reward"].ready == 2
    assert world.counts["started"] == 2

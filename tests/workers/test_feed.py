"""The prompt worker: which prompts it offers, in which order, and what a restart repeats or skips."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import structlog

from common.errors import ConfigError, Reject, WorkerError
from common.group import GroupKey
from common.section import Section
from pipeline_parts import Encoder, Rows, config
from pipeline_world import World
from workers.prompt.feed import REJECTED_IN_A_ROW, Feed
from workers.prompt.schedule import Schedule
from workers.prompt.source import Row

pytestmark = pytest.mark.unit


class Selective(Encoder):
    """Refuses rows of these names."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = set(refused)

    def encode(self, row: Row, sampling: Mapping[str, Any], evaluation_size: int) -> Sequence[Section]:
        if row.id in self.refused:
            raise Reject(f"row {row.id} has no ids")
        return super().encode(row, sampling, evaluation_size)


def started(world: World, want: int = 1000) -> list[tuple[str, int, str]]:
    """Lease what waits for rollout: (group, place in the order, prompt)."""
    leases = world.client("rollout").lease("rollout", want, 0.0, 0).leases
    return [(leased.group.key.id, leased.group.key.seq, leased.group.value("prompt_id")) for leased in leases]


def scheduled(world: World, rows: int, count: int) -> list[str]:
    schedule = Schedule(rows, world.config.epochs, world.config.seed)
    places = [schedule.row_of(seq) for seq in range(count)]
    return [f"train/{place[1]}" for place in places if place is not None]


def run(feed: Feed, turns: int = 20) -> None:
    for _ in range(turns):
        feed.turn()


def test_prompts_come_in_the_order_of_the_schedule() -> None:
    world = World(config(groups_per_step=50, epochs=2))
    run(world.feed(Rows(20)))
    found = started(world)
    assert [prompt for _, _, prompt in found] == scheduled(world, 20, 40)
    assert [(group, seq) for group, seq, _ in found] == [(f"train-{i}", i) for i in range(40)]


def test_d16_ten_prompts_for_two_epochs_are_twenty_groups_and_then_the_data_ends() -> None:
    world = World(config(groups_per_step=50, epochs=2, steps=None))
    run(world.feed(Rows(10)))
    assert len(started(world)) == 20
    assert world.service.ledger.data_ended


def test_d16_with_both_limits_the_steps_end_the_run_first() -> None:
    world = World(config(groups_per_step=4, epochs=2, steps=3, max_staleness=8))
    run(world.feed(Rows(10)))
    assert len(started(world)) == 12  # 3 steps of 4
    assert not started(world)


@pytest.mark.parametrize("offered", [0, 1, 16, 17, 31])
def test_e1_a_feed_that_restarts_goes_on_where_its_predecessor_stopped(offered: int) -> None:
    """However many prompts the broker has taken in: none is repeated, none is skipped."""
    world = World(config(groups_per_step=100, epochs=2))
    schedule, source, first = Schedule(20, 2, 0), Rows(20), world.client("prompt")
    for seq in range(offered):
        place = schedule.row_of(seq)
        assert place is not None
        sections = Encoder().encode(source.train[place[1]], {}, 0)
        first.add([(GroupKey(f"train-{seq}", seq), sections)], 0.0).result(0)
    run(world.feed(source))
    assert [prompt for _, _, prompt in started(world)] == scheduled(world, 20, 40)
    assert world.counts["repeated"] == 0


def emptied(world: World, feed: Feed) -> list[tuple[str, int, str]]:
    """Start all prompts, a window at a time, each window dropped to make room for the next; the feed takes turns."""
    client, found = world.client("rollout"), list[tuple[str, int, str]]()
    while batch := started(world):
        found += batch
        client.drop([group for group, _, _ in batch], "seen")
        run(feed, 3)
    return found


def test_a_feed_that_dies_with_an_offer_open_loses_none_of_it() -> None:
    world = World(config(groups_per_step=4, epochs=1, broker={"max_queue_groups": 8}))
    world.feed(Rows(40)).turn()  # 16 offered, 8 taken in, 8 wait for room
    assert world.service.ledger.next_seq["train"] == 8
    world.samples.detach("prompt-0#1")
    found = emptied(world, world.feed(Rows(40)))
    assert [prompt for _, _, prompt in found] == scheduled(world, 40, 40)
    assert [seq for _, seq, _ in found] == list(range(40))


def test_what_finds_no_room_is_offered_again_until_it_does() -> None:
    world = World(config(groups_per_step=4, epochs=1, broker={"max_queue_groups": 8}))
    feed = world.feed(Rows(30))
    for refused in range(3):
        run(feed, 2)
        assert (world.service.ledger.next_seq["train"], world.service.refused["QueueFull"]) == (8, refused)
        world.tick(61)  # broker.request_seconds is 60
    assert [prompt for _, _, prompt in emptied(world, feed)] == scheduled(world, 30, 30)
    assert world.service.ledger.data_ended


@pytest.mark.parametrize(
    "refused", [("train/3",), ("train/0", "train/1", "train/2"), tuple(f"train/{i}" for i in range(9))]
)
def test_a_row_that_cannot_be_encoded_is_skipped_and_the_rest_keeps_its_order(refused: tuple[str, ...]) -> None:
    world = World(config(groups_per_step=50, epochs=1))
    run(world.feed(Rows(10), Selective(*refused)))
    assert [prompt for _, _, prompt in started(world)] == [p for p in scheduled(world, 10, 10) if p not in refused]
    assert world.service.ledger.data_ended


def test_a_hundred_rows_refused_one_after_the_other_are_a_wrong_data_set() -> None:
    world = World(config(groups_per_step=300, epochs=1))
    order = scheduled(world, 300, 300)
    run(world.feed(Rows(300), Selective(*order[1:REJECTED_IN_A_ROW])), 40)  # 99 in a row
    assert world.service.ledger.next_seq["train"] == 300
    other = World(config(groups_per_step=50, epochs=1))
    feed = other.feed(Rows(300), Selective(*order[1 : REJECTED_IN_A_ROW + 1]))
    with pytest.raises(WorkerError, match=r"100 rows of data source 'mod10' in a row: row train/.* has no ids"):
        run(feed, 40)


def asked_for(world: World) -> list[tuple[int, str, int, int]]:
    """Lease evaluation prompts: (place, prompt, size of its evaluation, oldest version that may answer)."""
    leases = world.client("rollout").lease("rollout", 1000, 0.0, world.service.ledger.window.version).leases
    found = [leased.group for leased in leases if leased.group.key.purpose == "eval"]
    return [(g.key.seq, g.value("prompt_id"), g.value("evaluation_size"), g.key.min_version) for g in found]


def test_held_out_prompts_are_added_once_for_each_evaluation_that_is_asked_for() -> None:
    world = World(config(evaluation={"prompts": 5}))
    feed, trainer = world.feed(Rows(1, heldout=7)), world.client("trainer")
    run(feed)
    assert asked_for(world) == []
    trainer.evaluate(0)
    world.beat()
    run(feed)
    assert asked_for(world) == [(i, f"heldout/{i}", 5, 0) for i in range(5)]
    run(feed)
    assert asked_for(world) == []
    for version in (1, 2, 3):
        trainer.advance(version)
    trainer.evaluate(3)
    world.beat()
    run(feed)
    assert asked_for(world) == [(5 + i, f"heldout/{i}", 5, 3) for i in range(5)]


def test_an_evaluation_prompt_is_answered_once_at_the_temperature_of_evaluations() -> None:
    world = World(config(evaluation={"prompts": 1, "temperature": 0.5}))
    world.client("trainer").evaluate(0)
    run(world.feed(Rows(1, heldout=1)))
    (leased,) = [
        leased
        for leased in world.client("rollout").lease("rollout", 9, 0.0, 0).leases
        if leased.group.key.purpose == "eval"
    ]
    assert leased.group.value("sampling") == '{"temperature": 0.5, "num_samples": 1}'


@pytest.mark.parametrize("turns", [1, 2])
def test_a_restart_in_the_middle_of_an_evaluation_adds_the_rest(turns: int) -> None:
    world = World(config(evaluation={"prompts": 40}))
    world.client("trainer").evaluate(0)
    run(world.feed(Rows(1, heldout=40)), turns)
    assert world.service.ledger.next_seq["eval"] == 16 * turns
    run(world.feed(Rows(1, heldout=40)))
    assert [(seq, prompt) for seq, prompt, _, _ in asked_for(world)] == [(i, f"heldout/{i}") for i in range(40)]
    assert world.counts["repeated"] == 0


def test_two_evaluations_asked_for_at_once_are_both_added() -> None:
    world = World(config(evaluation={"prompts": 3}))
    trainer = world.client("trainer")
    trainer.evaluate(0)
    for version in (1, 2):
        trainer.advance(version)
    trainer.evaluate(2)
    run(world.feed(Rows(1, heldout=3)))
    assert [(seq, version) for seq, _, _, version in asked_for(world)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 2),
        (4, 2),
        (5, 2),
    ]


def test_a_full_rollout_queue_does_not_hold_an_evaluation_up() -> None:
    world = World(config(groups_per_step=4, epochs=1, evaluation={"prompts": 3}, broker={"max_queue_groups": 4}))
    feed = world.feed(Rows(40, heldout=3))
    run(feed, 2)
    world.client("trainer").evaluate(0)
    world.beat()
    run(feed, 2)
    assert [seq for seq, *_ in asked_for(world)] == [0, 1, 2]


def test_an_evaluation_without_held_out_rows_is_a_mistake_of_the_configuration() -> None:
    world = World(config(evaluation={"prompts": 5}))
    with pytest.raises(ConfigError, match=r"'evaluation.prompts' = 5, but data source 'mod10' has no held-out rows"):
        world.feed(Rows(3))
    World(config(evaluation={"prompts": 0})).feed(Rows(3))


def test_a_held_out_row_that_cannot_be_encoded_is_named_and_ends_the_run() -> None:
    world = World(config(evaluation={"prompts": 3}))
    world.client("trainer").evaluate(0)
    feed = world.feed(Rows(1, heldout=3), Selective("heldout/1"))
    with pytest.raises(ConfigError, match="a held-out row of data source 'mod10': row heldout/1 has no ids"):
        run(feed)


def test_a_prompt_worker_that_finds_no_room_says_once_for_what_it_waits_and_once_that_it_goes_on() -> None:
    world = World(config(groups_per_step=1, max_staleness=0, epochs=1, steps=None, broker={"max_queue_groups": 1}))
    feed = world.feed(Rows(2))
    with structlog.testing.capture_logs() as logged:
        run(feed, 3)
        world.tick(2.0)
        world.beat()
        run(feed, 3)
        assert [group for group, _, _ in started(world)] == ["train-0"]
        world.service.ledger.drop("train-0", "filtered")
        world.tick(0.1)
        run(feed, 1)
    lines = [each["event"] for each in logged if each["event"].startswith("prompts")]
    assert lines == [
        "prompts wait: queue 'rollout' holds 1 of at most 1 groups",
        "prompts are taken in again",
    ]

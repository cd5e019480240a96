"""The loop of the stages that answer groups one for one."""

from collections.abc import Sequence

import pytest

from common.errors import Reject
from common.group import Group
from common.section import Section
from pipeline_parts import ByLength, Rows, config
from pipeline_world import World
from workers import stage

pytestmark = pytest.mark.unit


class Picky(ByLength):
    """Refuses the groups in `refused` each time it sees them; remembers what it was given together."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.seen: list[list[str]] = []

    def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
        self.seen.append([group.key.id for group in groups])
        for group in groups:
            if group.key.id in self.refused:
                raise Reject(f"cannot read {group.key.id}")
        return super().handle(groups)


def generated(groups: int, **settings: object) -> World:
    """A world in which so many groups wait for their reward."""
    world = World(config(groups_per_step=groups, **settings))
    world.staff(Rows(groups), served=())
    world.work()
    return world


def serve(world: World, served: stage.Stage, want: int = 16) -> int:
    """Run the stage's loop until its queue is empty."""
    client = world.client("reward", patient=True)
    queue = world.service.ledger.books.queues["reward"]
    return stage.run("reward", served, client, lambda: not queue.ready, want)


def test_a_batch_is_handled_together_and_acknowledged() -> None:
    world, picky = generated(5), Picky()
    assert serve(world, picky) == 5
    assert picky.seen == [[f"train-{i}" for i in range(5)]]
    assert world.service.ledger.books.queues["advantage"].ready == 5


def test_no_more_groups_are_leased_than_wanted() -> None:
    world, picky = generated(5), Picky()
    assert serve(world, picky, want=2) == 5
    assert [len(batch) for batch in picky.seen] == [2, 2, 1]


def test_one_rejected_group_goes_back_and_the_others_of_its_batch_pass() -> None:
    world, picky = generated(5), Picky("train-2")
    client = world.client("reward")
    results = stage.answer(picky, client.lease("reward", 16, 0.0).leases, client)
    assert [result.lease.group.key.id for result in results] == ["train-0", "train-1", "train-3", "train-4"]
    assert picky.seen == [[f"train-{i}" for i in range(5)], *([f"train-{i}"] for i in range(5))]
    (again,) = client.lease("reward", 16, 0.0).leases
    assert (again.group.key.id, again.group.attempt) == ("train-2", 2)


@pytest.mark.parametrize("refused", [("train-0",), ("train-2",), ("train-4",), ("train-0", "train-4")])
def test_d2_what_is_beyond_repair_ends_as_dead_with_its_reason(refused: tuple[str, ...]) -> None:
    """5 groups, some cannot be handled: 5 - n pass, n are dead after 3 attempts, sum 5, and the loop goes on."""
    world = generated(5)
    assert serve(world, Picky(*refused)) == 5 - len(refused)
    counts = world.counts
    assert counts["dead"] == {f"reward: cannot read {name}": 1 for name in refused}
    assert world.service.ledger.books.queues["advantage"].ready == 5 - len(refused)
    letters = dict(world.service.ledger.dead_letters)
    assert {name: len(history) for name, history in letters.items()} == dict.fromkeys(refused, 3)
    assert all(f"attempt {i + 1}" in line for line in letters.values() for i, line in enumerate(line))


def test_a_dead_group_returns_its_credit() -> None:
    world = World(config(groups_per_step=4))
    world.staff(Rows(40), served=("reward",), reward=Picky("train-1"))
    world.work()
    assert world.counts["started"] == 5  # 4 credits, one of them came back
    assert world.service.ledger.window.outstanding == 4


@pytest.mark.parametrize("error", [ValueError, KeyError, RuntimeError])
def test_anything_but_reject_ends_the_loop_and_the_leases_are_still_held(error: type[Exception]) -> None:
    class Broken(ByLength):
        def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
            raise error("no idea")

    world = generated(3)
    with pytest.raises(error, match="no idea"):
        serve(world, Broken())
    assert len(world.service.ledger.books.leases) == 3
    world.tick(2e6)  # the worker is silent from now on: its leases expire and the groups are ready for another one
    assert world.service.ledger.books.queues["reward"].ready == 3


def test_a_stage_that_loses_a_section_is_broken_and_not_a_matter_of_one_group() -> None:
    class Forgetful(ByLength):
        def handle(self, groups: Sequence[Group]) -> Sequence[Section]:
            return super().handle(groups)[1:]

    with pytest.raises(ValueError, match="zip"):
        serve(generated(3), Forgetful())


def test_the_loop_ends_with_the_run() -> None:
    world = generated(2)
    world.client("trainer").end("finished")
    assert stage.run("reward", Picky(), world.client("reward", patient=True), lambda: False, 16) == 0


def test_an_empty_queue_is_asked_again_until_the_stop_flag_is_seen() -> None:
    world, asked = generated(1), iter([False, False, False, True])
    picky = Picky()
    assert stage.run("reward", picky, world.client("reward", patient=True), lambda: next(asked), 16) == 1
    assert world.events.count("lease reward") == 3

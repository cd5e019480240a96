"""A trainer comes back from a checkpoint: what it trained since is handed to it again, as it was."""

import pytest

from common.errors import LeaseLost, WireError
from ledger_cases import Bench

pytestmark = pytest.mark.unit
MIDDLE = ("reward", "reference", "advantage")


def train(bench: Bench, steps: int, size: int = 2) -> list[list[str]]:
    """Make updates without a checkpoint; return the groups of each, in their order."""
    made: list[list[str]] = []
    for _ in range(steps):
        while bench.ledger.books.queues["rollout"].groups < 4 * size:
            bench.add(bench.ledger.next_seq["train"])
        bench.generate()
        grants = bench.lease("trainer", size, at_least=size)
        for grant in grants:
            bench.ack(grant)
        bench.ledger.advance(bench.ledger.window.version + 1)
        made.append([grant.lease.group for grant in grants])
    return made


def resume(bench: Bench, version: int) -> None:
    bench.ledger.resume(version, bench.clock.now())


@pytest.mark.parametrize("s", [0, 1, 3])
@pytest.mark.parametrize("back_to", [1, 2, 4])
def test_steps_after_the_checkpoint_are_made_again_of_the_same_groups_in_the_same_order(s: int, back_to: int) -> None:
    bench = Bench(2, s)
    made = train(bench, 1)
    bench.ledger.commit(1)
    made += train(bench, 3)
    started = bench.ledger.counts.started
    resume(bench, back_to)
    window = bench.ledger.window
    # four steps of two; those since `back_to` are in the window again, and (s + 1) x 2 may be started beyond step 3
    assert (window.version, window.trained, bench.ledger.counts.trained) == (back_to, 2 * back_to, 2 * back_to)
    assert window.outstanding == started - 2 * back_to
    assert train(bench, 4 - back_to) == made[back_to:]
    assert bench.ledger.counts.trained == 8
    again = {name for step in train(bench, 2) for name in step}
    assert not again & {name for step in made for name in step}


def test_nothing_of_it_is_generated_or_scored_again() -> None:
    bench = Bench(2)
    (step,) = train(bench, 1)
    resume(bench, 0)
    assert bench.lease("reward", 5) == []
    assert [grant.lease.group for grant in bench.lease("trainer", 2)] == step
    for group in step:
        assert bench.here(group) == {"inputs", "tokens", "reference", "advantage"}


def test_a_step_under_way_and_the_leases_of_the_trainer_that_died_begin_anew() -> None:
    bench = Bench(3)
    for seq in range(3):
        bench.add(seq)
    bench.generate()
    first, second, _third = bench.lease("trainer", 3)
    bench.ack(second)  # and then it died, before it said that the update was made
    resume(bench, 0)
    with pytest.raises(LeaseLost):
        bench.ack(first)
    grants = bench.lease("trainer", 3)
    assert [grant.lease.group for grant in grants] == ["train-1", "train-0", "train-2"]
    assert [grant.lease.attempt for grant in grants] == [1, 1, 1]  # its death was no fault of theirs
    assert bench.ledger.window.outstanding == 3


def test_a_checkpoint_before_the_last_commit_or_that_was_never_made_is_refused() -> None:
    bench = Bench(2)
    train(bench, 3)
    bench.ledger.commit(2)
    with pytest.raises(WireError, match=r"resumes at version 1: it can at the last commit, 2, or later, .* beyond 3"):
        resume(bench, 1)
    with pytest.raises(WireError, match=r"resumes at version 4: .* 2, or later, and not beyond 3"):
        resume(bench, 4)
    assert (bench.ledger.window.version, bench.ledger.counts.trained) == (3, 6)
    resume(bench, 3)
    assert (bench.ledger.window.version, bench.ledger.counts.trained) == (3, 6)


def test_workers_ahead_of_the_trainer_go_on_as_before_and_what_they_started_stays() -> None:
    # s = 1, B = 2: at version 3, four may be under way.
    bench = Bench(2, 1)
    made = train(bench, 3)
    for seq in range(20, 30):
        bench.add(seq)
    bench.generate()  # up to four
    assert bench.ledger.window.outstanding == 4
    resume(bench, 1)
    window = bench.ledger.window
    assert window.outstanding == 4 + 2 * 2
    assert [window.credits(w) for w in (1, 2, 3)] == [0, 0, 0]
    assert bench.lease("rollout", version=3) == []  # known, not refused
    with pytest.raises(WireError, match="is at version 4, the trainer only at 3"):
        bench.lease("rollout", version=4)
    ready = next(iter(bench.ledger.books.started))
    bench.ledger.drop(ready, "filtered")
    assert [window.credits(w) for w in (1, 2, 3)] == [0, 0, 1]
    (ahead,) = bench.lease("rollout", 5, version=3)
    assert ahead.record.deadline == 4
    bench.finish([ahead])  # its spans are of version 3, though the trainer is at 1
    bench.serve(*MIDDLE)
    assert train(bench, 2) == made[1:]
    while window.version < 5:
        for grant in bench.lease("trainer", 2):
            assert window.version - grant.record.version_min <= 1
            bench.ack(grant)
        bench.ledger.advance(window.version + 1)
    assert bench.ledger.counts.dropped == {"filtered": 1}


def test_a_group_that_is_lost_from_a_step_made_again_is_replaced() -> None:
    bench = Bench(2, 1)
    made = train(bench, 2)
    bench.generate()
    resume(bench, 0)
    (first, second) = made[0]
    bench.ledger.drop(first, "filtered")
    grants = bench.lease("trainer", 2, at_least=2)
    assert [grant.lease.group for grant in grants] != made[0]
    assert grants[0].lease.group == second
    assert len(grants) == 2


def test_the_last_short_step_is_made_again_as_it_was() -> None:
    bench = Bench(2)
    for seq in range(3):
        bench.add(seq)
    bench.ledger.end_of_data()
    bench.generate()
    bench.finish(bench.lease("trainer", 2, at_least=2))
    bench.ledger.advance(1)
    bench.generate()
    bench.finish(bench.lease("trainer", 2, at_least=2))
    bench.ledger.advance(2)
    assert bench.ledger.exhausted
    resume(bench, 0)
    assert not bench.ledger.exhausted
    for step in (["train-0", "train-1"], ["train-2"]):
        grants = bench.lease("trainer", 2, at_least=2)
        assert [grant.lease.group for grant in grants] == step
        bench.finish(grants)
        bench.ledger.advance(bench.ledger.window.version + 1)
    assert bench.ledger.exhausted
    bench.ledger.commit(2)
    assert (bench.store.bytes, bench.ledger.counts.trained) == (0, 3)


def test_a_run_with_an_end_ends_after_as_many_groups_however_often_the_trainer_came_back() -> None:
    bench = Bench(2, 2, total_groups=8)
    for seq in range(20):
        bench.add(seq)
    for back_to in (0, 2, 3, 3):
        while bench.ledger.window.version < 4:
            bench.generate()
            bench.finish(bench.lease("trainer", 2, at_least=2))
            bench.ledger.advance(bench.ledger.window.version + 1)
        assert (bench.ledger.exhausted, bench.ledger.counts.started) == (True, 8)
        bench.ledger.commit(back_to)
        resume(bench, back_to)
    assert bench.ledger.counts.trained == 6


def test_a_restart_of_the_broker_between_death_and_return_of_the_trainer_changes_nothing() -> None:
    bench = Bench(2, 1)
    made = train(bench, 3)
    before = bench.portrait()
    bench.restart()
    assert bench.portrait() == before
    resume(bench, 1)
    before = bench.portrait()
    bench.restart()
    assert bench.portrait() == before
    assert train(bench, 2) == made[1:]


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 20), (20, 3, 1, 7)])
def test_long_responses_are_not_lost_by_a_trainer_that_comes_back_every_three_steps(lengths: tuple[int, ...]) -> None:
    """A response of n tokens takes n ticks. Whatever is slow, the prompts that are trained are the first 24, once each.

    s = 1, B = 2, total 24 groups: 12 steps, and the trainer dies after every third, one step after its checkpoint.
    """
    bench = Bench(2, 1, total_groups=24, lease_seconds=1000.0)
    for seq in range(30):
        bench.add(seq)
    running: dict[int, list[object]] = {}
    trained, deaths = list[str](), 0
    while not bench.ledger.exhausted:
        for grant in bench.lease("rollout", 10, version=bench.ledger.window.reached):
            running[grant.lease.id] = [grant, lengths[grant.record.key.seq % len(lengths)]]
        for lease_id, work in list(running.items()):
            work[1] -= 1  # pyright: ignore[reportOperatorIssue]
            if not work[1]:
                bench.finish([running.pop(lease_id)[0]])  # pyright: ignore[reportArgumentType]
        bench.serve(*MIDDLE)
        grants = bench.lease("trainer", 2, at_least=2)
        if not grants:
            continue
        bench.finish(grants)
        trained += [grant.lease.group for grant in grants]
        version = bench.ledger.window.version + 1
        bench.ledger.advance(version)
        if version % 3 == 2:
            bench.ledger.commit(version)
        if version == 3 * (deaths + 1) and deaths < 3:
            deaths += 1
            bench.ledger.resume(version - 1, bench.clock.now())
            del trained[2 * (version - 1) :]
    assert deaths == 3
    assert sorted(trained) == sorted(f"train-{seq}" for seq in range(24))
    assert (bench.ledger.counts.started, bench.ledger.counts.trained) == (24, 24)

"""A group that keeps the trainer from its next batch: waited for, dropped, generated again, or trained late."""

import pytest

from brokers.record import Grant
from common.errors import LeaseLost
from ledger_cases import Bench

pytestmark = pytest.mark.unit
MIDDLE = ("reward", "reference", "advantage")


def with_one_slow_group(policy: str, **limits: object) -> tuple[Bench, Grant]:
    """Two groups a step, s = 1, at version 1: the slow one of version 0 is due now, and one of its batch is handed out.

    Started are (1 + 1) x 2 = 4 at version 0, of which step 0 took two, and two at version 1 that are ready.
    """
    bench = Bench(2, 1, stragglers=policy, straggler_seconds=10.0, **limits)
    for seq in range(12):
        bench.add(seq)
    slow, *rest = bench.lease("rollout", 4)
    bench.finish(rest)
    bench.generate()
    assert bench.step(2) == ["train-1", "train-2"]
    bench.generate()
    assert [grant.lease.group for grant in bench.lease("trainer", 2)] == ["train-3"]
    assert bench.lease("trainer", 1) == []  # train-4 and train-5 are ready; the slot is train-0's
    return bench, slow


def test_by_default_the_trainer_waits_for_ever() -> None:
    bench, slow = with_one_slow_group("wait")
    bench.clock.advance(29.0)
    bench.ledger.expire(bench.clock.now())
    assert bench.lease("trainer", 1) == []
    bench.finish([slow])
    bench.serve(*MIDDLE)
    assert [grant.lease.group for grant in bench.lease("trainer", 1)] == ["train-0"]


@pytest.mark.parametrize("noticed_by", ["time", "lease"])
def test_a_straggler_is_dropped_when_the_trainer_has_waited_for_it_long_enough(noticed_by: str) -> None:
    bench, slow = with_one_slow_group("drop")
    bench.clock.advance(9.9)
    bench.ledger.expire(bench.clock.now())
    assert bench.lease("trainer", 1) == []
    bench.clock.advance(0.1)
    if noticed_by == "time":
        bench.ledger.books.changed.clear()
        bench.ledger.expire(bench.clock.now())
        assert bench.ledger.counts.dropped == {"straggler": 1}
        assert {"rollout", "trainer"} <= bench.ledger.books.changed  # whoever waits there is served anew
    assert [grant.lease.group for grant in bench.lease("trainer", 1)] == ["train-4"]
    assert bench.ledger.counts.dropped == {"straggler": 1}
    assert bench.ledger.window.credits(1) == 1  # (1 + 1) x 2 - 2 in the trainer's hands - train-5
    with pytest.raises(LeaseLost):
        bench.put(slow)


def test_the_time_begins_anew_whenever_something_moves() -> None:
    bench, _slow = with_one_slow_group("drop")
    bench.clock.advance(9.0)
    bench.ledger.drop("train-5", "filtered")  # one less is ready
    assert bench.lease("trainer", 1) == []
    bench.clock.advance(9.0)
    assert bench.lease("trainer", 1) == []
    bench.clock.advance(1.0)
    assert [grant.lease.group for grant in bench.lease("trainer", 1)] == ["train-4"]


def test_nobody_is_a_straggler_while_no_trainer_waits() -> None:
    bench, _slow = with_one_slow_group("drop", lease_seconds=1000.0)
    bench.ledger.lost("trainer", "gone", bench.clock.now())
    for _ in range(3):
        bench.clock.advance(100.0)
        bench.ledger.expire(bench.clock.now())
    assert bench.ledger.counts.dropped == {}


def test_when_all_are_equally_slow_nobody_is_a_straggler() -> None:
    bench = Bench(2, stragglers="drop", straggler_seconds=1.0, lease_seconds=1000.0)
    bench.add(0)
    bench.add(1)
    bench.lease("rollout", 2)
    for _ in range(3):
        assert bench.lease("trainer", 2) == []
        bench.clock.advance(100.0)
        bench.ledger.expire(bench.clock.now())
    assert bench.ledger.counts.dropped == {}


def test_on_policy_the_last_group_of_a_batch_can_be_a_straggler_and_is_replaced() -> None:
    # s = 0, B = 3, closed batch: two are ready, and the credits of all three are taken.
    bench = Bench(3, stragglers="drop", straggler_seconds=10.0)
    for seq in range(4):
        bench.add(seq)
    _slow, *rest = bench.lease("rollout", 3)
    bench.finish(rest)
    bench.serve(*MIDDLE)
    assert bench.lease("trainer", 3, at_least=3) == []
    bench.clock.advance(10.0)
    assert bench.lease("trainer", 3, at_least=3) == []
    assert bench.ledger.counts.dropped == {"straggler": 1}
    bench.generate()
    grants = bench.lease("trainer", 3, at_least=3)
    assert [grant.lease.group for grant in grants] == ["train-1", "train-2", "train-3"]


def test_only_as_many_are_stragglers_as_others_could_take_the_place_of() -> None:
    # s = 1, B = 2: at version 1 train-0 and train-1 are due, train-4 alone is ready; one of the two must go.
    bench = Bench(2, 1, stragglers="drop", straggler_seconds=10.0)
    for seq in range(5):
        bench.add(seq)
    early = bench.lease("rollout")
    bench.clock.advance(1.0)
    late = bench.lease("rollout")
    bench.finish(bench.lease("rollout", 2))
    bench.serve(*MIDDLE)
    assert bench.step(2) == ["train-2", "train-3"]
    bench.generate()
    assert bench.lease("trainer", 2) == []
    bench.clock.advance(10.0)
    assert [grant.lease.group for grant in bench.lease("trainer", 2)] == ["train-4"]
    assert early[0].lease.group not in bench.ledger.books.records  # it was under way for longer
    assert late[0].lease.group in bench.ledger.books.records


@pytest.mark.parametrize("stages_done", [0, 1, 2])
def test_a_straggler_is_generated_again_under_a_new_version_and_deadline(stages_done: int) -> None:
    bench, slow = with_one_slow_group("regenerate")
    held = slow
    if stages_done:  # it is stuck with a later stage: what was generated is freed
        bench.finish([slow])
        for name in MIDDLE[: stages_done - 1]:
            bench.serve(name)
        (held,) = bench.lease(MIDDLE[stages_done - 1])
        bench.put(held)
    bench.clock.advance(10.0)
    assert [grant.lease.group for grant in bench.lease("trainer", 1)] == ["train-4"]
    assert bench.here("train-0") == {"prompt", "inputs"}
    with pytest.raises(LeaseLost):
        bench.ack(held)
    counts, window = bench.ledger.counts, bench.ledger.window
    # started: 4 at version 0, 2 at version 1; train-0 is not started any more
    assert (counts.regenerated, counts.started, window.outstanding, counts.dropped) == (1, 5, 3, {})
    (again,) = bench.lease("rollout", version=1)
    assert (again.lease.group, again.lease.attempt, again.record.deadline) == ("train-0", 2, 2)
    bench.finish([again])
    (reward,) = bench.lease("reward")
    assert (reward.lease.group, reward.lease.attempt) == ("train-0", 1)
    bench.finish([reward])
    bench.generate()
    for lease in bench.ledger.books.held_by("trainer"):
        bench.ledger.ack(lease.id, "trainer", bench.clock.now(), 1)
    bench.ledger.advance(2)
    assert "train-0" in bench.step()


def test_a_straggler_that_was_generated_max_attempts_times_is_dead_with_its_history() -> None:
    bench, _slow = with_one_slow_group("regenerate", max_attempts=2)
    bench.clock.advance(10.0)
    assert len(bench.lease("trainer", 1)) == 1
    for lease in bench.ledger.books.held_by("trainer"):
        bench.ledger.ack(lease.id, "trainer", bench.clock.now(), 1)
    bench.ledger.advance(2)
    (again,) = bench.lease("rollout")  # stuck again, due at version 3
    assert again.lease.group == "train-0"
    bench.generate()
    assert len(bench.step(2)) == 2
    bench.generate()
    while bench.lease("trainer", 2):
        pass
    bench.clock.advance(10.0)
    bench.ledger.expire(bench.clock.now())
    ((group, history),) = bench.ledger.dead_letters
    assert group == "train-0"
    assert history == ["rollout, attempt 1: straggler, generated again", "rollout, attempt 2: straggler"]
    assert bench.ledger.counts.dead == {"rollout: straggler": 1}


def test_a_straggler_that_comes_late_is_trained_with_less_weight() -> None:
    bench, slow = with_one_slow_group("down_weight", late_factor=0.5)
    bench.clock.advance(10.0)
    assert [grant.lease.group for grant in bench.lease("trainer", 1)] == ["train-4"]
    assert (bench.ledger.window.late, bench.ledger.window.outstanding) == (1, 3)
    for lease in bench.ledger.books.held_by("trainer"):
        bench.ledger.ack(lease.id, "trainer", bench.clock.now(), 1)
    bench.ledger.advance(2)
    bench.put(slow)  # its lease has gone on all the time
    bench.ack(slow)
    bench.serve(*MIDDLE)
    late, other = bench.lease("trainer", 2)
    # oldest span 0, s = 1: its deadline was 1; at version 2 it is one version beyond
    assert (late.lease.group, late.record.weight) == ("train-0", 0.5)
    assert (other.lease.group, other.record.weight) == ("train-5", 1.0)
    bench.ack(late)
    bench.ack(other)
    assert bench.ledger.counts.down_weighted == 1
    bench.ledger.advance(3)
    assert (bench.ledger.window.late, bench.ledger.counts.trained) == (0, 6)


def test_when_all_slots_are_spoken_for_a_late_group_has_the_next_credit_before_any_new_start() -> None:
    bench, slow = with_one_slow_group("down_weight", late_factor=0.5)
    bench.clock.advance(10.0)
    bench.lease("trainer", 1)
    for lease in bench.ledger.books.held_by("trainer"):
        bench.ledger.ack(lease.id, "trainer", bench.clock.now(), 1)
    bench.ledger.advance(2)
    bench.generate()  # three more are started at version 2: with train-5, (1 + 1) x 2
    bench.finish([slow])
    bench.serve(*MIDDLE)
    assert bench.ledger.window.credits(2) == 0
    assert bench.step(2) == ["train-5", "train-6"]
    # At version 3 two credits are free; one is its own, and it is due at 3 + 1 = 4 like who starts now.
    assert len(bench.lease("rollout", 5)) == 1
    assert bench.ledger.window.late == 0
    assert bench.step(2) == ["train-7", "train-8"]  # they are due at 3
    (late,) = bench.lease("trainer", 1)
    assert (late.lease.group, late.record.weight) == ("train-0", 0.125)  # at version 4, three beyond its deadline


def test_a_late_group_pushes_no_other_beyond_its_deadline() -> None:
    # s = 0, B = 2: train-0 is excused, train-2 replaces it and takes its slot; the late one joins the next step.
    bench = Bench(2, stragglers="down_weight", straggler_seconds=10.0)
    for seq in range(4):
        bench.add(seq)
    slow, fast = bench.lease("rollout", 2)
    bench.finish([fast])
    bench.serve(*MIDDLE)
    assert len(bench.lease("trainer", 2)) == 1
    assert bench.lease("trainer", 1) == []
    bench.clock.advance(10.0)
    assert bench.lease("trainer", 1) == []
    (replacement,) = bench.lease("rollout", 2)
    bench.finish([slow])
    bench.serve(*MIDDLE)
    assert bench.lease("trainer", 1) == []
    bench.finish([replacement])
    bench.serve(*MIDDLE)
    assert [grant.lease.group for grant in bench.lease("trainer", 1)] == ["train-2"]
    for lease in bench.ledger.books.held_by("trainer"):
        bench.ledger.ack(lease.id, "trainer", bench.clock.now(), 0)
    bench.ledger.advance(1)
    (late,) = bench.lease("trainer", 2)
    assert (late.lease.group, late.record.weight) == ("train-0", 0.5)


def test_at_most_one_batch_is_excused_at_any_time() -> None:
    bench = Bench(2, stragglers="down_weight", straggler_seconds=10.0, lease_seconds=1000.0)
    for seq in range(6):
        bench.add(seq)
    bench.finish(bench.lease("rollout"))
    bench.serve(*MIDDLE)
    assert len(bench.lease("trainer", 2)) == 1
    for _ in range(5):
        bench.lease("rollout", 5)
        assert bench.lease("trainer", 1) == []
        bench.clock.advance(10.0)
        bench.ledger.expire(bench.clock.now())
    assert bench.ledger.window.late == 2
    assert bench.ledger.counts.started == 4


@pytest.mark.parametrize(
    ("policy", "fate"),
    [("wait", "dropped"), ("drop", "dropped"), ("regenerate", "generated again"), ("down_weight", "trained")],
)
def test_a_group_that_is_found_too_old_when_it_could_leave_is_treated_by_the_policy(policy: str, fate: str) -> None:
    # s = 2: oldest span 3 may be trained at 5 at the latest; it waits until v = 6.
    bench = Bench(1, 2, stragglers=policy)
    for version in range(1, 6):
        bench.ledger.advance(version)
    bench.add(0)
    (old,) = bench.lease("rollout")
    bench.put(old, (3, 5))
    bench.ack(old)
    bench.serve(*MIDDLE)
    bench.ledger.window.advance(6, 0)  # as if step 5 had been made without it
    grants = bench.lease("trainer")
    assert [grant.record.weight for grant in grants] == ([0.5] if fate == "trained" else [])
    assert bench.ledger.counts.dropped == ({"stale": 1} if fate == "dropped" else {})
    assert bench.ledger.counts.regenerated == (fate == "generated again")
    assert bench.ledger.window.credits(6) == (2 if fate == "trained" else 3)
    assert len(bench.lease("rollout")) == (fate == "generated again")

"""How groups, steps and runs end in the ledger, and which groups the trainer gets."""

import pytest

from ledger_cases import Bench

pytestmark = pytest.mark.unit


def start(bench: Bench, num_groups: int) -> None:
    for seq in range(num_groups):
        bench.add(seq)
    bench.generate()


def test_a_prompt_that_fails_every_time_is_dead_after_three_attempts_with_its_history() -> None:
    bench = Bench(1)
    bench.add(0)
    bench.add(1)
    for attempt in (1, 2, 3):
        (rollout,) = bench.lease("rollout", worker=f"w{attempt}")
        assert (rollout.lease.group, rollout.lease.attempt) == ("train-0", attempt)
        bench.nack(rollout, f"engine said no, {attempt}")
    ((group, history),) = bench.ledger.dead_letters
    assert group == "train-0"
    assert history == [f"rollout, attempt {n}, w{n}: engine said no, {n}" for n in (1, 2, 3)]
    assert bench.ledger.counts.dead.total() == 1
    assert bench.store.bytes == 5 + 7  # those of train-1
    bench.generate()  # the run goes on with the credit that came back
    assert bench.step() == ["train-1"]
    assert (bench.ledger.counts.started, bench.ends()) == (2, 2)


def test_giving_back_without_a_fault_is_no_attempt() -> None:
    bench = Bench(1)
    bench.add(0)
    for _ in range(5):
        (rollout,) = bench.lease("rollout")
        assert rollout.lease.attempt == 1
        bench.nack(rollout, "worker left", fault=False)
    assert not bench.ledger.dead_letters


@pytest.mark.parametrize("stage", ["rollout", "reward", "reference", "advantage", "trainer"])
def test_a_handler_that_fails_for_one_group_of_five_ends_that_group_alone(stage: str) -> None:
    bench = Bench(5)
    bench.ledger.end_of_data()
    for seq in range(5):
        bench.add(seq)
    before = ("rollout", "reward", "reference", "advantage", "trainer")
    bench.serve(*before[: before.index(stage)])
    for _ in range(3):
        grants = bench.lease(stage, 5)
        for grant in grants:
            if grant.lease.group == "train-2":
                bench.nack(grant)
            else:
                bench.finish([grant])
    if stage == "trainer":
        bench.ledger.advance(1)
        bench.ledger.commit(1)
    else:
        bench.generate()
        assert len(bench.step()) == 4
    counts = bench.ledger.counts
    assert (counts.trained, counts.dead.total(), counts.started) == (4, 1, 5)
    assert (bench.store.bytes, bench.ledger.window.outstanding) == (0, 0)


def test_seven_prompts_make_steps_of_four_and_three_and_then_the_data_is_over() -> None:
    bench = Bench(4)
    start(bench, 7)
    bench.ledger.end_of_data()
    assert len(bench.lease("trainer", 4, at_least=4)) == 4
    for lease in bench.ledger.books.held_by("trainer"):
        bench.ledger.ack(lease.id, "trainer", 0.0, 0)
    bench.ledger.advance(1)
    assert bench.lease("trainer", 4, at_least=4) == []
    assert bench.ledger.starved("trainer", 1) == "waiting for groups in queue 'trainer'"
    bench.generate()
    rest = bench.lease("trainer", 4, at_least=4)
    assert len(rest) == 3
    assert bench.ledger.exhausted
    assert bench.ledger.starved("trainer", 1) == "no more groups"


def test_fewer_than_asked_for_are_not_handed_out_as_long_as_more_may_come() -> None:
    bench = Bench(4)
    for seq in range(4):
        bench.add(seq)
    slow, *rest = bench.lease("rollout", 4)
    bench.finish(rest)
    bench.serve("reward", "reference", "advantage")
    assert bench.lease("trainer", 4, at_least=4) == []
    assert [grant.lease.attempt for grant in bench.lease("trainer", 4, at_least=3)] == [1, 1, 1]
    bench.finish([slow])
    bench.serve("reward", "reference", "advantage")
    assert len(bench.lease("trainer", 1, at_least=4)) == 1  # nobody can get more than they want


def test_no_stage_but_rollout_is_started_beyond_the_window_while_reward_is_down() -> None:
    # s = 1, B = 3: (1 + 1) x 3 = 6
    bench = Bench(3, 1)
    for seq in range(12):
        bench.add(seq)
    bench.serve("rollout")
    assert bench.ledger.counts.started == 6
    assert bench.ledger.starved("rollout", 0) == "waiting for credit at version 0"
    assert bench.ledger.books.queues["reward"].groups == 6


def test_a_group_whose_oldest_span_is_older_than_its_start_is_dropped_as_stale_and_its_credit_returns() -> None:
    # s = 2: oldest span 3 may be trained at 5 at the latest; it waits until v = 6.
    bench = Bench(1, 2)
    for version in range(1, 6):
        bench.ledger.advance(version)
    bench.add(0)
    bench.add(1)
    (slow, fast) = bench.lease("rollout", 2)
    bench.put(slow, (3, 5))
    bench.ack(slow)
    bench.finish([fast])
    bench.serve("reward", "reference", "advantage")
    assert bench.ledger.books.records["train-0"].deadline == 5
    bench.ledger.window.advance(6, 0)  # as if step 5 had been made without it
    assert bench.step() == ["train-1"]
    assert bench.ledger.counts.dropped == {"stale": 1}
    assert bench.ledger.window.outstanding == 0


def test_a_slow_group_is_trained_within_the_bound_because_the_others_wait_for_it() -> None:
    # s = 1, B = 2: four groups start at version 0; the slow one may miss step 0 and must be in step 1.
    bench = Bench(2, 1)
    for seq in range(12):
        bench.add(seq)
    slow, *rest = bench.lease("rollout", 4)
    bench.finish(rest)
    bench.generate()
    assert len(bench.step(2)) == 2
    bench.generate()  # two more are started at version 1 and finished before the slow one
    assert [grant.lease.group for grant in bench.lease("trainer", 2)] == ["train-3"]
    assert bench.lease("trainer", 2) == []  # a young group would push the slow one beyond its deadline
    bench.finish([slow])
    bench.generate()
    (last,) = bench.lease("trainer", 2)
    assert (last.lease.group, last.record.version_min) == ("train-0", 0)


def test_when_a_group_that_held_others_back_is_lost_the_trainer_is_served_anew() -> None:
    bench = Bench(1, 1)
    bench.add(0)
    bench.add(1)
    slow, fast = bench.lease("rollout", 2, worker="a")
    bench.finish([fast])
    bench.generate()
    assert bench.step() == ["train-1"]
    bench.add(2)
    bench.generate()
    assert bench.lease("trainer") == []  # train-0 is due now
    bench.ledger.books.changed.clear()
    bench.nack(slow, "worker died")
    assert "trainer" in bench.ledger.books.changed
    assert [grant.lease.group for grant in bench.lease("trainer")] == ["train-2"]


def test_in_order_hands_out_by_prompt_however_the_groups_finish() -> None:
    bench = Bench(2, in_order=True)
    bench.add(0)
    bench.add(1)
    first, second = bench.lease("rollout", 2)
    bench.finish([second])
    bench.serve("reward", "reference", "advantage")
    assert bench.lease("trainer", 2) == []
    bench.finish([first])
    bench.serve("reward", "reference", "advantage")
    assert bench.step() == ["train-0", "train-1"]


def test_a_dead_trainers_groups_come_back_and_are_trained_once() -> None:
    bench = Bench(2)
    start(bench, 2)
    assert len(bench.lease("trainer", 2, worker="t#1")) == 2
    assert len(bench.ledger.lost("t#1", "gone", bench.clock.now())) == 2
    assert sorted(bench.step()) == ["train-0", "train-1"]
    assert bench.ledger.counts.trained == 2


def test_held_out_prompts_need_a_version_and_no_credit() -> None:
    bench = Bench(1)
    bench.add(0)
    bench.add(0, "eval", min_version=1)
    assert [grant.lease.group for grant in bench.lease("rollout", 5)] == ["train-0"]
    bench.ledger.advance(1)
    assert bench.lease("rollout", 5, version=0) == []
    (evaluation,) = bench.lease("rollout", 5, version=1)
    bench.put(evaluation, (1, 1))
    bench.ack(evaluation)
    bench.serve("reward", "evaluate")
    counts = bench.ledger.counts
    assert (counts.evaluated, counts.started) == (1, 1)
    assert bench.here("eval-0") == set()


def test_the_end_drops_what_is_in_no_update_and_hands_out_nothing_more() -> None:
    bench = Bench(1, 3)
    start(bench, 4)
    bench.add(4)
    bench.add(0, "eval")
    for grant in bench.lease("trainer", 1):
        bench.ack(grant)  # the process ends before it says that the update is made
    bench.ledger.end("failed", "trainer-0 ended with code 5")
    counts = bench.ledger.counts
    assert (counts.started, counts.dropped, counts.evaluation_lost) == (4, {"run ended": 4}, 1)
    assert (bench.store.bytes, bench.ledger.window.outstanding, bench.ledger.books.leases) == (0, 0, {})
    assert [bench.lease(name) for name in ("rollout", "reward", "trainer")] == [[], [], []]
    assert not bench.add(5)
    assert bench.ledger.starved("rollout", 0) == "run ended"
    bench.ledger.end("finished", "too late")
    assert bench.ledger.ended == ("failed", "trainer-0 ended with code 5")


def test_a_finished_group_leaves_nothing_behind_but_numbers() -> None:
    bench = Bench(2)
    for seq in range(600):
        bench.add(seq)
        if seq % 2:
            bench.generate()
            assert len(bench.step()) == 2
    books = bench.ledger.books
    assert (len(books.records), len(books.leases), len(bench.store), len(books.started)) == (0, 0, 0, 0)
    assert len(books._expiries) < 200  # pyright: ignore[reportPrivateUsage]
    for queue in (*books.queues.values(), books.evaluation, books.order):
        for heap in (*queue._lanes, queue._by_age):  # pyright: ignore[reportPrivateUsage]
            assert len(heap) < 200
        assert (queue.groups, queue.bytes, queue.ready) == (0, 0, 0)

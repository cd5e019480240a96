"""In which order groups leave the queues of stages, and lanes of predicted lengths."""

import pytest

from brokers.queues import StageQueue
from common.errors import WireError
from ledger_cases import Bench

pytestmark = pytest.mark.unit
LENGTHS = (40, 5, 0, 300, 20)
"""predicted tokens of the groups train-0 .. train-4; the third is unknown"""


def offered(**limits: object) -> Bench:
    bench = Bench(10, 1, **limits)
    for seq, length in enumerate(LENGTHS):
        bench.add(seq, length=length)
    return bench


def seqs(bench: Bench, stage: str, want: int = 10, lane: int | None = None) -> list[int]:
    return [grant.record.key.seq for grant in bench.lease(stage, want, lane=lane)]


def generated(bench: Bench) -> Bench:
    """Groups finish rollout in the order 2, 0, 1, with 9, 7 and 8 tokens; 2 was started at an older version."""
    grants = bench.lease("rollout", 3)
    for place, tokens in ((2, 9), (0, 7), (1, 8)):
        bench.put(grants[place], (0, 1) if place == 2 else (1, 1), tokens)
        bench.ack(grants[place])
    return bench


@pytest.mark.parametrize(
    ("order", "rollout", "reward"),
    [
        ("fifo", [0, 1, 2, 3, 4], [2, 0, 1]),
        ("oldest_version", [0, 1, 2, 3, 4], [2, 0, 1]),
        ("short_first", [1, 4, 0, 3, 2], [0, 1, 2]),
    ],
)
def test_the_order_of_stage_queues_is_a_setting(order: str, rollout: list[int], reward: list[int]) -> None:
    assert seqs(offered(order=order), "rollout") == rollout
    bench = Bench(10, 1, order=order)
    bench.ledger.advance(1)
    for seq in range(3):
        bench.add(seq)
    assert seqs(generated(bench), "reward") == reward


def test_in_fifo_the_last_to_come_leaves_last_though_it_is_the_oldest() -> None:
    for order, expected in (("fifo", [0, 1]), ("oldest_version", [1, 0])):
        bench = Bench(10, 1, order=order)
        bench.ledger.advance(1)
        bench.add(0)
        bench.add(1)
        first, second = bench.lease("rollout", 2)
        bench.put(first, (1, 1))
        bench.ack(first)
        bench.put(second, (0, 1))
        bench.ack(second)
        assert seqs(bench, "reward") == expected


def test_what_was_given_back_keeps_its_place() -> None:
    bench = offered(order="fifo")
    first, _second = bench.lease("rollout", 2)
    bench.nack(first)
    assert seqs(bench, "rollout") == [0, 2, 3, 4]


def test_who_has_waited_too_long_leaves_first_whatever_its_length() -> None:
    bench = Bench(10, order="short_first", fairness_seconds=10.0)
    bench.add(0, length=1000)
    bench.clock.advance(5.0)
    bench.add(1, length=1)
    bench.add(2, length=2)
    assert seqs(bench, "rollout", 1) == [1]
    bench.clock.advance(5.1)  # 0 waits for 10.1 s, the others for 5.1 s
    bench.add(3, length=1)
    assert seqs(bench, "rollout") == [0, 3, 2]


def test_the_trainer_gets_the_earliest_deadline_and_among_equals_the_shortest() -> None:
    bench = Bench(3, 1, order="short_first")
    for seq in range(6):
        bench.add(seq)
    grants = bench.lease("rollout", 6)
    for grant, tokens in zip(grants, (30, 20, 10, 60, 50, 40), strict=True):
        bench.put(grant, tokens=tokens)
        bench.ack(grant)
    bench.serve("reward", "reference", "advantage")
    assert bench.step(3) == ["train-2", "train-1", "train-0"]
    for seq in (6, 7, 8):
        bench.add(seq)
    for grant in bench.lease("rollout", 3):
        bench.put(grant, tokens=1)  # shorter than all that is left, and due one version later
        bench.ack(grant)
    bench.serve("reward", "reference", "advantage")
    assert bench.step(3) == ["train-5", "train-4", "train-3"]


def test_a_worker_gets_its_lane_first_and_then_the_nearest_one() -> None:
    # lanes: 0 up to 10 tokens (1), 1 up to 100 (0 and 4), 2 longer and unknown (2 and 3)
    for lane, expected in ((0, [1, 0, 4, 2, 3]), (1, [0, 4, 1, 2, 3]), (2, [2, 3, 0, 4, 1]), (None, [0, 1, 2, 3, 4])):
        assert seqs(offered(lanes=(10, 100)), "rollout", lane=lane) == expected
    assert seqs(offered(lanes=(10, 100), order="short_first"), "rollout", lane=1) == [4, 0, 1, 3, 2]


def test_a_bound_belongs_to_its_lane() -> None:
    bench = Bench(10, lanes=(10,))
    for seq, length in enumerate((11, 10)):
        bench.add(seq, length=length)
    assert seqs(bench, "rollout", 1, lane=0) == [1]


def test_no_lane_starves_when_all_workers_ask_for_another() -> None:
    bench = Bench(10, lanes=(10,), fairness_seconds=10.0)
    bench.add(0, length=500)
    for seq in range(1, 8):
        bench.clock.advance(3.0)
        bench.add(seq, length=5)
        if 0 in seqs(bench, "rollout", 1, lane=0):
            assert seq == 4  # after 12 s
            return
    pytest.fail("the long one was never handed out")


@pytest.mark.parametrize("lane", [-1, 2])
def test_a_lane_that_is_not_there_is_refused(lane: int) -> None:
    with pytest.raises(WireError, match=f"lane {lane} .* broker.lanes makes 2"):
        offered(lanes=(10,)).lease("rollout", lane=lane)


def test_a_queue_has_no_use_for_groups_that_were_removed() -> None:
    queue = StageQueue(lanes=2, patience=10.0)
    for number in range(10_000):
        queue.enter(f"g{number}", 1, float(number))
        queue.push(f"g{number}", (number,), number % 2)
        if number >= 5:
            queue.leave(f"g{number - 5}")
    assert (queue.ready, queue.groups, queue.bytes) == (5, 5, 5)
    assert sum(len(heap) for heap in (*queue._lanes, queue._by_age)) < 300  # pyright: ignore[reportPrivateUsage]
    assert queue.first(now=9_999.0) == "g9995"
    assert queue.oldest(10_000.0) == 5.0

"""The ledger, verb by verb."""

import pytest

from common.errors import LeaseLost, WireError
from common.group import GroupKey
from common.section import SectionInfo
from ledger_cases import Bench

pytestmark = pytest.mark.unit


def test_reward_and_reference_work_on_the_same_group_at_the_same_time() -> None:
    bench = Bench(1)
    bench.add(0)
    assert bench.lease("reward") == []
    bench.serve("rollout")
    assert [grant.lease.group for grant in bench.lease("reward") + bench.lease("reference")] == ["train-0", "train-0"]
    assert bench.lease("advantage") == []


def test_a_stage_is_given_only_the_sections_it_requires() -> None:
    bench = Bench(1)
    bench.add(0)
    (rollout,) = bench.lease("rollout")
    assert {info.name for info in rollout.sections} == {"prompt", "inputs"}
    bench.finish([rollout])
    (reward,) = bench.lease("reward")
    assert {info.name for info in reward.sections} == {"prompt", "response"}


def test_bytes_are_freed_after_the_last_ack_that_needs_them_and_the_trainers_at_commit() -> None:
    bench = Bench(1)
    bench.add(0)
    assert bench.here("train-0") == {"prompt", "inputs"}  # no stage requires media: they are not kept at all
    bench.serve("rollout")
    assert bench.here("train-0") == {"prompt", "inputs", "response", "tokens"}
    (reward,) = bench.lease("reward")
    bench.put(reward)
    assert bench.here("train-0") == {"prompt", "inputs", "response", "tokens", "reward"}  # put, not yet acknowledged
    bench.ack(reward)
    assert bench.here("train-0") == {"inputs", "tokens", "reward"}
    bench.serve("reference", "advantage")
    assert bench.here("train-0") == {"inputs", "tokens", "reference", "advantage"}
    (trainer,) = bench.lease("trainer")
    bench.ack(trainer)
    bench.ledger.advance(1)
    assert (
        bench.store.bytes == 7 + 13 + 19 + 23
    )  # inputs, tokens, reference, advantage: the checkpoint is not there yet
    bench.ledger.commit(1)
    assert (bench.store.bytes, len(bench.store)) == (0, 0)


def test_a_dropped_groups_bytes_are_freed_at_its_drop_those_put_and_not_acknowledged_too() -> None:
    bench = Bench(1)
    bench.add(0)
    (rollout,) = bench.lease("rollout")
    bench.put(rollout)
    assert bench.store.bytes == 5 + 7 + 11 + 13
    bench.ledger.drop("train-0", "filtered")
    assert bench.store.bytes == 0
    with pytest.raises(LeaseLost):
        bench.ack(rollout)
    assert bench.ledger.counts.dropped == {"filtered": 1}
    assert bench.ledger.window.credits(0) == 1


def test_a_repeated_prompt_is_ignored_and_counted() -> None:
    bench = Bench(2)
    assert bench.add(0)
    assert not bench.add(0)
    bench.generate()
    bench.ledger.drop("train-0", "done with it")
    assert not bench.add(0)  # also when its group is long gone
    assert bench.ledger.counts.repeated == 2


def test_a_repeated_put_is_ignored_and_counted() -> None:
    bench = Bench(1)
    bench.add(0)
    (rollout,) = bench.lease("rollout")
    assert bench.put(rollout) == ["response", "tokens"]
    assert bench.put(rollout) == []
    assert bench.ledger.counts.repeated == 2
    assert bench.store.bytes == 5 + 7 + 11 + 13


def test_a_stage_cannot_put_what_it_does_not_add_nor_acknowledge_without_what_it_adds() -> None:
    bench = Bench(1)
    bench.add(0)
    (rollout,) = bench.lease("rollout")
    with pytest.raises(WireError, match=r"stage 'rollout' put sections \['reward'\]"):
        bench.ledger.put(rollout.lease.id, "rollout", [SectionInfo("reward", 1, 1, 0)], (0, 0))
    with pytest.raises(WireError, match=r"group train-0 without \['response', 'tokens'\]"):
        bench.ack(rollout)
    bench.finish([rollout])


def test_a_group_that_rollout_could_never_lease_or_whose_name_is_taken_is_refused() -> None:
    bench = Bench(1)
    with pytest.raises(WireError, match=r"comes without sections \['inputs'\]"):
        bench.ledger.add(GroupKey("g", 0), [SectionInfo("prompt", 1, 1, 0)], 0.0)
    bench.add(0)
    sections = [SectionInfo("prompt", 1, 1, 0), SectionInfo("inputs", 1, 1, 0)]
    with pytest.raises(WireError, match="group train-0 is here already, as train prompt 0"):
        bench.ledger.add(GroupKey("train-0", 1), sections, 0.0)
    with pytest.raises(WireError, match="unknown purpose 'test'"):
        bench.ledger.add(GroupKey("g", 1, "test"), sections, 0.0)  # pyright: ignore[reportArgumentType]
    assert (bench.ledger.next_seq["train"], len(bench.ledger.books.records)) == (1, 1)


@pytest.mark.parametrize("versions", [(-1, -1), (0, 3), (2, 1), (3, 3)])
def test_spans_of_versions_that_no_trainer_made_are_refused(versions: tuple[int, int]) -> None:
    bench = Bench(1, 2)
    bench.ledger.advance(1)
    bench.ledger.advance(2)
    bench.add(0)
    (rollout,) = bench.lease("rollout")
    with pytest.raises(WireError, match=f"holds versions {versions[0]} to {versions[1]}, the trainer is at 2"):
        bench.put(rollout, versions)


def test_a_worker_or_checkpoint_ahead_of_the_trainer_and_a_skipped_step_are_refused() -> None:
    bench = Bench(1, 1)
    bench.add(0)
    with pytest.raises(WireError, match="rollout is at version 5, the trainer only at 0"):
        bench.lease("rollout", version=5)
    with pytest.raises(WireError, match="checkpoint is at version 1"):
        bench.ledger.commit(1)
    with pytest.raises(WireError, match="reached version 2, expected 1"):
        bench.ledger.advance(2)
    with pytest.raises(WireError, match="step 1, expected 0"):
        bench.lease("trainer", version=1)
    bench.generate()
    (trainer,) = bench.lease("trainer")
    with pytest.raises(WireError, match="step -1, expected 0"):
        bench.ack(trainer, step=-1)
    bench.ack(trainer)
    bench.ledger.advance(1)
    bench.ledger.advance(1)  # a repeat
    assert (bench.ledger.counts.trained, bench.ledger.window.outstanding) == (1, 0)


def test_a_silent_workers_groups_go_back_and_its_late_ack_is_refused() -> None:
    bench = Bench(2, lease_seconds=30.0)
    bench.add(0)
    bench.add(1)
    dead, alive = bench.lease("rollout", worker="a") + bench.lease("rollout", worker="b")
    bench.clock.advance(20)
    bench.ledger.extend("b", bench.clock.now())
    bench.clock.advance(10)
    assert [lease.group for lease in bench.ledger.expire(bench.clock.now())] == ["train-0"]
    assert bench.ledger.window.credits(0) == 1  # its credit came back with it
    with pytest.raises(LeaseLost, match=r"lease 1 of a has ended"):
        bench.put(dead)
    (again,) = bench.lease("rollout", worker="b")
    assert (again.lease.group, again.lease.attempt) == ("train-0", 2)
    bench.finish([again, alive])
    assert (bench.ledger.counts.expired, bench.ledger.counts.restarted, bench.ledger.counts.started) == (1, 1, 2)


def test_a_worker_that_fell_silent_after_many_signs_of_life_loses_its_lease_when_the_last_one_is_too_old() -> None:
    bench = Bench(2, lease_seconds=30.0)
    bench.add(0)
    bench.lease("rollout", worker="a")
    for _ in range(10):  # until 200 s
        bench.clock.advance(20)
        bench.ledger.extend("a", bench.clock.now())
        assert bench.ledger.expire(bench.clock.now()) == []
    bench.clock.advance(29)
    assert bench.ledger.expire(bench.clock.now()) == []
    bench.clock.advance(1)
    assert [lease.group for lease in bench.ledger.expire(bench.clock.now())] == ["train-0"]


def test_a_lease_is_only_good_for_the_worker_that_holds_it() -> None:
    bench = Bench(1)
    bench.add(0)
    (rollout,) = bench.lease("rollout", worker="a")
    with pytest.raises(LeaseLost):
        bench.ledger.ack(rollout.lease.id, "b", 0.0)
    with pytest.raises(LeaseLost):
        bench.ledger.nack(rollout.lease.id, "b", "mine", 0.0)

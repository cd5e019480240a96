"""Waiting, bounds, damage, turns and the end of a run, alike in memory and through sockets."""

import gc
import resource
from concurrent import futures
from pathlib import Path

import pytest

from brokers.channel import wait
from brokers.client import Leased, Result
from brokers.record import Limits
from common.errors import Damaged, QueueFull, WireError
from common.group import Group, GroupKey
from common.header import Header
from contract import SECONDS, Build, Mangling, MemoryWorld, Worker, World, answer, prompt

pytestmark = pytest.mark.contract

MIB = 1 << 20


def resident() -> int:
    """Bytes of memory that this process has now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def test_a_waiting_lease_is_answered_as_soon_as_something_is_ready(world: World) -> None:
    worker = world.join("rollout-0")
    pending = worker.ask("reward")
    wait(worker.offer(0), SECONDS)
    assert not pending.done()
    worker.serve("rollout")
    assert [leased.group.key.id for leased in worker.take(wait(pending, SECONDS)).leases] == ["train-0"]


def test_a_lease_that_waited_in_vain_says_for_what(build: Build) -> None:
    world = build(1)
    worker = world.join("rollout-0")
    assert worker.lease("rollout", 1, 0.0, 0).starved == "waiting for prompts"
    wait(worker.offer(0, 1), SECONDS)
    worker.get("rollout")
    pending = worker.ask("rollout", seconds=5.0)
    worker.status(SECONDS)
    world.let_pass(4.9)
    worker.status(SECONDS)
    assert not pending.done()
    world.let_pass(0.2)
    batch = worker.take(wait(pending, SECONDS))
    assert (batch.leases, batch.starved, batch.ended) == ([], "waiting for credit at version 0", False)
    worker.end_of_data()
    assert worker.lease("trainer", 1, 0.0, 0).starved == "waiting for groups in queue 'trainer'"


def test_a_second_lease_request_for_a_stage_answers_the_first_with_nothing(world: World) -> None:
    worker, other = world.join("rollout-0"), world.join("rollout-1")
    first, elsewhere, others = worker.ask("rollout"), worker.ask("reward"), other.ask("rollout", 1)
    second = worker.ask("rollout", 2)
    assert worker.take(wait(first, SECONDS)).leases == []
    wait(worker.offer(0, 1, 2), SECONDS)
    given = [*worker.take(wait(second, SECONDS)).leases, *other.take(wait(others, SECONDS)).leases]
    assert sorted(leased.group.key.seq for leased in given) == [0, 1, 2]
    assert not elsewhere.done()


def test_a_prompt_that_finds_no_room_waits_in_line_and_is_taken_when_there_is_some(build: Build) -> None:
    world = build(max_queue_groups=2)
    feeder, worker = world.join("prompt-0", "prompt"), world.join("rollout-0")
    pending = feeder.offer(0, 1, 2, seconds=1000.0)
    behind = feeder.offer(3, seconds=1000.0)
    feeder.status(SECONDS)
    assert not pending.done()
    assert feeder.next_seq["train"] == 0  # it has heard nothing yet
    worker.serve("rollout")
    wait(pending, SECONDS)
    wait(behind, SECONDS)
    assert feeder.next_seq["train"] == 4


def test_the_ninth_group_of_8_mib_in_a_queue_of_64_waits_and_is_refused_naming_queue_and_bound(build: Build) -> None:
    world = build(max_queue_bytes=64 * MIB + 65536)
    feeder, medium = world.join("prompt-0", "prompt"), bytes(8 * MIB)
    for seq in range(8):
        wait(feeder.offer(seq, media=medium), SECONDS)
    ninth = feeder.offer(8, media=medium, seconds=30.0)
    status = feeder.status(SECONDS)
    assert not ninth.done()
    assert status["queues"]["rollout"]["groups"] == 8
    world.let_pass(30.0)
    with pytest.raises(QueueFull, match=r"group train-8 waited 30 s: queue 'rollout' holds 671\d+ of at most 67174400"):
        wait(ninth, SECONDS)
    assert feeder.channel.pulse.state["next_seq"]["train"] == 8


def test_five_hundred_sections_of_200_kb_reach_a_late_reader_while_the_producer_waits(build: Build) -> None:
    world = build(500, max_queue_groups=20)
    feeder, reader = world.join("prompt-0", "prompt"), world.join("rollout-0")
    medium = bytes(200_000)
    offers = [feeder.offer(*range(seq, seq + 10), media=medium, seconds=1000.0) for seq in range(0, 500, 10)]
    futures.wait(offers, SECONDS, futures.FIRST_COMPLETED)
    reader.status(SECONDS)
    assert not offers[-1].done()  # the producer waits
    arrived: list[int] = []
    while len(arrived) < 500:
        leases = reader.take(wait(reader.request_lease("rollout", 10, 1000.0, 0), SECONDS)).leases
        assert all(len(leased.group.value("media_data")) == 200_000 for leased in leases)
        assert reader.finish("rollout", leases) == []
        arrived += [leased.group.key.seq for leased in leases]
    assert arrived == list(range(500))
    assert all(offer.exception(SECONDS) is None for offer in offers)


def damaged(world: World, name: str) -> tuple[Worker, Mangling]:
    world.wrap = Mangling
    worker = world.join(name)
    assert isinstance(worker.channel, Mangling)
    return worker, worker.channel


def test_sections_damaged_on_the_way_to_a_worker_are_fetched_again(world: World) -> None:
    worker, channel = damaged(world, "rollout-0")
    wait(worker.offer(0, 1, media=bytes(500)), SECONDS)
    channel.replies = {"lease": 1, "fetch": 1}
    leases = worker.get("rollout", 2)
    assert [leased.group.value("media_data") for leased in leases] == [bytes(500)] * 2
    assert worker.status(SECONDS)["counts"]["refused"] == {"damaged": 2}


def test_bytes_that_stay_damaged_are_an_error_after_three_tries(world: World) -> None:
    worker, channel = damaged(world, "rollout-0")
    wait(worker.offer(0), SECONDS)
    channel.replies = {"lease": 1, "fetch": 9}
    with pytest.raises(Damaged, match="checksum"):
        worker.get("rollout")


def test_a_group_that_is_lost_while_it_is_fetched_again_is_left_out(world: World) -> None:
    worker, channel = damaged(world, "rollout-0")
    wait(worker.offer(0, 1), SECONDS)
    channel.replies = {"lease": 1}
    reply = wait(worker.ask("rollout", 2), SECONDS)
    worker.drop([reply.header.items[0].group], "filtered")
    assert [leased.group.key.id for leased in worker.take(reply).leases] == ["train-1"]


def test_sections_damaged_on_the_way_to_the_broker_are_refused_whole_and_sent_again(world: World) -> None:
    worker, channel = damaged(world, "rollout-0")
    channel.requests = {"add": 1}
    with pytest.raises(Damaged):
        wait(worker.offer(0, 1), SECONDS)
    assert worker.status(SECONDS)["bytes"] == 0
    wait(worker.offer(0, 1), SECONDS)
    leases = worker.get("rollout", 2)
    channel.requests = {"put": 2}
    assert worker.finish("rollout", leases) == []
    assert worker.status(SECONDS)["counts"]["refused"] == {"Damaged": 3}
    assert [leased.group.value("text") for leased in worker.get("reward", 2)] == ["train-0", "train-1"]


def test_rollout_and_trainer_take_turns(world: World) -> None:
    rollout, other, trainer = world.join("rollout-0"), world.join("rollout-1"), world.join("trainer-0", "trainer")
    fence = rollout.take_turn("rollout", 0.0)
    assert fence == other.take_turn("rollout", 0.0) == 1
    turn = trainer.channel.request(Header("turn", run="run-a", stage="trainer", deadline_s=1000.0))
    rollout.give_turn("rollout", fence)
    trainer.status(SECONDS)
    assert not turn.done()
    other.give_turn("rollout", fence)
    assert wait(turn, SECONDS).header.body["fence"] == 2
    trainer.give_turn("trainer", fence)  # outdated: changes nothing
    assert trainer.status(SECONDS)["turn"] == {"side": "trainer", "fence": 2}
    late = rollout.channel.request(Header("turn", run="run-a", stage="rollout", deadline_s=3.0))
    rollout.status(SECONDS)
    world.let_pass(3.0)
    assert wait(late, SECONDS).header.body["fence"] == 0


def test_nobody_waits_for_the_turn_of_a_worker_that_is_gone(world: World) -> None:
    dying, other, trainer = world.join("rollout-0"), world.join("rollout-1"), world.join("trainer-0", "trainer")
    dying.take_turn("rollout", 0.0)
    fence = other.take_turn("rollout", 0.0)
    dying.leave(SECONDS)
    other.give_turn("rollout", fence)
    assert trainer.take_turn("trainer", 0.0) == 2


def test_a_worker_that_is_heard_and_does_nothing_loses_its_groups_to_another_if_the_run_says_so(build: Build) -> None:
    world = build(watchdog_seconds=5.0, watchdog_action="expire")
    hung, other = world.join("rollout-0"), world.join("rollout-1")
    wait(hung.offer(0), SECONDS)
    leases = hung.get("rollout")
    pending = other.ask("rollout")
    for second in range(7):
        assert pending.done() == (second > 5)
        world.let_pass(1.0)
        world.beat(hung)
        world.beat(other)
        stuck = other.status(SECONDS)["stuck"]
        assert [(one["stage"], one["worker"], one["group"]) for one in stuck if one["worker"]] == (
            [("rollout", "rollout-0", "train-0")] if second == 5 else []
        )
    again = other.take(wait(pending, SECONDS)).leases
    assert [leased.group.attempt for leased in again] == [2]
    assert hung.finish("rollout", leases) == ["train-0"]
    assert other.finish("rollout", again) == []
    assert other.status(SECONDS)["counts"]["expired"] == 0  # it was heard all the time


def test_an_evaluation_reaches_the_prompt_worker_and_its_groups_need_a_version_and_no_credit(build: Build) -> None:
    world = build(1)
    trainer, feeder = world.join("trainer-0", "trainer"), world.join("prompt-0", "prompt")
    trainer.evaluate(0)
    feeder.status(SECONDS)
    world.beat(feeder)
    assert feeder.evaluation == (1, 0)
    wait(feeder.offer(0, 1, 2, purpose="eval"), SECONDS)
    wait(feeder.offer(3, purpose="eval", version=1), SECONDS)
    rollout = world.join("rollout-0")
    rollout.serve("rollout", "reward")
    done = trainer.get("evaluate", 5)
    assert [leased.group.key.id for leased in done] == ["eval-0", "eval-1", "eval-2"]
    trainer.ack(done)
    assert trainer.status(SECONDS)["counts"]["evaluated"] == 3
    assert trainer.status(SECONDS)["counts"]["started"] == 0


def test_a_run_is_trained_committed_and_freed(build: Build) -> None:
    world = build(2, 1, total_groups=4)
    worker, trainer = world.join("worker-0"), world.join("trainer-0", "trainer")
    wait(worker.offer(*range(6)), SECONDS)
    for version in range(2):
        worker.serve("rollout", "reward")
        batch = trainer.get("trainer", 2, version)
        assert len(batch) == 2
        trainer.ack(batch, version)
        trainer.advance(version + 1)
        trainer.commit(version + 1)
    assert trainer.lease("trainer", 2, 1000.0, 2).starved == "no more groups"
    counts = trainer.status(SECONDS)["counts"]
    assert (counts["started"], counts["trained"]) == (4, 4)
    trainer.end("finished")
    status = trainer.status(SECONDS)
    assert (status["bytes"], status["state"], status["outstanding"]) == (0, "finished", 0)


def test_the_end_of_a_run_is_told_to_everybody_who_waits(world: World) -> None:
    workers = [world.join(f"worker-{number}") for number in range(3)]
    feeder, trainer = world.join("prompt-0", "prompt"), world.join("trainer-0", "trainer")
    waiting = [worker.ask(stage) for worker, stage in zip(workers, ("rollout", "reward", "evaluate"), strict=True)]
    waiting.append(trainer.request_lease("trainer", 1, 1000.0, 0))
    turn = trainer.channel.request(Header("turn", run="run-a", stage="trainer", deadline_s=1000.0))
    trainer.status(SECONDS)
    feeder.end("failed", "trainer-0 ended with code 5")
    assert all(workers[0].take(wait(pending, SECONDS)).ended for pending in waiting)
    assert wait(turn, SECONDS).header.body["fence"] == 0
    assert all(worker.ended for worker in workers)
    assert trainer.status(SECONDS)["reason"] == "trainer-0 ended with code 5"


def test_status_tells_queues_workers_and_counts_to_anybody(world: World) -> None:
    worker = world.join("rollout-0")
    worker.channel.pulse.report(tokens=12)
    wait(worker.offer(0, 1), SECONDS)
    worker.get("rollout", version=0)
    world.let_pass(2.0)
    status = world.stranger("person").status(SECONDS)
    assert status["queues"]["rollout"] | {"bytes": 0} == {
        "groups": 2, "ready": 1, "bytes": 0, "oldest_s": 2.0, "waiting_workers": 0,
    }  # fmt: skip
    (member,) = status["workers"]
    assert (member["name"], member["role"], member["host"], member["pid"]) == ("rollout-0", "rollout", "host-a", 4711)
    assert (status["run"], status["state"], status["version"], status["outstanding"]) == ("run-a", "running", 0, 1)


def test_closing_counts_what_was_never_answered_and_fails_it(build: Build) -> None:
    world = build(max_queue_groups=1)
    worker = world.join("rollout-0")
    wait(worker.offer(0), SECONDS)
    puts = [worker.offer(seq, seconds=1000.0) for seq in (1, 2)]
    question = worker.ask("reward")
    worker.status(SECONDS)
    assert worker.channel.close(0.05) == 2
    assert all("closed" in str(pending.exception(0)) for pending in (*puts, question))


def test_memory_stays_flat_over_ten_thousand_groups() -> None:
    world = MemoryWorld(Limits(500))
    worker, trainer = world.join("worker-0"), world.join("trainer-0", "trainer")
    sections, after_first = prompt(0), 0
    any_lease = Leased(0, Group(GroupKey("g", 0)))
    made = {stage: answer(stage, any_lease).sections for stage in ("rollout", "reward")}
    for version in range(20):
        keys = [GroupKey(f"g{seq}", seq) for seq in range(500 * version, 500 * (version + 1))]
        wait(worker.add([(key, sections) for key in keys], 0.0), SECONDS)
        for stage in ("rollout", "reward"):
            leases = worker.get(stage, 500, version)
            results = [Result(leased, made[stage], version, version, 3) for leased in leases]
            assert worker.confirm(worker.put(results), results) == []
        batch = trainer.get("trainer", 500, version)
        trainer.ack(batch, version)
        trainer.advance(version + 1)
        trainer.commit(version + 1)
        after_first = after_first or (resident() if version == 1 else 0)
    assert trainer.status(SECONDS)["counts"]["trained"] == 10_000
    assert resident() - after_first < 5 * MIB


def test_a_wrong_purpose_is_refused_before_anything_of_the_message_is_taken(world: World) -> None:
    worker = world.join("prompt-0", "prompt")
    with pytest.raises(WireError, match="unknown purpose 'test'"):
        wait(worker.offer(0, purpose="test"), SECONDS)  # pyright: ignore[reportArgumentType]
    assert worker.status(SECONDS)["next_seq"] == {"train": 0, "eval": 0}

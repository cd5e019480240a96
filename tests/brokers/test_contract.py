"""Membership and delivery, alike in memory and through sockets."""

import pytest

from brokers.channel import wait
from common.errors import LeaseLost, WireError
from common.header import Header
from contract import CONFIG, SECONDS, Build, World

pytestmark = pytest.mark.contract


def test_hello_tells_the_run_its_configuration_its_folder_and_its_version(world: World) -> None:
    worker = world.stranger("rollout-0")
    told = worker.hello("rollout", "host-a", 4711, seconds=SECONDS)
    assert (told.run, told.folder, told.version, told.config) == ("run-a", "/runs/a", 0, CONFIG)
    assert worker.run == "run-a"


def test_an_endpoint_that_a_member_brings_is_told_to_everybody(world: World) -> None:
    first = world.join("rollout-0")
    world.stranger("weights-0").hello("weights", "host-a", 1, endpoint="tcp://127.0.0.1:5601", seconds=SECONDS)
    first.status(SECONDS)
    world.join("rollout-1")
    first.end_of_data()  # any reply carries it
    assert first.channel.pulse.state["endpoints"] == {"weights": "tcp://127.0.0.1:5601"}


def test_another_run_is_refused_with_both_names_and_nothing_is_stored(world: World) -> None:
    with pytest.raises(WireError, match=r"'run-b' reached the broker of run 'run-a'"):
        world.stranger("rollout-0", run="run-b").hello("rollout", "host-a", 1, seconds=SECONDS)
    prompts = world.join("prompt-0", "prompt")
    prompts.run = "run-b"
    with pytest.raises(WireError, match=r"'run-b' reached the broker of run 'run-a'"):
        wait(prompts.offer(0), SECONDS)
    status = world.stranger("person").status(SECONDS)
    assert (status["bytes"], status["counts"]["refused"]) == (0, {"WireError": 2})
    assert [worker["name"] for worker in status["workers"]] == ["prompt-0"]


def test_a_worker_that_has_not_said_hello_is_told_to(world: World) -> None:
    with pytest.raises(WireError, match="unknown worker 'rollout-0#1': say hello first"):
        world.stranger("rollout-0", run="run-a").get("rollout")


def test_an_unknown_verb_or_stage_is_refused_with_the_known_ones(world: World) -> None:
    worker = world.join("rollout-0")
    with pytest.raises(WireError, match=r"unknown verb 'steal'; known: hello, beat"):
        wait(worker.channel.request(Header("steal", run="run-a")), SECONDS)
    with pytest.raises(WireError, match=r"unknown stage 'judge'; known: rollout, reward, trainer, evaluate"):
        worker.get("judge")


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("beat", {"progress": 3}),
        ("lease", {"want": "many"}),
        ("lease", {"version": True}),
        ("advance", {}),
        ("advance", {"version": 7}),
        ("commit", {"version": 7}),
        ("evaluate", {"version": None}),
        ("fetch", {}),
        ("end", {"state": 1}),
        ("turn", {"give": "1"}),
        ("hello", {"pid": "x"}),
    ],
)
def test_wrong_arguments_are_refused_and_the_broker_goes_on(world: World, verb: str, body: dict[str, object]) -> None:
    worker = world.join("rollout-0")
    with pytest.raises(WireError):
        wait(worker.channel.request(Header(verb, run="run-a", worker="rollout-0", stage="rollout", body=body)), SECONDS)
    assert worker.status(SECONDS)["version"] == 0


def test_a_lease_comes_with_the_sections_its_stage_requires_and_what_the_broker_knows(world: World) -> None:
    worker = world.join("rollout-0")
    wait(worker.offer(0, media=b"png"), SECONDS)
    (leased,) = worker.get("rollout", version=0)
    assert (leased.group.key.id, leased.group.attempt, leased.deadline) == ("train-0", 1, 0)
    assert leased.group.value("media_data") == b"png"
    assert worker.finish("rollout", [leased]) == []
    (leased,) = worker.get("reward")
    assert set(leased.group.sections) == {"response"}
    assert leased.group.value("text") == "train-0"
    assert (leased.tokens, leased.version_min, leased.version_max) == (3, 0, 0)


def test_a_dead_workers_groups_are_handled_by_the_other_each_once(world: World) -> None:
    first, second = world.join("rollout-0"), world.join("rollout-1")
    wait(first.offer(*range(100)), SECONDS)
    assert len(first.get("rollout", 50)) == 50
    world.kill(first)
    mine = second.get("rollout", 50)
    world.beat(second)
    world.let_pass(20)
    world.beat(second)
    pending = second.ask("rollout", 100)
    world.let_pass(10)  # 30 s without a sign of the first
    theirs = second.take(wait(pending, SECONDS)).leases
    assert {leased.group.attempt for leased in mine} == {1}
    assert {leased.group.attempt for leased in theirs} == {2}
    assert second.finish("rollout", [*mine, *theirs]) == []
    handled = [leased.group.key.seq for leased in [*mine, *theirs]]
    assert sorted(handled) == list(range(100))
    assert second.status(SECONDS)["queues"]["reward"]["groups"] == 100


def test_a_worker_that_comes_back_under_its_name_is_heard_at_once_and_gets_what_it_had_not_acknowledged(
    world: World,
) -> None:
    old = world.join("rollout-0", incarnation="1")
    wait(old.offer(*range(100)), SECONDS)
    leases = old.get("rollout", 100)
    old.finish("rollout", leases[:10])
    world.kill(old)
    new = world.join("rollout-0", incarnation="2")  # no time has passed
    again = new.get("rollout", 100)
    assert sorted(leased.group.key.seq for leased in again) == list(range(10, 100))
    assert {leased.group.attempt for leased in again} == {2}
    new.finish("rollout", again)
    assert len(new.get("reward", 200)) == 100


def test_a_late_ack_of_a_replaced_worker_is_refused_as_lost(world: World) -> None:
    old = world.join("rollout-0", incarnation="1")
    wait(old.offer(0), SECONDS)
    leases = old.get("rollout")
    world.samples.verbs["pong"] = lambda message: None  # the old one hangs: nobody hears an answer to a ping
    new = world.stranger("rollout-0", "2", "run-a")
    joining = new.channel.request(Header("hello", worker="rollout-0", body={"role": "rollout"}))
    while not world.samples._claims:  # pyright: ignore[reportPrivateUsage]
        old.status(SECONDS)
    world.let_pass(1.0)
    wait(joining, SECONDS)
    assert [leased.group.attempt for leased in new.get("rollout")] == [2]
    with pytest.raises(LeaseLost, match=r"rollout-0#1 was replaced by rollout-0#2"):
        old.finish("rollout", leases)
    with pytest.raises(LeaseLost):
        old.ack(leases)


def test_a_trainer_that_comes_before_everybody_waits_and_is_told_for_what_and_trains_this_run_only(
    world: World,
) -> None:
    trainer, leftover = world.join("trainer-0", "trainer"), world.stranger("rollout-0", run="run-of-yesterday")
    pending = trainer.request_lease("trainer", 1, 2.0, 0)
    trainer.status(SECONDS)
    world.let_pass(2.0)
    assert trainer.take(wait(pending, SECONDS)).starved == "waiting for groups in queue 'trainer'"
    with pytest.raises(WireError, match="'run-of-yesterday' reached the broker of run 'run-a'"):
        wait(leftover.offer(7), SECONDS)
    pending = trainer.request_lease("trainer", 1, 1000.0, 0)
    trainer.status(SECONDS)
    worker = world.join("rollout-0")
    wait(worker.offer(0), SECONDS)
    worker.serve("rollout", "reward")
    assert [leased.group.key.id for leased in trainer.take(wait(pending, SECONDS)).leases] == ["train-0"]


def test_two_live_workers_cannot_have_one_name(world: World) -> None:
    first = world.join("rollout-0", incarnation="1")
    wait(first.offer(0), SECONDS)
    leases = first.get("rollout")
    with pytest.raises(WireError, match=r"'rollout-0' is held by process 4711 on host-a, which answers"):
        world.join("rollout-0", incarnation="2")
    assert first.finish("rollout", leases) == []


def test_an_answer_to_a_worker_that_is_gone_is_counted_and_its_group_is_ready_again(world: World) -> None:
    gone, alive = world.join("rollout-0"), world.join("rollout-1")
    gone.ask("rollout", 5)
    alive.status(SECONDS)
    world.kill(gone)
    wait(alive.offer(0), SECONDS)
    (leased,) = alive.take(wait(alive.ask("rollout"), SECONDS)).leases
    status = alive.status(SECONDS)
    assert leased.group.attempt == 2
    assert status["counts"]["unroutable"] == 1
    assert {worker["name"]: worker["lost"] for worker in status["workers"]} == {
        "rollout-0": "its connection is gone",
        "rollout-1": "",
    }


def test_a_worker_that_joins_later_gets_its_share_and_nobody_holds_more_than_asked_for(world: World) -> None:
    first = world.join("rollout-0")
    wait(first.offer(*range(100)), SECONDS)
    mine = first.get("rollout", 10)
    second, shares = world.join("rollout-1"), {"first": 0, "second": 0}
    theirs = second.get("rollout", 10)
    while mine or theirs:
        assert len(mine) <= 10
        assert len(theirs) <= 10
        first.finish("rollout", mine)
        second.finish("rollout", theirs)
        shares = {"first": shares["first"] + len(mine), "second": shares["second"] + len(theirs)}
        mine, theirs = first.get("rollout", 10), second.get("rollout", 10)
    assert shares == {"first": 50, "second": 50}


def test_what_a_worker_holds_when_it_leaves_is_ready_at_once_and_no_attempt(world: World) -> None:
    leaving, staying = world.join("rollout-0"), world.join("rollout-1")
    wait(leaving.offer(0), SECONDS)
    leaving.get("rollout")
    question = leaving.ask("reward")
    leaving.leave(SECONDS)
    assert question.exception(SECONDS) is not None
    assert leaving.channel.close(SECONDS) == 0
    assert [leased.group.attempt for leased in staying.get("rollout")] == [1]


def test_a_put_cannot_reach_into_another_group(world: World) -> None:
    worker = world.join("rollout-0")
    wait(worker.offer(0, 1), SECONDS)
    first, second = worker.get("rollout", 2)
    swapped = type(first)(first.id, second.group)
    assert worker.finish("rollout", [swapped]) == ["train-1"]
    assert worker.finish("rollout", [first, second]) == []


def test_a_repeated_put_or_prompt_is_ignored_and_counted(world: World) -> None:
    worker = world.join("rollout-0")
    wait(worker.offer(0), SECONDS)
    wait(worker.offer(0), SECONDS)
    leases = worker.get("rollout", 2)
    assert len(leases) == 1
    assert worker.finish("rollout", leases) == []
    assert worker.finish("rollout", leases) == ["train-0"]  # acknowledged already: the lease is over
    assert len(worker.get("reward", 5)) == 1
    assert worker.status(SECONDS)["counts"]["repeated"] == 1


def test_groups_of_two_items_fail_one_by_one(build: Build) -> None:
    world = build(2)
    worker = world.join("rollout-0")
    wait(worker.offer(0, 1), SECONDS)
    leases = worker.get("rollout", 2)
    worker.drop(["train-0"], "filtered")
    assert worker.finish("rollout", leases) == ["train-0"]
    assert [leased.group.key.id for leased in worker.get("reward", 2)] == ["train-1"]
    with pytest.raises(LeaseLost, match="train-0"):
        worker.ack([leases[0]])

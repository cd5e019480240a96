"""The pool with real processes: what one sample does never decides about another."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hanging
from common.errors import ConfigError, WorkerError
from common.group import Group, GroupKey
from common.section import encode
from common.settings import Component, Rewards
from workers.reward.pool import RewardPool, Scored
from workers.reward.reward import Response
from workers.reward.stage import RewardStage

pytestmark = pytest.mark.e2e

OBEY = f"{hanging.__name__}:Obey"
LIMIT = 0.3


def responses(*texts: str) -> list[Response]:
    return [Response(text, "stop", "", f"row-{i}", "[]") for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def pair() -> Iterator[RewardPool]:
    with RewardPool(Component(name=OBEY), processes=2, timeout_seconds=LIMIT) as pool:
        yield pool


@pytest.mark.parametrize("place", [0, 40])
def test_one_hanging_sample_of_64_times_out_and_the_other_63_are_scored(pair: RewardPool, place: int) -> None:
    texts = [str(i) for i in range(64)]
    texts[place] = "hang"
    expected = [Scored(float(i), "ok") for i in range(64)]
    expected[place] = Scored(0.0, "timeout")
    assert pair.score(responses(*texts)) == expected


def test_the_process_that_hung_is_gone_and_another_one_scores(pair: RewardPool) -> None:
    before = {scored.score for scored in pair.score(responses(*["pid"] * 64))}
    pair.score(responses("hang", "hang"))
    after = {scored.score for scored in pair.score(responses(*["pid"] * 64))}
    assert not before & after
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_all_processes_hang_and_the_next_task_is_still_served(pair: RewardPool) -> None:
    scored = pair.score(responses("hang", "hang", "5"))
    assert [s.status for s in scored] == ["timeout", "timeout", "ok"]
    assert scored[2].score == 5.0


def test_samples_behind_a_slow_one_move_to_the_idle_process() -> None:
    # One chunk holds the slow sample and others; the limit is far away, so they can only have been recalled.
    with RewardPool(Component(name=OBEY), processes=2, timeout_seconds=60) as pool:
        texts = ["spend 0.4", *["pid"] * 15]
        scored = pool.score(responses(*texts))
    assert scored[0] == Scored(1.0, "ok")
    assert {s.status for s in scored} == {"ok"}
    assert len({s.score for s in scored[1:]}) == 1


def test_a_reward_that_ends_after_its_limit_is_a_timeout_even_if_nobody_was_there_to_kill_it(pair: RewardPool) -> None:
    assert [s.status for s in pair.score(responses("spend 0.05", "spend 0.5"))] == ["ok", "timeout"]


def test_after_a_timeout_the_next_batch_is_served_within_two_seconds_of_the_start() -> None:
    with RewardPool(Component(name=OBEY), processes=1, timeout_seconds=LIMIT) as pool:
        start = time.monotonic()
        assert pool.score(responses("hang")) == [Scored(0.0, "timeout")]
        assert time.monotonic() - start < 2
        assert pool.score(responses("1")) == [Scored(1.0, "ok")]


def test_a_limit_of_zero_lets_nothing_run(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool(Component(name=OBEY), processes=1, timeout_seconds=0) as pool:
        assert pool.score(responses("1", "say hello")) == [Scored(0.0, "timeout")] * 2
    assert "hello" not in capfd.readouterr().out


@pytest.mark.parametrize("word", ["raise", "none", "text", "nan", "infinite", "huge"])
def test_an_exception_or_a_score_that_is_no_finite_float32_is_a_failure(pair: RewardPool, word: str) -> None:
    assert pair.score(responses("1", word, "2")) == [Scored(1.0, "ok"), Scored(0.0, "failed"), Scored(2.0, "ok")]


def test_numbers_of_any_kind_are_scores_and_no_process_imports_torch(pair: RewardPool) -> None:
    scored = pair.score(responses("true", "fraction", "-3", "torch"))
    assert scored == [Scored(1.0, "ok"), Scored(0.25, "ok"), Scored(-3.0, "ok"), Scored(0.0, "ok")]


@pytest.mark.parametrize("word", ["exit", "leave", "crash"])
def test_a_process_that_dies_fails_the_sample_in_hand_only(pair: RewardPool, word: str) -> None:
    texts = [str(i) for i in range(32)]
    texts[3] = word
    scored = pair.score(responses(*texts))
    assert scored[3] == Scored(0.0, "failed")
    assert [s for i, s in enumerate(scored) if i != 3] == [Scored(float(i), "ok") for i in range(32) if i != 3]


def test_a_process_killed_while_idle_costs_no_sample(pair: RewardPool) -> None:
    for pid in {scored.score for scored in pair.score(responses(*["pid"] * 64))}:
        os.kill(int(pid), signal.SIGKILL)
    assert pair.score(responses("1", "2", "3")) == [Scored(float(i), "ok") for i in (1, 2, 3)]


def test_a_thousand_samples_keep_their_order_and_an_empty_batch_is_empty(pair: RewardPool) -> None:
    assert [s.score for s in pair.score(responses(*map(str, range(1000))))] == [float(i) for i in range(1000)]
    assert pair.score([]) == []


def test_what_a_reward_started_ends_with_it(pair: RewardPool, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert pair.score(responses(f"spawn {path}")) == [Scored(0.0, "timeout")]
        # The read end reports the end of the stream when the last writer, the grandchild, is gone.
        assert select.select([reader], [], [], 5)[0]
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_a_process_in_the_middle_of_a_sample_dies_with_its_parent() -> None:
    program = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from common.settings import Component\n"
        "from workers.reward.pool import RewardPool\n"
        "from workers.reward.reward import Response\n"
        f"pool = RewardPool(Component(name={OBEY!r}), 1, 60.0)\n"
        "pool.score([Response('say begun', 'stop', '', '', '[]')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, *sys.path], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.read(5) == b"begun"
        parent.kill()
        # The stream ends when the last holder of it, the reward process, is gone.
        assert select.select([parent.stdout], [], [], 5)[0]
        assert parent.stdout.read() == b""


def test_closing_ends_every_process() -> None:
    pool = RewardPool(Component(name=OBEY), processes=2, timeout_seconds=1)
    pids = {int(scored.score) for scored in pool.score(responses(*["pid"] * 64))}
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("reward", "kind", "message"),
    [
        (Component(name="exakt"), ConfigError, r"reward.name' = 'exakt' is unknown; known: exact, "),
        (Component(name=OBEY, factor="much"), ConfigError, r"'reward.factor': Input should be a valid number"),
        (Component(name=f"{hanging.__name__}:Broken"), WorkerError, r"FileNotFoundError: the answer key"),
        (Component(name=f"{hanging.__name__}:Dying"), WorkerError, r"code 9 before it was ready"),
    ],
)
def test_a_reward_that_cannot_be_built_is_named_at_the_start(reward: Component, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        RewardPool(reward, processes=1, timeout_seconds=1)


def group(name: str, kind: str, label: str, *samples: tuple[str, str]) -> Group:
    prompt = {"prompt_id": [name], "messages": ["[]"], "label": [label], "source": ["test"], "reward_kind": [kind]}
    texts, reasons = zip(*samples, strict=True)
    response = {"text": texts, "finish_reason": reasons, "num_tokens": [1] * len(samples)}
    sections = {
        "prompt": encode("prompt", {**prompt, "sampling": ["{}"], "evaluation_size": [0]}),
        "response": encode("response", response),
    }
    return Group(GroupKey(name, 0), sections=sections)


def outcome(of: Group, section: object) -> list[tuple[float, str]]:
    of.sections["reward"] = section  # pyright: ignore[reportArgumentType]
    return list(zip(of.values("reward"), of.values("reward_status"), strict=True))


def test_the_stage_reports_samples_while_it_scores_so_that_many_slow_ones_are_progress() -> None:
    told: list[int] = []
    limits = Rewards(processes=1, timeout_seconds=LIMIT)
    stage = RewardStage(Component(name=OBEY), limits, told.append)
    try:
        stage.handle([group("a", "", "", ("hang", "stop"), ("1", "stop"), ("hang", "stop"))])
        stage.handle([group("b", "", "", ("1", "stop"))])
    finally:
        stage.close()
    assert told == sorted(set(told))
    assert told[-2:] == [3, 4]
    assert len(told) >= 3  # each sample that ran into its limit was told by itself


def test_the_stage_tells_a_timeout_from_a_wrong_answer_and_an_aborted_sample_from_both() -> None:
    stage = RewardStage(Component(name=OBEY), Rewards(processes=1, timeout_seconds=LIMIT))
    first = group("a", "", "", ("0.5", "stop"), ("hang", "stop"), ("0", "length"), ("hang", "abort"))
    second = group("b", "exact", "7", ("7", "stop"), ("8", "stop"), ("7", "length"))
    third = group("c", "nobody", "7", ("7", "stop"), ("7", "abort"))
    fourth = group("d", "os:system", "7", ("7", "stop"))
    groups = [first, second, third, fourth]
    try:
        sections = stage.handle(groups)
    finally:
        stage.close()
    assert outcome(first, sections[0]) == [(0.5, "ok"), (0.0, "timeout"), (0.0, "ok"), (0.0, "aborted")]
    assert outcome(second, sections[1]) == [(1.0, "ok"), (0.0, "ok"), (0.0, "ok")]
    assert outcome(third, sections[2]) == [(0.0, "failed"), (0.0, "aborted")]
    assert outcome(fourth, sections[3]) == [(0.0, "failed")]

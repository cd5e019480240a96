"""One suite over every engine that needs no server."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import Reject, WireError
from common.tensor import from_numpy
from engine_cases import END, Case, alike, collected, finish, ids, image_prompt, media_forbidden, run, weights
from workers.models.tiny import write_tiny_text, write_tiny_vision
from workers.registry import find
from workers.rollout.engine import Generation, Request

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    write_tiny_text(home / "text", hidden=32)
    write_tiny_vision(home / "vision", hidden=32, heads=2, kv_heads=1)
    return {"text": home / "text", "vision": home / "vision"}


@pytest.fixture(params=["torch-text", "torch-vision", "fake"])
def case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    prompt_ids = np.array([3, 4, 13, 5, 14], dtype=np.int32)
    if request.param == "fake":
        options = {"vocabulary": 18, "lengths": "long-tail", "tokens_per_step": 1}
        return Case(find("engine", "fake"), folders["text"], options, prompt_ids)
    if request.param == "torch-text":
        return Case(find("engine", "torch"), folders["text"], {}, prompt_ids, forbidden=(0, 2))
    prompt_ids, tensors = image_prompt(folders["vision"])
    forbidden = media_forbidden(folders["vision"])
    return Case(find("engine", "torch"), folders["vision"], {}, prompt_ids, tensors, forbidden)


def long(case: Case, group: str = "g", **options: Any) -> Request:
    """A request that no stop id ends: 12 tokens each."""
    return case.request(group, stop_ids=(), **options)


def test_equal_seeds_draw_equal_tokens_and_log_probs(case: Case) -> None:
    first, second = case.start(), case.start()
    samples = run(first, case.request())["g"]
    assert alike(run(second, case.request())["g"], samples)
    assert alike(run(first, case.request())["g"], samples)


def test_samples_come_in_the_order_of_their_seeds(case: Case) -> None:
    engine = case.start()
    ahead = ids(run(engine, case.request(seeds=(1, 2, 3, 4)))["g"])
    assert ids(run(engine, case.request(seeds=(4, 3, 2, 1)))["g"]) == ahead[::-1]
    assert len(set(ahead)) > 1


def test_a_sample_ends_with_the_first_stop_id_or_at_the_limit(case: Case) -> None:
    samples = run(case.start(), case.request(seeds=range(100, 160), max_tokens=8))["g"]
    for sample in samples:
        assert END not in sample.ids[:-1]
        assert sample.finish_reason == ("stop" if sample.ids[-1] == END else "length")
        assert sample.finish_reason == "stop" or len(sample.ids) == 8
        assert len(sample.logprobs) == len(sample.ids) <= 8
        assert all(logprob < 0 for logprob in sample.logprobs)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}


def test_each_sample_has_a_limit_of_its_own(case: Case) -> None:
    limits = (7, 1, 12, 3)
    whole = run(case.start(), long(case, seeds=(1, 2, 3, 4)))["g"]
    samples = run(case.start(), long(case, seeds=(1, 2, 3, 4), max_tokens=limits))["g"]
    for sample, uncut, limit in zip(samples, whole, limits, strict=True):
        assert (len(sample.ids), sample.finish_reason) == (limit, "length")
        assert sample.ids == uncut.ids[:limit]


def test_a_resumed_group_keeps_the_limits_of_its_samples(case: Case) -> None:
    engine = case.start()
    request = long(case, max_tokens=(9, 2, 5))
    whole = run(engine, request)["g"]
    engine.submit(request)
    engine.step(1.0)
    (part,) = engine.abort({"g"})
    assert alike(run(engine, replace(request, begun=tuple(part.samples)))["g"], whole)


def test_it_counts_the_tokens_it_draws_while_it_draws_them(case: Case) -> None:
    engine = case.start()
    engine.submit(long(case, seeds=(1, 2, 3)))
    counts = [engine.generated]
    while engine.running():
        engine.step(0.0)
        counts.append(engine.generated)
    # 3 samples of 12 tokens; more with every step, none without one
    assert (counts[0], counts[-1]) == (0, 36)
    assert counts == sorted(set(counts))
    engine.step(0.0)
    assert engine.generated == 36


def test_a_group_is_admitted_while_another_is_decoding(case: Case) -> None:
    engine = case.start()
    alone = {
        name: ids(run(engine, case.request(name, seeds=seeds))[name]) for name, seeds in (("a", (1, 2)), ("b", (3, 4)))
    }
    engine.submit(case.request("a", seeds=(1, 2)))
    done = engine.step(1.0)
    engine.submit(case.request("b", seeds=(3, 4)))
    assert "b" in engine.running()
    together = collected([*done, *finish(engine)])
    assert {name: ids(samples) for name, samples in together.items()} == alone
    assert not engine.running()


def test_more_groups_than_there_is_room_for_all_finish(case: Case) -> None:
    limit = {"max_running_groups": 2} if case.engine is find("engine", "fake") else {"max_running_samples": 5}
    engine = case.start(**limit)
    requests = [case.request(f"g{i}", seeds=(10 * i, 10 * i + 1)) for i in range(4)]
    assert engine.room() >= 1
    engine.submit(requests[0])
    assert engine.room() == 1  # 5 rows or 2 groups, 2 rows or 1 group taken
    engine.submit(requests[1])
    assert engine.room() == 0
    assert set(run(engine, *requests[2:])) == {"g0", "g1", "g2", "g3"}


def test_weights_that_arrive_in_mid_generation_start_a_new_span(case: Case) -> None:
    engine = case.start()
    engine.submit(long(case, max_tokens=40))
    assert engine.step(1.0) == []
    engine.load(3, weights(case.folder, noise=0.02))
    assert engine.version == 3
    samples = collected(finish(engine))["g"]
    for sample in samples:
        (zero, old), (boundary, new) = sample.spans
        assert (zero, old, new) == (0, 0, 3)
        assert 0 < boundary < len(sample.ids)
    before = run(case.start(), long(case, max_tokens=40))["g"]
    for sample, unchanged in zip(samples, before, strict=True):
        boundary = sample.spans[1][0]
        assert sample.ids[:boundary] == unchanged.ids[:boundary]
        assert np.allclose(sample.logprobs[:boundary], unchanged.logprobs[:boundary], atol=1e-5)
        assert not np.isclose(sample.logprobs[boundary], unchanged.logprobs[boundary], atol=1e-4)


def test_a_group_that_was_aborted_and_resumed_equals_one_that_was_not(case: Case) -> None:
    engine = case.start()
    whole = run(engine, long(case))["g"]
    engine.submit(long(case))
    assert engine.step(1.0) == []
    (part,) = engine.abort({"g"})
    assert not engine.running()
    assert all(sample.finish_reason == "abort" and 0 < len(sample.ids) < 12 for sample in part.samples)
    resumed = run(engine, long(case, begun=tuple(part.samples)))["g"]
    assert ids(resumed) == ids(whole)
    for sample, begun, other in zip(resumed, part.samples, whole, strict=True):
        assert sample.logprobs[: len(begun.ids)] == begun.logprobs
        assert np.allclose(sample.logprobs, other.logprobs, atol=1e-5)
        assert sample.spans == ((0, 0),)
        assert sample.finish_reason == other.finish_reason


def test_a_group_that_is_resumed_under_other_weights_keeps_its_first_span(case: Case) -> None:
    engine = case.start()
    engine.submit(long(case))
    engine.step(1.0)
    (part,) = engine.abort({"g"})
    engine.load(2, weights(case.folder, noise=0.02))
    for sample, begun in zip(run(engine, long(case, begun=tuple(part.samples)))["g"], part.samples, strict=True):
        assert sample.spans == ((0, 0), (len(begun.ids), 2))
        assert sample.ids[: len(begun.ids)] == begun.ids


def test_finished_samples_of_a_resumed_group_are_not_generated_again(case: Case) -> None:
    ended = Generation((4, END), (-1.5, -2.5), ((0, 0),), "stop")
    begun = (ended, Generation((), (), ((0, 0),), "abort"), ended)
    samples = run(case.start(), case.request(begun=begun))["g"]
    assert (samples[0], samples[2]) == (ended, ended)
    assert alike(samples[1:2], run(case.start(), case.request())["g"][1:2])
    assert run(case.start(), case.request(begun=(ended, ended, ended)))["g"] == (ended, ended, ended)


def test_an_abort_before_the_first_token_leaves_empty_samples_of_the_version_it_was_started_with(case: Case) -> None:
    engine = case.start()
    engine.load(4, weights(case.folder))
    engine.submit(case.request())
    (completion,) = engine.abort({"g", "unknown"})
    assert completion.samples == (Generation((), (), ((0, 4),), "abort"),) * 3
    assert engine.abort({"g"}) == []
    again = run(engine, case.request(begun=tuple(completion.samples)))["g"]
    assert ids(again) == ids(run(case.start(), case.request())["g"])


def test_an_abort_leaves_other_groups_untouched(case: Case) -> None:
    engine = case.start()
    alone = ids(run(engine, long(case, "b", seeds=(5, 6)))["b"])
    engine.submit(long(case, "a"))
    engine.submit(long(case, "b", seeds=(5, 6)))
    engine.step(1.0)
    engine.abort({"a"})
    assert engine.running() == ("b",)
    assert ids(collected(finish(engine))["b"]) == alone


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(case: Case, fault: str) -> None:
    engine = case.start()
    before = run(engine, case.request())["g"]
    other = weights(case.folder, noise=0.5)
    values = other[-1].numpy()
    other = {
        "missing": other[:-1],
        "unknown": [*other, from_numpy("model.extra", values)],
        "twice": [*other, other[0]],
        "shape": [*other[:-1], from_numpy(other[-1].name, np.zeros((*values.shape, 2), np.float32))],
        "dtype": [*other[:-1], from_numpy(other[-1].name, values.astype(np.float64))],
    }[fault]
    with pytest.raises(WireError, match="tensor"):
        engine.load(1, other)
    assert engine.version == 0
    assert alike(run(engine, case.request())["g"], before)


def test_the_same_version_can_be_loaded_twice(case: Case) -> None:
    engine = case.start()
    engine.load(7, weights(case.folder, noise=0.02))
    once = run(engine, case.request())["g"]
    engine.load(7, weights(case.folder, noise=0.02))
    assert alike(run(engine, case.request())["g"], once)
    assert engine.version == 7


def test_requests_that_cannot_be_served_are_refused_and_nothing_runs(case: Case) -> None:
    engine, good = case.start(), case.request()
    high, low = good.prompt_ids.copy(), good.prompt_ids.copy()
    high[2], low[2] = 151655, -1
    for prompt_ids, token in ((high, "151655"), (low, "-1")):
        with pytest.raises(Reject, match=f"token id {token} is outside the vocabulary"):
            engine.submit(replace(good, prompt_ids=prompt_ids))
    with pytest.raises(Reject):
        engine.submit(replace(good, sampling=replace(good.sampling, max_tokens=0)))
    for limits in ((), (4, 4), (4, 0, 4)):
        with pytest.raises(Reject, match="max_tokens"):
            engine.submit(replace(good, sampling=replace(good.sampling, max_tokens=limits)))
    assert not engine.running()
    engine.submit(good)
    with pytest.raises(Reject, match="running already"):
        engine.submit(good)


def test_an_engine_that_slept_serves_as_before(case: Case) -> None:
    engine = case.start()
    before = run(engine, case.request())["g"]
    engine.sleep()
    engine.wake()
    assert alike(run(engine, case.request())["g"], before)
    engine.submit(case.request())
    engine.close()
    assert not engine.running()


def test_forbidden_ids_are_never_drawn(case: Case) -> None:
    request = case.request(seeds=range(40))
    request = replace(request, sampling=replace(request.sampling, forbidden_ids=(*case.forbidden, 7, 8, 9)))
    drawn = {token for sample in run(case.start(), request)["g"] for token in sample.ids}
    assert drawn
    assert not drawn & {*case.forbidden, 7, 8, 9}


def test_a_group_has_the_same_bits_in_any_company_in_deterministic_mode(case: Case) -> None:
    alone = run(case.start(deterministic=True), long(case, max_tokens=70))["g"]
    engine = case.start(deterministic=True)
    company = [case.request(f"other{i}", seeds=range(20 * i, 20 * i + 7 + i), rotate=i % 3) for i in range(3)]
    assert run(engine, *company[:2], long(case, max_tokens=70), company[2])["g"] == alone
    assert run(engine, long(case, max_tokens=70))["g"] == alone


def test_the_fake_engine_takes_its_time_and_runs_groups_at_once(folders: dict[str, Path]) -> None:
    case = Case(find("engine", "fake"), folders["text"], {"vocabulary": 18}, np.array([3, 4], dtype=np.int32))
    slow = case.start(seconds_per_group=1e6)
    slow.submit(case.request())
    assert slow.step(0.0) == []
    assert slow.abort({"g"})[0].samples[0].finish_reason == "abort"
    quick = case.start(seconds_per_group=0.02)
    assert set(run(quick, case.request("a"), case.request("b"))) == {"a", "b"}
    assert run(quick, case.request())["g"] == run(case.start(), case.request())["g"]

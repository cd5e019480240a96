"""Engine `torch` against transformers itself: tokens of `generate`, log-probs of a full forward pass."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from common.errors import ConfigError, Reject, WireError, WorkerError
from common.tensor import from_numpy
from engine_cases import Case, collected, finish, image_prompt, media_forbidden, run, weights
from workers.models.load import load_model, media_token_ids, stop_ids, to_named, to_torch
from workers.models.tiny import write_tiny_text, write_tiny_vision
from workers.models.weights import replace_weights
from workers.rollout.engine import Generation, Request
from workers.rollout.engines.torch import TorchEngine
from workers.rollout.sample import draw, uniform

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    write_tiny_text(home / "text", hidden=32)
    write_tiny_vision(home / "vision", hidden=32, heads=2, kv_heads=1)
    torch.manual_seed(0)
    window = MistralConfig(
        vocab_size=18,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=4,
        bos_token_id=None,
        eos_token_id=1,
    )
    MistralForCausalLM(window).save_pretrained(home / "window")
    return {name: home / name for name in ("text", "vision", "window")}


@pytest.fixture(params=["text", "vision", "window"])
def case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Case:
    folder = folders[request.param]
    if request.param == "vision":
        return Case(TorchEngine, folder, {}, *image_prompt(folder), media_forbidden(folder))
    return Case(TorchEngine, folder, {}, np.array([3, 4, 13, 5, 14, 9, 8], np.int32), forbidden=(0, 2))


def forward(model: PreTrainedModel, request: Request, response: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] that chose each response token, by one pass over the whole sequence without a cache."""
    sequence = torch.tensor([[*request.prompt_ids.tolist(), *response]])
    extra: dict[str, Any] = {}
    for part in request.tensors:
        values = to_torch(part.tensor)
        extra[part.tensor.name] = torch.nn.functional.pad(values, (0, len(response))) if part.per_token else values
    with torch.no_grad():
        logits = model(input_ids=sequence, **extra).logits[0]
    return logits[len(request.prompt_ids) - 1 : -1]


def check_logprobs(model: PreTrainedModel, request: Request, sample: Generation) -> None:
    logits_TV = forward(model, request, sample.ids)
    logits_TV[:, list(request.sampling.forbidden_ids)] = -torch.inf
    expected_TV = (logits_TV / (request.sampling.temperature or 1.0)).log_softmax(-1)
    expected_T = expected_TV[torch.arange(len(sample.ids)), torch.tensor(sample.ids)]
    assert torch.allclose(torch.tensor(sample.logprobs), expected_T, rtol=0, atol=1e-5)


def test_greedy_tokens_equal_those_of_generate(case: Case) -> None:
    model = load_model(case.folder)
    requests = [
        case.request(f"g{i}", seeds=(i,), temperature=0.0, max_tokens=20, stop_ids=(), rotate=i) for i in range(3)
    ]
    done = run(case.start(), *requests)
    for request in requests:
        extra = {part.tensor.name: to_torch(part.tensor) for part in request.tensors}
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        generated = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            **extra,
            max_new_tokens=20,
            min_new_tokens=20,
            do_sample=False,
            suppress_tokens=[*case.forbidden, 1],
        )
        # `min_new_tokens` bans the end mark in `generate`, so it is banned here.
        banned = replace(request, sampling=replace(request.sampling, forbidden_ids=(*case.forbidden, 1)))
        (sample,) = run(case.start(), banned)[request.group]
        assert list(sample.ids) == generated[0, prompt.shape[1] :].tolist()
        check_logprobs(model, request, done[request.group][0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_full_forward_pass_however_rows_come_and_go(case: Case, temperature: float) -> None:
    model, engine = load_model(case.folder), case.start(max_running_samples=9)
    # Stop id 1 ends rows at different times; prompts differ in length; groups join while others decode.
    requests = {
        f"g{i}": case.request(
            f"g{i}", seeds=range(9 * i, 9 * i + 2 + i), max_tokens=6 + 9 * i, temperature=temperature, rotate=i
        )
        for i in range(5)
    }
    done = []
    for request in requests.values():
        engine.submit(request)
        done += engine.step(0)
    samples = collected([*done, *finish(engine)])
    assert samples.keys() == requests.keys()
    assert len({len(sample.ids) for group in samples.values() for sample in group}) > 3
    for name, group in samples.items():
        for sample in group:
            check_logprobs(model, requests[name], sample)


def test_requests_of_one_step_may_differ_in_temperature_stop_and_forbidden_ids(case: Case) -> None:
    model, engine = load_model(case.folder), case.start()
    warm = case.request("warm", seeds=range(8), temperature=1.5)
    greedy = case.request("greedy", seeds=(1, 2), temperature=0.0, stop_ids=(1, 9, 10))
    masked = case.request("masked", seeds=range(8))
    masked = replace(masked, sampling=replace(masked.sampling, forbidden_ids=(*case.forbidden, 7, 8, 9, 10)))
    done = run(engine, warm, greedy, masked)
    for request in (warm, greedy, masked):
        for sample in done[request.group]:
            check_logprobs(model, request, sample)
            assert not {*sample.ids[:-1]} & {*request.sampling.stop_ids}
            assert not {*sample.ids} & {*request.sampling.forbidden_ids}
    assert done["greedy"][0].ids == done["greedy"][1].ids  # their log-probs were checked above


def test_a_resumed_sample_is_prefilled_with_its_own_tokens(case: Case) -> None:
    model, engine = load_model(case.folder), case.start()
    request = case.request(seeds=range(6), max_tokens=30)
    engine.submit(request)
    engine.step(0)
    engine.step(0)
    (part,) = engine.abort({"g"})
    # Cut to 0, 1, 2 and 3 tokens, as rows that began at different times would be.
    begun = tuple(
        replace(sample, ids=sample.ids[:i], logprobs=sample.logprobs[:i], finish_reason="abort")
        for i, sample in enumerate(part.samples[:4])
    )
    request = replace(request, seeds=request.seeds[:4], begun=begun)
    for sample in run(engine, request)["g"]:
        check_logprobs(model, request, sample)


def test_log_probs_after_a_load_are_those_of_the_new_weights(case: Case) -> None:
    engine, model = case.start(), load_model(case.folder)
    run(engine, case.request())
    engine.load(1, weights(case.folder, noise=0.3))
    replace_weights(model, weights(case.folder, noise=0.3))
    for sample in run(engine, case.request())["g"]:
        assert sample.spans == ((0, 1),)
        check_logprobs(model, case.request(), sample)


def test_a_long_response_outgrows_the_cache_and_the_token_buffers(folders: dict[str, Path]) -> None:
    case = Case(TorchEngine, folders["text"], {}, np.array([3, 4, 5], np.int32))
    request = case.request(seeds=(1, 2), max_tokens=1000, stop_ids=())
    samples = run(case.start(), request)["g"]
    # 128 positions less 3 prompt tokens
    assert [len(sample.ids) for sample in samples] == [125, 125]
    assert {sample.finish_reason for sample in samples} == {"length"}
    for sample in samples:
        check_logprobs(load_model(case.folder), request, sample)
    with pytest.raises(Reject, match="no room"):
        case.start().submit(replace(request, prompt_ids=np.full(128, 3, np.int32)))


def test_sampled_frequencies_match_the_probabilities(folders: dict[str, Path]) -> None:
    case = Case(TorchEngine, folders["text"], {}, np.array([3, 4, 5], np.int32), forbidden=(0, 2))
    request = case.request(seeds=range(4000), max_tokens=1, stop_ids=())
    counts = Counter(sample.ids[0] for sample in run(case.start(), request)["g"])
    logits_V = forward(load_model(case.folder), request, (3,))[0]
    logits_V[[0, 2]] = -torch.inf
    expected = (4000 * logits_V.softmax(-1)).tolist()
    assert counts[0] == counts[2] == 0
    # 16 possible tokens: chi-square with 15 degrees of freedom exceeds 37.7 once in a thousand seeds.
    assert sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected) if e > 0) < 37.7


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    # The published first outputs of splitmix64 from state 0 are e220a8397b1dcdaf, 6e789e6aa1b965f4; the top 53 bits.
    seed, position = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1])
    expected = [(0xE220A8397B1DCDAF >> 11) * 2.0**-53, (0x6E789E6AA1B965F4 >> 11) * 2.0**-53]
    assert uniform(seed, position).tolist() == expected
    large = uniform(torch.arange(2**62, 2**62 + 20000), torch.zeros(20000, dtype=torch.int64))
    assert 0 <= large.min() < 0.001 < 0.999 < large.max() < 1
    assert abs(float(large.mean()) - 0.5) < 0.01  # standard error 0.289 / sqrt(20000) = 0.002


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    # Probabilities 1/2, 1/4, 1/4 and a forbidden fourth: the cumulative sums are 0.5, 0.75, 1.
    logits_RV = torch.tensor([0.5, 0.25, 0.25, 0.9]).log().expand(6, 4)
    uniform_R = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2.0**-53], dtype=torch.float64)
    forbidden_RV = torch.tensor([[False, False, False, True]])
    token_R, logprob_R = draw(logits_RV, uniform_R, torch.ones(6), forbidden_RV)
    assert token_R.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.allclose(logprob_R.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


def test_a_refused_load_leaves_every_byte_of_the_weights(folders: dict[str, Path]) -> None:
    model = load_model(folders["text"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WireError, match=r"'model.norm.weight' is missing"):
        replace_weights(model, [t for t in weights(folders["text"], noise=1.0) if t.name != "model.norm.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_weights_may_come_under_either_name_and_must_agree_under_both(folders: dict[str, Path]) -> None:
    model, new = load_model(folders["text"]), weights(folders["text"], noise=1.0)
    embedding = next(t for t in new if t.name == "model.embed_tokens.weight")
    head = replace(embedding, name="lm_head.weight")
    replace_weights(model, [*(t for t in new if t is not embedding), head])
    assert torch.equal(model.get_input_embeddings().weight, to_torch(head))
    replace_weights(model, [*new, head])
    with pytest.raises(WireError, match="tied"):
        replace_weights(model, [*new, from_numpy("lm_head.weight", head.numpy() + 1)])


def test_weights_that_are_not_finite_end_the_worker_instead_of_drawing_tokens(folders: dict[str, Path]) -> None:
    case = Case(TorchEngine, folders["text"], {}, np.array([3], np.int32))
    engine = case.start()
    broken = [from_numpy(t.name, np.full_like(t.numpy(), np.nan)) for t in weights(case.folder)]
    engine.load(1, broken)
    with pytest.raises(WorkerError, match="version 1 are not finite"):
        run(engine, case.request())


@pytest.mark.parametrize("change", [-1, 1])
def test_placeholders_that_do_not_match_the_picture_are_refused_with_both_numbers(
    folders: dict[str, Path], change: int
) -> None:
    prompt_ids, tensors = image_prompt(folders["vision"])
    case = Case(TorchEngine, folders["vision"], {}, prompt_ids, tensors)
    (image,) = set(prompt_ids[2:6].tolist())
    found = 4 + change
    wrong = np.concatenate([prompt_ids[:2], np.full(found, image, np.int32), prompt_ids[6:]])
    kinds = from_numpy("mm_token_type_ids", (wrong == image).astype(np.int64)[None])
    parts = tuple(replace(part, tensor=kinds) if part.per_token else part for part in tensors)
    with pytest.raises(Reject, match=rf"{found} image placeholders in the prompt, 4 expected"):
        case.start().submit(replace(case.request(), prompt_ids=wrong, tensors=parts))
    with pytest.raises(Reject, match=r"4 image placeholders in the prompt, 0 expected"):
        case.start().submit(replace(case.request(), tensors=()))


def test_pictures_of_several_groups_go_through_one_prefill_each_to_its_own_prompt(folders: dict[str, Path]) -> None:
    model = load_model(folders["vision"])
    requests = []
    for i in range(3):
        case = Case(TorchEngine, folders["vision"], {}, *image_prompt(folders["vision"], shade=60 * i))
        requests.append(case.request(f"g{i}", seeds=(1, 2), rotate=i))
    text = Case(TorchEngine, folders["vision"], {}, np.array([7, 8, 9], np.int32)).request("text")
    for request, samples in zip([*requests, text], run(case.start(), *requests, text).values(), strict=True):
        for sample in samples:
            check_logprobs(model, request, sample)


def test_bfloat16_weights_travel_bit_for_bit(folders: dict[str, Path]) -> None:
    model = load_model(folders["text"], dtype="bfloat16")
    name, value = next(iter(model.state_dict().items()))
    named = to_named(name, value)
    assert (named.dtype, named.numpy().dtype, named.shape) == ("bfloat16", np.uint16, tuple(value.shape))
    assert torch.equal(to_torch(replace(named, data=bytes(named.data))), value)
    replace_weights(model, [to_named(n, v.clone()) for n, v in model.state_dict().items()])
    case = Case(TorchEngine, folders["text"], {"dtype": "bfloat16"}, np.array([3, 4], np.int32))
    assert len(run(case.start(), case.request())["g"]) == 3


def test_end_and_media_tokens_are_read_from_the_folder(folders: dict[str, Path]) -> None:
    assert stop_ids(folders["text"]) == stop_ids(folders["window"]) == (1,)
    assert media_token_ids(load_model(folders["text"]).config) == ()
    # pad, end, unknown, then vision start, vision end, image, video
    assert media_token_ids(load_model(folders["vision"]).config) == (3, 4, 5, 6)
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_model(folders["text"] / "nowhere")

import math
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Reject
from common.group import Group
from training_groups import IMAGE, VIDEO, VOCABULARY, image_group, make_group, random_groups, text_folder, vision_folder
from workers.models.batch import pad_rows, ragged_like_tokens, read_rows, split_rows, wanted
from workers.models.forward import Scorer, token_rules, token_scores
from workers.models.load import load_model, to_torch

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(text_folder(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(vision_folder(tmp_path_factory.mktemp("vision")))


def read(model: Any, *groups: Group) -> Any:
    return read_rows(groups, token_rules(model))


def scores(model: Any, groups: list[Group], chosen: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    scorer = Scorer(model)
    rows = read_rows(groups, scorer.rules)
    return scorer.score(rows, np.array(range(len(rows.group_S)) if chosen is None else chosen))


@torch.no_grad()
def alone(model: Any, prompt: list[int], response: list[int], temperature: float, **media: Any) -> tuple[Any, Any]:
    """One row in a plain forward pass, token by token, without padding: log-probs and entropies in float64."""
    ids = torch.tensor([prompt + response])
    if "mm_token_type_ids" in media:
        zeros = torch.zeros(1, len(response), dtype=torch.long)
        media["mm_token_type_ids"] = torch.cat([media["mm_token_type_ids"], zeros], 1)
    logits = model(input_ids=ids, use_cache=False, **media).logits[0].double()
    forbidden = token_rules(model).forbidden
    logprobs, entropies = [], []
    for j, token in enumerate(response):
        row = logits[len(prompt) - 1 + j] / (temperature or 1.0)
        kept = [i for i in range(VOCABULARY) if i not in forbidden]
        p = row[kept].softmax(-1)
        logprobs.append(float(p[kept.index(token)].log()))
        entropies.append(float(-(p * p.log()).sum()))
    return logprobs, entropies


def check_against_rows_alone(model: Any, groups: list[Group]) -> None:
    logprob_RT, entropy_RT = scores(model, groups)
    row = 0
    for group in groups:
        media = {t.tensor.name: to_torch(t.tensor) for t in read(model, group).tensors_G[0]}
        prompt = group.arrays("prompt_ids")[0].tolist()
        for response, temperature in zip(group.values("response_ids"), group.values("temperature"), strict=True):
            logprobs, entropies = alone(model, prompt, response, temperature, **media)
            n = len(response)
            assert logprob_RT[row, :n].tolist() == pytest.approx(logprobs, abs=1e-5)
            assert entropy_RT[row, :n].tolist() == pytest.approx(entropies, abs=1e-5)
            assert not logprob_RT[row, n:].any()
            row += 1


# Whole rows are fed where prompts are short, prompts once where that halves the tokens; at most one token per response
# leaves the second pass nothing to do.
@pytest.mark.parametrize(("samples", "longest"), [(2, 6), (16, 3), (16, 1)])
def test_rows_of_all_lengths_score_in_one_batch_as_they_do_alone(text: Any, samples: int, longest: int) -> None:
    check_against_rows_alone(text, random_groups(seed=1, count=3, samples=samples, longest=longest))


@pytest.mark.parametrize("repeats", [1, 6])
def test_pictures_of_different_prompts_score_in_one_padded_batch_as_they_do_alone(vision: Any, repeats: int) -> None:
    # Once: 4 rows of up to 19 + 3 tokens; six times: 24 rows, of which two prompts of up to 19 are a small part.
    check_against_rows_alone(
        vision, [image_group([[7, 8, 9], [10]] * repeats), two_pictures([[11, 1], [12, 13, 14, 15]] * repeats)]
    )


@pytest.mark.parametrize("repeats", [1, 6])
def test_text_rows_of_a_vision_model_score_as_they_do_alone(vision: Any, repeats: int) -> None:
    scores(vision, [image_group([[7, 8, 9], [10]])])  # leaves the model's own state of a picture behind
    check_against_rows_alone(vision, [make_group([7, 8, 9, 10], [[11, 12], [13]] * repeats)])


def two_pictures(responses: list[list[int]], **more: Any) -> Group:
    """4 x 4 patches make 4 placeholders, 4 x 8 make 8."""
    pixels = torch.randn(16 + 32, 96, generator=torch.Generator().manual_seed(5))
    prompt = [2, *[IMAGE] * 4, 3, 9, 2, *[IMAGE] * 8, 3, 7]
    types = torch.tensor([[int(i == IMAGE) for i in prompt]])
    tensors = [
        ("pixel_values", pixels, False),
        ("image_grid_thw", torch.tensor([[1, 4, 4], [1, 4, 8]]), False),
        ("mm_token_type_ids", types, True),
    ]
    return make_group(prompt, responses, name="two", **{"tensors": tensors, "runs": [(1, 4), (8, 8)], **more})


def test_a_picture_matters_to_the_rows_of_its_own_prompt_only(vision: Any) -> None:
    responses = [[7, 8], [9, 10]]
    first, _ = scores(vision, [image_group(responses, seed=1), image_group(responses, seed=2)])
    second, _ = scores(vision, [image_group(responses, seed=3), image_group(responses, seed=2)])
    assert (first[:2] - second[:2]).abs().min() > 1e-3
    assert torch.equal(first[2:], second[2:])


def test_rows_with_and_without_media_are_of_two_kinds(vision: Any) -> None:
    rows = read(vision, make_group([7, 8], [[9]], name="t"), image_group([[9], [10]]), make_group([8], [[9]], name="u"))
    assert rows.kind_S.tolist() == [0, 1, 1, 0]


def test_an_empty_list_of_pictures_is_a_text_row(vision: Any) -> None:
    empty = [
        ("pixel_values", torch.zeros(0, 96), False),
        ("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64), False),
    ]
    bare, listed = make_group([7, 8], [[9, 10]]), make_group([7, 8], [[9, 10]], tensors=empty)
    assert torch.equal(scores(vision, [bare])[0], scores(vision, [listed])[0])


def test_a_later_token_changes_no_earlier_score_and_no_neighbour(text: Any) -> None:
    base, _ = scores(text, [make_group([7, 8, 9], [[10, 11, 12], [13, 14]])])
    changed, _ = scores(text, [make_group([7, 8, 9], [[10, 11, 17], [13, 14]])])
    assert torch.equal(base[0, :2], changed[0, :2])
    assert torch.equal(base[1], changed[1])


def test_a_prompt_of_one_token_and_a_response_without_any_are_rows_too(text: Any) -> None:
    group = make_group([7], [[8], []])
    logprob_RT, _ = scores(text, [group])
    assert logprob_RT.shape == (2, 1)
    assert logprob_RT[0].tolist() == pytest.approx(alone(text, [7], [8], 1.0)[0], abs=1e-5)
    assert logprob_RT[1].tolist() == [0]


def test_padding_leaves_every_token_in_its_place(text: Any) -> None:
    # Fed: prompt + response without its last token: 7 8 | 9 10 and 6 | (nothing), in rows of 4. The first prompt ends
    # at flat place 1, so its three response tokens are read at 1, 2, 3; the second row begins, and its prompt ends,
    # at 4.
    rows = read(text, make_group([7, 8], [[9, 10, 11]], name="a"), make_group([6], [[17]], name="b", temperature=0.5))
    padded = pad_rows(rows, np.array([0, 1]), pad=0)
    assert padded.ids_RL.tolist() == [[7, 8, 9, 10], [6, 0, 0, 0]]
    assert padded.present_RL.tolist() == [[True] * 4, [True, False, False, False]]
    assert padded.position_N.tolist() == [1, 2, 3, 4]
    want = wanted(rows, np.array([0, 1]))
    assert want.inside_RT.tolist() == [[True, True, True], [True, False, False]]
    assert want.target_N.tolist() == [9, 10, 11, 17]
    assert want.temperature_N.tolist() == [1, 1, 1, 0.5]


def test_prompts_that_rows_share_are_fed_once(text: Any) -> None:
    # Prompts 7 8 and 6 in rows of 2 end at flat places 1 and 2, where all first tokens are read; the responses follow
    # in rows of 2 from place 4 on. Nothing is read at 13, the last token of a response that is not the longest.
    rows = read(text, make_group([7, 8], [[9, 10, 11], [12, 13]]), make_group([6], [[14], [15, 16, 17]]))
    split = split_rows(rows, np.array([0, 1, 3]), pad=0)
    assert split.prompt_ids_UP.tolist() == [[7, 8], [6, 0]]
    assert split.prompt_present_UP.tolist() == [[True, True], [True, False]]
    assert split.prompt_R.tolist() == [0, 0, 1]
    assert split.response_ids_RT1.tolist() == [[9, 10], [12, 13], [15, 16]]
    assert split.position_N.tolist() == [1, 4, 5, 1, 6, 2, 8, 9]


# Scores of given logits


def test_forbidden_ids_have_no_share_in_probability_or_entropy() -> None:
    # logits 0, ln 3 and a forbidden 50: probabilities 1/4 and 3/4; entropy ln 4 - 3/4 ln 3
    logits = torch.tensor([[0.0, 50.0, math.log(3)]], requires_grad=True)
    logprob, entropy = token_scores(logits, torch.tensor([2]), torch.tensor([1.0]), (1,))
    (logprob + entropy).backward()
    assert logprob.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert logits.grad is not None
    assert logits.grad[0, 1].item() == 0
    assert logits.grad.isfinite().all()


def test_a_temperature_divides_the_logits_and_zero_leaves_them_alone() -> None:
    # logits 0, ln 2: at 1 (and 0) p = 1/3, 2/3; at 0.5 the logits double: 1/5, 4/5
    logits = torch.tensor([[0.0, math.log(2)]]).expand(3, 2)
    logprob, _ = token_scores(logits, torch.tensor([1, 1, 1]), torch.tensor([1.0, 0.0, 0.5]), ())
    assert logprob.tolist() == pytest.approx([math.log(2 / 3), math.log(2 / 3), math.log(0.8)])


def test_gradients_of_log_prob_and_entropy_are_those_of_finite_differences() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)

    def function(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_scores(logits_NV, torch.tensor([0, 3, 5, 6]), temperature, (1, 2))

    assert torch.autograd.gradcheck(function, (logits,))


def test_nan_logits_of_a_token_that_does_not_count_pass_no_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, math.nan]], requires_grad=True)
    logprob, entropy = token_scores(logits, torch.tensor([1, 1]), torch.ones(2), ())
    (logprob + entropy).where(torch.tensor([True, False]), 0.0).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0].any()


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    logprob, _ = token_scores(logits, torch.tensor([2]), torch.ones(1), ())
    # 2 - ln(1 + e + e^2) = -0.40761
    assert logprob.dtype == torch.float32
    assert logprob.item() == pytest.approx(2 - math.log(1 + math.e + math.e**2), abs=1e-6)
    logprob.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


# What is refused


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (make_group([7, VOCABULARY], [[8]], name="x"), ["group x", "prompt token 1 is 18", "vocabulary 18"]),
        (make_group([7, -1], [[8]], name="x"), ["group x", "prompt token 1 is -1"]),
        (make_group([7], [[8], [9, 151655]], name="x"), ["group x, sample 1", "response token 1 is 151655"]),
        (make_group([7], [[8], [], [-5]], name="x"), ["group x, sample 2", "response token 0 is -5"]),
        (make_group([7], [[8, IMAGE]], name="x"), ["group x, sample 0", "response token 1 is 4", "media token"]),
        (make_group([], [[8]], name="x"), ["group x", "no token"]),
        (make_group([7], [[8]], name="x", temperature=-1.0), ["group x, sample 0", "temperature -1"]),
        (make_group([7], [[8]], name="x", temperature=math.nan), ["group x, sample 0", "temperature nan"]),
        (make_group([7], [[8]], name="x", runs=[(0, 2)]), ["group x", "0+2", "prompt of 1"]),
        (
            make_group([7], [[8]], name="x", tensors=[("mm_token_type_ids", torch.zeros(1, 3), True)]),
            ["group x", "mm_token_type_ids", "(1, 3)", "prompt of 1"],
        ),
    ],
)
def test_a_malformed_group_is_refused_with_its_numbers(vision: Any, group: Group, words: list[str]) -> None:
    with pytest.raises(Reject) as refusal:
        read(vision, make_group([7], [[8]], name="fine"), group)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("found", [3, 5, 15])
def test_placeholders_that_do_not_match_the_grid_are_refused_with_both_numbers(vision: Any, found: int) -> None:
    pixels, grid = torch.zeros(16, 96), torch.tensor([[1, 4, 4]])
    group = make_group(
        [2, *[IMAGE] * found, 3],
        [[8]],
        runs=[(1, found)],
        tensors=[("pixel_values", pixels, False), ("image_grid_thw", grid, False)],
    )
    with pytest.raises(Reject, match=rf"{found} image placeholder tokens, the grids ask for 4"):
        read(vision, group)


def test_a_video_is_counted_over_its_frames(vision: Any) -> None:
    # grid 2 x 4 x 4 = 32 patches, 32 / 2² = 8 placeholders
    def clip(found: int) -> Group:
        tensors = [
            ("pixel_values_videos", torch.zeros(32, 96), False),
            ("video_grid_thw", torch.tensor([[2, 4, 4]]), False),
        ]
        return make_group([2, *[VIDEO] * found, 3], [[8]], runs=[(1, found)], tensors=tensors)

    assert read(vision, clip(8)).kind_S.tolist() == [0]
    with pytest.raises(Reject, match="7 video placeholder tokens, the grids ask for 8"):
        read(vision, clip(7))


def test_placeholders_without_pixels_are_refused_before_the_forward_pass(vision: Any) -> None:
    with pytest.raises(Reject, match="4 image placeholder tokens but no pixel_values"):
        read(vision, image_group([[8]], tensors=[]))
    grid = [("image_grid_thw", torch.tensor([[1, 4, 4]]), False)]
    with pytest.raises(Reject, match="4 image placeholder tokens but no pixel_values"):
        read(vision, image_group([[8]], tensors=grid))


def test_pixels_without_placeholders_or_of_another_size_are_refused(vision: Any) -> None:
    tensors = [("pixel_values", torch.zeros(12, 96), False), ("image_grid_thw", torch.tensor([[1, 4, 4]]), False)]
    with pytest.raises(Reject, match="0 image placeholder tokens, the grids ask for 4"):
        read(vision, make_group([7], [[8]], tensors=tensors))
    with pytest.raises(Reject, match="12 rows of pixel_values, the grids ask for 16"):
        read(vision, image_group([[8]], tensors=tensors))


def test_placeholders_outside_the_announced_runs_are_refused(vision: Any) -> None:
    with pytest.raises(Reject, match="2 placeholder tokens lie outside the 1 media runs, the first at 3"):
        read(vision, image_group([[8]], runs=[(1, 2)]))


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_columns_of_unequal_length_are_refused_with_both_lengths(name: str) -> None:
    short: dict[str, Any] = {name: [[0.0], [0.0, 0.0]]}
    with pytest.raises(Reject, match=rf"group x, sample 1: 2 values of '{name}' for 3 response tokens"):
        ragged_like_tokens([make_group([7], [[8]]), make_group([7], [[8], [9, 10, 11]], name="x", **short)], name)


def test_a_missing_section_is_refused_by_column_and_group(text: Any) -> None:
    group = make_group([7], [[8]], name="x")
    del group.sections["tensors"]
    with pytest.raises(Reject, match="group x: column 'tensor_name' needs section 'tensors'"):
        read(text, group)

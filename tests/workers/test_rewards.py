"""Rewards: each score is worked out by hand in the comment beside it."""

import pytest
from pydantic import ValidationError

from workers.registry import find, known, options
from workers.reward.reward import Response
from workers.reward.rewards.exact import Exact
from workers.reward.rewards.math import Math

pytestmark = pytest.mark.unit


def exact(text: str, label: str, reason: str = "stop", **options: object) -> float:
    reward = Exact(Exact.Options.model_validate(options))
    return reward.score(Response(text, reason, label, "", "[]"))


@pytest.mark.contract
@pytest.mark.parametrize("name", known("reward"))
def test_every_registered_reward_is_found_with_options_that_have_defaults(name: str) -> None:
    assert options("reward", name).model_validate({}) is not None
    assert callable(find("reward", name).score)


def test_exact_is_one_or_zero_unless_shares_are_given() -> None:
    assert exact("7", "7") == 1.0
    assert exact("8", "7") == 0.0
    assert exact("", "7") == 0.0
    assert exact("", "") == 1.0


def test_a_response_that_was_cut_off_is_exact_only_when_a_stop_is_not_required() -> None:
    assert exact("7", "7", "length") == 0.0
    assert exact("7", "7", "length", require_stop=False) == 1.0


def test_white_space_counts_only_when_it_is_not_stripped() -> None:
    assert exact(" 7\n", "7 ") == 1.0
    assert exact(" 7", "7", strip=False) == 0.0


@pytest.mark.parametrize(
    ("text", "reason", "score"),
    [
        ("321", "stop", 1.0),
        ("321", "length", 0.5),  # 3 of 3 characters, no end: 0.5 x 3/3
        ("321+", "stop", 0.5),  # the same, with one character too many
        ("325", "stop", 1 / 3),  # 2 of 3: 0.5 x 2/3
        ("3", "stop", 1 / 6),  # 1 of 3: 0.5 x 1/3
        ("132", "stop", 0.0),  # right characters in wrong places
        ("", "stop", 0.0),
    ],
)
def test_right_characters_in_place_earn_their_share(text: str, reason: str, score: float) -> None:
    assert exact(text, "321", reason, character_share=0.5) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "reason", "score"),
    [
        ("4", "stop", 1.0),
        ("5", "stop", 0.1),  # a digit 0.05 + an end 0.05
        ("L", "stop", 0.05),  # an end only
        ("55", "length", 0.05),  # a digit only
        ("L5", "length", 0.0),
        ("4", "length", 0.05),
        ("", "stop", 0.0),  # an end mark at once is no answer
    ],
)
def test_a_well_formed_answer_earns_credit_for_its_form_and_for_its_end(text: str, reason: str, score: float) -> None:
    assert exact(text, "4", reason, form="[0-9]", form_share=0.05, stop_share=0.05) == pytest.approx(score)


def test_shares_that_could_beat_an_exact_answer_and_a_broken_pattern_are_refused() -> None:
    with pytest.raises(ValidationError, match="more than an exact answer's 1"):
        Exact.Options(character_share=0.6, form_share=0.5)
    with pytest.raises(ValidationError, match="not a regular expression"):
        Exact.Options(form="[0-9")
    with pytest.raises(ValidationError, match="charater_share"):
        Exact.Options.model_validate({"charater_share": 0.1})


@pytest.fixture(scope="module")
def math() -> Math:
    pytest.importorskip("math_verify")
    return Math(Math.Options())


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [
        ("The answer is $0.5$.", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{42}", "42", 1.0),
        (r"\boxed{41}", "42", 0.0),
        ("first 41, then 42", "42", 1.0),  # the last number of a plain text
        ("<answer>3</answer>", "3", 1.0),  # the package reads nothing between tags
        ("<answer>4</answer> no: <answer>3</answer> 17", "3", 1.0),
        ("<answer>3", "3", 1.0),
        (r"$\{1, 2\}$", r"$\{2, 1\}$", 1.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math_compares_values_and_not_strings(math: Math, text: str, label: str, score: float) -> None:
    assert math.score(Response(text, "stop", label, "", "[]")) == score


def test_a_label_that_is_no_expression_is_an_error_and_not_a_wrong_answer(math: Math) -> None:
    with pytest.raises(ValueError, match="label 'nothing to compare'"):
        math.score(Response("3", "stop", "nothing to compare", "", "[]"))

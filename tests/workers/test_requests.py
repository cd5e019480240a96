"""What a prompt's `sampling` makes of a request."""

import json
from typing import Any

import pytest

from brokers.client import Leased
from common.errors import Reject
from common.group import Group, GroupKey, concatenate
from common.section import encode
from common.settings import Config
from workers.rollout.engine import Request
from workers.rollout.requests import request_of

pytestmark = pytest.mark.unit

END, MARK = 1, 7


def requested(sampling: dict[str, Any]) -> Request:
    """The run's own settings: temperature 1, 256 tokens, 3 samples."""
    config = Config.model_validate(
        {"name": "run", "groups_per_step": 4, "group_size": 3, "model": {"path": "x"}, "data": {"name": "mod10"}}
    )
    prompt = {name: [""] for name in ("prompt_id", "messages", "label", "source", "reward_kind")}
    inputs = {
        "prompt_ids": concatenate([[3, 4]], "int32"),
        "placeholder_start": concatenate([[]], "int32"),
        "placeholder_length": concatenate([[]], "int32"),
    }
    sections = [
        encode("prompt", {**prompt, "sampling": [json.dumps(sampling)], "evaluation_size": [0]}),
        encode("inputs", inputs),
    ]
    group = Group(GroupKey("g", 5), 1, {section.name: section for section in sections})
    return request_of(Leased(1, group), config, (END,), (MARK,))


def test_a_prompt_without_settings_gets_those_of_the_run() -> None:
    request = requested({})
    sampling = request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_ids) == (1.0, 256, (END,))
    assert sampling.forbidden_ids == (MARK,)
    assert len(set(request.seeds)) == 3


def test_a_prompt_sets_temperature_samples_and_one_limit_for_each_of_them() -> None:
    request = requested({"temperature": 0, "num_samples": 2, "max_tokens": [5, 9]})
    assert (request.sampling.temperature, len(request.seeds)) == (0.0, 2)
    assert request.sampling.limits(2) == (5, 9)
    assert requested({"max_tokens": 4}).sampling.limits(3) == (4, 4, 4)


def test_ignored_end_marks_end_nothing_and_are_not_forbidden() -> None:
    sampling = requested({"ignore_stop": True}).sampling
    assert (sampling.stop_ids, sampling.forbidden_ids) == ((), (MARK,))


@pytest.mark.parametrize(
    ("sampling", "flaw"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": [5, 0, 5]}, "max_tokens"),
        ({"max_tokens": [5, 5]}, "max_tokens for 2 samples, but there are 3"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_settings_that_are_unknown_or_do_not_fit_are_refused(sampling: dict[str, Any], flaw: str) -> None:
    with pytest.raises(Reject, match=flaw):
        requested(sampling)

"""Acceptance scenarios that cross more than one worker; each docstring names its id."""

import ast
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.columns import COLUMNS
from common.errors import Reject
from common.group import Group, GroupKey, concatenate
from common.section import encode
from common.settings import Component, Rewards
from passing import Told, passed, prompted, sampled, step
from pipeline_parts import END, NOWHERE, config
from training_groups import make_group, text_folder
from workers.advantage.stage import AdvantageStage
from workers.algorithms.grpo import Grpo
from workers.models.tiny import CHARACTERS, write_tiny_text
from workers.prompt.encode import PromptEncoder
from workers.prompt.source import Row
from workers.reference.stage import ReferenceStage
from workers.reward.stage import RewardStage
from workers.rollout.engine import Completion
from workers.rollout.engines.fake import FakeEngine
from workers.rollout.requests import request_of
from workers.trainer.backends.torch import TorchBackend
from workers.trainer.torch_backend import Training

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("status", ["failed", "timeout", "aborted"])
def test_d5_d6_a_sample_without_a_score_has_no_gradient_and_no_part_in_the_baseline(text: Path, status: str) -> None:
    """D5, D6. Rewards 1, 0, FAILED, 1: mean 2/3 over three rows; the step is that of a group without the fourth."""
    responses, advantage = ([6, 7], [8], [9, 10, 11], [12, END]), AdvantageStage(config())
    told = Told([1, 0, 0, 1], ["ok", "ok", status, "ok"])
    group = passed(prompted(), sampled(*responses), reward=told, advantage=advantage)
    # Population deviation of 1, 0, 1: sqrt(2/9); (1 - 2/3) / sqrt(2/9) = sqrt(1/2), (0 - 2/3) / sqrt(2/9) = -sqrt(2).
    firsts = [values[0] for values in group.arrays("advantages")]
    assert firsts == pytest.approx([math.sqrt(0.5), -math.sqrt(2), 0, math.sqrt(0.5)], rel=1e-6)
    assert group.values("loss_weight") == [1, 1, 0, 1]
    three = passed(
        prompted(), sampled(*responses[:2], responses[3]), reward=Told([1, 0, 1], ["ok"] * 3), advantage=advantage
    )
    gradient, metrics = step(text, [group], entropy=0.1)
    without, others = step(text, [three], entropy=0.1)
    assert metrics["tokens"] == others["tokens"] == 5
    assert (gradient - without).abs().max() < 1e-7
    assert dict(metrics) == pytest.approx(dict(others), abs=1e-6)


def test_d12_seeds_are_those_of_run_prompt_sample_and_attempt_and_of_nothing_else() -> None:
    """D12. Distinct over all four and over purposes; equal after a restart, whichever worker asks."""
    seen: dict[int, tuple[Any, ...]] = {}
    for run in (0, 1):
        for purpose in ("train", "eval"):
            for seq in (0, 1, 10):
                for attempt in (1, 2):
                    leased = prompted(seq, attempt=attempt, purpose=purpose)
                    seeds = request_of(leased, config(seed=run, group_size=4), (END,), ()).seeds
                    again = request_of(
                        prompted(seq, attempt=attempt, purpose=purpose), config(seed=run), (), (5,)
                    ).seeds
                    assert seeds[:2] == again  # another worker, another group size, the same samples
                    for sample, seed in enumerate(seeds):
                        assert 0 <= seed < 2**63
                        assert seen.setdefault(seed, (run, purpose, seq, attempt, sample)) == (
                            run,
                            purpose,
                            seq,
                            attempt,
                            sample,
                        )
    assert len(seen) == 2 * 2 * 3 * 2 * 4


def test_d13_what_the_reward_of_one_sample_changes_no_other_sample_sees() -> None:
    """D13. Mutable copies are the sample's own, and the shared fields cannot be written."""
    group = passed(prompted(), sampled([6], [7], [8], [9]))
    texts = ["read", "write", "read", "read"]
    response = {"text": texts, "finish_reason": ["stop"] * 4, "num_tokens": [1] * 4}
    group.sections["response"] = encode("response", response)
    group = Group(group.key, 1, group.sections)
    stage = RewardStage(Component(name="meddling:Meddler"), Rewards(processes=1, timeout_seconds=10))
    try:
        (section,) = stage.handle([group])
    finally:
        stage.close()
    group.sections["reward"] = section
    assert group.values("reward_status") == ["ok", "failed", "ok", "ok"]
    assert [r for r, s in zip(group.values("reward"), group.values("reward_status"), strict=True) if s == "ok"] == [
        1.0
    ] * 3


def test_d15_nothing_of_ours_is_done_in_a_finalizer() -> None:
    """D15. Closing is explicit: a client whose last reference goes does nothing that could block an event loop."""
    for path in [p for layer in ("common", "brokers", "workers", "launch") for p in (ROOT / layer).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.FunctionDef) and node.name == "__del__"), path
            assert not (isinstance(node, ast.Attribute) and node.attr == "finalize"), path


def test_b14_f20_a_group_that_was_aborted_before_its_first_token_passes_every_stage(text: Path) -> None:
    """B14, F20. 0 tokens in every column, a version in its span, weight 0; the step is that of the rest."""
    empty, reference = sampled((), (), reason="abort"), ReferenceStage(config(backend={"name": "torch"}), text)
    rewards = RewardStage(Component(name="exact"), Rewards(processes=1))
    stages = {"reward": rewards, "reference": reference, "advantage": AdvantageStage(config())}
    try:
        group = passed(prompted(), empty, **stages)
    finally:
        rewards.close()
    assert group.values("reward_status") == ["aborted"] * 2
    for name in ("response_ids", "logprobs", "ref_logprobs", "advantages"):
        assert [len(values) for values in group.arrays(name)] == [0, 0]
    assert group.values("span_version") == [[0], [0]]
    other = make_group(
        [7], [[8, 9], [10]], name="other", advantages=[[1.0, 1.0], [-1.0]], reference=[[-1.0, -1.0], [-1.0]]
    )
    gradient, metrics = step(text, [group, other], kl=0.1)
    alone, others = step(text, [other], kl=0.1)
    assert torch.equal(gradient, alone)
    assert dict(metrics) == dict(others)
    assert all(math.isfinite(value) for value in step(text, [group], kl=0.1)[1].values())


def test_g1_the_sampled_ids_are_trained_and_not_what_their_text_would_be_encoded_as(text: Path) -> None:
    """G1. Both responses print "ab"; one was sampled as two tokens, the other as one."""
    group = passed(
        prompted(), sampled([6, 7], [8]), reward=Told([1, 0], ["ok"] * 2), advantage=AdvantageStage(config())
    )
    assert group.values("text") == ["ab", "ab"]
    assert group.values("response_ids") == [[6, 7], [8]]
    _, metrics = step(text, [group])
    assert metrics["tokens"] == 3
    (scored,) = TorchBackend(TorchBackend.Options(), text, False).logprobs([group])
    assert [len(row) for row in scored] == [2, 1]


def test_g4_a_sample_that_was_aborted_and_resumed_is_as_long_in_every_column() -> None:
    """G4. 5 tokens under version 0 and 7 more under version 1 are 12 everywhere, with the boundary at 5."""
    engine = FakeEngine(FakeEngine.Options(vocabulary=18, tokens_per_step=1), NOWHERE, False)
    settings = config(sampling={"max_tokens": 12}, algorithm={"name": "grpo", "kl": 0.1})
    leased = prompted()
    request = request_of(leased, settings, (END,), ())
    engine.submit(request)
    for _ in range(5):
        engine.step(0.0)
    (part,) = engine.abort([request.group])
    assert [(len(sample.ids), sample.finish_reason) for sample in part.samples] == [(5, "abort")] * 2
    engine.load(1, [])
    engine.submit(replace(request, begun=tuple(part.samples)))
    done: list[Completion] = []
    while not done:
        done = engine.step(0.0)
    told = Told([1, 0], ["ok"] * 2)
    stages = {"reward": told, "reference": ReferenceStage(settings, NOWHERE), "advantage": AdvantageStage(settings)}
    group = passed(leased, done[0], **stages)
    for name in ("response_ids", "logprobs", "ref_logprobs", "advantages"):
        assert [len(values) for values in group.arrays(name)] == [12, 12], name
    assert group.values("num_tokens") == [12, 12]
    assert group.values("span_start") == [[0, 5]] * 2
    assert group.values("span_version") == [[0, 1]] * 2
    assert all(
        ids[:5] == list(sample.ids) for ids, sample in zip(group.values("response_ids"), part.samples, strict=True)
    )


def test_g6_eight_threads_with_an_encoder_each_encode_as_one_thread_does(tmp_path: Path) -> None:
    """G6. 1,000 texts; no "Already borrowed", and the ids of the serial result."""
    write_tiny_text(tmp_path, hidden=32)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list(CHARACTERS), rng.integers(1, 30))) for _ in range(1000)]

    def encoded(part: Sequence[str]) -> list[bytes]:
        encoder = PromptEncoder(tmp_path)
        rows = [Row(text, ({"role": "user", "content": text},), "") for text in part]
        return [bytes(encoder.encode(row, {}, 0)[1].data) for row in rows]

    with ThreadPoolExecutor(8) as pool:
        parallel = [data for part in pool.map(encoded, [texts[i::8] for i in range(8)]) for data in part]
    assert parallel == encoded([text for i in range(8) for text in texts[i::8]])


@pytest.mark.parametrize("token", [151655, 2**31 - 1, 0])
def test_g7_a_large_token_id_survives_every_hop(token: int) -> None:
    """G7. As uint16, 151655 would be 20583."""
    group = passed(prompted(), sampled([token, 20583]))
    assert group.values("response_ids") == [[token, 20583]]
    ids: Any = concatenate([[token]], "int32")
    section = encode("inputs", {"prompt_ids": ids, "placeholder_start": ids, "placeholder_length": ids})
    again = Group(GroupKey("g", 0), 1, {"inputs": section})
    assert again.arrays("prompt_ids")[0].tolist() == [token]


def test_g7_a_token_outside_the_vocabulary_is_refused_by_the_trainer_with_its_id(text: Path) -> None:
    """G7. Before anything is added, and never replaced."""
    group = passed(
        prompted(), sampled([6, 151655], [7]), reward=Told([1, 0], ["ok"] * 2), advantage=AdvantageStage(config())
    )
    with pytest.raises(Reject, match="response token 1 is 151655, outside the vocabulary of 18"):
        step(text, [group])


@pytest.mark.parametrize(
    ("section", "column"), [("tokens", "response_ids"), ("advantage", "advantages"), ("reference", "ref_logprobs")]
)
def test_f14_a_missing_section_is_named_and_an_earlier_value_is_never_used(
    text: Path, section: str, column: str
) -> None:
    """F14. The same backend has seen the section in the step before."""
    training = Training(TorchBackend.Options(), text, False)
    training.prepare_training(Grpo(Grpo.Options(kl=0.1)), None)
    good = make_group([7], [[8]], reference=[[-1.0]])
    training.accumulate([good])
    training.update()
    bad = make_group([7], [[8]], name="x", reference=[[-1.0]])
    del bad.sections[section]
    with pytest.raises(Reject, match=f"group x: column '{column}' needs section '{section}'"):
        training.accumulate([bad])
    assert training.update()["tokens"] == 0


def test_f1_what_a_step_reports_survives_extreme_log_probs(text: Path) -> None:
    """F1. Behaviour -90 where the weight is 0, and where it is not: loss, gradient and metrics are finite."""
    for weights in ([0.0, 1.0], [1.0, 1.0]):
        group = make_group([7], [[8], [9]], logprobs=[[-90.0], [-1.0]], advantages=[[1.0], [-1.0]], weights=weights)
        gradient, metrics = step(text, [group])
        assert gradient.isfinite().all()
        assert all(math.isfinite(value) for value in metrics.values())


def test_every_column_says_what_it_means_and_none_has_narrow_offsets() -> None:
    """A17, for all columns: no list, string or bytes with 32-bit offsets."""
    for column in COLUMNS.values():
        assert column.meaning
        assert str(column.type).split("<", maxsplit=1)[0] not in {"list", "string", "binary"}, column.name

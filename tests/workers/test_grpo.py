import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Reject
from common.group import Group, GroupKey
from common.section import encode
from workers.algorithms.grpo import Grpo
from workers.trainer.algorithm import TokenBatch, TokenLoss

pytestmark = pytest.mark.unit


def scored(
    rewards: Sequence[float], statuses: Sequence[str] | None = None, num_tokens: Sequence[int] | None = None
) -> Group:
    count = len(rewards)
    sections = [
        encode("reward", {"reward": list(rewards), "reward_status": list(statuses or ["ok"] * count)}),
        encode(
            "response",
            {
                "text": [""] * count,
                "finish_reason": ["stop"] * count,
                "num_tokens": list(num_tokens or [2] * count),
            },
        ),
    ]
    return Group(GroupKey("g", 0), sections={s.name: s for s in sections})


def advantage(group: Group, **options: Any) -> tuple[list[list[float]], list[float]]:
    (section,) = Grpo(Grpo.Options(**options)).advantage([group])
    result = Group(group.key, sections={"advantage": section})
    return result.values("advantages"), result.values("loss_weight")


def token_batch(
    current: Any, behaviour: Any, advantages: Any, mask: Any = None, entropy: Any = None, reference: Any = None
) -> TokenBatch:
    current_RT = torch.tensor(current).requires_grad_()
    return TokenBatch(
        current_RT=current_RT,
        entropy_RT=torch.tensor(entropy).requires_grad_() if entropy is not None else torch.zeros_like(current_RT),
        behaviour_RT=torch.tensor(behaviour),
        advantage_RT=torch.tensor(advantages),
        mask_RT=torch.ones(current_RT.shape, dtype=torch.bool) if mask is None else torch.tensor(mask),
        reference_RT=None if reference is None else torch.tensor(reference),
    )


def loss(batch: TokenBatch, **options: Any) -> TokenLoss:
    return Grpo(Grpo.Options(**options)).loss(batch)


# Advantages


def test_advantages_are_rewards_minus_the_mean_over_the_population_deviation() -> None:
    # 1, 0, 0, 1, 0: mean 0.4, variance (2 * 0.36 + 3 * 0.16) / 5 = 0.24; 0.6 / sqrt(0.24), -0.4 / sqrt(0.24)
    values, weights = advantage(scored([1, 0, 0, 1, 0], num_tokens=[1, 2, 3, 1, 1]))
    high, low = 0.6 / math.sqrt(0.24), -0.4 / math.sqrt(0.24)
    assert [len(v) for v in values] == [1, 2, 3, 1, 1]
    assert np.concatenate(values) == pytest.approx([high, low, low, low, low, low, high, low], rel=1e-6)
    assert weights == [1, 1, 1, 1, 1]


def test_a_sample_that_failed_leaves_the_statistics() -> None:
    # 1, 0, 1 remain: mean 2/3, variance (2 * 1/9 + 4/9) / 3 = 2/9;
    # 1/3 / sqrt(2/9) = sqrt(1/2), -2/3 / sqrt(2/9) = -sqrt(2)
    values, weights = advantage(scored([1, 0, 9.0, 1], ["ok", "ok", "failed", "ok"]))
    assert [v[0] for v in values] == pytest.approx([math.sqrt(0.5), -math.sqrt(2), 0, math.sqrt(0.5)], rel=1e-6)
    assert weights == [1, 1, 0, 1]
    centred, _ = advantage(scored([1, 0, 9.0, 1], ["ok", "ok", "failed", "ok"]), normalize_std=False)
    assert [v[0] for v in centred] == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3])


@pytest.mark.parametrize("status", ["failed", "timeout", "aborted"])
def test_a_group_without_any_score_has_no_weight(status: str) -> None:
    values, weights = advantage(scored([1, 0], [status] * 2))
    assert (values, weights) == ([[0, 0], [0, 0]], [0, 0])


def test_a_reward_of_a_failed_sample_may_be_nan_but_not_one_that_is_ok() -> None:
    values, _ = advantage(scored([math.nan, 1, 1], ["timeout", "ok", "ok"]))
    assert values == [[0, 0], [0, 0], [0, 0]]
    with pytest.raises(Reject, match=r"group g, sample 1: reward nan"):
        advantage(scored([1, math.nan, 1]))


@pytest.mark.parametrize(("value", "count"), [(0.1, 7), (0.3, 6), (0.7, 7), (1 / 3, 7), (-1e30, 5), (1.0, 1)])
def test_equal_rewards_give_exactly_zero(value: float, count: int) -> None:
    values, weights = advantage(scored([value] * count))
    assert values == [[0.0, 0.0]] * count
    assert weights == [1] * count


def test_spread_below_the_floor_is_not_blown_up() -> None:
    # mean 0.5 + 1e-5, deviation 1e-5 < 1e-4: advantages are the differences themselves
    values, _ = advantage(scored([0.5, 0.5 + 2e-5]))
    assert [v[0] for v in values] == pytest.approx([-1e-5, 1e-5], rel=0.01)
    normalized, _ = advantage(scored([0.5, 0.5 + 2e-5]), std_floor=1e-6)
    assert [v[0] for v in normalized] == pytest.approx([-1, 1], rel=1e-6)


@pytest.mark.parametrize("rewards", [[1.0] + [0.0] * 7, [0.0] + [0.95] * 7, [1.0] + [0.0] * 63])
def test_one_sample_apart_from_the_rest_stays_bounded(rewards: list[float]) -> None:
    # population deviation: |A| <= sqrt(n - 1), and reached by the one that differs: sqrt(7) = 2.65, sqrt(63) = 7.94
    values, _ = advantage(scored(rewards))
    assert max(abs(v[0]) for v in values) == pytest.approx(math.sqrt(len(rewards) - 1), rel=1e-6)


def test_a_response_without_a_token_has_no_part_in_anything() -> None:
    # 1 and 0 remain: mean 0.5, deviation 0.5
    values, weights = advantage(scored([1, 5, 0], num_tokens=[1, 0, 2]))
    assert values == [[1], [], [-1, -1]]
    assert weights == [1, 0, 1]


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans(), st.integers(0, 3)), min_size=1, max_size=24),
)
def test_advantages_agree_with_a_float64_oracle(rows: list[tuple[float, bool, int]]) -> None:
    rewards, ok, tokens = ([row[i] for row in rows] for i in range(3))
    values, weights = advantage(scored(rewards, ["ok" if good else "failed" for good in ok], tokens))
    counts = np.array(ok) & (np.array(tokens) > 0)
    expected = np.zeros(len(rows))
    if counts.any():
        kept = np.array(rewards, np.float64)[counts]
        expected[counts] = kept - np.mean(kept)
        if np.std(kept) >= 1e-4:
            expected[counts] /= np.std(kept)
    assert weights == counts.astype(float).tolist()
    assert [len(v) for v in values] == tokens
    for row, value in zip(values, expected, strict=True):
        assert row == pytest.approx([value] * len(row), rel=1e-5, abs=1e-6)


# Loss


def test_the_objective_is_clipped_above_for_gains_and_below_for_losses() -> None:
    # bounds 0.8 and 1.28. ratio 1.5: A=1 -> min(1.5, 1.28) = 1.28; A=-1 -> min(-1.5, -1.28) = -1.5.
    # ratio 0.5: A=1 -> min(0.5, 0.8) = 0.5; A=-1 -> min(-0.5, -0.8) = -0.8. ratio 1.25 is inside: A=2 -> 2.5
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.25], [1.0, -1.0, 1.0, -1.0, 2.0]
    batch = token_batch([[math.log(r) for r in ratios]], [[0.0] * 5], [advantages])
    result = loss(batch)
    result.loss_RT.sum().backward()
    assert result.loss_RT[0].tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.5])
    # d/d current of -ratio A is -ratio A where unbounded, 0 where the bound is active
    assert batch.current_RT.grad is not None
    assert batch.current_RT.grad[0].tolist() == pytest.approx([0, 1.5, -0.5, 0, -2.5])
    assert result.metrics["clip_fraction"][0].tolist() == [1, 0, 0, 1, 0]
    assert result.metrics["ratio"][0].tolist() == pytest.approx(ratios)
    # k3 of behaviour against current: r - 1 - ln r; 0.5 - ln 1.5 = 0.0945, ln 2 - 0.5 = 0.1931
    assert result.metrics["kl"][0, [0, 2]].tolist() == pytest.approx([0.5 - math.log(1.5), math.log(2) - 0.5])


def test_the_clip_fraction_is_counted_before_clipping() -> None:
    result = loss(token_batch([[math.log(1.5)]], [[0.0]], [[1.0]]), clip_low=0.2, clip_high=0.2)
    assert result.metrics["clip_fraction"].item() == 1.0


@pytest.mark.parametrize("current", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("behaviour", [-90.0, math.nan, -math.inf])
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(current: float, behaviour: float) -> None:
    batch = token_batch(
        [[-1.0, current]],
        [[-1.0, behaviour]],
        [[2.0, math.nan]],
        mask=[[True, False]],
        entropy=[[0.5, current]],
        reference=[[-1.0, behaviour]],
    )
    result = loss(batch, entropy=0.1, kl=0.3)
    result.loss_RT.sum().backward()
    # ratio 1: -2; entropy -0.1 * 0.5; KL 0
    assert result.loss_RT[0].tolist() == pytest.approx([-2.05, 0])
    assert batch.current_RT.grad is not None
    assert batch.entropy_RT.grad is not None
    assert batch.current_RT.grad[0].tolist() == [-2.0, 0.0]
    assert batch.entropy_RT.grad[0].tolist() == pytest.approx([-0.1, 0.0])
    assert {name: values[0, 1].item() for name, values in result.metrics.items()} == dict.fromkeys(result.metrics, 0.0)


def test_an_extreme_log_ratio_stays_finite() -> None:
    # log-ratio 89 would be inf in float32; clamped to 20: A=-1 loses e^20, and no gradient flows from beyond the clamp
    batch = token_batch([[-1.0, -90.0]], [[-90.0, -1.0]], [[-1.0, 1.0]])
    result = loss(batch)
    result.loss_RT.sum().backward()
    assert result.loss_RT[0].tolist() == pytest.approx([math.exp(20), -math.exp(-20)])
    assert batch.current_RT.grad is not None
    assert batch.current_RT.grad[0].tolist() == [0, 0]


def test_bonus_and_penalty_enter_with_their_weights() -> None:
    # ratio 1, A=0: loss = -0.1 * 2 + 0.3 * (e^d - d - 1), d = reference - current = ln 2: 2 - 0.6931 - 1 = 0.3069
    result = loss(
        token_batch([[-1.0]], [[-1.0]], [[0.0]], entropy=[[2.0]], reference=[[-1.0 + math.log(2)]]), entropy=0.1, kl=0.3
    )
    assert result.loss_RT.item() == pytest.approx(-0.2 + 0.3 * (1 - math.log(2)))
    assert result.metrics["reference_kl"].item() == pytest.approx(1 - math.log(2))


def test_reference_log_probs_are_required_under_a_penalty_only() -> None:
    assert Grpo(Grpo.Options()).loss_requires == frozenset()
    assert Grpo(Grpo.Options(kl=0.1)).loss_requires == {"ref_logprobs"}


def oracle(current: np.ndarray[Any, Any], data: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Loss [R, T] in float64, one token at a time. Options: entropy 0.05, kl 0.2, clips 0.2 and 0.28."""
    out = np.zeros(current.shape)
    for i, j in zip(*np.nonzero(data["mask"]), strict=True):
        ratio, a = math.exp(current[i, j] - data["behaviour"][i, j]), data["advantages"][i, j]
        bounded = min(max(ratio, 0.8), 1.28)
        d = data["reference"][i, j] - current[i, j]
        out[i, j] = -min(ratio * a, bounded * a) - 0.05 * data["entropy"][i, j] + 0.2 * (math.exp(d) - d - 1)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_agree_with_a_float64_oracle_on_ragged_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 7)), int(rng.integers(1, 9)))
    current = rng.normal(-2, 0.5, shape)
    data = {name: rng.normal(-2, 0.5, shape) for name in ("behaviour", "reference", "entropy")}
    data["advantages"] = rng.normal(0, 1, shape)
    data["mask"] = np.arange(shape[1]) < rng.integers(0, shape[1] + 1, shape[0])[:, None]
    batch = token_batch(current, **{name: value for name, value in data.items()})
    result = loss(batch, entropy=0.05, kl=0.2)
    result.loss_RT.sum().backward()
    np.testing.assert_allclose(result.loss_RT.detach().numpy(), oracle(current, data), rtol=1e-9, atol=1e-12)
    # Central differences; a token whose ratio is next to a bound would straddle the kink, none is within 1e-4 here.
    step = 1e-6
    slope = (oracle(current + step, data) - oracle(current - step, data)) / (2 * step)
    assert batch.current_RT.grad is not None
    np.testing.assert_allclose(batch.current_RT.grad.numpy(), slope, rtol=1e-6, atol=1e-8)

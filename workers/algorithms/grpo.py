"""GRPO: advantages relative to the group, PPO's clipped objective per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from common.errors import Reject
from common.group import Group, concatenate
from common.section import Section, encode
from common.settings import Table
from workers.trainer.algorithm import TokenBatch, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is a ratio nobody wants and still far from the overflow of float32 at exp(88.7)."""


class Grpo:
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300, equations 3 and 4, outcome supervision).

    Advantage of sample i, the same at each of its tokens: A_i = (r_i - mean(r)) / std(r), over the samples of its group
    that were scored and hold a token. The paper writes std(r) of the group's rewards: the population estimator (divide
    by n), which bounds |A_i| by sqrt(n - 1). `normalize_std = false` leaves r_i - mean(r) (Dr. GRPO, arXiv 2503.20783).

    Loss of a token, with ratio = exp(current - behaviour): the clipped objective with an upper bound of its own
    (clip-higher of DAPO, arXiv 2503.14476, equation 10), minus `entropy` times the entropy, plus `kl` times the
    estimator k3 = exp(d) - d - 1 of KL(current || reference), d = reference - current (equation 4 of the GRPO paper).
    The backend takes the mean over the tokens of a step (token-level loss of DAPO) instead of a mean per response.
    """

    class Options(Table):
        """`clip_low`, `clip_high`: how far a ratio may fall below and rise above 1 before its gain stops.

        `entropy`, `kl`: weights of bonus and penalty, 0 switches off. `std_floor`: a smaller standard deviation is not
        divided by; spread below 1e-4 is no more than the rounding of float32 scores up to about 1,000.
        """

        clip_low: float = Field(0.2, ge=0, le=1)
        clip_high: float = Field(0.28, ge=0)
        entropy: float = Field(0.0, ge=0)
        kl: float = Field(0.0, ge=0)
        normalize_std: bool = True
        std_floor: float = Field(1e-4, gt=0)

    scope: ClassVar[Literal["group", "batch"]] = "group"
    advantage_requires: ClassVar[frozenset[str]] = frozenset({"reward", "reward_status", "num_tokens"})

    def __init__(self, options: Options) -> None:
        self._options = options

    @property
    def loss_requires(self) -> frozenset[str]:
        """The reference log-probs, under a KL term."""
        return frozenset({"ref_logprobs"} if self._options.kl > 0 else ())

    def advantage(self, groups: Sequence[Group]) -> list[Section]:
        """Return one `advantage` section per group.

        A sample that could not be scored, or holds no token, leaves the statistics and gets advantage and weight 0.
        Raises `Reject` when a reward whose status is ok is not finite.
        """
        return [self._section(group) for group in groups]

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the loss per token and, per token: ratio, clip_fraction, kl (behaviour to current), reference_kl.

        `clip_fraction` is 1 where the bound is active, judged on the ratio before clipping.
        """
        options, mask_RT = self._options, batch.mask_RT
        log_ratio_RT = _selected(batch.current_RT - batch.behaviour_RT, mask_RT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_RT, advantage_RT = log_ratio_RT.exp(), _selected(batch.advantage_RT, mask_RT)
        gain_RT = ratio_RT * advantage_RT
        bounded_RT = ratio_RT.clamp(1 - options.clip_low, 1 + options.clip_high) * advantage_RT
        loss_RT = -gain_RT.minimum(bounded_RT)
        metrics = {"ratio": ratio_RT, "clip_fraction": bounded_RT < gain_RT, "kl": ratio_RT - 1 - log_ratio_RT}
        if options.entropy:
            loss_RT = loss_RT - options.entropy * _selected(batch.entropy_RT, mask_RT)
        if options.kl:
            assert batch.reference_RT is not None, "loss_requires asks for ref_logprobs"
            gap_RT = _selected(batch.reference_RT - batch.current_RT, mask_RT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            reference_kl_RT = gap_RT.exp() - gap_RT - 1
            loss_RT = loss_RT + options.kl * reference_kl_RT
            metrics["reference_kl"] = reference_kl_RT
        return TokenLoss(
            _selected(loss_RT, mask_RT),
            {name: _selected(values.detach().to(loss_RT.dtype), mask_RT) for name, values in metrics.items()},
        )

    def _section(self, group: Group) -> Section:
        rewards, num_tokens = group.numpy("reward").astype(np.float64), group.numpy("num_tokens")
        scored = np.array([status == "ok" for status in group.values("reward_status")], bool)
        broken = np.flatnonzero(scored & ~np.isfinite(rewards))
        if broken.size:
            raise Reject(f"group {group.key.id}, sample {broken[0]}: reward {rewards[broken[0]]} with status ok")
        counts = scored & (num_tokens > 0)
        advantages = np.zeros(len(rewards))
        advantages[counts] = self._normalized(rewards[counts])
        per_token = concatenate(
            (np.full(n, a) for n, a in zip(num_tokens.tolist(), advantages.tolist(), strict=True)), "float32"
        )
        weights: Any = counts.astype(np.float32).tolist()
        return encode("advantage", {"advantages": per_token, "loss_weight": weights})

    def _normalized(self, rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Two passes in float64: the mean first, then the spread around it. Equal rewards give exactly 0."""
        if not rewards.size or rewards.min() == rewards.max():
            return np.zeros(rewards.shape)
        centred = rewards - rewards.mean()
        std = np.sqrt(np.mean(centred**2))
        return centred / std if self._options.normalize_std and std >= self._options.std_floor else centred


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    """Values inside the mask, 0 with gradient 0 outside, whatever stands there."""
    return values.where(mask, values.new_zeros(()))

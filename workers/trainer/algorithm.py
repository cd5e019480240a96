"""What an algorithm is: how rewards become advantages, and what is minimised per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import BaseModel

from common.group import Group
from common.section import Section

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a loss sees, per response token. R: rows (samples), T: longest response of the micro-batch.

    `mask_RT` (bool) marks tokens that count: inside the response, of a row with weight, with a finite behaviour
    log-prob. Everything outside the mask may hold any value, also NaN: select, never multiply.
    """

    current_RT: Tensor
    """log-probs of the policy that is being trained, float32, with gradient"""
    entropy_RT: Tensor
    """entropy of its next-token distribution, nats, with gradient"""
    behaviour_RT: Tensor
    """log-probs recorded when the tokens were sampled"""
    advantage_RT: Tensor
    mask_RT: Tensor
    reference_RT: Tensor | None
    """log-probs of the reference policy; None when the algorithm does not require `ref_logprobs`"""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss_RT`: loss per token, 0 with gradient 0 outside the mask. `metrics`: name -> values per token, detached."""

    loss_RT: Tensor
    metrics: Mapping[str, Tensor]


class Algorithm(Protocol):
    """`Algorithm(options)`. `scope` "batch": advantages need the closed batch of a step, not one group."""

    Options: type[BaseModel]
    scope: ClassVar[Literal["group", "batch"]]
    advantage_requires: ClassVar[frozenset[str]]

    @property
    def loss_requires(self) -> frozenset[str]:
        """Columns that the loss reads beside tokens, log-probs and advantages (`ref_logprobs` under a KL term)."""
        ...

    def advantage(self, groups: Sequence[Group]) -> list[Section]:
        """Return one `advantage` section per group; float64 two-pass statistics inside."""
        ...

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the per-token loss; the backend sums it and divides by the step's number of tokens."""
        ...

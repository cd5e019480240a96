"""Drawing tokens by counter: a draw depends on (seed of the sample, position in the response) and the logits alone.

No generator has a state, so a sample that was aborted and resumed, or decoded in other company, draws the same numbers.
Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

# Constants of splitmix64 (Steele, Lea and Flood 2014), as the signed 64-bit integers that torch computes with.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return float64 in [0, 1): output number `position` of splitmix64 started at `seed`, its upper 53 bits."""
    z_R = seed_R + (position_R + 1) * _GAMMA
    z_R = (z_R ^ _shifted(z_R, 30)) * _MIX_1
    z_R = (z_R ^ _shifted(z_R, 27)) * _MIX_2
    z_R = z_R ^ _shifted(z_R, 31)
    return _shifted(z_R, 11).double() * 2.0**-53


def draw(
    logits_RV: Tensor, uniform_R: Tensor, temperature_R: Tensor, forbidden_RV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return tokens (int64) and their log-probs (float32), one per row.

    Log-probs are of logits / temperature over what `forbidden_RV` (bool, may broadcast) leaves; at temperature 0 they
    are of the unscaled logits and the token is the most likely one. The inverse of the cumulative distribution is taken
    in float64: in float32 the sum over a large vocabulary would lose the rare tokens.
    """
    logits_RV = logits_RV.float()
    if forbidden_RV is not None:
        logits_RV = logits_RV.masked_fill(forbidden_RV, -torch.inf)
    greedy_R = temperature_R == 0
    logp_RV = (logits_RV / torch.where(greedy_R, 1.0, temperature_R)[:, None]).log_softmax(-1)
    cumulative_RV = logp_RV.double().exp_().cumsum(-1)
    total_R = cumulative_RV[:, -1]
    # Below the total even after rounding, so that a trailing token of probability 0 is out of reach.
    target_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    sampled_R = torch.searchsorted(cumulative_RV, target_R[:, None], right=True)[:, 0]
    # Only NaN leads past the end; the caller finds it in the log-prob.
    token_R = torch.where(greedy_R, logp_RV.argmax(-1), sampled_R.clamp(max=logits_RV.shape[1] - 1))
    return token_R, logp_RV.gather(1, token_R[:, None])[:, 0]


def _shifted(z_R: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned."""
    return (z_R >> bits) & ((1 << (64 - bits)) - 1)

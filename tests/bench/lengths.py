"""Response lengths of the long-tailed benchmarks, a function of prompt and sample, so that every peer has the same.

`length_of(i, j, cap)` is the number of tokens that sample `j` of prompt `i` has. With `u` uniform in (0, 1), taken from
the bits of `splitmix64(splitmix64(i) + j)`, and `z` the standard normal quantile of `u`,

    length = clamp(round(cap / 4 * exp(0.9 * z)), cap / 16, cap)

a log-normal of median `cap / 4`, cut at both ends to a 16-fold spread. About 6 % of the samples have the length `cap`,
and the mean is 0.34 of it: a batch of a hundred samples nearly always waits for one three times as long as the mean.
"""

import math
from statistics import NormalDist

MEDIAN_SHARE = 1 / 4
SPREAD = 16
SIGMA = 0.9

_MASK = (1 << 64) - 1
_STANDARD_NORMAL = NormalDist()


def splitmix64(state: int) -> int:
    """The output for `state` of the generator of Steele, Lea and Flood (2014), an unsigned 64-bit integer."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def length_of(prompt: int, sample: int, cap: int) -> int:
    """Tokens in the response `sample` of `prompt`, in max(1, cap // 16) .. cap; `prompt` and `sample` count from 0."""
    bits = splitmix64(splitmix64(prompt) + sample)
    uniform = ((bits >> 12) + 0.5) / (1 << 52)  # 52 bits and a half are exact in a double, and never 0 or 1
    length = round(cap * MEDIAN_SHARE * math.exp(SIGMA * _STANDARD_NORMAL.inv_cdf(uniform)))
    return min(max(length, cap // SPREAD, 1), cap)

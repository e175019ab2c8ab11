"""The mathematics that the kernels over a vocabulary share, as ``kernels/vocabulary.py`` is for torch.

All of it is in fp32 on tiles ``[m, n]`` of logits with row values ``[m]``. A row's state is ``(top, total, moment)``:
its largest z so far, Σ exp(z − top) and Σ (z − top)·exp(z − top).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32: the top of a row that has shown nothing but −inf, against which all its terms are 0."""

LOG_ZERO = tl.constexpr(-1e3)
"""Stands for log 0 beside a factor that is 0 already, where 0 · (−inf) would be NaN."""


@triton.jit
def tanh(x):
    """Within an ulp of 1 everywhere; from ``exp(−2|x|)``, which does not overflow."""
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def cap(raw, softcap):
    """``softcap · tanh(raw / softcap)``, or ``raw`` where there is no cap."""
    if softcap is not None:
        return softcap * tanh(raw / softcap)
    else:
        return raw


@triton.jit
def fold(top, total, moment, z, ENTROPY: tl.constexpr):
    """A row's state after a tile of z (temperature and cap applied, −inf outside the vocabulary)."""
    new_top = tl.maximum(top, tl.max(z, axis=1))
    gap = tl.maximum(top - new_top, LOG_ZERO)
    share = tl.exp(gap)
    distance = z - new_top[:, None]
    term = tl.exp(distance)
    if ENTROPY:
        moment = (moment + total * gap) * share + tl.sum(tl.maximum(distance, LOG_ZERO) * term, axis=1)
    return new_top, total * share + tl.sum(term, axis=1), moment


@triton.jit
def merge(top, total, moment, other_top, other_total, other_moment):
    """The state of a row of which two parts were folded apart."""
    new_top = tl.maximum(top, other_top)
    gap = tl.maximum(top - new_top, LOG_ZERO)
    other_gap = tl.maximum(other_top - new_top, LOG_ZERO)
    share = tl.exp(gap)
    other_share = tl.exp(other_gap)
    moment = (moment + total * gap) * share + (other_moment + other_total * other_gap) * other_share
    return new_top, total * share + other_total * other_share, moment


@triton.jit
def finish(found, top, total, moment, kept):
    """Log-prob and entropy of rows, 0 where not kept, and the logarithm of the total; ``found`` is the target's z."""
    log_sum = tl.log(total)
    logprob = tl.where(kept, (found - top) - log_sum, 0.0)
    entropy = tl.where(kept, log_sum - moment / total, 0.0)
    return logprob, entropy, log_sum


@triton.jit
def tile_gradient(raw, at_target, a, b, c, entropy, top, log_sum, inverse, softcap):
    """The gradient of a tile of raw logits: dz_j = a·1[j = target] + p_j·(b − c·(log p_j + entropy)), through 1/T and
    the cap. Row values are ``[m, 1]``; ``c`` and ``entropy`` are ``None`` without a gradient through the entropy."""
    capped = cap(raw, softcap)
    log_p = (capped * inverse - top) - log_sum
    p = tl.exp(log_p)
    if c is not None:
        dz = p * (b - c * (tl.maximum(log_p, LOG_ZERO) + entropy))
    else:
        dz = p * b
    dz = tl.where(at_target, dz + a, dz)
    if softcap is not None:
        t = capped / softcap
        dz *= 1 - t * t
    return dz * inverse

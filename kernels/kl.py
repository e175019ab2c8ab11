"""Per-token estimators of the KL divergence between two policies from the sampled token's log-probs alone."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor

# exp(20) = 4.9e8. Beyond it a ratio is constant and has no gradient: an exponent free to overflow turns a zero
# advantage into inf·0.
MAX_LOG_RATIO = 20.0

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate of KL(π ‖ π_ref) from tokens drawn from π, with ``x = log π_ref − log π``.

    ======== ===================== =============================================================
    name     value                 properties
    ======== ===================== =============================================================
    ``k1``   ``−x``                unbiased, high variance, either sign; its gradient has mean 0
    ``abs``  ``|x|``               not a KL; a bounded pull to the reference
    ``k2``   ``x² / 2``            biased value, low variance; its gradient is unbiased for KL's
    ``k3``   ``exp(x) − x − 1``    unbiased, low variance, never negative
    ======== ===================== =============================================================

    A trailing ``+`` (``k1+``, ``abs+``, ``k3+``) is straight-through: that estimator's value, with the gradient
    of ``k2``.

    Args:
        logprob: log π of the sampled tokens, any shape, in nats.
        ref_logprob: log π_ref of the same tokens, same shape.
        estimator: one of :data:`KL_ESTIMATORS`.

    Returns:
        The estimate of each token, same shape, in nats.

    Raises:
        ValueError: an unknown estimator; the nearest name is given.

    Source: Schulman, Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html; the names with
    ``+`` are verl's.
    """
    if estimator not in KL_ESTIMATORS:
        nearest = difflib.get_close_matches(estimator, KL_ESTIMATORS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown KL estimator {estimator!r}, did you mean {nearest!r}? Known: {KL_ESTIMATORS}")
    x = ref_logprob - logprob
    if estimator.endswith("+"):
        value, gradient = _estimate(x.detach(), estimator[:-1]), _estimate(x, "k2")
        return value + (gradient - gradient.detach())
    return _estimate(x, estimator)


def _estimate(x: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -x
    if estimator == "abs":
        return x.abs()
    if estimator == "k2":
        return 0.5 * x.square()
    x = x.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(x) - x  # exp(x) − 1 rounds small x away: at 1e-4 in fp32 the estimate would be noise

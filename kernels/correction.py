"""Rollout correction: importance weights for the gap between the sampler's log-probs and the trainer's.

A sampler with other kernels or another precision than the trainer draws from a slightly different policy. The
weight of a token is built from ``ρ_t = π_old(t) / π_rollout(t)``, where π_old is the trainer's policy at the
weights that sampled, and multiplies its policy term. It carries no gradient.
"""

from __future__ import annotations

import difflib

import torch
from torch import Tensor

from .kl import MAX_LOG_RATIO
from .sequences import Sequences

ROLLOUT_CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "icepop",
    "geometric_mask",
)
TOKEN_CORRECTIONS = ("none", "token_truncate", "token_mask", "icepop")


@torch.no_grad()
def rollout_weights(
    old_logprob: Tensor,
    rollout_logprob: Tensor,
    sequences: Sequences,
    *,
    mode: str = "token_truncate",
    cap: float = 2.0,
    floor: float | None = None,
) -> Tensor:
    """Correction weights ``[M]``, with ``ρ_t = π_old(t) / π_rollout(t)`` and ``o`` the token's sequence.

    ===================== ============================ ==========================================================
    mode                  ratio                        weight
    ===================== ============================ ==========================================================
    ``none``              —                            1
    ``token_truncate``    ``r = ρ_t``                  ``clip(r, floor, cap)`` (truncated importance sampling)
    ``token_mask``        ``r = ρ_t``                  ``r`` if ``floor ≤ r ≤ cap`` else 0
    ``icepop``            ``r = ρ_t``                  the same, two-sided also where no floor is given
    ``sequence_truncate`` ``r = Π_{s ∈ o} ρ_s``        ``clip(r, floor, cap)``
    ``sequence_mask``     ``r = Π_{s ∈ o} ρ_s``        ``r`` if ``floor ≤ r ≤ cap`` else 0
    ``geometric_mask``    ``r = (Π_{s ∈ o} ρ_s)^1/|o|`` 1 if ``floor ≤ r ≤ cap`` else 0 (rejection alone)
    ===================== ============================ ==========================================================

    The product over a sequence grows with its length, so the ``sequence_`` modes cap or drop long sequences
    first; the geometric mean does not depend on the length, and wants a cap close to 1, such as 1.001.

    Args:
        old_logprob: trainer's log-probs ``[M]``, in nats, finite.
        rollout_logprob: sampler's log-probs ``[M]``, finite.
        sequences: of the ``M`` tokens. The ``sequence_`` and ``geometric_`` modes need whole sequences.
        mode: one of :data:`ROLLOUT_CORRECTIONS`.
        cap: largest ratio.
        floor: smallest ratio; ``None`` is ``1 / cap`` for ``icepop`` and ``geometric_mask``, and 0 elsewhere.

    Raises:
        ValueError: an unknown mode (the nearest name is given), or bounds out of order.

    Sources: truncated importance sampling, Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training (2025); IcePop, Ling Team, Every Step Evolves, arXiv:2510.18855; sequence and geometric masks, Liu
    et al., When Speed Kills Stability (2025); the names are TRL's where it has one.
    """
    if mode not in ROLLOUT_CORRECTIONS:
        nearest = difflib.get_close_matches(mode, ROLLOUT_CORRECTIONS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown rollout correction {mode!r}, did you mean {nearest!r}? Known: {ROLLOUT_CORRECTIONS}"
        )
    if floor is None:
        floor = 1.0 / cap if mode in ("icepop", "geometric_mask") else 0.0
    if not 0.0 <= floor < cap:
        raise ValueError(f"rollout_floor {floor} and rollout_cap {cap} must satisfy 0 <= floor < cap")
    log_ratio = old_logprob - rollout_logprob
    if mode == "none":
        return torch.ones_like(log_ratio)
    if mode.startswith("sequence"):
        log_ratio = sequences.sum(log_ratio)
    elif mode == "geometric_mask":
        log_ratio = sequences.mean(log_ratio)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(floor, cap)
    inside = (ratio >= floor) & (ratio <= cap)
    return (inside if mode == "geometric_mask" else ratio * inside).to(ratio.dtype)

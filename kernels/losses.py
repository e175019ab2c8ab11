"""The policy loss of one micro-batch over flat tokens: clipped or soft surrogate, KL, entropy, rollout correction.

torch is its only GPU backend: all of it is algebra on ``[M]``, a few megabytes at most beside the gigabytes of logits
that ``linear_logprob`` folds, and a Triton kernel for each loss and option would not move the time of a step.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any, Literal

import torch
from torch import Tensor

from .correction import TOKEN_CORRECTIONS, rollout_weights
from .kl import kl_estimate
from .loss_metrics import mean_metrics, merge_metrics, metric_reduction, sampling_metrics, total
from .loss_types import (
    LossBatch,
    LossType,
    get_loss,
    loss_names,
    loss_options,
    register_loss,
    sequence_ratio,
    token_ratio,
)
from .sequences import Sequences

__all__ = [
    "LossBatch",
    "loss_names",
    "loss_normalizer",
    "loss_options",
    "mean_metrics",
    "merge_metrics",
    "metric_reduction",
    "policy_loss",
    "register_loss",
]


def policy_loss(
    logprob: Tensor,
    advantages: Tensor,
    *,
    sequence_ids: Tensor,
    normalizer: Tensor | float,
    old_logprob: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    entropy: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
    importance: Literal["token", "sequence"] = "token",
    beta: float = 0.0,
    kl_estimator: str = "k3",
    bias_corrected_kl: bool = False,
    entropy_coef: float = 0.0,
    rollout_correction: str = "none",
    rollout_cap: float = 2.0,
    rollout_floor: float | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of ``M`` trained tokens, to be minimised, and sums of metrics.

    ``loss = Σ_t c_t (w_t l_t + β KL_t − entropy_coef H_t) / normalizer``: ``l_t`` the term of the loss type,
    ``w_t`` the rollout correction, ``c_t`` 1, or ``1/|o|`` for the types that average each sequence. The
    normaliser is that of the whole optimizer step (:func:`loss_normalizer`), so the losses and gradients of its
    micro-batches add up to those of the whole batch.

    All tensors are ``[M]``, one entry a trained token, in any order, without padding; ``M`` may be 0. They are
    computed in fp32, or in fp64 where ``logprob`` is fp64. Nothing waits for the device and nothing is collective.

    Args:
        logprob: log π of each token, in nats, with gradient.
        advantages: one a token. A token of advantage 0 gets exactly no gradient from its term.
        sequence_ids: int64; tokens of one sequence share any integer.
        normalizer: 0-d; where it is 0, which says that the whole step trains no token, 1 is taken.
        old_logprob: log-probs of the policy that sampled, as the trainer computes them. ``None`` is on policy:
            ``logprob`` itself, so that every ratio is exactly 1.
        ref_logprob: log-probs of the reference model; needed where ``beta`` is not 0.
        rollout_logprob: the sampler's log-probs. A token whose value is not finite, which is a fault of the
            sampler, is dropped: nothing of it enters the loss, it counts as ratio 1 in its sequence, it stays in
            every denominator, and ``sampling/dropped_mean`` reports it. So pass them also where they stand in as
            ``old_logprob``. NaN anywhere else is a fault of the model and makes the loss NaN.
        entropy: of each token's distribution, in nats, with gradient where ``entropy_coef`` is not 0.
        sequence_lengths: trained tokens of each token's whole sequence, for a caller that splits sequences over
            micro-batches; ``None`` counts them here. Sequence-level ratios and corrections need whole sequences.
        loss_type: name in the registry of :mod:`metagrpo.kernels.loss_types`, which has the equations.
        epsilon: lower clip range; for ``gmpo`` in log space. ``cispo``, ``sapo``, ``vespo``, ``dppo``,
            ``dppo_kl`` and ``kl_cov`` do not clip by it and have options of their own.
        epsilon_high: upper clip range; ``None`` is ``epsilon``.
        delta: two-sided clip of the clipped surrogates.
        dual_clip: dual clip of the clipped surrogates.
        importance: level of the ratio. ``gspo`` and ``luspo`` are sequence-level always.
        beta: weight of the KL to the reference.
        kl_estimator: see :func:`metagrpo.kernels.kl.kl_estimate`.
        bias_corrected_kl: multiply the KL by the ratio, with its gradient, which makes it unbiased off policy
            (DeepSeek-V3.2, arXiv:2512.02556).
        entropy_coef: weight of the entropy bonus.
        rollout_correction: see :func:`metagrpo.kernels.correction.rollout_weights`, with ``rollout_cap`` and
            ``rollout_floor`` its bounds. ``vespo`` takes it into its own weight.
        options: of the loss type; :func:`metagrpo.kernels.loss_types.loss_options` lists them.

    Returns:
        The 0-d loss, with a graph also where ``M`` is 0, and detached sums for
        :func:`metagrpo.kernels.loss_metrics.merge_metrics`: the counts ``tokens`` and ``sequences``;
        ``ratio/mean``; what the loss type reports, such as ``clip_ratio/{low,high,region}_mean``; ``kl`` and
        ``entropy`` where given; the sampling metrics where ``rollout_logprob`` is.

    Raises:
        ValueError: an unknown name (with the nearest), a shape that differs, a tensor that an argument needs, or
            arguments that do not go together.
        TypeError: an option that the loss type does not have (with the nearest).
    """
    loss = get_loss(loss_type)
    if logprob.dim() != 1:
        raise ValueError(f"logprob must be flat, [M], got {list(logprob.shape)}")
    dtype = torch.float64 if logprob.dtype == torch.float64 else torch.float32
    _check_shapes(
        logprob,
        advantages=advantages,
        sequence_ids=sequence_ids,
        old_logprob=old_logprob,
        ref_logprob=ref_logprob,
        rollout_logprob=rollout_logprob,
        entropy=entropy,
        sequence_lengths=sequence_lengths,
    )
    _check_arguments(loss, importance, rollout_correction, options)
    if rollout_correction != "none" and rollout_logprob is None:
        raise ValueError(f"rollout_correction {rollout_correction!r} needs rollout_logprob")

    logprob = logprob.to(dtype)
    advantages = advantages.detach().to(dtype)
    sequences = Sequences.from_ids(sequence_ids, dtype)
    old = logprob.detach() if old_logprob is None else old_logprob.detach().to(dtype)
    metrics = {
        "tokens": torch.full((), logprob.numel(), dtype=torch.float64, device=logprob.device),
        "sequences": sequences.count.to(torch.float64),
    }

    kept = torch.ones_like(sequence_ids, dtype=torch.bool)
    weight = torch.ones_like(advantages)
    if rollout_logprob is not None:
        rollout = rollout_logprob.detach().to(dtype)
        kept = torch.isfinite(rollout)
        old = torch.where(kept, old, logprob.detach())
        rollout = torch.where(kept, rollout, old)
        weight = rollout_weights(
            old, rollout, sequences, mode=rollout_correction, cap=rollout_cap, floor=rollout_floor
        )
        metrics |= sampling_metrics(old, rollout, weight, kept, sequences, rollout_correction != "none")

    log_ratio = logprob - old
    if loss.importance == "sequence" or importance == "sequence":
        ratio = sequence_ratio(log_ratio, sequences)
    else:
        ratio = token_ratio(log_ratio)
    batch = LossBatch(logprob, old, advantages, log_ratio, ratio, weight, sequences)
    shared = {
        "epsilon": epsilon,
        "epsilon_high": epsilon if epsilon_high is None else epsilon_high,
        "delta": delta,
        "dual_clip": dual_clip,
    }
    for name in ("delta", "dual_clip"):
        if shared[name] is not None and name not in loss.shared:
            raise ValueError(f"the loss type {loss.name!r} has no {name}")
    terms, reported = loss.function(batch, **{name: shared[name] for name in loss.shared}, **options)
    metrics |= {name: total(values) for name, values in {"ratio/mean": ratio, **reported}.items()}

    if not loss.weighs_itself:
        terms = weight * terms
    if ref_logprob is not None:
        kl = kl_estimate(logprob, ref_logprob.detach().to(dtype), kl_estimator)
        if bias_corrected_kl:
            kl = kl * ratio
        if beta != 0:
            terms = terms + beta * kl
        metrics["kl"] = total(kl)
    elif beta != 0:
        raise ValueError(f"beta {beta} needs ref_logprob")
    if entropy is not None:
        if entropy_coef != 0:
            terms = terms - entropy_coef * entropy.to(dtype)
        metrics["entropy"] = total(entropy)
    elif entropy_coef != 0:
        raise ValueError(f"entropy_coef {entropy_coef} needs entropy")

    terms = torch.where(kept, terms, 0.0)
    if loss.aggregation == "sequence_mean":
        terms = terms / (sequences.length if sequence_lengths is None else sequence_lengths.to(dtype))
    return terms.sum() / _denominator(normalizer, dtype), metrics


def loss_normalizer(loss_type: str, lengths: Tensor, *, max_completion_length: int | None = None) -> Tensor:
    """The denominator of an optimizer step, 0-d int64, from all its sequences; additive over micro-batches and ranks.

    Tokens for the types that average over tokens; sequences with at least one trained token for those that
    average over sequences; that times ``max_completion_length`` for ``dr_grpo``.

    Args:
        loss_type: name in the registry.
        lengths: int ``[S]``, trained tokens of each sequence after all masking.
        max_completion_length: the generation budget, in tokens; needed by ``dr_grpo``.

    Raises:
        ValueError: an unknown loss type (the nearest is named), or a budget that is needed and missing.
    """
    aggregation = get_loss(loss_type).aggregation
    if aggregation == "token_mean":
        return lengths.sum(dtype=torch.int64)
    sequences = (lengths > 0).sum()
    if aggregation != "budget_mean":
        return sequences
    if max_completion_length is None:
        raise ValueError(f"the loss type {loss_type!r} needs max_completion_length")
    return sequences * max_completion_length


def _denominator(normalizer: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    if not isinstance(normalizer, Tensor):
        return normalizer or 1.0
    if normalizer.dim() != 0:
        raise ValueError(f"normalizer must be 0-d, got {list(normalizer.shape)}")
    normalizer = normalizer.detach().to(dtype)
    return torch.where(normalizer == 0, 1.0, normalizer)


def _check_shapes(logprob: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != logprob.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, logprob has {list(logprob.shape)}")


def _check_arguments(loss: LossType, importance: str, rollout_correction: str, options: dict[str, Any]) -> None:
    for name in options:
        if name not in loss.options:
            known = [*loss.options, *inspect.signature(policy_loss).parameters]
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TypeError(
                f"the loss type {loss.name!r} has no option {name!r}, did you mean {nearest!r}? "
                f"Its options: {list(loss.options)}"
            )
    if importance not in ("token", "sequence"):
        raise ValueError(f"importance must be 'token' or 'sequence', got {importance!r}")
    if importance == "sequence" and loss.importance == "token":
        raise ValueError(f"the loss type {loss.name!r} is not defined for importance 'sequence'")
    if loss.weighs_itself and rollout_correction not in TOKEN_CORRECTIONS:
        raise ValueError(
            f"the loss type {loss.name!r} takes the correction into its own weight: rollout_correction must be "
            f"one of {TOKEN_CORRECTIONS}, got {rollout_correction!r}"
        )

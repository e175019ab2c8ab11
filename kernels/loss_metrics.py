"""Sums that add over micro-batches and ranks, and the means they give.

A metric is a 0-d float64 tensor. A name that ends in ``/max`` or ``/min`` reduces so; every other one is a sum, and
:func:`mean_metrics` divides it by its count. Which names there are depends on the arguments of a call, never on
its data, so that all ranks reduce the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from .kl import MAX_LOG_RATIO, kl_estimate
from .sequences import Sequences

COUNTS = ("tokens", "sequences", "sampling/tokens")
"""Names that count observations and are not divided."""


def metric_reduction(name: str) -> Literal["sum", "max", "min"]:
    """How two values of this metric become one."""
    if name.endswith("/max"):
        return "max"
    return "min" if name.endswith("/min") else "sum"


def merge_metrics(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of the union of two batches; a name that one of them lacks is taken from the other."""
    merged = {**a, **b}
    for name in a.keys() & b.keys():
        reduction = metric_reduction(name)
        if reduction == "sum":
            merged[name] = a[name] + b[name]
        else:
            merged[name] = (torch.maximum if reduction == "max" else torch.minimum)(a[name], b[name])
    return merged


def mean_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The means, extremes and counts as Python floats; one device-to-host copy. A mean of nothing is left out."""
    values = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
    means = {}
    for name, value in values.items():
        count = values[_count_of(name)]
        if name in COUNTS:
            means[name] = value
        elif count:
            means[name] = value / count if metric_reduction(name) == "sum" else value
    return means


def _count_of(name: str) -> str:
    """What a metric is averaged over: tokens, those of them with a sampler's log-prob, or sequences."""
    if name == "sampling/masked_sequences_mean":
        return "sequences"
    if name == "mismatch_kl" or (name.startswith("sampling/") and name != "sampling/dropped_mean"):
        return "sampling/tokens"
    return "tokens"


def total(values: Tensor) -> Tensor:
    """Detached 0-d float64 sum of a bool or floating tensor ``[M]``."""
    return values.detach().sum(dtype=torch.float64)


@torch.no_grad()
def sampling_metrics(
    old_logprob: Tensor, rollout_logprob: Tensor, weight: Tensor, kept: Tensor, sequences: Sequences, corrected: bool
) -> dict[str, Tensor]:
    """How far the sampler's log-probs lie from the trainer's; all arguments ``[M]``, ``kept`` bool.

    - ``sampling/dropped_mean``: share of tokens without a finite sampler's log-prob.
    - ``sampling/sampling_logp_difference/{mean,max}``: ``|log π_old − log π_rollout|``, in nats.
    - ``sampling/importance_sampling_ratio/{min,mean,max}``: the correction weight, as capped and masked; the
      token ratio ``π_old / π_rollout`` where nothing is corrected.
    - ``sampling/masked_mean``: share of tokens with weight 0; ``sampling/masked_sequences_mean``: share of
      sequences that have no other token. The first above the second: it is the long ones that are masked.
    - ``mismatch_kl``: k3 estimate of KL(π_rollout ‖ π_old), in nats.
    """
    log_ratio = old_logprob - rollout_logprob
    difference = log_ratio.abs()
    ratio = weight if corrected else log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    masked = kept & (weight == 0)

    def extreme(values: Tensor, nothing: float) -> Tensor:
        values = torch.where(kept, values, nothing).to(torch.float64)
        values = torch.cat((values, values.new_full((1,), nothing)))  # an empty batch has an extreme too
        return values.amin() if nothing > 0 else values.amax()

    infinity = float("inf")
    return {
        "sampling/tokens": total(kept),
        "sampling/dropped_mean": total(~kept),
        "sampling/sampling_logp_difference/mean": total(torch.where(kept, difference, 0.0)),
        "sampling/sampling_logp_difference/max": extreme(difference, -infinity),
        "sampling/importance_sampling_ratio/min": extreme(ratio, infinity),
        "sampling/importance_sampling_ratio/mean": total(torch.where(kept, ratio, 0.0)),
        "sampling/importance_sampling_ratio/max": extreme(ratio, -infinity),
        "sampling/masked_mean": total(masked),
        "sampling/masked_sequences_mean": sequences.count_all(weight == 0).to(torch.float64),
        "mismatch_kl": total(torch.where(kept, kl_estimate(rollout_logprob, old_logprob), 0.0)),
    }

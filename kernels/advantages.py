"""Advantages relative to a group: how much better an outcome was than the others from the same prompt.

torch is its only GPU backend: N is the number of samples of a step, thousands at most, and the time is that of a
dozen launches. A Triton kernel would still need the sort behind ``unique``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: Baseline | Tensor = "mean",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """``(reward − baseline) / (std + eps)`` of each sample, over its group.

    The defaults are GRPO's (DeepSeekMath, arXiv:2402.03300, §4.1.2). ``scale="none"`` is Dr. GRPO's
    (arXiv:2503.20783), ``baseline="leave_one_out"`` RLOO's (arXiv:2402.14740).

    A NaN reward was not scored: it stays out of all statistics and its advantage is 0. The standard deviation is the
    unbiased one; where it is 0, because one reward alone was scored or all are equal, there is nothing to scale by
    and the advantage is exactly 0. With the baselines ``"mean"`` and ``"leave_one_out"`` it is exactly 0 there
    without scaling too. Statistics are float64 sums over differences from a member of the group, so equal rewards
    leave no residue and a large common offset costs no digits.

    Args:
        rewards: ``[N]``, floating point; NaN where not scored.
        groups: integer ``[N]``; samples with the same number form a group, in any order.
        baseline: the group's mean, the mean of the group's other samples, nothing, or a tensor ``[N]``.
        scale: divide by the group's standard deviation, by that of all scored rewards, or not.
        eps: added to the standard deviation.

    Returns:
        ``[N]``, fp32, without a gradient.

    Raises:
        TypeError: rewards that are not floating point, groups that are not integers.
        ValueError: shapes that do not match, an infinite reward, an unknown baseline or scale.
    """
    _check(rewards, groups, baseline, scale)
    scored = ~rewards.isnan()
    reward = rewards.double().masked_fill(~scored, 0)
    ids, member = groups.unique(return_inverse=True)
    count = _group_sum(scored.double(), member, ids)
    shift = torch.full(ids.shape, torch.inf, dtype=torch.float64, device=rewards.device)
    shift = shift.scatter_reduce(0, member, reward.masked_fill(~scored, torch.inf), "amin")[member]
    shifted = torch.where(scored, reward - shift, 0)
    deviation = shifted - (_group_sum(shifted, member, ids) / count)[member]

    if isinstance(baseline, Tensor):
        advantage = reward - baseline.double()
    elif baseline == "none":
        advantage = reward
    elif baseline == "mean":
        advantage = deviation
    else:
        # The mean of the others is mean − (reward − mean) / (n − 1).
        others = (count - 1)[member]
        advantage = torch.where(others > 0, deviation * (1 + 1 / others), 0)

    if scale != "none":
        if scale == "group":
            squares = _group_sum(torch.where(scored, deviation.square(), 0), member, ids)
            std = (squares / (count - 1).clamp(min=1)).sqrt()[member]
        else:
            std = _std(reward[scored])
        advantage = torch.where(std > 0, advantage / (std + eps), 0)
    return torch.where(scored, advantage, 0).float()


def _group_sum(values: Tensor, member: Tensor, ids: Tensor) -> Tensor:
    """Sums of float64 values ``[N]`` by group, in a fixed order; ``index_add_`` has none on a GPU."""
    total = torch.zeros(ids.shape, dtype=torch.float64, device=values.device)
    return total.index_put_((member,), values, accumulate=True)


def _std(rewards: Tensor) -> Tensor:
    """The unbiased standard deviation of all rewards, 0 for fewer than two."""
    if rewards.numel() < 2:
        return rewards.new_zeros(())
    return (rewards - rewards[0]).std()


def _check(rewards: Tensor, groups: Tensor, baseline: Baseline | Tensor, scale: Scale) -> None:
    if not rewards.is_floating_point():
        raise TypeError(f"rewards must be floating point, got {rewards.dtype}")
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise TypeError(f"groups must be integers, got {groups.dtype}")
    if rewards.dim() != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards and groups must both be [N], got {list(rewards.shape)} and {list(groups.shape)}")
    if isinstance(baseline, Tensor):
        if baseline.shape != rewards.shape:
            raise ValueError(f"baseline must be {list(rewards.shape)}, got {list(baseline.shape)}")
    elif baseline not in ("mean", "leave_one_out", "none"):
        raise ValueError(f'baseline must be "mean", "leave_one_out", "none" or a tensor, got {baseline!r}')
    if scale not in ("group", "batch", "none"):
        raise ValueError(f'scale must be "group", "batch" or "none", got {scale!r}')
    if rewards.isinf().any():
        raise ValueError("a reward is infinite; one that could not be scored is NaN")

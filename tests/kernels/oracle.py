"""The vocabulary operators in float64 straight from their formulas, sharing nothing with the code under test."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def token_logprob(
    logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob and entropy ``[N]`` and all log-probs ``[N, V]`` for logits ``[N, V]``, a row at a time."""
    n, vocab = logits.shape
    logprob, entropy = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    table = torch.zeros(n, vocab, dtype=torch.float64)
    heat = temperature.double() if isinstance(temperature, Tensor) else torch.full((n,), temperature).double()
    for i in range(n):
        if targets[i] == -100:
            continue
        z = logits[i].detach().double()
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / heat[i]
        table[i] = z - torch.logsumexp(z, 0)
        p = table[i].exp()
        logprob[i] = table[i, targets[i]]
        entropy[i] = -sum(a * math.log(a) for a in p.tolist() if a > 0) if vocab < 2000 else -torch.xlogy(p, p).sum()
    return logprob, entropy, table


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """``[N, V]`` by the chain rule: ∂log p_t/∂z_j = 1[j = t] − p_j, ∂H/∂z_j = −p_j (log p_j + H), ∂z/∂x."""
    _, entropy, table = token_logprob(logits, targets, temperature, softcap)
    grad = torch.zeros(logits.shape, dtype=torch.float64)
    for i in range(logits.shape[0]):
        if targets[i] == -100:
            continue
        p = table[i].exp()
        one_hot = torch.zeros_like(p)
        one_hot[targets[i]] = 1
        dz = float(grad_logprob[i]) * (one_hot - p)
        if grad_entropy is not None:
            dz -= float(grad_entropy[i]) * (torch.xlogy(p, p) + p * entropy[i])
        if softcap is not None:
            dz /= torch.cosh(logits[i].detach().double() / softcap).square()
        grad[i] = dz / (float(temperature[i]) if isinstance(temperature, Tensor) else temperature)
    return grad


def linear_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, logits_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias from that of the logits ``[M, V]``, a target at a time for hidden."""
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        grad_hidden[row] += logits_grad[i] @ weight.detach().double()
    return grad_hidden, logits_grad.T @ hidden.detach().double()[rows], logits_grad.sum(0)


def advantages(rewards: list[float], groups: list[int], baseline: str, scale: str, eps: float) -> list[float]:
    """Group by group, on exact means and standard deviations (the statistics module computes in fractions)."""
    every = [r for r in rewards if not math.isnan(r)]
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i and r == r]
        if math.isnan(reward):
            result.append(0.0)
            continue
        mine = [reward, *others]
        if baseline == "mean":
            value = reward - statistics.mean(mine)
        elif baseline == "leave_one_out":
            value = reward - statistics.mean(others) if others else 0.0
        else:
            value = reward
        if scale != "none":
            sample = mine if scale == "group" else every
            std = statistics.stdev(sample) if len(sample) > 1 else 0.0
            value = value / (std + eps) if std > 0 else 0.0
        result.append(value)
    return result


def splitmix64(state: int) -> int:
    """The output of splitmix64 in state ``state`` (before its step), in Python's unbounded integers."""
    mask = (1 << 64) - 1
    x = (state + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def error(value: Tensor, exact: Tensor) -> float:
    """The largest absolute error."""
    return (value.detach().double() - exact).abs().max().item() if exact.numel() else 0.0


class LargestTensor(TorchDispatchMode):
    """Records the most bytes of any storage that an operator returns and that did not come in with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)
        }
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out

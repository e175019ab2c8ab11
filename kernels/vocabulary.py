"""The mathematics and the checks that the operators over a vocabulary share.

``fold`` reduces tiles of logits to a few numbers a row, and ``tile_gradient`` turns a tile of logits into the
gradient of those logits. Both see a tile ``[n, width]`` at a time, in fp32 (float64 for float64 inputs), and do not
care where it comes from: ``token_logprob`` copies it from its logits, ``linear_logprob`` multiplies it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""The target that stands for "no token here": log-probability 0, entropy 0, no gradient."""

LOG_ZERO = -1e3
"""Stands for log 0 beside a probability that is 0 already, where 0 · (−inf) would be NaN."""


class Folded(NamedTuple):
    """What is left of n rows of logits, all ``[n]``.

    ``log p_j = (z_j − top) − log_sum``. Kept apart, the two lose nothing where all logits are large, as their sum
    would.
    """

    logprob: Tensor
    entropy: Tensor | None
    top: Tensor
    log_sum: Tensor

    def head(self, count: int) -> Folded:
        """The first rows."""
        return Folded(*(None if x is None else x[:count] for x in self))  # type: ignore[arg-type]


def fold(
    tiles: Iterable[tuple[int, Tensor]],
    targets: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    with_entropy: bool,
) -> Folded:
    """Reduce the tiles of n rows, which together cover the vocabulary once.

    Each tile is reduced against its own maximum and the partial sums are put together at the end, so a row's result
    depends on the widths of the tiles alone.

    Args:
        tiles: pairs of a first column and the logits from there on ``[n, width]``, contiguous; overwritten.
        targets: int64 ``[n]``.
        temperature: a float or ``[n, 1]``.
        softcap: bound on the logits or ``None``.
        with_entropy: also compute the entropies.
    """
    tops, sums, moments = [], [], []
    target_z = None
    for first, tile in tiles:
        z = _scale(tile, temperature, softcap)
        inside, column = _locate(targets, first, z.shape[-1])
        found = z.gather(-1, column).squeeze(-1)
        target_z = found if target_z is None else torch.where(inside, found, target_z)
        # A tile of −inf alone has no finite maximum to subtract; against any finite number its terms are all 0.
        top = z.amax(-1).clamp_(min=torch.finfo(z.dtype).min)
        distance = z.sub_(top.unsqueeze(-1))
        if with_entropy:
            term = distance.exp()
            moments.append(distance.clamp_(min=LOG_ZERO).mul_(term).sum(-1))
        else:
            term = distance.exp_()
        sums.append(term.sum(-1))
        tops.append(top)
    assert target_z is not None
    tile_top, tile_sum = torch.stack(tops, -1), torch.stack(sums, -1)
    top = tile_top.amax(-1)
    tile_distance = tile_top - top.unsqueeze(-1)
    share = tile_distance.exp()
    total = (tile_sum * share).sum(-1)
    log_sum = total.log()
    ignored = targets == IGNORE
    logprob = ((target_z - top) - log_sum).masked_fill_(ignored, 0)
    if not with_entropy:
        return Folded(logprob, None, top, log_sum)
    moment = ((torch.stack(moments, -1) + tile_sum * tile_distance) * share).sum(-1)
    return Folded(logprob, (log_sum - moment / total).masked_fill_(ignored, 0), top, log_sum)


def concatenate(parts: list[Folded]) -> Folded:
    """The rows of all parts, in order."""
    logprob, entropy, top, log_sum = zip(*parts, strict=True)
    return Folded(
        torch.cat(logprob), None if entropy[0] is None else torch.cat(entropy), torch.cat(top), torch.cat(log_sum)
    )


class RowGradient(NamedTuple):
    """What the gradient needs of n rows beside their logits, all ``[n]``.

    ``dz_j = a·1[j = target] + p_j·(b − c·(log p_j + entropy))`` with ``p_j`` from ``top`` and ``log_sum``. ``c`` is
    ``None`` where no gradient comes through the entropy; then the entropy may be missing too.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None
    entropy: Tensor | None
    top: Tensor
    log_sum: Tensor

    def take(self, span: slice, padding: int = 0) -> RowGradient:
        """The rows of the span and ``padding`` rows of zeros after them."""
        return RowGradient(*(None if x is None else F.pad(x[span], (0, padding)) for x in self))  # type: ignore[arg-type]


def row_gradient(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    targets: Tensor,
    entropy: Tensor | None,
    top: Tensor,
    log_sum: Tensor,
) -> RowGradient:
    """Coefficients for the upstream gradients of log-probs and entropies: a = −b = the first, c = the second."""
    ignored = targets == IGNORE
    a = torch.zeros_like(top) if grad_logprob is None else grad_logprob.masked_fill(ignored, 0)
    c = None if grad_entropy is None else grad_entropy.masked_fill(ignored, 0)
    return RowGradient(a, -a, c, entropy, top, log_sum)


def tile_gradient(
    tile: Tensor,
    first: int,
    targets: Tensor,
    rows: RowGradient,
    temperature: float | Tensor,
    softcap: float | None,
) -> Tensor:
    """The gradient of a tile of logits ``[n, width]`` that starts at column ``first``; the tile is overwritten."""
    z = _scale(tile, temperature, softcap)
    slope = None if softcap is None else (z * (temperature / softcap)).square_().neg_().add_(1)  # 1 − tanh²
    log_p = z.sub_(rows.top.unsqueeze(-1)).sub_(rows.log_sum.unsqueeze(-1))
    if rows.c is None:
        dz = log_p.exp_().mul_(rows.b.unsqueeze(-1))
    else:
        assert rows.entropy is not None
        p = log_p.exp()
        factor = log_p.clamp_(min=LOG_ZERO).add_(rows.entropy.unsqueeze(-1)).mul_(-rows.c.unsqueeze(-1))
        dz = factor.add_(rows.b.unsqueeze(-1)).mul_(p)
    inside, column = _locate(targets, first, dz.shape[-1])
    dz.scatter_add_(-1, column, rows.a.masked_fill(~inside, 0).unsqueeze(-1))
    if slope is not None:
        dz.mul_(slope)
    return dz if _is_one(temperature) else dz.div_(temperature)


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor | None) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise RuntimeError("token_logprob and linear_logprob can be differentiated once only")


def first_derivative(grad: Tensor | None, *inputs: Tensor | None) -> Tensor | None:
    """A gradient that raises where someone differentiates it again with respect to what it was made from.

    ``once_differentiable`` raises only if the upstream gradient is itself differentiable; for a plain loss it would
    drop the second derivative without a word.
    """
    return _FirstDerivative.apply(grad, *inputs) if grad is not None and torch.is_grad_enabled() else grad


def _scale(tile: Tensor, temperature: float | Tensor, softcap: float | None) -> Tensor:
    """``z`` from raw logits, in place."""
    if softcap is not None:
        tile.div_(softcap).tanh_().mul_(softcap)
    return tile if _is_one(temperature) else tile.div_(temperature)


def _is_one(temperature: float | Tensor) -> bool:
    return isinstance(temperature, float) and temperature == 1.0


def _locate(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Whether each target ``[n]`` lies in the tile, and its column there ``[n, 1]`` (any where it does not)."""
    local = targets - first
    return (local >= 0) & (local < width), local.clamp(0, width - 1).unsqueeze(-1)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp32 for every input but float64, which stays as it is (for gradcheck)."""
    return torch.promote_types(x.dtype, torch.float32)


def require(condition: Tensor, message: str, error: type[Exception] = ValueError) -> None:
    """Raise unless the 0-dim condition holds; on a GPU a device-side assertion, so that the host does not wait."""
    if condition.device.type == "cuda":
        torch._assert_async(condition, message)
    elif not condition:
        raise error(message)


def check_floating(x: Tensor, name: str) -> None:
    """Raise ``TypeError`` unless ``x`` is floating point."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")


def check_indices(x: Tensor, name: str, shape: torch.Size) -> None:
    """Raise unless ``x`` is int64 of this shape."""
    if x.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")


def check_targets(targets: Tensor, vocab: int) -> None:
    """Raise ``IndexError`` unless each target is in ``[0, vocab)`` or −100."""
    valid = ((targets >= 0) & (targets < vocab)) | (targets == IGNORE)
    require(valid.all(), f"a target is outside [0, {vocab}) and is not {IGNORE}", IndexError)


def check_temperature(temperature: float | Tensor, shape: torch.Size, dtype: torch.dtype) -> float | Tensor:
    """A float, or a flat tensor in ``dtype`` from one of this shape; raises unless all are positive and finite."""
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        return float(temperature)
    if temperature.shape != shape:
        raise ValueError(f"temperature must be a float or {list(shape)}, got {list(temperature.shape)}")
    if temperature.requires_grad:
        raise ValueError("temperature requires a gradient, and there is none for it")
    require(((temperature > 0) & temperature.isfinite()).all(), "temperature must be positive and finite")
    return temperature.to(dtype).reshape(-1)


def check_softcap(softcap: float | None) -> None:
    """Raise unless there is no softcap or it is positive and finite."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}")


def rows_of(temperature: float | Tensor, span: slice) -> float | Tensor:
    """The temperature of a span of rows: the float, or ``[n, 1]`` from a flat tensor."""
    return temperature if isinstance(temperature, float) else temperature[span].unsqueeze(-1)

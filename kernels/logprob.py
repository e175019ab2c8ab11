"""Log-probability and entropy of target tokens under ``softmax(logits / temperature)``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor

from metagrpo.kernels.backend import choose, register
from metagrpo.kernels.triton import refusal
from metagrpo.kernels.vocabulary import (
    IGNORE,
    Folded,
    RowGradient,
    accumulation_dtype,
    check_floating,
    check_indices,
    check_softcap,
    check_targets,
    check_temperature,
    concatenate,
    first_derivative,
    fold,
    row_gradient,
    rows_of,
    tile_gradient,
)

BLOCK = 16384
"""Columns of a tile. It may not depend on the number of rows, or a row's sum would depend on the batch around it;
and ATen splits the sum of a lone row over its threads from 32768 elements on, which would have the same effect."""

TILE = 1 << 20
"""Elements of a tile: 4 MiB in fp32, which stays in a CPU's cache between the passes over it."""

register("token_logprob", "torch", __name__)
register("token_logprob", "triton", "metagrpo.kernels.triton.logprob", refusal)


@overload
def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    return_entropy: Literal[False] = ...,
) -> Tensor: ...
@overload
def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    return_entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``log softmax(z)[target]`` in nats, and on request the entropy ``−Σ p log p`` of each row.

    ``z = softcap · tanh(logits / softcap) / temperature``. The logits are read whatever their strides, are never
    copied whole, and are all that is kept for the backward beside a few numbers a row.

    A logit of −inf is a token that cannot occur: it adds nothing to the entropy and gets no gradient. A row with no
    finite logit has no distribution and gives NaN. A target of −100 gives 0 and no gradient, and its row may hold
    anything, NaN included. Differentiable once, in the logits only.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64, any strides.
        targets: int64 ``[...]``, each in ``[0, V)`` or −100.
        temperature: positive, one for all or a tensor ``[...]`` with one a token.
        softcap: positive bound on the logits (Gemma 2, arXiv:2408.00118), ``None`` for none.
        return_entropy: return the entropies as well.

    Returns:
        Log-probabilities ``[...]``, or them and the entropies ``[...]``; fp32 (float64 for float64 logits).

    Raises:
        TypeError: logits that are not floating point, targets that are not int64.
        ValueError: shapes that do not match, a temperature or a softcap that is not positive.
        IndexError: a target outside ``[0, V)`` other than −100. On a GPU this, like the check of a temperature
            tensor, is a device-side assertion.
    """
    check_floating(logits, "logits")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits must be [..., V] with V >= 1, got {list(logits.shape)}")
    shape = logits.shape[:-1]
    check_indices(targets, "targets", shape)
    check_targets(targets, logits.shape[-1])
    temperature = check_temperature(temperature, shape, accumulation_dtype(logits))
    check_softcap(softcap)
    implementation = choose("token_logprob", logits)
    logprob, entropy = _TokenLogprob.apply(
        logits, targets.reshape(-1), temperature, softcap, return_entropy, implementation
    )
    return (logprob.view(shape), entropy.view(shape)) if return_entropy else logprob.view(shape)


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        softcap: float | None,
        entropy: bool,
        implementation: Any,
    ) -> tuple[Tensor, Tensor | None]:
        folded = implementation.token_logprob_forward(logits, targets, temperature, softcap, entropy)
        ctx.save_for_backward(logits, targets, *folded[1:])
        ctx.temperature, ctx.softcap, ctx.implementation = temperature, softcap, implementation
        ctx.set_materialize_grads(False)
        return folded.logprob, folded.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 6
        logits, targets, *saved = ctx.saved_tensors
        with torch.no_grad():
            rows = row_gradient(grad_logprob, grad_entropy, targets, *saved)
            grad = ctx.implementation.token_logprob_backward(rows, logits, targets, ctx.temperature, ctx.softcap)
        return first_derivative(grad, logits, grad_logprob, grad_entropy), None, None, None, None, None


def token_logprob_forward(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, softcap: float | None, with_entropy: bool
) -> Folded:
    """Fold the rows of logits ``[..., V]``; targets are flat ``[N]``, the temperature is a float or ``[N]``."""
    parts = [
        fold(_tiles(view), targets[span], rows_of(temperature, span), softcap, with_entropy)
        for span, view in _row_chunks(logits)
    ]
    return concatenate(parts)


def token_logprob_backward(
    rows: RowGradient, logits: Tensor, targets: Tensor, temperature: float | Tensor, softcap: float | None
) -> Tensor:
    """The gradient of the logits ``[..., V]``, contiguous and in their dtype."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    flat = grad.view(-1, logits.shape[-1])
    for span, view in _row_chunks(logits):
        target, row, heat = targets[span], rows.take(span), rows_of(temperature, span)
        ignored = (target == IGNORE).unsqueeze(-1)  # p may be NaN there, and 0 · NaN is no gradient
        for first, tile in _tiles(view):
            dz = tile_gradient(tile, first, target, row, heat, softcap).masked_fill_(ignored, 0)
            flat[span, first : first + dz.shape[-1]] = dz
    return grad


def _tiles(view: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Copies of ``[n, V]`` logits, BLOCK columns at a time, each with its first column."""
    dtype = accumulation_dtype(view)
    for first in range(0, view.shape[-1], BLOCK):
        tile = view[:, first : first + BLOCK]
        yield first, tile.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _row_chunks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Views ``[n, V]`` of the logits ``[..., V]`` in row order, each with its span of flat row numbers."""
    step = max(1, TILE // min(BLOCK, logits.shape[-1]))
    start = 0
    for view in _row_views(logits):
        for chunk in view.split(step):
            yield slice(start, start + chunk.shape[0]), chunk
            start += chunk.shape[0]


def _row_views(logits: Tensor) -> list[Tensor]:
    """The logits as 2-D views: one where the strides allow it, else as few as it takes. Never a copy."""
    try:
        return [logits.view(-1, logits.shape[-1])]
    except RuntimeError:
        return [view for part in logits.unbind(0) for view in _row_views(part)]

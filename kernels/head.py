"""Log-probability of target tokens from hidden states: the output head, a tile of logits at a time.

Neither pass ever holds the logits: the forward folds each tile into a few numbers a row, and the backward multiplies
it out again. That is four GEMMs of the size of the logits, or three with a frozen head, LoRA's case, where the
gradient of the weight is never formed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
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
    require,
    row_gradient,
    rows_of,
    tile_gradient,
)

ROWS = 1024
"""Targets in a tile of logits."""

BLOCK = 4096
"""Vocabulary entries in a tile of logits: with ROWS it makes 16 MiB in fp32."""

ROW_MULTIPLE = 16
"""A GEMM of a few rows goes to other BLAS kernels, which add up in another order. Padded to a multiple of this (8 is
enough for MKL on AVX2), a row's result does not depend on how many rows came with it."""

register("linear_logprob", "torch", __name__)
register("linear_logprob", "triton", "metagrpo.kernels.triton.head", refusal)


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = ...,
    bias: Tensor | None = ...,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    return_entropy: Literal[False] = ...,
) -> Tensor: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = ...,
    bias: Tensor | None = ...,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    return_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = ...,
    bias: Tensor | None = ...,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    return_entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``token_logprob(hidden[rows] @ weight.T + bias, targets)`` without the logits.

    Logits are fp32, never rounded to the operands' dtype, and so are the sums behind each gradient. Gradients are
    formed only for those of ``hidden``, ``weight`` and ``bias`` that require one. Under autocast the three are cast
    as ``F.linear`` casts them. Differentiable once.

    Args:
        hidden: ``[N, H]``, float16, bfloat16, float32 or float64, any strides.
        weight: ``[V, H]``, in the dtype of ``hidden``.
        targets: int64 ``[M]``, each in ``[0, V)`` or −100: log-probability 0, entropy 0, no gradient.
        rows: int64 ``[M]``, the hidden row of each target, any order; a row may serve several targets. ``None``
            pairs them in order, and N = M.
        bias: ``[V]``, in the dtype of ``hidden``.
        temperature: positive, one for all or a tensor ``[M]``.
        softcap: positive bound on the logits, applied before the temperature; ``None`` for none.
        return_entropy: return the entropies as well.

    Returns:
        Log-probabilities ``[M]`` in nats, or them and the entropies ``[M]``; fp32 (float64 for float64 operands).

    Raises:
        TypeError: operands of different or not floating dtypes, indices that are not int64.
        ValueError: shapes that do not match, a temperature or a softcap that is not positive.
        IndexError: a target or a row out of range (on a GPU a device-side assertion).
    """
    hidden, weight = _autocast(hidden), _autocast(weight)
    bias = None if bias is None else _autocast(bias)
    _check_operands(hidden, weight, bias)
    if targets.dim() != 1:
        raise ValueError(f"targets must be [M], got {list(targets.shape)}")
    rows = _check_rows(rows, targets, hidden.shape[0])
    check_indices(targets, "targets", rows.shape)
    check_targets(targets, weight.shape[0])
    temperature = check_temperature(temperature, targets.shape, accumulation_dtype(hidden))
    check_softcap(softcap)
    implementation = choose("linear_logprob", hidden)
    logprob, entropy = _LinearLogprob.apply(
        hidden, weight, bias, targets, rows, temperature, softcap, return_entropy, implementation
    )
    return (logprob, entropy) if return_entropy else logprob


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: Tensor,
        temperature: float | Tensor,
        softcap: float | None,
        entropy: bool,
        implementation: Any,
    ) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(hidden.device.type, enabled=False):
            folded = implementation.linear_logprob_forward(
                hidden, weight, bias, targets, rows, temperature, softcap, entropy
            )
        ctx.save_for_backward(hidden, weight, bias, targets, rows, *folded[1:])
        ctx.temperature, ctx.softcap, ctx.implementation = temperature, softcap, implementation
        ctx.set_materialize_grads(False)
        return folded.logprob, folded.entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 9
        hidden, weight, bias, targets, rows, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            gradient = row_gradient(grad_logprob, grad_entropy, targets, *saved)
            grads = ctx.implementation.linear_logprob_backward(
                gradient, hidden, weight, bias, targets, rows, ctx.temperature, ctx.softcap, needs
            )
        sources = (hidden, weight, bias, grad_logprob, grad_entropy)
        return *(first_derivative(grad, *sources) for grad in grads), None, None, None, None, None, None


def linear_logprob_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    with_entropy: bool,
) -> Folded:
    """Fold each target's row of logits; shapes as in ``linear_logprob``, with ``rows`` given."""
    parts = []
    for span in _spans(targets.shape[0]):
        chunk = _chunk(hidden, targets, rows, temperature, span)
        tiles = ((first, tile) for first, _, tile in _tiles(chunk.hidden, weight, bias))
        folded = fold(tiles, chunk.targets, chunk.temperature, softcap, with_entropy)
        parts.append(folded.head(span.stop - span.start))
    return concatenate(parts)


class LinearGrads(NamedTuple):
    """Gradients of the operands; ``None`` for one that needs none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_logprob_backward(
    gradient: RowGradient,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    needs: tuple[bool, bool, bool],
) -> LinearGrads:
    """Gradients of hidden, weight and bias where ``needs`` says so, in their dtypes."""
    grad_hidden = _zeros(hidden) if needs[0] else None
    grad_weight = _zeros(weight) if needs[1] else None
    grad_bias = _zeros(bias) if bias is not None and needs[2] else None
    for span in _spans(targets.shape[0]):
        chunk = _chunk(hidden, targets, rows, temperature, span)
        row = gradient.take(span, padding=chunk.targets.shape[0] - (span.stop - span.start))
        grad_chunk = None
        for first, block, tile in _tiles(chunk.hidden, weight, bias):
            dz = tile_gradient(tile, first, chunk.targets, row, chunk.temperature, softcap)
            columns = slice(first, first + dz.shape[1])
            if grad_bias is not None:
                grad_bias[columns] += dz.sum(0)
            dz = dz.to(block.dtype)
            if grad_hidden is not None:
                product = _matmul(dz, block)
                grad_chunk = product if grad_chunk is None else grad_chunk.add_(product)
            if grad_weight is not None:
                grad_weight[columns] += _matmul(dz.T, chunk.hidden)
        if grad_hidden is not None and grad_chunk is not None:
            add_rows(grad_hidden, chunk.rows, grad_chunk)
    return LinearGrads(
        None if grad_hidden is None else grad_hidden.to(hidden.dtype),
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(hidden.dtype),
    )


class _Chunk(NamedTuple):
    """The targets of one span, padded to ``n``, a multiple of ROW_MULTIPLE, with ignored ones."""

    hidden: Tensor  # [n, H], an operand of a GEMM
    targets: Tensor  # [n]
    rows: Tensor  # [n]
    temperature: float | Tensor  # or [n, 1]


def _spans(count: int) -> list[slice]:
    """``count`` targets, at most ROWS at a time; without targets one empty span, so that there is always a part."""
    return [slice(start, min(start + ROWS, count)) for start in range(0, max(count, 1), ROWS)]


def _chunk(hidden: Tensor, targets: Tensor, rows: Tensor, temperature: float | Tensor, span: slice) -> _Chunk:
    padding = -(span.stop - span.start) % ROW_MULTIPLE
    targets = F.pad(targets[span], (0, padding), value=IGNORE)
    rows = F.pad(rows[span], (0, padding))
    # Whatever lies in the hidden row of an ignored target, NaN included, meets the weight's gradient as 0 · 0.
    operand = hidden.index_select(0, rows).masked_fill_((targets == IGNORE).unsqueeze(-1), 0)
    if isinstance(temperature, Tensor):
        temperature = F.pad(temperature[span], (0, padding), value=1.0)
    return _Chunk(_operand(operand), targets, rows, rows_of(temperature, slice(None)))


def _tiles(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each BLOCK entries of the vocabulary: the first, their weight as an operand, and their logits."""
    for first in range(0, weight.shape[0], BLOCK):
        block = _operand(weight[first : first + BLOCK])
        tile = _matmul(hidden, block.T)
        yield first, block, tile if bias is None else tile.add_(bias[first : first + BLOCK])


def _operand(x: Tensor) -> Tensor:
    """What a GEMM with fp32 results multiplies: 16-bit operands on a GPU, whose GEMM can return fp32.

    Elsewhere the GEMM of 16-bit operands rounds its results to 16 bits: with logits of a standard deviation of 1.2
    the error is 0.016, against 1.3e-6 for fp32 operands. Casting them, a block of the weight at a time, is exact and
    was faster too on AVX2 (256 × 576 × 49152: 0.10 s, against 0.77 s in bfloat16).
    """
    return x if x.device.type == "cuda" else x.to(accumulation_dtype(x))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` accumulated and returned in fp32 (float64 for float64)."""
    dtype = accumulation_dtype(a)
    return torch.mm(a, b) if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """``total[rows[i]] += values[i]``, in a fixed order: each call is the deterministic one on its device."""
    if total.device.type == "cuda":
        total.index_put_((rows,), values, accumulate=True)  # sorts; index_add_ would use atomics
    else:
        total.index_add_(0, rows, values)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=accumulation_dtype(x), device=x.device)


def _autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast, where it is on, has ``F.linear`` compute in; float64 stays."""
    device = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _check_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating(hidden, "hidden")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] < 1:
        raise ValueError(f"hidden must be [N, H] and weight [V, H], got {list(hidden.shape)}, {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    if len(dtypes) > 1:
        raise TypeError(
            f"hidden, weight and bias must share a dtype, got {sorted(map(str, dtypes))}: cast one of them"
        )


def _check_rows(rows: Tensor | None, targets: Tensor, count: int) -> Tensor:
    if rows is None:
        if targets.shape[0] != count:
            raise ValueError(f"{targets.shape[0]} targets for {count} hidden rows: say which with rows=")
        return torch.arange(count, device=targets.device)
    check_indices(rows, "rows", targets.shape)
    require(((rows >= 0) & (rows < count)).all(), f"a row is outside [0, {count})", IndexError)
    return rows

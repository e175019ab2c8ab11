"""``token_logprob`` in Triton: one pass over the logits forward, one backward, a row a program.

Both passes are bound by memory. The forward reads each logit once and keeps a row's maximum, sum and moment in
registers; the backward reads it once and writes its gradient. A row's tiles are folded in order, so that neither the
batch around it nor a second run changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from metagrpo.kernels.vocabulary import Folded, RowGradient

from .configs import lookup
from .launch import launch
from .softmax import LOWEST, cap, finish, fold, tile_gradient


@triton.jit(do_not_specialize=["inner"])
def token_logprob_forward_kernel(
    logits,
    targets,
    temperature,
    logprob,
    entropy,
    top_out,
    log_sum_out,
    inner,
    outer_stride,
    inner_stride,
    stride,
    vocab,
    softcap,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row ``i`` of logits lies at ``(i // inner, i % inner)`` of a plane ``[outer, inner, vocab]``."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + (row // inner) * outer_stride + (row % inner) * inner_stride
    target = tl.load(targets + row)
    kept = target >= 0
    heat = temperature
    if PER_ROW:
        heat = tl.load(temperature + row)
    inverse = 1.0 / heat
    top = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    moment = tl.zeros((1,), tl.float32)
    for first in range(0, tl.where(kept, vocab, 0), BLOCK):  # an ignored row is not read
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        raw = tl.load(start + column * stride, mask=column < vocab, other=-float("inf")).to(tl.float32)
        z = tl.where(column < vocab, cap(raw, softcap) * inverse, -float("inf"))
        top, total, moment = fold(top, total, moment, z, ENTROPY)
    found = cap(tl.load(start + target * stride, mask=kept, other=0.0).to(tl.float32), softcap) * inverse
    row_logprob, row_entropy, log_sum = finish(found, top, total, moment, kept)
    one = row + tl.arange(0, 1)
    tl.store(logprob + one, row_logprob)
    if ENTROPY:
        tl.store(entropy + one, row_entropy)
    tl.store(top_out + one, top)
    tl.store(log_sum_out + one, log_sum)


@triton.jit(do_not_specialize=["inner"])
def token_logprob_backward_kernel(
    logits,
    targets,
    temperature,
    a_in,
    b_in,
    c_in,
    entropy_in,
    top_in,
    log_sum_in,
    grad,
    inner,
    outer_stride,
    inner_stride,
    stride,
    vocab,
    softcap,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a plane, ``[rows, vocab]`` and contiguous, from the coefficients of its rows."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + (row // inner) * outer_stride + (row % inner) * inner_stride
    target = tl.load(targets + row)
    read = tl.where(target >= 0, vocab, 0)  # an ignored row is not read, and its gradient is 0
    heat = temperature
    if PER_ROW:
        heat = tl.load(temperature + row)
    inverse = 1.0 / heat
    a = tl.load(a_in + row)
    b = tl.load(b_in + row)
    if c_in is not None:
        c = tl.load(c_in + row)
        entropy = tl.load(entropy_in + row)
    else:
        c = None
        entropy = None
    top = tl.load(top_in + row)
    log_sum = tl.load(log_sum_in + row)
    for first in range(0, vocab, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        raw = tl.load(start + column * stride, mask=column < read, other=0.0).to(tl.float32)
        dz = tile_gradient(raw, column == target, a, b, c, entropy, top, log_sum, inverse, softcap)
        tl.store(grad + row * vocab + column, tl.where(column < read, dz, 0.0), mask=column < vocab)


def token_logprob_forward(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, softcap: float | None, with_entropy: bool
) -> Folded:
    """As the reference's: logits ``[..., V]``, targets ``[N]``, temperature a float or ``[N]``."""
    targets, temperature = targets.contiguous(), _dense(temperature)
    out = [torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(3 + with_entropy)]
    logprob, top, log_sum = out[:3]
    entropy = out[3] if with_entropy else None
    config = lookup("token_logprob_forward", logits)
    for span, plane in _planes(logits):
        launch(
            token_logprob_forward_kernel,
            span.stop - span.start,
            config,
            plane,
            targets[span],
            temperature[span] if isinstance(temperature, Tensor) else temperature,
            logprob[span],
            None if entropy is None else entropy[span],
            top[span],
            log_sum[span],
            *_layout(plane),
            softcap,
            PER_ROW=isinstance(temperature, Tensor),
            ENTROPY=with_entropy,
        )
    return Folded(logprob, entropy, top, log_sum)


def token_logprob_backward(
    rows: RowGradient, logits: Tensor, targets: Tensor, temperature: float | Tensor, softcap: float | None
) -> Tensor:
    """As the reference's: the gradient of the logits ``[..., V]``, contiguous and in their dtype."""
    targets, temperature = targets.contiguous(), _dense(temperature)
    rows = RowGradient(*(None if x is None else x.contiguous() for x in rows))  # type: ignore[arg-type]
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    flat = grad.view(-1, logits.shape[-1])
    config = lookup("token_logprob_backward", logits)
    for span, plane in _planes(logits):
        row = rows.take(span)
        launch(
            token_logprob_backward_kernel,
            span.stop - span.start,
            config,
            plane,
            targets[span],
            temperature[span] if isinstance(temperature, Tensor) else temperature,
            *row,
            flat[span],
            *_layout(plane),
            softcap,
            PER_ROW=isinstance(temperature, Tensor),
        )
    return grad


def _dense(temperature: float | Tensor) -> float | Tensor:
    return temperature.contiguous() if isinstance(temperature, Tensor) else temperature


def _planes(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Views ``[outer, inner, V]`` of the logits ``[..., V]`` in row order, each with its span of flat row numbers."""
    start = 0
    for plane in _views(logits):
        stop = start + plane.shape[0] * plane.shape[1]
        yield slice(start, stop), plane
        start = stop


def _layout(plane: Tensor) -> tuple[int, int, int, int, int]:
    """Inner count, strides and vocabulary. The stride of a lone outer index is 0, not a number that varies with the
    rows, whose divisibility Triton would compile for."""
    outer_stride = plane.stride(0) if plane.shape[0] > 1 else 0
    return plane.shape[1], outer_stride, plane.stride(1), plane.stride(2), plane.shape[2]


def _views(logits: Tensor) -> list[Tensor]:
    """As few 3-D views as the strides allow; one for ``[:, :-1]`` of a batch. Never a copy."""
    try:
        return [logits.view(1, -1, logits.shape[-1])]
    except RuntimeError:
        if logits.dim() == 3:
            return [logits]
        return [view for part in logits.unbind(0) for view in _views(part)]

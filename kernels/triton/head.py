"""``linear_logprob`` in Triton: products of hidden states and weight whose logits stay in registers.

Forward: a program multiplies out SPAN columns of the logits of a tile of rows and folds them as they appear; a small
second kernel merges the spans. Backward: logits are multiplied out again and leave the registers as their gradient,
in the operands' dtype, a tile of at most ROWS × COLUMNS at a time; products of that tile with the weight and with the
hidden states add up in fp32.

Why not library GEMMs on chunks of fp32 logits, as the torch reference has it? The forward would move 8 bytes a logit
for the 2H FLOPs that make it: by an H100's peaks, at H = 1024, as long as the product itself. And a library picks its
kernel, and with it the order of a sum, by the number of rows: a row's gradient would depend on the batch around it.
Why is dH not summed where its logits' gradient lies in registers? A program would need [BLOCK_M, H] sums there, or
atomic additions, whose order no two runs share.

All offsets are 64 bits wide; no result depends on the number of rows; there are no atomics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from metagrpo.kernels.head import LinearGrads, add_rows
from metagrpo.kernels.vocabulary import IGNORE, Folded, RowGradient

from .configs import lookup
from .launch import launch
from .softmax import LOWEST, cap, finish, fold, merge, tile_gradient

ROWS = 4096
"""Targets in a tile of logit gradients."""

COLUMNS = 4096
"""Vocabulary entries in a tile of logit gradients: with ROWS it makes 32 MiB in 16 bits, about an L2 cache."""

ALIGN = 128
"""Rows are padded to a multiple of this with ignored ones: no kernel's BLOCK_M or BLOCK_K is larger."""


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The tile ``(m, n)`` of a program: GROUP tiles along m take turns along n together."""
    group = program // (GROUP * tiles_n)
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    place = program % (GROUP * tiles_n)
    return group * GROUP + place % size, place // size


@triton.jit
def logits_tile(
    hidden,
    weight,
    bias,
    row,
    column,
    width,
    vocab,
    hidden_row,
    hidden_column,
    weight_row,
    weight_column,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Raw logits ``[m, n]`` of hidden rows ``row [m]`` (−1: a row of zeros) and weight rows ``column [n]``."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    a_row = hidden + row[:, None] * hidden_row
    b_row = weight + column[None, :] * weight_row
    for first in range(0, width, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
        a = tl.load(a_row + k[None, :] * hidden_column, mask=(row[:, None] >= 0) & (k[None, :] < width), other=0.0)
        b = tl.load(
            b_row + k[:, None] * weight_column, mask=(column[None, :] < vocab) & (k[:, None] < width), other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + column, mask=column < vocab, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["tiles", "spans"])
def linear_logprob_forward_kernel(
    hidden,
    weight,
    bias,
    index,
    targets,
    temperature,
    parts,
    tiles,
    spans,
    width,
    vocab,
    hidden_row,
    hidden_column,
    weight_row,
    weight_column,
    softcap,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``parts [4, spans, tiles · BLOCK_M]``: top, total, moment and the target's z (0 where it lies elsewhere)."""
    tile, span = tile_of(tl.program_id(0), tiles, spans, GROUP)
    m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(index + m)
    kept = row >= 0
    target = tl.load(targets + m, mask=kept, other=-1)
    heat = temperature
    if PER_ROW:
        heat = tl.load(temperature + m, mask=kept, other=1.0)[:, None]
    inverse = 1.0 / heat
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    moment = tl.zeros((BLOCK_M,), tl.float32)
    found = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(span * SPAN, tl.minimum(span * SPAN + SPAN, vocab), BLOCK_N):
        column = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        raw = logits_tile(
            hidden, weight, bias, row, column, width, vocab,
            hidden_row, hidden_column, weight_row, weight_column, BLOCK_K, PRECISION,
        )  # fmt: skip
        z = tl.where(column[None, :] < vocab, cap(raw, softcap) * inverse, -float("inf"))
        found += tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), axis=1)
        top, total, moment = fold(top, total, moment, z, ENTROPY)
    rows = tiles.to(tl.int64) * BLOCK_M
    out = parts + span * rows + m
    tl.store(out, top)
    tl.store(out + spans * rows, total)
    if ENTROPY:
        tl.store(out + 2 * spans * rows, moment)
    tl.store(out + 3 * spans * rows, found)


@triton.jit(do_not_specialize=["rows", "padded", "spans"])
def linear_logprob_combine_kernel(
    parts,
    index,
    logprob,
    entropy,
    top_out,
    log_sum_out,
    rows,
    padded,
    spans,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the spans ``parts [4, spans, padded]`` of each row, in order."""
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = m < rows
    kept = tl.load(index + m, mask=inside, other=-1) >= 0
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    found = tl.zeros((BLOCK,), tl.float32)
    stride = padded.to(tl.int64) * spans
    for span in range(spans):
        part = parts + padded.to(tl.int64) * span + m
        part_moment = moment
        if ENTROPY:
            part_moment = tl.load(part + 2 * stride, mask=inside, other=0.0)
        top, total, moment = merge(
            top, total, moment,
            tl.load(part, mask=inside, other=0.0), tl.load(part + stride, mask=inside, other=0.0), part_moment,
        )  # fmt: skip
        found += tl.load(part + 3 * stride, mask=inside, other=0.0)
    row_logprob, row_entropy, log_sum = finish(found, top, total, moment, kept)
    tl.store(logprob + m, row_logprob, mask=inside)
    if ENTROPY:
        tl.store(entropy + m, row_entropy, mask=inside)
    tl.store(top_out + m, top, mask=inside)
    tl.store(log_sum_out + m, log_sum, mask=inside)


@triton.jit(do_not_specialize=["tiles", "begin"])
def linear_logprob_dlogits_kernel(
    hidden,
    weight,
    bias,
    index,
    targets,
    temperature,
    a_in,
    b_in,
    c_in,
    entropy_in,
    top_in,
    log_sum_in,
    dlogits,
    column_sums,
    tiles,
    begin,
    columns,
    width,
    vocab,
    hidden_row,
    hidden_column,
    weight_row,
    weight_column,
    softcap,
    PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dlogits [tiles · BLOCK_M, columns]`` of the vocabulary from ``begin`` on, 0 in ignored rows; for the bias
    also its ``column_sums [tiles, columns]``, not rounded."""
    tile, block = tile_of(tl.program_id(0), tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(index + m)
    kept = row >= 0
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column = (begin + n).to(tl.int64)
    raw = logits_tile(
        hidden, weight, bias, row, column, width, vocab,
        hidden_row, hidden_column, weight_row, weight_column, BLOCK_K, PRECISION,
    )  # fmt: skip
    heat = temperature
    if PER_ROW:
        heat = tl.load(temperature + m, mask=kept, other=1.0)[:, None]
    target = tl.load(targets + m, mask=kept, other=-1)
    a = tl.load(a_in + m, mask=kept, other=0.0)[:, None]
    b = tl.load(b_in + m, mask=kept, other=0.0)[:, None]
    if c_in is not None:
        c = tl.load(c_in + m, mask=kept, other=0.0)[:, None]
        entropy = tl.load(entropy_in + m, mask=kept, other=0.0)[:, None]
    else:
        c = None
        entropy = None
    top = tl.load(top_in + m, mask=kept, other=0.0)[:, None]
    log_sum = tl.load(log_sum_in + m, mask=kept, other=0.0)[:, None]
    at_target = column[None, :] == target[:, None]
    dz = tile_gradient(raw, at_target, a, b, c, entropy, top, log_sum, 1.0 / heat, softcap)
    inside = n < columns
    dz = tl.where(kept[:, None] & inside[None, :], dz, 0.0)
    tl.store(dlogits + m[:, None] * columns + n[None, :], dz, mask=inside[None, :])
    if column_sums is not None:
        tl.store(column_sums + tile * columns + n, tl.sum(dz, axis=0), mask=inside)


@triton.jit
def linear_logprob_product_kernel(
    left,
    right,
    index,
    out,
    height,
    width,
    depth,
    left_row,
    left_column,
    right_row,
    right_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out [height, width] += left [height, depth] @ right[index]``; an index of −1 is a row of zeros, and without
    an index ``right`` is ``[depth, width]`` as it lies."""
    tile, block = tile_of(tl.program_id(0), tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N), GROUP)
    m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, depth, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
        row = k
        kept = k < depth
        if index is not None:
            row = tl.load(index + k, mask=kept, other=-1)
            kept = row >= 0
        a = tl.load(
            left + m[:, None] * left_row + k[None, :] * left_column,
            mask=(m[:, None] < height) & (k[None, :] < depth),
            other=0.0,
        )
        b = tl.load(
            right + row[:, None] * right_row + n[None, :] * right_column,
            mask=kept[:, None] & (n[None, :] < width),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = out + m[:, None] * width + n[None, :]
    inside = (m[:, None] < height) & (n[None, :] < width)
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)


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
    """As the reference's. Extra memory: 16 bytes for each SPAN logits."""
    count, vocab = targets.shape[0], weight.shape[0]
    hidden, weight = _operand(hidden), _operand(weight)
    config = lookup("linear_logprob_forward", hidden)
    index = _index(rows, targets)
    tiles = index.shape[0] // int(config["BLOCK_M"])
    spans = triton.cdiv(vocab, int(config["SPAN"]))
    parts = torch.empty((4, spans, index.shape[0]), dtype=torch.float32, device=hidden.device)
    launch(
        linear_logprob_forward_kernel,
        tiles * spans,
        config,
        hidden,
        weight,
        bias,
        index,
        targets.contiguous(),
        _dense(temperature),
        parts,
        tiles,
        spans,
        hidden.shape[1],
        vocab,
        *hidden.stride(),
        *weight.stride(),
        softcap,
        PER_ROW=isinstance(temperature, Tensor),
        ENTROPY=with_entropy,
    )
    out = [torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3 + with_entropy)]
    logprob, top, log_sum = out[:3]
    entropy = out[3] if with_entropy else None
    config = lookup("linear_logprob_combine", hidden)
    launch(
        linear_logprob_combine_kernel,
        triton.cdiv(count, int(config["BLOCK"])),
        config,
        parts,
        index,
        logprob,
        entropy,
        top,
        log_sum,
        count,
        index.shape[0],
        spans,
        ENTROPY=with_entropy,
    )
    return Folded(logprob, entropy, top, log_sum)


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
    """As the reference's. Extra memory: a tile of logit gradients, dH in fp32 by target, and COLUMNS rows of dW."""
    count, (vocab, width), device, dtype = targets.shape[0], weight.shape, hidden.device, hidden.dtype
    hidden, weight = _operand(hidden), _operand(weight)
    targets, temperature = targets.contiguous(), _dense(temperature)
    gradient = RowGradient(*(None if x is None else x.contiguous() for x in gradient))  # type: ignore[arg-type]
    index = _index(rows, targets)
    config = lookup("linear_logprob_dlogits", hidden)
    block = int(config["BLOCK_M"])
    store = torch.empty(min(ROWS, index.shape[0]) * min(COLUMNS, vocab), dtype=hidden.dtype, device=device)
    by_target = torch.zeros((index.shape[0], width), dtype=torch.float32, device=device) if needs[0] else None
    grad_weight = torch.empty((vocab, width), dtype=dtype, device=device) if needs[1] else None
    with_bias = bias is not None and needs[2]
    grad_bias = torch.zeros(vocab, dtype=torch.float32, device=device) if with_bias else None
    for columns in _spans(vocab, COLUMNS):
        wide = columns.stop - columns.start
        grad_block = torch.zeros((wide, width), dtype=torch.float32, device=device) if needs[1] else None
        for span in _spans(index.shape[0], ROWS):
            tiles = (span.stop - span.start) // block
            dlogits = store[: (span.stop - span.start) * wide].view(-1, wide)
            sums = torch.empty((tiles, wide), dtype=torch.float32, device=device) if with_bias else None
            launch(
                linear_logprob_dlogits_kernel,
                tiles * triton.cdiv(wide, int(config["BLOCK_N"])),
                config,
                hidden,
                weight,
                bias,
                index[span],
                targets[span],
                temperature[span] if isinstance(temperature, Tensor) else temperature,
                *gradient.take(span),
                dlogits,
                sums,
                tiles,
                columns.start,
                wide,
                width,
                vocab,
                *hidden.stride(),
                *weight.stride(),
                softcap,
                PER_ROW=isinstance(temperature, Tensor),
            )
            if by_target is not None:
                _product(by_target[span], dlogits, weight[columns])
            if grad_block is not None:
                _product(grad_block, dlogits.T, hidden, index[span])
            if grad_bias is not None and sums is not None:
                grad_bias[columns] += sums.sum(0)
        if grad_weight is not None and grad_block is not None:
            grad_weight[columns] = grad_block
    grad_hidden = None
    if by_target is not None:
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=device)
        add_rows(grad_hidden, rows, by_target[:count])
    return LinearGrads(
        None if grad_hidden is None else grad_hidden.to(dtype),
        grad_weight,
        None if grad_bias is None else grad_bias.to(dtype),
    )


def _product(out: Tensor, left: Tensor, right: Tensor, index: Tensor | None = None) -> None:
    """``out += left @ right[index]``, or ``left @ right``; out is fp32 and contiguous."""
    config = lookup("linear_logprob_product", left)
    height, width = out.shape
    launch(
        linear_logprob_product_kernel,
        triton.cdiv(height, int(config["BLOCK_M"])) * triton.cdiv(width, int(config["BLOCK_N"])),
        config,
        left,
        right,
        index,
        out,
        height,
        width,
        left.shape[1],
        *left.stride(),
        *right.stride(),
    )


def _index(rows: Tensor, targets: Tensor) -> Tensor:
    """The hidden row of each target, −1 where it is ignored and in the padding to a multiple of ALIGN."""
    index = rows.masked_fill(targets == IGNORE, -1)
    return F.pad(index, (0, -index.shape[0] % ALIGN), value=-1)


def _operand(x: Tensor) -> Tensor:
    """What a product multiplies. On a CPU, Triton's interpreter would multiply bfloat16 operands by their bits."""
    return x.float() if x.device.type == "cpu" else x


def _dense(temperature: float | Tensor) -> float | Tensor:
    return temperature.contiguous() if isinstance(temperature, Tensor) else temperature


def _spans(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))

"""``sample_tokens`` in Triton: one program draws a row's token by inversion of its cumulative distribution.

Three passes over the row, which stays in the L2 cache after the first: its maximum, its weight, and the block in
which the cumulative weight passes the threshold; then one block more for the token. Weights are fp32, their sums
fp64, so that the draw differs from the torch reference's only where its fp32 block sums round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metagrpo.kernels.sampling import check_weights

from .configs import lookup
from .launch import launch
from .softmax import LOWEST

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(x):
    """splitmix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, step):
    """The number in (0, 1) that belongs to a seed and a step, as the reference's: fp64."""
    state = mix(seed.to(tl.uint64, bitcast=True) + GOLDEN)
    bits = mix(state + step.to(tl.uint64, bitcast=True) * GOLDEN + GOLDEN)
    return ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2⁻⁵²


@triton.jit
def scaled(start, column, stride, vocab, heat):
    """z of some columns, −inf outside the vocabulary."""
    raw = tl.load(start + column * stride, mask=column < vocab, other=-float("inf")).to(tl.float32)
    return tl.div_rn(raw, heat + tl.zeros_like(raw))


@triton.jit(do_not_specialize=["step"])
def sample_tokens_kernel(
    logits,
    seeds,
    step,
    temperature,
    tokens,
    logprob,
    total_out,
    row_stride,
    stride,
    vocab,
    STEP_PER_ROW: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    heat = temperature
    if PER_ROW:
        heat = tl.load(temperature + row)
    greedy = heat == 0
    heat = tl.where(greedy, 1.0, heat)
    place = tl.arange(0, BLOCK)
    top = tl.full((), LOWEST, tl.float32)
    for first in range(0, vocab, BLOCK):
        top = tl.maximum(top, tl.max(scaled(start, (first + place).to(tl.int64), stride, vocab, heat), axis=0))
    total = tl.zeros((), tl.float64)
    largest = vocab + tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        z = scaled(start, (first + place).to(tl.int64), stride, vocab, heat)
        total += tl.sum(tl.exp(z - top).to(tl.float64), axis=0)
        largest = tl.minimum(largest, tl.min(tl.where(z == top, first + place, vocab), axis=0))

    at = step
    if STEP_PER_ROW:
        at = tl.load(step + row)
    threshold = uniform(tl.load(seeds + row), at.to(tl.int64)) * total
    # The last block with any weight that begins at or below the threshold: the one in which it is passed.
    begin = tl.zeros((), tl.float64)
    block = tl.zeros((), tl.int32)
    before = begin
    for first in range(0, vocab, BLOCK):
        z = scaled(start, (first + place).to(tl.int64), stride, vocab, heat)
        size = tl.sum(tl.exp(z - top).to(tl.float64), axis=0)
        taken = (begin <= threshold) & (size > 0)
        block = tl.where(taken, first, block)
        before = tl.where(taken, begin, before)
        begin += size
    # And in it the last token of any weight, by the same rule. A sum in parallel may not grow monotonically in its
    # last bits, but a token without weight is never taken, and some token always is.
    weight = tl.exp(scaled(start, (block + place).to(tl.int64), stride, vocab, heat) - top).to(tl.float64)
    begins = tl.cumsum(weight, axis=0) - weight
    drawn = block + tl.max(tl.where((begins <= threshold - before) & (weight > 0), place, 0), axis=0)
    token = tl.minimum(tl.where(greedy, largest, drawn), vocab - 1).to(tl.int64)  # a row of NaN has no largest

    z = scaled(start, token, stride, vocab, heat)
    tl.store(tokens + row, token)
    tl.store(logprob + row, ((z - top).to(tl.float64) - tl.log(total)).to(tl.float32))
    tl.store(total_out + row, total)


def draw(logits: Tensor, seeds: Tensor, step: int | Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """As the reference's: tokens and log-probs ``[B]``."""
    tokens, logprob, total = sample(logits, seeds, step, temperature)
    check_weights(total)
    return tokens, logprob


def sample(
    logits: Tensor, seeds: Tensor, step: int | Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and weights ``Σ exp(z − max z)`` of the rows, ``[B]``, whether or not they are sound."""
    batch, vocab = logits.shape
    tokens = torch.empty_like(seeds, memory_format=torch.contiguous_format)
    logprob, total = (torch.empty(batch, dtype=d, device=logits.device) for d in (torch.float32, torch.float64))
    launch(
        sample_tokens_kernel,
        batch,
        lookup("sample_tokens", logits),
        logits,
        seeds.contiguous(),
        _dense(step),
        _dense(temperature),
        tokens,
        logprob,
        total,
        *logits.stride(),
        vocab,
        STEP_PER_ROW=isinstance(step, Tensor),
        PER_ROW=isinstance(temperature, Tensor),
    )
    return tokens, logprob, total


def _dense(x: float | Tensor) -> float | Tensor:
    return x.contiguous() if isinstance(x, Tensor) else x

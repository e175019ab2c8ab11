"""What the ahead-of-time report compiles, and what a call of each kernel costs.

Operators run on tensors without storage at the shapes of a real step, in the form that asks most of the registers:
entropy, softcap, a temperature for each row, every gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS, WIDTH, VOCAB, BATCH = 4096, 2048, 151936, 64
"""Targets, hidden size, vocabulary (Qwen2's) and sequences that are sampled."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""float16 has bfloat16's configurations, and the same code but for the name of its instructions."""

SOFTCAP = 30.0


class Cost(NamedTuple):
    """Of one call."""

    flops: int
    bytes: int
    """That have to cross the memory bus: each input and output once."""
    matrix: bool
    """Whether the FLOPs are products of matrices, for tensor cores."""


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def token_logprob(dtype: torch.dtype) -> None:
    """Forward and backward."""
    from metagrpo.kernels.triton import logprob
    from metagrpo.kernels.vocabulary import RowGradient

    logits, targets, row = _empty(ROWS, VOCAB, dtype=dtype), _empty(ROWS, dtype=torch.int64), _empty(ROWS)
    logprob.token_logprob_forward(logits, targets, row, SOFTCAP, True)
    logprob.token_logprob_backward(RowGradient(*[row] * 6), logits, targets, row, SOFTCAP)


def linear_logprob(dtype: torch.dtype) -> None:
    """Forward and backward, nothing frozen."""
    from metagrpo.kernels.triton import head
    from metagrpo.kernels.vocabulary import RowGradient

    hidden, weight, bias = (_empty(*shape, dtype=dtype) for shape in ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,)))
    targets, row = _empty(ROWS, dtype=torch.int64), _empty(ROWS)
    operands = (hidden, weight, bias, targets, targets, row, SOFTCAP)
    head.linear_logprob_forward(*operands, True)
    head.linear_logprob_backward(RowGradient(*[row] * 6), *operands, (True, True, True))


def sample_tokens(dtype: torch.dtype) -> None:
    """A step and a temperature for each row."""
    from metagrpo.kernels.triton import sampling

    seeds = _empty(BATCH, dtype=torch.int64)
    sampling.sample(_empty(BATCH, VOCAB, dtype=dtype), seeds, seeds, _empty(BATCH))


OPERATORS: dict[str, Callable[[torch.dtype], None]] = {
    "token_logprob": token_logprob,
    "linear_logprob": linear_logprob,
    "sample_tokens": sample_tokens,
}


def cost(kernel: str, programs: int, arguments: dict[str, Any]) -> Cost:
    """The cost of a launch, from the kernel's name and its arguments by name."""
    return _COSTS[kernel](programs, arguments)


# FLOPs a logit of the vocabulary kernels: scale, cap, subtract, exponential, the sums.


def _logits(flops: int, passes: int) -> Callable[[int, dict[str, Any]], Cost]:
    def of(programs: int, x: dict[str, Any]) -> Cost:
        logits = x["logits"]
        return Cost(flops * logits.numel(), passes * logits.numel() * logits.element_size(), False)

    return of


def _forward(programs: int, x: dict[str, Any]) -> Cost:
    hidden, weight, parts = x["hidden"], x["weight"], x["parts"]
    operands = (hidden.numel() + weight.numel()) * hidden.element_size()
    return Cost(2 * hidden.numel() * weight.shape[0], operands + 4 * parts.numel(), True)


def _combine(programs: int, x: dict[str, Any]) -> Cost:
    parts = x["parts"]
    return Cost(5 * parts.numel(), 4 * parts.numel() + 16 * x["rows"], False)


def _dlogits(programs: int, x: dict[str, Any]) -> Cost:
    tile, size = x["dlogits"], x["dlogits"].element_size()
    operands = sum(tile.shape) * x["width"] * size
    return Cost(2 * tile.numel() * x["width"], operands + tile.numel() * size, True)


def _product(programs: int, x: dict[str, Any]) -> Cost:
    height, width, depth, size = x["height"], x["width"], x["depth"], x["left"].element_size()
    return Cost(2 * height * width * depth, (height + width) * depth * size + 8 * height * width, True)


_COSTS: dict[str, Callable[[int, dict[str, Any]], Cost]] = {
    "token_logprob_forward": _logits(14, 1),
    "token_logprob_backward": _logits(20, 2),
    "linear_logprob_forward": _forward,
    "linear_logprob_combine": _combine,
    "linear_logprob_dlogits": _dlogits,
    "linear_logprob_product": _product,
    "sample_tokens": _logits(20, 1),
}

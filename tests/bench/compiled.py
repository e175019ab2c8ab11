"""Run as a script, where Triton's interpreter is off: kernels that must fail the report, and what the shipped ones
are compiled for at different numbers of rows. Prints JSON."""

from __future__ import annotations

import json
import sys
import warnings

import torch
import triton
import triton.language as tl

from metagrpo.bench import static, static_cases
from metagrpo.kernels.triton import head, logprob, sampling
from metagrpo.kernels.triton.launch import Launch, recording
from metagrpo.kernels.vocabulary import RowGradient


@triton.jit
def dot_kernel(a, b, out, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A product of tiles, all of it in one program."""
    total = tl.zeros((M, N), tl.float32)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    for first in range(0, depth, K):
        left = tl.load(a + m[:, None] * depth + first + k[None, :])
        right = tl.load(b + n[None, :] * depth + first + k[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def sum_kernel(a, b, out, depth, M: tl.constexpr, N: tl.constexpr):
    """The same product by multiplications and additions."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for k in range(depth):
        total += tl.load(a + m * depth + k).to(tl.float32)[:, None] * tl.load(b + n * depth + k).to(tl.float32)
    tl.store(out + m[:, None] * N + n[None, :], total)


def faults() -> dict[str, list[str]]:
    """What the report finds wrong with a sound product and with three bad ones, on an sm_80."""
    pointers = [torch.empty(4096, dtype=d, device="meta") for d in (torch.bfloat16, torch.bfloat16, torch.float32)]
    launches = {
        "sound": (dot_kernel, {"M": 64, "N": 64, "K": 32, "num_warps": 4, "num_stages": 2}),
        "too many registers": (dot_kernel, {"M": 256, "N": 256, "K": 32, "num_warps": 4, "num_stages": 2}),
        "too much shared memory": (dot_kernel, {"M": 128, "N": 128, "K": 128, "num_warps": 8, "num_stages": 5}),
        "no dot": (sum_kernel, {"M": 32, "N": 32, "num_warps": 4, "num_stages": 2}),
    }
    cost = static_cases.Cost(flops=1, bytes=1, matrix=True)
    return {
        name: static.row(name, "bf16", "sm_80", Launch(kernel, 1, (*pointers, 1024), constants), cost).faults
        for name, (kernel, constants) in launches.items()
    }


def specialisations(rows: int) -> list[str]:
    """What each launch of every operator is compiled for."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    targets, row = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.float32)
    gradient = RowGradient(*[row] * 6)
    with recording("sm_90") as launches:
        for logits in (empty(rows, 50257), empty(3, rows + 1, 50257)[:, :-1]):
            count = logits.numel() // 50257
            flat, each = empty(count, dtype=torch.int64), empty(count, dtype=torch.float32)
            logprob.token_logprob_forward(logits, flat, each, None, True)
            logprob.token_logprob_backward(RowGradient(*[each] * 6), logits, flat, each, None)
        operands = (empty(rows, 72), empty(50257, 72), None, targets, targets, row, None)
        head.linear_logprob_forward(*operands, True)
        head.linear_logprob_backward(gradient, *operands, (True, True, False))
        sampling.sample(empty(rows, 50257), targets, targets, row)
    return sorted({f"{launch.kernel.__name__} {static._specialised(launch)}" for launch in launches})


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    json.dump(
        {
            "faults": faults(),
            "specialisations": {rows: specialisations(rows) for rows in (2, 7, 64, 1000, 20_001)},
        },
        sys.stdout,
    )

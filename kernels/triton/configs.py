"""Tile shapes, warps and pipeline stages by kernel, target and size of an element.

A target stands for the GPUs that its code suits. Nothing is tuned at run time: the first call of a shape costs what
the second does, two processes compute the same bits, and the ahead-of-time report sees all that ships.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

Config = dict[str, int | str]
"""Compile-time arguments of a kernel, with ``num_warps`` and ``num_stages`` among them."""

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What kernels are compiled for: Ampere and all other NVIDIA GPUs, Hopper, data-centre Blackwell, and AMD."""

INTERPRETER = "interpreter"
"""Triton's interpreter on a CPU: tiles small enough that small tests see several."""


def lookup(kernel: str, x: Tensor) -> Config:
    """The configuration of a kernel for operands like ``x``."""
    table = _TABLE[kernel]
    target = target_of(x.device)
    return table.get((target, x.element_size())) or table[target, 0]


_TARGET: ContextVar[str | None] = ContextVar("metagrpo_triton_target", default=None)


@contextmanager
def for_target(target: str) -> Iterator[None]:
    """Look configurations up for this target, whatever the device."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_of(device: torch.device) -> str:
    """The target that serves a device."""
    return _TARGET.get() or (INTERPRETER if device.type == "cpu" else _gpu_target(device))


@cache
def _gpu_target(device: torch.device) -> str:
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def _everywhere(config: Config, interpreter: Config) -> dict[tuple[str, int], Config]:
    """One configuration for all targets and sizes."""
    return {**{(target, 0): config for target in TARGETS}, (INTERPRETER, 0): {**config, **interpreter}}


def _tile(m: int, n: int, k: int, warps: int, stages: int, precision: str = "ieee", **more: int) -> Config:
    """A tile ``[m, n]`` of a product, ``k`` deep a step.

    GROUP tiles along m run beside each other, so that they find each other's columns in the L2 cache.
    """
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": 8,
        "PRECISION": precision,
        "num_warps": warps,
        "num_stages": stages,
        **more,
    }


# Products of fp32 operands, whatever torch's own TF32 switch says. NVIDIA's tensor cores have no fp32: three TF32
# products of the operands' high and low parts stand in. Emulated on normal numbers 1024 deep, the largest error is
# 2.0e-6, against 1.7e-6 in fp32 and 1.1e-3 with one TF32 product, which is not offered; multiply-adds in fp32
# ("ieee") run at less than half the speed by the peaks. AMD's matrix cores multiply fp32 as it is.
_FP32 = "tf32x3"

_TABLE: dict[str, dict[tuple[str, int], Config]] = {
    # One row a program: wide tiles, since the maximum and the sums of a tile cost a barrier each.
    "token_logprob_forward": _everywhere({"BLOCK": 4096, "num_warps": 8, "num_stages": 2}, {"BLOCK": 1024}),
    "token_logprob_backward": _everywhere({"BLOCK": 4096, "num_warps": 8, "num_stages": 2}, {"BLOCK": 1024}),
    "sample_tokens": _everywhere({"BLOCK": 2048, "num_warps": 8, "num_stages": 2}, {"BLOCK": 256}),
    "linear_logprob_combine": _everywhere({"BLOCK": 128, "num_warps": 4, "num_stages": 2}, {"BLOCK": 32}),
    # SPAN columns a program, the same for any number of rows: a few rows still fill a GPU, and a row's sums are
    # formed in one order whatever the batch.
    "linear_logprob_forward": {
        ("sm_80", 2): _tile(128, 128, 32, 8, 4, SPAN=1024),
        ("sm_90", 2): _tile(128, 128, 64, 8, 4, SPAN=1024),
        ("sm_100", 2): _tile(128, 128, 64, 8, 4, SPAN=1024),
        ("gfx942", 2): _tile(128, 128, 64, 8, 2, SPAN=1024),
        ("sm_80", 4): _tile(64, 64, 32, 4, 3, _FP32, SPAN=1024),
        ("sm_90", 4): _tile(128, 64, 32, 8, 3, _FP32, SPAN=1024),
        ("sm_100", 4): _tile(128, 64, 32, 8, 3, _FP32, SPAN=1024),
        ("gfx942", 4): _tile(128, 64, 32, 8, 2, SPAN=1024),
        (INTERPRETER, 0): _tile(128, 128, 32, 4, 2, SPAN=256),
    },
    "linear_logprob_dlogits": {
        ("sm_80", 2): _tile(128, 128, 64, 8, 3),
        ("sm_90", 2): _tile(128, 128, 64, 8, 4),
        ("sm_100", 2): _tile(128, 128, 64, 8, 4),
        ("gfx942", 2): _tile(128, 128, 64, 8, 2),
        ("sm_80", 4): _tile(64, 64, 32, 4, 3, _FP32),
        ("sm_90", 4): _tile(128, 64, 32, 8, 3, _FP32),
        ("sm_100", 4): _tile(128, 64, 32, 8, 3, _FP32),
        ("gfx942", 4): _tile(128, 64, 32, 8, 2),
        (INTERPRETER, 0): _tile(128, 128, 32, 4, 2),
    },
    "linear_logprob_product": {
        ("sm_80", 2): _tile(128, 128, 64, 8, 3),
        ("sm_90", 2): _tile(128, 128, 64, 8, 4),
        ("sm_100", 2): _tile(128, 128, 64, 8, 4),
        ("gfx942", 2): _tile(128, 128, 64, 8, 2),
        ("sm_80", 4): _tile(64, 64, 32, 4, 3, _FP32),
        ("sm_90", 4): _tile(128, 64, 32, 8, 3, _FP32),
        ("sm_100", 4): _tile(128, 64, 32, 8, 3, _FP32),
        ("gfx942", 4): _tile(128, 64, 32, 8, 2),
        (INTERPRETER, 0): _tile(128, 64, 128, 4, 2),
    },
}

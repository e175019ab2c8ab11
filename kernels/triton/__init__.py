"""Triton implementations of the vocabulary operators, one file an operator. This file needs no Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refusal(x: Tensor) -> str | None:
    """Why the kernels cannot take an input like ``x``; ``None`` if they can."""
    if not _installed():
        return "triton is not installed"
    if x.dtype not in DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {x.dtype}"
    if x.device.type == "cuda" or (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return f"its kernels run on a GPU, or under TRITON_INTERPRET=1 on a CPU, not on {x.device.type}"


@cache
def _installed() -> bool:
    return find_spec("triton") is not None

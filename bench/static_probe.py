"""A kernel that any working toolchain compiles."""

import triton
import triton.language as tl


@triton.jit
def probe_kernel(x):
    tl.store(x, 1.0)

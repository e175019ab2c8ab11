"""Where the Triton kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU.

Import this before any module of ``metagrpo.kernels.triton``: Triton decides when it meets ``@triton.jit``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton 3.6's interpreter needs numpy < 2.4 for a loop's bound", allow_module_level=True)

    # Another test's imports (transformers') may have brought Triton in before; then its own library, tl.sum and the
    # like, was compiled for a GPU, and the interpreter cannot call it.
    for name, function in vars(tl.standard).copy().items():
        if type(function) is triton.JITFunction:
            plain = triton.jit(function.fn)
            for module in (tl, tl.standard):
                if getattr(module, name, None) is function:
                    setattr(module, name, plain)

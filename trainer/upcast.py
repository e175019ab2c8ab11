"""bfloat16 linear layers on a CPU that cannot multiply bfloat16.

There torch falls back to a scalar loop, 20 to 40 times slower than a float32 GEMM. Upcasting the operands is exact,
sums in float32 as the native instruction does, and costs one pass over the weights; they stay bfloat16 in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UpcastLinear(nn.Linear):
    """``nn.Linear`` whose product is computed in float32 and rounded once to the input's type."""

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` in, ``[..., O]`` out."""
        return _UpcastProduct.apply(input, self.weight, self.bias)


class _UpcastProduct(torch.autograd.Function):
    """Keeps the operands as they are for the backward pass, not their float32 copies."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        ctx.dtypes = input.dtype, None if bias is None else bias.dtype
        return F.linear(input.float(), weight.float(), None if bias is None else bias.float()).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        input_dtype, bias_dtype = ctx.dtypes
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad.float()
        rows = grad.flatten(0, -2)
        return (
            (grad @ weight.float()).to(input_dtype) if needs_input else None,
            (rows.T @ input.flatten(0, -2).float()).to(weight.dtype) if needs_weight else None,
            rows.sum(0).to(bias_dtype) if needs_bias else None,
        )


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether GEMMs of this type run on the device's matrix or vector units."""
    return dtype == torch.float32 or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def upcast_linears(model: nn.Module) -> None:
    """Turn every plain ``nn.Linear`` of a model into an :class:`UpcastLinear`, in place; parameters stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = UpcastLinear

"""bfloat16 linear layers computed in float32: right to one rounding, and nothing but the operands is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metagrpo.trainer.upcast import UpcastLinear, multiplies_natively, upcast_linears

LAST_BIT = 2.0**-8  # half a unit in the last place of bfloat16, relative


def layer(bias: bool, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 21, bias=bias)).to(torch.bfloat16).requires_grad_(not frozen)
    upcast_linears(model)
    assert type(model[0]) is UpcastLinear
    return model[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)])
def test_value_and_gradients_are_exact_to_one_rounding(bias: bool, frozen: bool, shape: tuple[int, ...]) -> None:
    module = layer(bias, frozen)
    x = torch.randn(*shape, 37).to(torch.bfloat16).requires_grad_()
    upstream = torch.randn(*shape, 21).to(torch.bfloat16)
    out = module(x)
    assert out.dtype == torch.bfloat16
    out.backward(upstream)

    rows, grads = x.detach().double().flatten(0, -2), upstream.double().flatten(0, -2)
    weight = module.weight.detach().double()
    expected = rows @ weight.T + (module.bias.detach().double() if bias else 0.0)
    pairs = [(out.detach().flatten(0, -2), expected), (x.grad.flatten(0, -2), grads @ weight)]  # type: ignore[union-attr]
    if not frozen:
        pairs.append((module.weight.grad, grads.T @ rows))  # type: ignore[arg-type]
        if bias:
            pairs.append((module.bias.grad, grads.sum(0)))  # type: ignore[arg-type]
    else:
        assert module.weight.grad is None
    for actual, exact in pairs:
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), exact, rtol=1.01 * LAST_BIT, atol=1e-5)


def test_only_the_operands_are_kept_for_the_backward_pass() -> None:
    module = layer(bias=True, frozen=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(torch.randn(4, 37).to(torch.bfloat16).requires_grad_())
    assert [tensor.data_ptr() for tensor in kept] == [module.weight.data_ptr()]


def test_subclasses_and_other_layers_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(2, 2), nn.Embedding(2, 2), nn.Linear(2, 2))
    upcast_linears(model)
    assert [type(module) for module in model] == [Special, nn.Embedding, UpcastLinear]


def test_float32_and_gpus_are_native() -> None:
    assert multiplies_natively(torch.float32, torch.device("cpu"))
    assert multiplies_natively(torch.bfloat16, torch.device("cuda"))

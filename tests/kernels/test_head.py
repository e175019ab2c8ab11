"""``linear_logprob`` against float64 formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from metagrpo.kernels import head as module
from metagrpo.kernels.head import linear_logprob

from . import oracle

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
INF = float("inf")


def case(
    n: int = 7, width: int = 24, vocab: int = 50, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets."""
    generator = torch.Generator().manual_seed(n + vocab)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((n, width), (vocab, width), (vocab,))
    )
    targets = torch.randint(vocab, (n,), generator=generator)
    return hidden.to(dtype), (weight / width**0.5 * 2).to(dtype), bias.to(dtype), targets


def exact_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    selected = hidden.detach().double() if rows is None else hidden.detach().double()[rows]
    logits = selected @ weight.detach().double().T
    return logits if bias is None else logits + bias.detach().double()


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 129, 50257, 151936])
def test_no_worse_than_plain_torch_at_any_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = case(6, 8, vocab, dtype)
    ours, plain = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    up_logprob, up_entropy = torch.linspace(-1, 2, 6), torch.linspace(1, -1, 6)

    logprob, entropy = linear_logprob(ours[0], ours[1], targets, bias=ours[2], return_entropy=True)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.autograd.backward([logprob, entropy], [up_logprob, up_entropy])

    table = torch.log_softmax(F.linear(*plain).float(), -1)
    plain_logprob, plain_entropy = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    torch.autograd.backward([plain_logprob, plain_entropy], [up_logprob, up_entropy])

    logits = exact_logits(hidden, weight, bias)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets)
    dlogits = oracle.logits_gradient(logits, targets, up_logprob, up_entropy)
    exact = oracle.linear_gradients(hidden, weight, bias, torch.arange(6), dlogits)
    # fp32 logits: the log-probs do not see the rounding of the operands' dtype.
    assert oracle.error(logprob, exact_logprob) < 5e-6
    assert oracle.error(logprob, exact_logprob) <= 2 * oracle.error(plain_logprob, exact_logprob) + 1e-6
    assert oracle.error(entropy, exact_entropy) <= 2 * oracle.error(plain_entropy, exact_entropy) + 1e-6
    for mine, theirs, right in zip(ours, plain, exact, strict=True):
        assert mine.grad.dtype == dtype
        assert oracle.error(mine.grad, right) <= 1.5 * oracle.error(theirs.grad, right) + 1e-6


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [0.5, "per token"])
def test_rows_that_repeat_bias_softcap_and_temperature(
    with_bias: bool, softcap: float | None, temperature: float | str
) -> None:
    hidden, weight, bias, _ = case()
    rows = torch.tensor([3, 3, 0, 6, 3, 1, 0, 5, 2])  # row 4 serves none
    targets = torch.tensor([1, 7, 0, 49, 1, -100, 22, 48, 3])
    heat = torch.linspace(0.4, 2.0, 9) if isinstance(temperature, str) else temperature
    inputs = leaves(hidden, weight, bias)
    logprob, entropy = linear_logprob(
        inputs[0],
        inputs[1],
        targets,
        rows=rows,
        bias=inputs[2] if with_bias else None,
        temperature=heat,
        softcap=softcap,
        return_entropy=True,
    )
    logits = exact_logits(hidden, weight, bias if with_bias else None, rows)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets, heat, softcap)
    assert oracle.error(logprob, exact_logprob) < 1e-5 and oracle.error(entropy, exact_entropy) < 1e-5
    up = torch.linspace(-2, 2, 9)
    torch.autograd.backward([logprob, entropy], [up, up.flip(0)])
    dlogits = oracle.logits_gradient(logits, targets, up, up.flip(0), heat, softcap)
    exact = oracle.linear_gradients(hidden, weight, bias, rows, dlogits)
    for leaf, right in list(zip(inputs, exact, strict=True))[: 3 if with_bias else 2]:
        assert oracle.error(leaf.grad, right) < 2e-5
    assert inputs[0].grad[4].abs().max() == 0


def test_ignored_targets_may_have_any_hidden_row() -> None:
    hidden, weight, bias, targets = case()
    targets[2] = targets[5] = -100
    keep = targets != -100
    clean, dirty = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    with torch.no_grad():
        dirty[0][2], dirty[0][5] = float("nan"), INF
    expected = linear_logprob(clean[0], clean[1], targets, bias=clean[2])
    logprob, entropy = linear_logprob(dirty[0], dirty[1], targets, bias=dirty[2], return_entropy=True)
    assert torch.equal(logprob, expected) and logprob[~keep].abs().sum() + entropy[~keep].abs().sum() == 0
    expected.sum().backward()
    (logprob.sum() + 0 * entropy.sum()).backward()
    for x, y in zip(clean, dirty, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-6)
    assert dirty[0].grad[~keep].abs().max() == 0


@pytest.mark.parametrize("count", [0, 5])
def test_nothing_to_score_is_zero_and_keeps_the_graph(count: int) -> None:
    hidden, weight, bias = leaves(*case(max(count, 1))[:3])
    logprob = linear_logprob(hidden[:count], weight, torch.full((count,), -100), bias=bias)
    assert logprob.shape == (count,) and logprob.sum() == 0
    logprob.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() == 0 for x in (hidden, weight, bias))


def test_no_target_out_of_some_hidden_rows() -> None:
    hidden, weight = leaves(*case()[:2])
    none = torch.zeros(0, dtype=torch.int64)
    linear_logprob(hidden, weight, none, rows=none).sum().backward()
    assert hidden.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0


def test_minus_infinity_in_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a head masks tokens; here a whole first block of them, and one target."""
    monkeypatch.setattr(module, "BLOCK", 8)
    hidden, weight, bias, targets = case()
    bias[:8] = bias[20] = -INF
    targets = targets.clamp(min=21)
    targets[3] = 20
    inputs = leaves(hidden, weight)
    logprob, entropy = linear_logprob(*inputs, targets, bias=bias, return_entropy=True)
    logits = exact_logits(hidden, weight, bias)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets)
    torch.testing.assert_close(logprob.double(), exact_logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    up = torch.ones(7)
    torch.autograd.backward([logprob, entropy], [up, up])
    exact = oracle.linear_gradients(
        hidden, weight, bias, torch.arange(7), oracle.logits_gradient(logits, targets, up, up)
    )
    assert oracle.error(inputs[0].grad, exact[0]) < 1e-5 and oracle.error(inputs[1].grad, exact[1]) < 1e-5


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_common_shift_costs_what_fp32_logits_cost(shift: float) -> None:
    """Logits around 1e4 are multiples of 2⁻¹⁰; the rest is exact."""
    hidden, weight, bias, targets = case()
    logprob = linear_logprob(hidden, weight, targets, bias=bias + shift)
    exact = oracle.token_logprob(exact_logits(hidden, weight, bias + shift), targets)[0]
    assert oracle.error(logprob, exact) < 2**-9


@pytest.mark.parametrize("trained", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_each_operand_frozen_or_not(trained: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = case()
    logits = exact_logits(hidden, weight, bias)
    exact = oracle.linear_gradients(
        hidden, weight, bias, torch.arange(7), oracle.logits_gradient(logits, targets, torch.ones(7))
    )
    inputs = [x.requires_grad_(bool(on)) for x, on in zip((hidden, weight, bias), trained, strict=True)]
    logprob = linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2])
    assert logprob.requires_grad == any(trained)
    if not any(trained):
        return
    products = []
    matmul = module._matmul
    monkeypatch.setattr(module, "_matmul", lambda a, b: products.append(a.shape) or matmul(a, b))
    logprob.sum().backward()
    assert len(products) == 1 + trained[0] + trained[1]  # a frozen head costs no product
    for leaf, right, on in zip(inputs, exact, trained, strict=True):
        assert (leaf.grad is not None) == bool(on)
        assert not on or oracle.error(leaf.grad, right) < 1e-5


def test_each_upstream_gradient_alone_and_expanded() -> None:
    hidden, weight, bias, targets = case()
    logits = exact_logits(hidden, weight)
    up, zero = torch.linspace(-2, 3, 7), torch.zeros(7)
    for grad_logprob, grad_entropy in [(up, None), (None, up), (torch.tensor(0.5).expand(7), up)]:
        leaf = leaves(hidden)[0]
        outputs = linear_logprob(leaf, weight, targets, return_entropy=True)
        pairs = [(o, g) for o, g in zip(outputs, (grad_logprob, grad_entropy), strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        dlogits = oracle.logits_gradient(
            logits, targets, zero if grad_logprob is None else grad_logprob, grad_entropy
        )
        assert (
            oracle.error(leaf.grad, oracle.linear_gradients(hidden, weight, bias, torch.arange(7), dlogits)[0]) < 1e-5
        )


def test_retained_graph_and_double_backward() -> None:
    hidden, weight, _, targets = case()
    hidden.requires_grad_()
    loss = linear_logprob(hidden, weight, targets).sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, hidden)
    grad = torch.autograd.grad(linear_logprob(hidden, weight, targets).sum(), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once only"):
        grad.sum().backward()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("hidden_dtype", DTYPES)
@pytest.mark.parametrize("amp", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_a_linear_layer_does(
    amp: torch.dtype, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = case()
    inputs = leaves(hidden.to(hidden_dtype), weight.to(weight_dtype), bias.to(weight_dtype))
    with torch.autocast("cpu", dtype=amp):
        logprob = linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2])
        assert logprob.dtype == torch.float32
        logprob.sum().backward()
    cast = [x.detach().to(amp) for x in inputs]
    logits = exact_logits(*cast)
    assert oracle.error(logprob, oracle.token_logprob(logits, targets)[0]) < 1e-5
    dlogits = oracle.logits_gradient(logits, targets, torch.ones(7))
    for leaf, right in zip(inputs, oracle.linear_gradients(*cast, torch.arange(7), dlogits), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), right, rtol=2**-7, atol=1e-3)


def test_inputs_stay_as_they_are() -> None:
    hidden, weight, bias, targets = case(dtype=torch.bfloat16)
    rows, heat = torch.arange(7).flip(0), torch.linspace(0.5, 1, 7)
    inputs = [hidden, weight, bias, targets, rows, heat]
    copies = [x.clone() for x in inputs]
    for x in inputs[:3]:
        x.requires_grad_()
    targets[1] = copies[3][1] = -100
    version = targets._version
    linear_logprob(hidden, weight, targets, rows=rows, bias=bias, temperature=heat, softcap=4.0).sum().backward()
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))
    assert [x._version for x in inputs] == [0, 0, 0, version, 0, 0]


def test_whole_batch_is_the_sum_of_its_parts() -> None:
    hidden, weight, _, targets = case(48)
    whole, parts = leaves(hidden, weight), leaves(hidden, weight)
    linear_logprob(*whole, targets).sum().backward()
    for start in range(0, 48, 12):
        span = slice(start, start + 12)
        linear_logprob(parts[0][span], parts[1], targets[span]).sum().backward()
    assert torch.equal(whole[0].grad, parts[0].grad)
    torch.testing.assert_close(whole[1].grad, parts[1].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("chunk", "block"), [(16, 1), (16, 7), (32, 4096), (1024, 13)])
def test_chunk_sizes_do_not_matter(chunk: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", chunk)
    monkeypatch.setattr(module, "BLOCK", block)
    hidden, weight, bias, _ = case()
    generator = torch.Generator().manual_seed(5)
    rows, targets = (torch.randint(high, (45,), generator=generator) for high in (7, 50))
    inputs = leaves(hidden, weight, bias)
    logprob, entropy = linear_logprob(
        inputs[0], inputs[1], targets, rows=rows, bias=inputs[2], return_entropy=True, softcap=5.0
    )
    logits = exact_logits(hidden, weight, bias, rows)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets, 1.0, 5.0)
    assert oracle.error(logprob, exact_logprob) < 1e-5 and oracle.error(entropy, exact_entropy) < 1e-5
    up = torch.linspace(-1, 1, 45)
    torch.autograd.backward([logprob, entropy], [up, up])
    dlogits = oracle.logits_gradient(logits, targets, up, up, 1.0, 5.0)
    for leaf, right in zip(inputs, oracle.linear_gradients(hidden, weight, bias, rows, dlogits), strict=True):
        assert oracle.error(leaf.grad, right) < 3e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    hidden, weight, _, targets = case()
    plain, ours = leaves(hidden, weight), leaves(hidden, weight)
    linear_logprob(plain[0] * 2, plain[1], targets).sum().backward()
    checkpoint(lambda h, w: linear_logprob(h * 2, w, targets), *ours, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, ours, strict=True))


def test_strides() -> None:
    hidden, weight, bias, targets = case(8, 24, 24)
    storage = torch.randn(8 * 25 + 1, generator=torch.Generator().manual_seed(1))
    views = {
        "transposed": hidden.T.contiguous().T,
        "odd offset": storage[1:].view(8, 25)[:, 1:],
        "expanded": hidden[:1].expand(8, 24),
    }
    for name, view in views.items():
        inputs = [view.detach().requires_grad_(), weight.T.detach().requires_grad_()]
        logprob = linear_logprob(*inputs, targets)
        logits = exact_logits(*inputs)
        assert oracle.error(logprob, oracle.token_logprob(logits, targets)[0]) < 1e-5, name
        grads = torch.autograd.grad(logprob.sum(), inputs)
        dlogits = oracle.logits_gradient(logits, targets, torch.ones(8))
        exact = oracle.linear_gradients(*inputs, bias, torch.arange(8), dlogits)
        assert all(oracle.error(g, e) < 1e-5 for g, e in zip(grads, exact, strict=False)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_twice(dtype: torch.dtype) -> None:
    hidden, weight, _, targets = case(1100, 40, 6000, dtype)

    def run(rows: Tensor) -> list[Tensor]:
        leaf = hidden[rows].requires_grad_()
        outputs = linear_logprob(leaf, weight, targets[rows], return_entropy=True)
        torch.autograd.backward(outputs, [torch.ones(len(rows)), torch.ones(len(rows))])
        return [*outputs, leaf.grad]

    every = run(torch.arange(1100))
    assert all(torch.equal(a, b) for a, b in zip(every, run(torch.arange(1100)), strict=True))
    for rows in ([0], [1099], [700, 3, 9], list(range(1000, 1050))):
        for alone, whole in zip(run(torch.tensor(rows)), every, strict=True):
            assert torch.equal(alone, whole[rows])


def test_gradients_of_repeated_rows_are_bitwise_the_same_twice() -> None:
    hidden, weight, _, _ = case(4)
    generator = torch.Generator().manual_seed(5)
    rows, targets = (torch.randint(high, (3000,), generator=generator) for high in (4, 50))
    first, second = (leaves(hidden, weight) for _ in range(2))
    for inputs in (first, second):
        linear_logprob(*inputs, targets, rows=rows).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap: float | None) -> None:
    hidden, weight, bias, _ = (x.double() for x in case(3, 4, 6))
    rows, targets = torch.tensor([0, 2, 2, 1]), torch.tensor([1, 5, 0, -100])
    heat = torch.tensor([0.5, 1.0, 2.0, 1.0])

    def run(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprob(
            h, w, targets, rows=rows, bias=b, temperature=heat, softcap=softcap, return_entropy=True
        )

    assert torch.autograd.gradcheck(run, leaves(hidden, weight, bias))


def test_memory_is_the_inputs_the_gradients_and_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 64)
    monkeypatch.setattr(module, "BLOCK", 256)
    hidden, weight, _, targets = case(600, 16, 3000, torch.bfloat16)
    hidden.requires_grad_()
    tile = 4 * 64 * 256
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
        oracle.LargestTensor() as forward,
    ):
        logprob, entropy = linear_logprob(hidden, weight, targets, return_entropy=True)
    assert forward.bytes == tile
    assert sum(x.numel() for x in saved) <= hidden.numel() + weight.numel() + 8 * 600
    assert {hidden.data_ptr(), weight.data_ptr()} <= {x.data_ptr() for x in saved}  # no copies
    with oracle.LargestTensor() as backward:
        torch.autograd.grad([logprob, entropy], hidden, [torch.ones(600), torch.ones(600)])
    assert backward.bytes == tile  # more than the fp32 gradient of hidden, and the frozen weight has none
    assert tile < 4 * 600 * 3000 / 100


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 4).long()}, TypeError, "hidden must be floating"),
        ({"hidden": torch.zeros(3, 5)}, ValueError, r"hidden must be \[N, H\]"),
        ({"hidden": torch.zeros(4)}, ValueError, r"hidden must be \[N, H\]"),
        ({"hidden": torch.zeros(3, 4).bfloat16()}, TypeError, "share a dtype.*bfloat16.*float32"),
        ({"bias": torch.zeros(8)}, ValueError, r"bias must be \[9\]"),
        ({"targets": torch.zeros(2).long()}, ValueError, "2 targets for 3 hidden rows"),
        ({"targets": torch.zeros(3)}, TypeError, "targets must be int64"),
        ({"targets": torch.zeros(3, 1).long()}, ValueError, r"targets must be \[M\]"),
        ({"targets": torch.tensor([0, 9, 0])}, IndexError, r"outside \[0, 9\)"),
        ({"targets": torch.tensor([0, -1, 0])}, IndexError, r"outside \[0, 9\)"),
        ({"rows": torch.tensor([0, 1, 3])}, IndexError, r"a row is outside \[0, 3\)"),
        ({"rows": torch.tensor([0, 1, -1])}, IndexError, r"a row is outside \[0, 3\)"),
        ({"rows": torch.zeros(2).long()}, ValueError, r"rows must be \[3\]"),
        ({"rows": torch.zeros(3)}, TypeError, "rows must be int64"),
        ({"temperature": torch.ones(2)}, ValueError, r"temperature must be a float or \[3\]"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ],
)
def test_what_is_refused(arguments: dict, error: type[Exception], message: str) -> None:
    inputs = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "targets": torch.zeros(3).long()} | arguments
    with pytest.raises(error, match=message):
        linear_logprob(inputs.pop("hidden"), inputs.pop("weight"), inputs.pop("targets"), **inputs)

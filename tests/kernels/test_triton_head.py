"""``linear_logprob`` in Triton against float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metagrpo.kernels import backend, last_backend, linear_logprob

from . import oracle
from .interpreted import DEVICE

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def triton():
    with backend("triton"):
        yield
    assert last_backend("linear_logprob") == "triton"


def case(
    n: int = 7, width: int = 24, vocab: int = 50, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, targets."""
    generator = torch.Generator().manual_seed(n + vocab)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((n, width), (vocab, width), (vocab,))
    )
    targets = torch.randint(vocab, (n,), generator=generator)
    return tuple(
        x.to(DEVICE) for x in (hidden.to(dtype), (weight / width**0.5 * 2).to(dtype), bias.to(dtype), targets)
    )


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def exact_run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    up_logprob: Tensor,
    up_entropy: Tensor | None = None,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> list[Tensor]:
    """Log-probs, entropies and the gradients of hidden, weight and bias, in float64 on the CPU."""
    to = [
        None if x is None else x.detach().cpu() for x in (hidden, weight, bias, targets, up_logprob, up_entropy, rows)
    ]
    hidden, weight, bias, targets, up_logprob, up_entropy, rows = to  # type: ignore[assignment]
    rows = torch.arange(len(targets)) if rows is None else rows
    heat = temperature.cpu() if isinstance(temperature, Tensor) else temperature
    logits = hidden.double()[rows] @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    logprob, entropy, _ = oracle.token_logprob(logits, targets, heat, softcap)
    dlogits = oracle.logits_gradient(logits, targets, up_logprob, up_entropy, heat, softcap)
    return [logprob, entropy, *oracle.linear_gradients(hidden, weight, bias, rows, dlogits)]


def errors(values: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [oracle.error(x.cpu(), y) for x, y in zip(values, exact, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 129, 400])
def test_no_worse_than_plain_torch(vocab: int, dtype: torch.dtype) -> None:
    """127 and 129 straddle a tile of the interpreter's configuration, 400 is two spans."""
    hidden, weight, bias, targets = case(6, 40, vocab, dtype)
    ours, plain = leaves(hidden, weight, bias), leaves(hidden.cpu(), weight.cpu(), bias.cpu())
    up_logprob, up_entropy = torch.linspace(-1, 2, 6), torch.linspace(1, -1, 6)
    logprob, entropy = linear_logprob(ours[0], ours[1], targets, bias=ours[2], return_entropy=True)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.autograd.backward([logprob, entropy], [up_logprob.to(DEVICE), up_entropy.to(DEVICE)])

    table = torch.log_softmax(F.linear(*plain).float(), -1)
    plain_logprob = table.gather(-1, targets.cpu()[:, None])[:, 0]
    plain_entropy = -(table.exp() * table).sum(-1)
    torch.autograd.backward([plain_logprob, plain_entropy], [up_logprob, up_entropy])

    exact = exact_run(hidden, weight, bias, targets, up_logprob, up_entropy)
    mine = errors([logprob, entropy, *(x.grad for x in ours)], exact)
    theirs = errors([plain_logprob, plain_entropy, *(x.grad for x in plain)], exact)
    # fp32 logits: the log-probs do not see the rounding of the operands' dtype.
    assert mine[0] < 5e-6 and mine[1] < 1e-5
    assert all(a <= 1.5 * b + 2e-6 for a, b in zip(mine, theirs, strict=True))
    assert all(x.grad.dtype == dtype for x in ours)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_real_vocabularies(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # wide tiles and little padding: the interpreter's time goes by their number
        from metagrpo.kernels.triton import configs, head

        logits = configs._tile(16, 4096, 16, 4, 2)
        wide = {"forward": {**logits, "SPAN": 16384}, "dlogits": logits, "product": configs._tile(512, 16, 512, 4, 2)}
        monkeypatch.setattr(head, "ALIGN", 16)
        for kernel, config in wide.items():
            monkeypatch.setitem(configs._TABLE[f"linear_logprob_{kernel}"], (configs.INTERPRETER, 0), config)
    hidden, weight, bias, targets = case(3, 8, vocab, torch.bfloat16)
    inputs = leaves(hidden, weight, bias)
    logprob, entropy = linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2], return_entropy=True)
    up = torch.ones(3)
    torch.autograd.backward([logprob, entropy], [up.to(DEVICE), up.to(DEVICE)])
    exact = exact_run(hidden, weight, bias, targets, up, up)
    found = errors([logprob, entropy, *(x.grad for x in inputs)], exact)
    scale = [1e-5, 1e-5, *(2**-7 * x.abs().max().item() for x in exact[2:])]
    assert all(a <= b for a, b in zip(found, scale, strict=True)), (found, scale)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [0.5, "per token"])
def test_rows_that_repeat_bias_softcap_and_temperature(
    with_bias: bool, softcap: float | None, temperature: float | str
) -> None:
    hidden, weight, bias, _ = case()
    rows = torch.tensor([3, 3, 0, 6, 3, 1, 0, 5, 2], device=DEVICE)  # row 4 serves none
    targets = torch.tensor([1, 7, 0, 49, 1, -100, 22, 48, 3], device=DEVICE)
    heat = torch.linspace(0.4, 2.0, 9, device=DEVICE) if isinstance(temperature, str) else temperature
    inputs = leaves(hidden, weight, bias)
    options = {"rows": rows, "temperature": heat, "softcap": softcap}
    logprob, entropy = linear_logprob(
        inputs[0], inputs[1], targets, bias=inputs[2] if with_bias else None, return_entropy=True, **options
    )
    up = torch.linspace(-2, 2, 9, device=DEVICE)
    torch.autograd.backward([logprob, entropy], [up, up.flip(0)])
    exact = exact_run(hidden, weight, bias if with_bias else None, targets, up, up.flip(0), **options)
    found = [logprob, entropy, *(x.grad for x in inputs[: 3 if with_bias else 2])]
    assert all(e < 2e-5 for e in errors(found, exact[: len(found)]))
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
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-6)
    assert dirty[0].grad[~keep].abs().max() == 0


@pytest.mark.parametrize("count", [0, 5])
def test_nothing_to_score_is_zero_and_keeps_the_graph(count: int) -> None:
    hidden, weight, bias = leaves(*case(max(count, 1))[:3])
    logprob = linear_logprob(hidden[:count], weight, torch.full((count,), -100, device=DEVICE), bias=bias)
    assert logprob.shape == (count,) and logprob.sum() == 0
    logprob.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() == 0 for x in (hidden, weight, bias))


def test_minus_infinity_in_the_bias() -> None:
    """How a head masks tokens; here a whole first span of them, some of the next, and one target."""
    hidden, weight, bias, targets = case(7, 24, 400)
    bias[:260] = bias[270] = -INF
    targets = targets.clamp(min=271)
    targets[3] = 270
    inputs = leaves(hidden, weight)
    logprob, entropy = linear_logprob(*inputs, targets, bias=bias, return_entropy=True)
    up = torch.ones(7, device=DEVICE)
    torch.autograd.backward([logprob, entropy], [up, up])
    exact = exact_run(hidden, weight, bias, targets, up, up)
    found = [logprob, entropy, *(x.grad for x in inputs)]
    for x, y in zip(found, exact, strict=False):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=2e-5)
    assert logprob[3] == -INF


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_common_shift_costs_what_fp32_logits_cost(shift: float) -> None:
    """Logits around 1e4 are multiples of 2⁻¹⁰; the rest is exact."""
    hidden, weight, bias, targets = case()
    logprob = linear_logprob(hidden, weight, targets, bias=bias + shift)
    exact = exact_run(hidden, weight, bias + shift, targets, torch.ones(7))
    assert oracle.error(logprob.cpu(), exact[0]) < 2**-9


@pytest.mark.parametrize("trained", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_each_operand_frozen_or_not(trained: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from metagrpo.kernels.triton import head as module

    hidden, weight, bias, targets = case()
    exact = exact_run(hidden, weight, bias, targets, torch.ones(7))
    inputs = [x.requires_grad_(bool(on)) for x, on in zip((hidden, weight, bias), trained, strict=True)]
    logprob = linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2])
    assert logprob.requires_grad == any(trained)
    if not any(trained):
        return
    products = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda *x: products.append(x[0].shape) or product(*x))
    logprob.sum().backward()
    assert len(products) == trained[0] + trained[1]  # a frozen head costs no product
    for leaf, right, on in zip(inputs, exact[2:], trained, strict=True):
        assert (leaf.grad is not None) == bool(on)
        assert not on or oracle.error(leaf.grad.cpu(), right) < 1e-5


def test_each_upstream_gradient_alone_and_expanded() -> None:
    hidden, weight, _, targets = case()
    up, zero = torch.linspace(-2, 3, 7), torch.zeros(7)
    for grad_logprob, grad_entropy in [(up, None), (None, up), (torch.tensor(0.5).expand(7), up)]:
        leaf = leaves(hidden)[0]
        outputs = linear_logprob(leaf, weight, targets, return_entropy=True)
        pairs = [(o, g) for o, g in zip(outputs, (grad_logprob, grad_entropy), strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g.to(DEVICE) for _, g in pairs])
        exact = exact_run(hidden, weight, None, targets, zero if grad_logprob is None else grad_logprob, grad_entropy)
        assert oracle.error(leaf.grad.cpu(), exact[2]) < 1e-5


@pytest.mark.parametrize("amp", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_a_linear_layer_does(amp: torch.dtype) -> None:
    hidden, weight, bias, targets = case()
    inputs = leaves(hidden, weight.bfloat16(), bias.bfloat16())
    with torch.autocast(DEVICE, dtype=amp):
        logprob = linear_logprob(inputs[0], inputs[1], targets, bias=inputs[2])
        logprob.sum().backward()
    exact = exact_run(*(x.detach().to(amp) for x in inputs), targets, torch.ones(7))
    assert logprob.dtype == torch.float32 and oracle.error(logprob.cpu(), exact[0]) < 1e-5
    for leaf, right in zip(inputs, exact[2:], strict=True):
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.cpu().double(), right, rtol=2**-7, atol=4e-3)


def test_inputs_stay_as_they_are() -> None:
    hidden, weight, bias, targets = case(dtype=torch.bfloat16)
    inputs = [
        hidden,
        weight,
        bias,
        targets,
        torch.arange(7, device=DEVICE).flip(0),
        torch.linspace(0.5, 1, 7).to(DEVICE),
    ]
    copies = [x.clone() for x in inputs]
    for x in inputs[:3]:
        x.requires_grad_()
    options = {"rows": inputs[4], "bias": bias, "temperature": inputs[5], "softcap": 4.0}
    linear_logprob(hidden, weight, targets, **options).sum().backward()
    assert all(torch.equal(x, y) and x._version == 0 for x, y in zip(inputs, copies, strict=True))


@pytest.mark.parametrize(("chunk", "block"), [(128, 16), (128, 4096), (256, 48)])
def test_chunk_sizes_do_not_matter(chunk: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from metagrpo.kernels.triton import head as module

    monkeypatch.setattr(module, "ROWS", chunk)
    monkeypatch.setattr(module, "COLUMNS", block)
    hidden, weight, bias, _ = case()
    generator = torch.Generator().manual_seed(5)
    rows, targets = (torch.randint(high, (300,), generator=generator).to(DEVICE) for high in (7, 50))
    inputs = leaves(hidden, weight, bias)
    logprob, entropy = linear_logprob(
        inputs[0], inputs[1], targets, rows=rows, bias=inputs[2], return_entropy=True, softcap=5.0
    )
    up = torch.linspace(-1, 1, 300, device=DEVICE)
    torch.autograd.backward([logprob, entropy], [up, up])
    exact = exact_run(hidden, weight, bias, targets, up, up, rows=rows, softcap=5.0)
    found = errors([logprob, entropy, *(x.grad for x in inputs)], exact)
    assert all(e < t for e, t in zip(found, (1e-5, 1e-5, 1e-4, 1e-4, 1e-4), strict=True))


def test_strides_and_offsets_past_two_to_the_31() -> None:
    hidden, weight, _, targets = case(8, 24, 24)
    storage = torch.randn(8 * 25 + 1, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    far = torch.empty(2**31 + 64, device=DEVICE).as_strided((2, 24), (2**31 + 7, 1))
    views = {
        "transposed": hidden.T.contiguous().T,
        "odd offset": storage[1:].view(8, 25)[:, 1:],
        "expanded": hidden[:1].expand(8, 24),
        "far apart": far.copy_(hidden[:2]),
    }
    for name, view in views.items():
        inputs = [view.detach().requires_grad_(), weight.T.detach().requires_grad_()]
        logprob = linear_logprob(*inputs, targets[: len(view)])
        grads = torch.autograd.grad(logprob.sum(), inputs)
        exact = exact_run(view, weight.T, None, targets[: len(view)], torch.ones(len(view)))
        assert all(e < 1e-5 for e in errors([logprob, *grads], [exact[0], *exact[2:4]])), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_twice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (
        DEVICE == "cpu"
    ):  # numpy's matmul gives a row other bits at another place in a tile; einsum, as a GPU, does not
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))
    hidden, weight, _, targets = case(140, 40, 150, dtype)

    def run(rows: list[int]) -> list[Tensor]:
        leaf = hidden[rows].requires_grad_()
        outputs = linear_logprob(leaf, weight, targets[rows], return_entropy=True)
        torch.autograd.backward(outputs, [torch.ones_like(outputs[0])] * 2)
        return [*outputs, leaf.grad]

    every = run(list(range(140)))
    for rows in (list(range(140)), [0], [139], [70, 3, 9]):
        for alone, whole in zip(run(rows), every, strict=True):
            assert torch.equal(alone, whole[rows])


def test_gradients_of_repeated_rows_are_bitwise_the_same_twice() -> None:
    hidden, weight, _, _ = case(4)
    generator = torch.Generator().manual_seed(5)
    rows, targets = (torch.randint(high, (300,), generator=generator).to(DEVICE) for high in (4, 50))
    first, second = (leaves(hidden, weight) for _ in range(2))
    for inputs in (first, second):
        linear_logprob(*inputs, targets, rows=rows).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(first, second, strict=True))


def test_memory_holds_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, to which the interpreter's products would cast other operands."""
    from metagrpo.kernels.triton import head as module

    monkeypatch.setattr(module, "ROWS", 128)
    monkeypatch.setattr(module, "COLUMNS", 128)
    hidden, weight, _, targets = case(256, 16, 1000)
    hidden.requires_grad_()
    logits = 4 * 256 * 1000
    with oracle.LargestTensor() as forward:
        logprob, entropy = linear_logprob(hidden, weight, targets, return_entropy=True)
    spans = 4 if DEVICE == "cpu" else 1
    assert forward.bytes <= 4 * 4 * spans * 256 < logits / 10
    up = torch.ones(256, device=DEVICE)
    with oracle.LargestTensor() as backward:
        torch.autograd.grad([logprob, entropy], hidden, [up, up])
    assert backward.bytes <= 4 * 128 * 128  # a tile of logit gradients; dH is smaller, and dW is never formed

"""``token_logprob`` in Triton against float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from metagrpo.kernels import backend, last_backend, token_logprob

from . import oracle
from .interpreted import DEVICE

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BLOCK = 1024
"""The interpreter's, so that the vocabularies below are less than, one more than and several blocks."""

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def triton():
    with backend("triton"):
        yield
    assert last_backend("token_logprob") == "triton"


def case(n: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + vocab)
    logits = (torch.randn(n, vocab, generator=generator) * scale).to(dtype)
    return logits.to(DEVICE), torch.randint(vocab, (n,), generator=generator).to(DEVICE)


def on_device(values: list[float]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def check(
    logits: Tensor, targets: Tensor, up_logprob: Tensor, up_entropy: Tensor, tolerance: float = 0.0, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradient of ``[N, V]`` against the oracle: at most twice the error of plain torch."""
    leaf = logits.detach().requires_grad_()
    logprob, entropy = token_logprob(leaf, targets, return_entropy=True, **options)
    torch.autograd.backward([logprob, entropy], [up_logprob, up_entropy])
    plain = logits.detach().cpu().requires_grad_()
    heat = options.get("temperature", 1.0)
    heat = heat.cpu()[:, None] if isinstance(heat, Tensor) else heat
    softcap = options.get("softcap")
    z = plain.float() if softcap is None else softcap * torch.tanh(plain.float() / softcap)
    table = torch.log_softmax(z / heat, -1)
    plain_logprob = table.gather(-1, targets.cpu()[:, None])[:, 0]
    plain_entropy = -(table.exp() * table).sum(-1)
    torch.autograd.backward([plain_logprob, plain_entropy], [up_logprob.cpu(), up_entropy.cpu()])

    heat = heat[:, 0] if isinstance(heat, Tensor) else heat
    exact_logprob, exact_entropy, _ = oracle.token_logprob(plain, targets.cpu(), heat, softcap)
    exact = oracle.logits_gradient(plain, targets.cpu(), up_logprob.cpu(), up_entropy.cpu(), heat, softcap)
    assert logprob.dtype == entropy.dtype == torch.float32 and leaf.grad.dtype == logits.dtype
    if DEVICE == "cpu" and logits.dtype == torch.bfloat16:  # the interpreter rounds it towards zero
        plain.grad += 2**-8 * exact.abs().max()
    for mine, theirs, right in (
        (logprob, plain_logprob, exact_logprob),
        (entropy, plain_entropy, exact_entropy),
        (leaf.grad, plain.grad, exact),
    ):
        assert oracle.error(mine.cpu(), right) <= 2 * oracle.error(theirs, right) + 1e-6 + tolerance
    return logprob, entropy, leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 129, BLOCK + 1])
def test_value_and_gradient(vocab: int, dtype: torch.dtype) -> None:
    logits, targets = case(3, vocab, dtype)
    check(logits, targets, on_device([1.0, -2.0, 0.5]), on_device([0.5, 0.0, -1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_value_and_gradient_at_real_vocabularies(vocab: int) -> None:
    logits, targets = case(2, vocab, torch.bfloat16)
    check(logits, targets, on_device([1.0, -2.0]), on_device([0.5, 1.0]))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [0.25, "per token"])
def test_temperature_and_softcap(temperature: float | str, softcap: float | None) -> None:
    logits, targets = case(4, 70)
    heat = torch.linspace(0.3, 3.0, 4, device=DEVICE) if isinstance(temperature, str) else temperature
    up = torch.linspace(1, 2, 4, device=DEVICE)
    check(logits, targets, up, up, tolerance=5e-6, temperature=heat, softcap=softcap)


def test_hand_worked_row() -> None:
    """p = (1/2, 1/4, 1/4): log p of the second is −2 ln 2, the entropy 1.5 ln 2."""
    logits = on_device([[math.log(2.0), 0.0, 0.0]]).requires_grad_()
    logprob, entropy = token_logprob(logits, torch.tensor([1], device=DEVICE), return_entropy=True)
    assert logprob.item() == pytest.approx(-2 * math.log(2), abs=1e-6)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
    logprob.sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([-0.5, 0.75, -0.25], abs=1e-6)


def test_ignored_rows_may_hold_anything() -> None:
    logits, targets = case(4, 40)
    targets[1] = targets[3] = -100
    dirty = logits.clone()
    dirty[1], dirty[3] = float("nan"), INF
    clean, dirty = logits.requires_grad_(), dirty.requires_grad_()
    token_logprob(clean, targets).sum().backward()
    logprob, entropy = token_logprob(dirty, targets, return_entropy=True)
    up = torch.where(targets == -100, float("nan"), 1.0)  # nor does what comes from above matter
    torch.autograd.backward([logprob, entropy], [up, torch.zeros_like(up)])
    assert logprob[[1, 3]].tolist() == entropy[[1, 3]].tolist() == [0.0, 0.0]
    assert dirty.grad[[1, 3]].abs().max() == 0
    assert torch.equal(logprob, token_logprob(clean, targets))
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (4,), ()])
def test_nothing_to_score_is_zero_and_keeps_the_graph(shape: tuple[int, ...]) -> None:
    logits = torch.randn(*shape, 7, device=DEVICE, requires_grad=True)
    logprob, entropy = token_logprob(logits, torch.full(shape, -100, device=DEVICE), return_entropy=True)
    assert logprob.shape == entropy.shape == shape
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.sum() == 0 and logits.grad.shape == logits.shape and logits.grad.abs().sum() == 0


def test_minus_infinity_anywhere() -> None:
    """Single ones, all but one, a whole first and a whole last block, and the target itself."""
    vocab = 2 * BLOCK if DEVICE == "cpu" else 16384
    logits, targets = case(5, vocab)
    logits[0, [0, 4]] = -INF
    targets[0] = 2
    logits[1, torch.arange(vocab, device=DEVICE) != targets[1]] = -INF
    logits[2, : vocab // 2] = -INF
    targets[2] = vocab - 1
    logits[3, vocab // 2 :] = -INF
    targets[3] = 0
    logits[4, targets[4]] = -INF
    up = on_device([1.0, -1.0, 2.0, 0.5, 1.5])
    leaf = logits.clone().requires_grad_()
    logprob, entropy = token_logprob(leaf, targets, return_entropy=True)
    torch.autograd.backward([logprob, entropy], [up, up])
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits.cpu(), targets.cpu())
    torch.testing.assert_close(logprob.cpu().double(), exact_logprob, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.cpu().double(), exact_entropy, rtol=1e-6, atol=2e-6)
    assert logprob[4] == -INF and logprob[1] == 0 and entropy[1] == 0
    exact = oracle.logits_gradient(logits.cpu(), targets.cpu(), up.cpu(), up.cpu())
    torch.testing.assert_close(leaf.grad.cpu().double(), exact, rtol=1e-6, atol=2e-6)


def test_no_finite_logit_is_no_distribution() -> None:
    logits = torch.full((1, 4), -INF, device=DEVICE)
    assert token_logprob(logits, torch.tensor([1], device=DEVICE)).isnan().all()


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_common_shift_costs_no_digits(shift: float) -> None:
    logits, targets = case(4, 300)
    check(logits + shift, targets, torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: 70,001 programs take the interpreter a minute")
def test_more_than_65535_rows() -> None:
    logits, targets = case(70_001, 3)
    logits.requires_grad_()
    logprob = token_logprob(logits, targets)
    logprob.sum().backward()
    p = torch.softmax(logits.detach().double(), -1)
    one_hot = torch.nn.functional.one_hot(targets, 3)
    assert oracle.error(logprob, (p * one_hot).sum(-1).log()) < 1e-5
    assert oracle.error(logits.grad, one_hot - p) < 1e-6


def test_offsets_past_two_to_the_31() -> None:
    """The second row starts at element 2³¹ + 7; the pages between are never touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
    logits = storage.as_strided((2, 5), (2**31 + 7, 1))
    logits.copy_(torch.randn(2, 5, generator=torch.Generator().manual_seed(3)))
    ones = torch.ones(2, device=DEVICE)
    check(logits, torch.tensor([4, 1], device=DEVICE), ones, ones)
    columns = storage.as_strided((2, 2), (1, 2**31 + 7))
    check(columns, torch.tensor([1, 0], device=DEVICE), ones, ones)


def test_any_strides() -> None:
    base = torch.randn(2, 5, 3, 11, generator=torch.Generator().manual_seed(1))
    storage = torch.randn(3 * 4 * 13 + 1, generator=torch.Generator().manual_seed(2))
    views = {
        "sliced": base[:, :, 0][:, :-1],
        "sliced twice": base[:, :-1, :-1],
        "odd offset": storage[1:].view(3, 4, 13)[..., 2:],
        "transposed": base.transpose(0, 2),
        "columns": base[0, 0].T,
        "every second": base[0, ..., ::2],
        "stride 0 rows": base[0, 0, :1].expand(4, 11),
        "stride 0 inside": base[:, :1, 0].expand(2, 6, 11),
        "stride 0 logits": base[0, 0, :, :1].expand(3, 9),
    }
    for name, view in views.items():
        count = math.prod(view.shape[:-1])
        odd = torch.randint(view.shape[-1], (2 * count + 1,), generator=torch.Generator().manual_seed(4))
        targets = odd[1::2].view(view.shape[:-1])
        leaf = view.to(DEVICE).detach().requires_grad_()
        logprob = token_logprob(leaf, targets.to(DEVICE))
        (grad,) = torch.autograd.grad(logprob.sum(), leaf)
        flat, flat_targets = view.reshape(count, -1), targets.reshape(-1)
        exact = oracle.token_logprob(flat, flat_targets)[0].view(targets.shape)
        assert oracle.error(logprob.cpu(), exact) < 2e-6, name
        exact = oracle.logits_gradient(flat, flat_targets, torch.ones(count)).view(view.shape)
        assert oracle.error(grad.cpu(), exact) < 1e-6, name


def test_each_upstream_gradient_alone_both_and_expanded() -> None:
    logits, targets = case(4, 50)
    up, zero = torch.linspace(-2, 3, 4), torch.zeros(4)
    for grad_logprob, grad_entropy in [
        (up, None),
        (None, up),
        (up, -up),
        (torch.tensor(0.5).expand(4), torch.tensor(-2.0).expand(4)),
    ]:
        leaf = logits.clone().requires_grad_()
        outputs = token_logprob(leaf, targets, return_entropy=True)
        pairs = [(o, g) for o, g in zip(outputs, (grad_logprob, grad_entropy), strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g.to(DEVICE) for _, g in pairs])
        exact = oracle.logits_gradient(
            logits.cpu(), targets.cpu(), zero if grad_logprob is None else grad_logprob, grad_entropy
        )
        assert oracle.error(leaf.grad.cpu(), exact) < 3e-6


@pytest.mark.parametrize("amp", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(amp: torch.dtype) -> None:
    logits, targets = case(2, 33, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    with torch.autocast(DEVICE, dtype=amp):
        logprob = token_logprob(leaf, targets)
        logprob.sum().backward()
    assert torch.equal(logprob, token_logprob(logits, targets)) and leaf.grad.dtype == logits.dtype


def test_inputs_stay_as_they_are() -> None:
    logits, targets = case(3, 9)
    inputs = [logits, targets, torch.rand(3, device=DEVICE) + 0.5]
    copies = [x.clone() for x in inputs]
    token_logprob(logits.requires_grad_(), targets, temperature=inputs[2], softcap=5.0).sum().backward()
    assert all(torch.equal(x, y) and x._version == 0 for x, y in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("gap", [2.0, 9.0, 16.0, 30.0])
def test_confident_rows(gap: float) -> None:
    """At p → 1 − 1e-7 the gradient of the target is 1 − p in fp32; a GPU's exponential is good to two places."""
    logits = on_device([[gap, 0.0]]).requires_grad_()
    logprob = token_logprob(logits, torch.tensor([0], device=DEVICE))
    logprob.sum().backward()
    rest = 1 / (1 + math.exp(gap))
    tolerance = 1.2e-7 if DEVICE == "cpu" else 2.4e-7
    assert logprob.item() == pytest.approx(math.log1p(-rest), abs=tolerance)
    assert logits.grad.tolist()[0] == pytest.approx([rest, -rest], abs=tolerance)


def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_twice() -> None:
    logits, targets = case(9, BLOCK + 300)
    up = torch.linspace(-1, 1, 9, device=DEVICE)

    def run(rows: list[int]) -> list[Tensor]:
        leaf = logits[rows].requires_grad_()
        outputs = token_logprob(leaf, targets[rows], return_entropy=True)
        torch.autograd.backward(outputs, [up[rows], up[rows]])
        return [*outputs, leaf.grad]

    every = run(list(range(9)))
    for rows in (list(range(9)), [0], [8], [5, 3]):
        for alone, whole in zip(run(rows), every, strict=True):
            assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("block", [16, 64, 4096])
def test_tile_sizes_do_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from metagrpo.kernels.triton import logprob as module

    monkeypatch.setattr(module, "lookup", lambda kernel, x: {"BLOCK": block, "num_warps": 1, "num_stages": 1})
    logits, targets = case(3, 130)
    ones = torch.ones(3, device=DEVICE)
    check(logits, targets, ones, ones, tolerance=4e-6, temperature=0.7, softcap=9.0)

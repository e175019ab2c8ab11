"""``token_logprob`` against float64 formulas."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from metagrpo.kernels import logprob as module
from metagrpo.kernels.logprob import token_logprob

from . import oracle

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
INF = float("inf")


def case(n: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab, generator=generator) * scale).to(dtype)
    return logits, torch.randint(vocab, (n,), generator=generator)


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes in torch: log-softmax and gather, in fp32."""
    table = torch.log_softmax(logits.float(), -1)
    return table.gather(-1, targets.clamp(min=0)[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 129, 50257, 151936])
def test_value_and_gradient_at_any_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    logits, targets = case(5, vocab, dtype)
    logits.requires_grad_()
    logprob, entropy = token_logprob(logits, targets, return_entropy=True)
    assert logprob.dtype == entropy.dtype == torch.float32
    up_logprob, up_entropy = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0]), torch.tensor([0.5, 0.0, -1.0, 2.0, 1.0])
    (logprob * up_logprob + entropy * up_entropy).sum().backward()

    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets)
    exact_grad = oracle.logits_gradient(logits, targets, up_logprob, up_entropy)
    plain_logits = logits.detach().clone().requires_grad_()
    plain_logprob, plain_entropy = plain(plain_logits, targets)
    (plain_logprob * up_logprob + plain_entropy * up_entropy).sum().backward()
    floor = 3e-7
    assert oracle.error(logprob, exact_logprob) <= 2 * oracle.error(plain_logprob, exact_logprob) + floor
    assert oracle.error(entropy, exact_entropy) <= 2 * oracle.error(plain_entropy, exact_entropy) + floor
    assert logits.grad.dtype == dtype
    assert oracle.error(logits.grad, exact_grad) <= 2 * oracle.error(plain_logits.grad, exact_grad) + floor


def test_hand_worked_row() -> None:
    """p = (1/2, 1/4, 1/4): log p of the second is −2 ln 2, the entropy 1.5 ln 2."""
    logits = torch.tensor([[math.log(2.0), 0.0, 0.0]], requires_grad=True)
    logprob, entropy = token_logprob(logits, torch.tensor([1]), return_entropy=True)
    assert logprob.item() == pytest.approx(-2 * math.log(2), abs=1e-6)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)
    logprob.sum().backward()
    assert logits.grad.tolist()[0] == pytest.approx([-0.5, 0.75, -0.25], abs=1e-6)


def test_ignored_rows_may_hold_anything() -> None:
    logits, targets = case(6, 40)
    targets[1] = targets[4] = -100
    clean = logits.clone().requires_grad_()
    token_logprob(clean, targets).sum().backward()
    dirty = logits.clone()
    dirty[1], dirty[4] = float("nan"), INF
    dirty.requires_grad_()
    logprob, entropy = token_logprob(dirty, targets, return_entropy=True)
    up = torch.where(targets == -100, float("nan"), 1.0)  # nor does what comes from above matter
    torch.autograd.backward([logprob, entropy], [up, torch.zeros(6)])
    assert logprob[[1, 4]].tolist() == entropy[[1, 4]].tolist() == [0.0, 0.0]
    assert dirty.grad[[1, 4]].abs().max() == 0
    assert torch.equal(token_logprob(dirty, targets), token_logprob(clean, targets))
    torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (4,), ()])
def test_nothing_to_score_is_zero_and_keeps_the_graph(shape: tuple[int, ...]) -> None:
    logits = torch.randn(*shape, 7, requires_grad=True)
    logprob, entropy = token_logprob(logits, torch.full(shape, -100), return_entropy=True)
    assert logprob.shape == entropy.shape == shape
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.sum() == 0 and logits.grad.shape == logits.shape and logits.grad.abs().sum() == 0


@pytest.mark.parametrize("block", [2, 3, 1000])
def test_minus_infinity_anywhere(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single ones, all but one, a whole first and a whole last block, and the target itself."""
    monkeypatch.setattr(module, "BLOCK", block)
    logits, targets = case(5, 6)
    logits[0, [0, 4]] = -INF
    targets[0] = 2
    logits[1, torch.arange(6) != targets[1]] = -INF
    logits[2, :3] = -INF
    targets[2] = 5
    logits[3, 3:] = -INF
    targets[3] = 0
    logits[4, targets[4]] = -INF
    logits.requires_grad_()
    logprob, entropy = token_logprob(logits, targets, return_entropy=True)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets)
    torch.testing.assert_close(logprob.double(), exact_logprob, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-6, atol=1e-6)
    assert logprob[4] == -INF and logprob[1] == 0 and entropy[1] == 0
    up = torch.tensor([1.0, -1.0, 2.0, 0.5, 1.5])
    torch.autograd.backward([logprob, entropy], [up, up])
    exact = oracle.logits_gradient(logits, targets, up, up)
    torch.testing.assert_close(logits.grad.double(), exact, rtol=1e-6, atol=1e-6)


def test_no_finite_logit_is_no_distribution() -> None:
    assert token_logprob(torch.full((1, 4), -INF), torch.tensor([1])).isnan().all()


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_a_common_shift_costs_no_digits(shift: float) -> None:
    logits, targets = case(8, 300)
    shifted = (logits + shift).requires_grad_()
    logprob, entropy = token_logprob(shifted, targets, return_entropy=True)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(shifted, targets)
    assert oracle.error(logprob, exact_logprob) < 2e-6
    assert oracle.error(entropy, exact_entropy) < 2e-6
    logprob.sum().backward()
    assert oracle.error(shifted.grad, oracle.logits_gradient(shifted, targets, torch.ones(8))) < 1e-6


def test_more_than_65535_rows() -> None:
    logits, targets = case(70_001, 3)
    logits.requires_grad_()
    logprob = token_logprob(logits, targets)
    p = torch.softmax(logits.detach().double(), -1)
    one_hot = torch.nn.functional.one_hot(targets, 3)
    assert oracle.error(logprob, (p * one_hot).sum(-1).log()) < 1e-5
    logprob.sum().backward()
    assert oracle.error(logits.grad, one_hot - p) < 1e-6


def test_offsets_past_two_to_the_31() -> None:
    """The second row starts at element 2³¹ + 7; the pages between are never touched."""
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 5), (2**31 + 7, 1))
    logits.copy_(torch.randn(2, 5, generator=torch.Generator().manual_seed(3)))
    logits.requires_grad_()
    targets = torch.tensor([4, 1])
    logprob = token_logprob(logits, targets)
    logprob.sum().backward()
    assert oracle.error(logprob, oracle.token_logprob(logits, targets)[0]) < 1e-6
    assert oracle.error(logits.grad, oracle.logits_gradient(logits, targets, torch.ones(2))) < 4e-3


def test_any_strides() -> None:
    base = torch.randn(2, 5, 3, 11, generator=torch.Generator().manual_seed(1))
    storage = torch.randn(3 * 4 * 13 + 1, generator=torch.Generator().manual_seed(2))
    views = {
        "sliced": base[:, :-1],
        "odd offset": storage[1:].view(3, 4, 13)[..., 2:],
        "transposed": base.transpose(0, 2),
        "columns": base[0, 0].T,
        "every second": base[..., ::2],
        "stride 0 rows": base[0, 0, :1].expand(4, 11),
        "stride 0 inside": base[:, :1].expand(2, 6, 3, 11),
        "stride 0 logits": base[0, 0, :, :1].expand(3, 9),
    }
    for name, view in views.items():
        count = math.prod(view.shape[:-1])
        odd = torch.randint(view.shape[-1], (2 * count + 1,), generator=torch.Generator().manual_seed(4))
        targets = odd[1::2].view(view.shape[:-1])
        leaf = view.detach().requires_grad_()
        logprob = token_logprob(leaf, targets)
        flat, flat_targets = view.reshape(count, -1), targets.reshape(-1)
        exact = oracle.token_logprob(flat, flat_targets)[0].view(targets.shape)
        assert oracle.error(logprob, exact) < 2e-6, name
        (grad,) = torch.autograd.grad(logprob.sum(), leaf)
        exact = oracle.logits_gradient(flat, flat_targets, torch.ones(count)).view(view.shape)
        assert oracle.error(grad, exact) < 1e-6, name


def test_each_upstream_gradient_alone_both_expanded_and_neither() -> None:
    logits, targets = case(6, 50)
    up = torch.linspace(-2, 3, 6)
    zero = torch.zeros(6)
    for grad_logprob, grad_entropy in [
        (up, None),
        (None, up),
        (up, -up),
        (torch.tensor(0.5).expand(6), torch.tensor(-2.0).expand(6)),
    ]:
        leaf = logits.clone().requires_grad_()
        outputs = token_logprob(leaf, targets, return_entropy=True)
        pairs = [(o, g) for o, g in zip(outputs, (grad_logprob, grad_entropy), strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        exact = oracle.logits_gradient(logits, targets, zero if grad_logprob is None else grad_logprob, grad_entropy)
        assert oracle.error(leaf.grad, exact) < 2e-6
    leaf = logits.clone().requires_grad_()
    logprob, entropy = token_logprob(leaf, targets, return_entropy=True)
    assert logprob.requires_grad and entropy.requires_grad
    (logprob.detach().sum() + leaf.sum() * 0).backward()
    assert leaf.grad.abs().max() == 0


def test_retained_graph_and_double_backward() -> None:
    logits, targets = case(4, 9)
    logits.requires_grad_()
    loss = token_logprob(logits, targets).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)
    grad = torch.autograd.grad(token_logprob(logits, targets).sum(), logits, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once only"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amp", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype, amp: torch.dtype) -> None:
    logits, targets = case(4, 33, dtype)
    leaf = logits.clone().requires_grad_()
    with torch.autocast("cpu", dtype=amp):
        logprob = token_logprob(leaf, targets)
        logprob.sum().backward()
    assert torch.equal(logprob, token_logprob(logits, targets)) and leaf.grad.dtype == dtype
    assert oracle.error(logprob, oracle.token_logprob(logits, targets)[0]) < 2e-6


def test_inputs_stay_as_they_are_and_a_later_change_is_caught() -> None:
    logits, targets = case(4, 9)
    heat = torch.rand(4) + 0.5
    inputs = [logits, targets, heat]
    copies = [x.clone() for x in inputs]
    leaf = logits.requires_grad_()
    token_logprob(leaf, targets, temperature=heat, softcap=5.0).sum().backward()
    assert all(torch.equal(x, y) and x._version == 0 for x, y in zip(inputs, copies, strict=True))
    hidden = leaf * 1
    logprob = token_logprob(hidden, targets)
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.sum().backward()


def test_without_a_gradient_nothing_is_kept() -> None:
    logits, targets = case(4, 9)
    assert not token_logprob(logits, targets).requires_grad
    with torch.no_grad():
        assert not token_logprob(logits.requires_grad_(), targets).requires_grad


def test_whole_batch_is_the_sum_of_its_parts() -> None:
    logits, targets = case(12, 40)
    whole = logits.clone().requires_grad_()
    token_logprob(whole, targets).sum().backward()
    parts = logits.clone().requires_grad_()
    for rows in range(0, 12, 3):
        token_logprob(parts[rows : rows + 3], targets[rows : rows + 3]).sum().backward()
    assert torch.equal(whole.grad, parts.grad)


@pytest.mark.parametrize(("block", "tile"), [(1, 1), (7, 40), (64, 1 << 20), (100_000, 1 << 20)])
def test_tile_sizes_do_not_matter(block: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "TILE", tile)
    logits, targets = case(9, 130)
    targets[3] = -100
    logits.requires_grad_()
    logprob, entropy = token_logprob(logits, targets, return_entropy=True, temperature=0.7, softcap=9.0)
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets, 0.7, 9.0)
    assert oracle.error(logprob, exact_logprob) < 4e-6 and oracle.error(entropy, exact_entropy) < 4e-6
    torch.autograd.backward([logprob, entropy], [torch.ones(9), torch.ones(9)])
    exact = oracle.logits_gradient(logits, targets, torch.ones(9), torch.ones(9), 0.7, 9.0)
    assert oracle.error(logits.grad, exact) < 4e-6


@pytest.mark.parametrize("temperature", [0.25, 2.0, 1, "per token"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_temperature_and_softcap(temperature: float | str, softcap: float | None) -> None:
    logits, targets = case(6, 70)
    heat = torch.linspace(0.3, 3.0, 6) if isinstance(temperature, str) else temperature
    leaf = logits.view(2, 3, 70).requires_grad_()
    shaped = heat.view(2, 3) if isinstance(heat, Tensor) else heat
    logprob, entropy = token_logprob(
        leaf, targets.view(2, 3), temperature=shaped, softcap=softcap, return_entropy=True
    )
    exact_logprob, exact_entropy, _ = oracle.token_logprob(logits, targets, heat, softcap)
    assert oracle.error(logprob.view(-1), exact_logprob) < 1e-5
    assert oracle.error(entropy.view(-1), exact_entropy) < 1e-5
    up = torch.linspace(1, 2, 6)
    torch.autograd.backward([logprob, entropy], [up.view(2, 3), up.view(2, 3)])
    exact = oracle.logits_gradient(logits, targets, up, up, heat, softcap)
    assert oracle.error(leaf.grad.view(6, 70), exact) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    logits, targets = case(4, 30)
    plain_leaf, leaf = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    token_logprob(plain_leaf * 2, targets).sum().backward()
    checkpoint(lambda x: token_logprob(x * 2, targets), leaf, use_reentrant=reentrant).sum().backward()
    assert torch.equal(plain_leaf.grad, leaf.grad)


@pytest.mark.parametrize("gap", [2.0, 9.0, 16.0, 30.0])
def test_confident_rows(gap: float) -> None:
    """At p → 1 − 1e-7 the gradient of the target is 1 − p to fp32's last place, not what bf16 would leave."""
    logits = torch.tensor([[gap, 0.0]], requires_grad=True)
    logprob = token_logprob(logits, torch.tensor([0]))
    logprob.sum().backward()
    rest = 1 / (1 + math.exp(gap))
    assert logprob.item() == pytest.approx(math.log1p(-rest), abs=1.2e-7)
    assert logits.grad.tolist()[0] == pytest.approx([rest, -rest], abs=1.2e-7)


@pytest.mark.parametrize("vocab", [40, 40_000, 70_001])
def test_a_row_is_bitwise_the_same_alone_in_a_batch_and_twice(vocab: int) -> None:
    logits, targets = case(67, vocab)
    up = torch.linspace(-1, 1, 67)

    def run(rows: Tensor) -> list[Tensor]:
        leaf = logits[rows].requires_grad_()
        outputs = token_logprob(leaf, targets[rows], return_entropy=True)
        torch.autograd.backward(outputs, [up[rows], up[rows]])
        return [*outputs, leaf.grad]

    every = run(torch.arange(67))
    assert all(torch.equal(a, b) for a, b in zip(every, run(torch.arange(67)), strict=True))
    for rows in (*([i] for i in range(10)), [66], [5, 3], list(range(20, 60))):
        for alone, whole in zip(run(torch.tensor(rows)), every, strict=True):
            assert torch.equal(alone, whole[rows])


def test_gradcheck() -> None:
    logits, targets = case(4, 6, torch.float64)
    logits[0, 1] = -INF
    targets[0], targets[3] = 2, -100
    finite = logits[1:].requires_grad_()
    heat = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    for options in ({}, {"softcap": 2.0}, {"temperature": heat}, {"temperature": heat, "softcap": 2.0}):
        assert torch.autograd.gradcheck(
            lambda x, options=options: token_logprob(x, targets[1:], return_entropy=True, **options), (finite,)
        )


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5),
    vocab=st.integers(1, 40),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 300.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    softcap=st.sampled_from([None, 10.0]),
    seed=st.integers(0, 10_000),
)
def test_conservation(n, vocab, scale, temperature, softcap, seed) -> None:
    """A row's gradient before the softcap sums to 0, 0 ≤ H ≤ ln V, and log p ≤ 0."""
    logits, targets = case(n, vocab, seed=seed, scale=scale)
    logits.requires_grad_()
    logprob, entropy = token_logprob(logits, targets, temperature=temperature, softcap=softcap, return_entropy=True)
    assert (logprob <= 0).all() and (entropy >= -1e-5).all() and (entropy <= math.log(vocab) + 1e-5).all()
    (logprob.sum() + entropy.sum()).backward()
    slope = 1.0 if softcap is None else 1 / torch.cosh(logits.detach() / softcap).square()
    kept = (slope > 1e-3) if isinstance(slope, Tensor) else torch.ones(n, vocab, dtype=torch.bool)
    rows = kept.all(-1)
    assert ((logits.grad / slope).sum(-1)[rows].abs() < 1e-3).all()


def test_memory_is_the_inputs_and_a_tile() -> None:
    logits, targets = case(300, 20_000, torch.bfloat16)
    logits.requires_grad_()
    saved: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
        oracle.LargestTensor() as largest,
    ):
        logprob, entropy = token_logprob(logits, targets, return_entropy=True)
    tile_bytes = 4 * module.TILE
    assert largest.bytes <= tile_bytes < 4 * logits.numel()
    # The logits themselves and a handful of numbers a row.
    assert [x.data_ptr() for x in saved if x.numel() >= logits.numel()] == [logits.data_ptr()]
    assert sum(x.numel() for x in saved) <= logits.numel() + 8 * 300
    with oracle.LargestTensor() as largest:
        torch.autograd.grad([logprob, entropy], logits, [torch.ones(300), torch.ones(300)])
    assert largest.bytes <= 2 * logits.numel()  # the gradient, in bf16


@pytest.mark.slow
def test_needs_torch_alone() -> None:
    code = """
import sys
for name in ("triton", "numpy", "transformers", "scipy"):
    sys.modules[name] = None
from metagrpo.kernels import advantages, head, logprob, sampling
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("target", [-1, -99, -101, 9, 2**40])
def test_a_target_out_of_range_raises(target: int) -> None:
    with pytest.raises(IndexError, match=r"outside \[0, 9\)"):
        token_logprob(torch.zeros(2, 9), torch.tensor([3, target]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.zeros(2, 9, dtype=torch.int64)}, TypeError, "logits must be floating"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "V >= 1"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, TypeError, "targets must be int64"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, r"targets must be \[2\]"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": float("nan")}, ValueError, "temperature must be positive"),
        ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, "temperature must be positive"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature must be a float or \[2\]"),
        ({"temperature": torch.ones(2, requires_grad=True)}, ValueError, "requires a gradient"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ],
)
def test_what_is_refused(arguments: dict, error: type[Exception], message: str) -> None:
    inputs = {"logits": torch.zeros(2, 9), "targets": torch.zeros(2, dtype=torch.int64)} | arguments
    with pytest.raises(error, match=message):
        token_logprob(inputs.pop("logits"), inputs.pop("targets"), **inputs)

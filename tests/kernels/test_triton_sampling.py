"""``sample_tokens`` in Triton: the reference's draws, and the distribution they come from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metagrpo.kernels import backend, last_backend, sample_tokens

from . import oracle
from .interpreted import DEVICE

INF = float("inf")

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def triton():
    with backend("triton"):
        yield
    assert last_backend("sample_tokens") == "triton"


def uniform(seed: int, step: int) -> float:
    """The random number of a seed and a step, in Python's integers."""
    bits = oracle.splitmix64((oracle.splitmix64(seed % 2**64) + step * 0x9E3779B97F4A7C15) % 2**64)
    return ((bits >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 5, 255, 257, 1000])
def test_a_draw_inverts_the_exact_distribution(vocab: int, dtype: torch.dtype) -> None:
    """At the number that the seed and the step stand for; a border between tokens may move by fp32's rounding."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(6, vocab, generator=generator) * 3).to(dtype)
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 987654321])
    steps = torch.tensor([0, 1, 5, 2**40, 2**63 - 1, -3])
    heat = torch.linspace(0.5, 2, 6)
    tokens, logprob = sample_tokens(
        logits.to(DEVICE), seeds=seeds.to(DEVICE), step=steps.to(DEVICE), temperature=heat.to(DEVICE)
    )
    exact = torch.log_softmax(logits.double() / heat[:, None].double(), -1)
    cumulative = exact.exp().cumsum(-1)
    for i, token in enumerate(tokens.tolist()):
        u = uniform(int(seeds[i]), int(steps[i]))
        below = 0.0 if token == 0 else cumulative[i, token - 1].item()
        assert below - 1e-6 <= u <= cumulative[i, token].item() + 1e-6
        assert logprob[i].item() == pytest.approx(exact[i, token].item(), abs=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, "per row"])
@pytest.mark.parametrize("step", [0, 1, 2**40, "per row"])
def test_the_tokens_are_the_references(step: int | str, temperature: float | str) -> None:
    """Seeds are fixed, so none of these numbers lies on a border."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 700, generator=generator) * 2).to(DEVICE)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).to(DEVICE)
    options = {
        "seeds": seeds,
        "step": torch.arange(5, device=DEVICE) if isinstance(step, str) else step,
        "temperature": torch.linspace(0, 2, 5, device=DEVICE) if isinstance(temperature, str) else temperature,
    }
    tokens, logprob = sample_tokens(logits, **options)
    with backend("torch"):
        expected, expected_logprob = sample_tokens(logits, **options)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprob, expected_logprob, rtol=0, atol=1e-6)
    sample_tokens(logits, **options)  # the last call is the fixture's to check


def test_impossible_tokens_are_never_drawn() -> None:
    """−inf at both ends, around block ends and nearly everywhere, and a probability that is 0 in fp32."""
    row = torch.full((1024,), -INF)
    possible = [7, 255, 256, 600, 1000]
    row[possible] = torch.tensor([0.0, 1.0, 0.5, -2.0, 0.0])
    row[601] = -200.0
    seeds = torch.arange(50, device=DEVICE)
    tokens, logprob = sample_tokens(row.to(DEVICE).expand(50, -1), seeds=seeds, step=0)
    assert set(tokens.tolist()) <= set(possible) and len(set(tokens.tolist())) >= 4 and logprob.isfinite().all()
    for place in (0, 255, 256, 699):
        row = torch.full((1, 700), -200.0, device=DEVICE)
        row[0, place] = 0.0
        tokens, logprob = sample_tokens(row, seeds=torch.tensor([place], device=DEVICE), step=0)
        assert tokens.item() == place and logprob.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack(
        [
            torch.zeros(900),
            torch.randn(900, generator=generator) * 1000,
            torch.linspace(-6e4, 6e4, 900),
            torch.full((900,), 3e4),
        ]
    ).to(dtype)
    for step in range(3):
        tokens, logprob = sample_tokens(rows.to(DEVICE), seeds=torch.arange(4, device=DEVICE), step=step)
        exact = torch.log_softmax(rows.double(), -1).gather(-1, tokens.cpu()[:, None])[:, 0]
        assert oracle.error(logprob.cpu(), exact) < 2e-6


def test_a_row_is_bitwise_the_same_alone_in_any_batch_and_twice() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(5, 300, generator=generator) * 2).to(DEVICE)
    seeds, steps, heat = (x.to(DEVICE) for x in (torch.arange(5) * 99, torch.arange(5) * 7, torch.linspace(0, 2, 5)))

    def run(rows: list[int]) -> tuple[Tensor, Tensor]:
        return sample_tokens(logits[rows], seeds=seeds[rows], step=steps[rows], temperature=heat[rows])

    every = run(list(range(5)))
    for rows in (list(range(5)), [0], [4], [3, 1, 3]):
        for alone, whole in zip(run(rows), every, strict=True):
            assert torch.equal(alone, whole[rows])


def test_temperature_zero_is_greedy() -> None:
    """The first of equals, and its log-probability at temperature 1."""
    logits = torch.tensor([[0.0, 3.0, 3.0, -INF], [5.0, 1.0, 2.0, 3.0], [-2.0, -3.0, -1.0, -1.5]])
    tokens, logprob = sample_tokens(logits.to(DEVICE), seeds=torch.arange(3, device=DEVICE), step=0, temperature=0)
    assert tokens.tolist() == [1, 0, 2]
    exact = torch.log_softmax(logits.double(), -1).gather(-1, tokens.cpu()[:, None])[:, 0]
    assert oracle.error(logprob.cpu(), exact) < 1e-6


def test_empty_batch_strides_and_inputs() -> None:
    tokens, logprob = sample_tokens(
        torch.zeros(0, 5, device=DEVICE), seeds=torch.zeros(0, device=DEVICE).long(), step=0
    )
    assert tokens.shape == logprob.shape == (0,)
    logits = torch.randn(300, 3, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    seeds = torch.arange(6, device=DEVICE)[::2]
    copies = [logits.clone(), seeds.clone()]
    strided = sample_tokens(logits.T, seeds=seeds, step=1)
    dense = sample_tokens(logits.T.contiguous(), seeds=seeds.contiguous(), step=1)
    assert all(torch.equal(x, y) for x, y in zip(strided, dense, strict=True))
    assert torch.equal(logits, copies[0]) and torch.equal(seeds, copies[1])


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU this is a device-side assertion, which ends the process")
@pytest.mark.parametrize("row", [[0.0, float("nan")], [0.0, INF], [-INF, -INF]])
def test_a_row_that_is_no_distribution_raises(row: list[float]) -> None:
    with pytest.raises(ValueError, match="a row of logits holds NaN"):
        sample_tokens(torch.tensor([row, [0.0, 0.0]]), seeds=torch.zeros(2).long(), step=0)

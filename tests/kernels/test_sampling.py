"""``sample_tokens``: the distribution it draws from, and what a draw may depend on."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from metagrpo.kernels import sampling as module
from metagrpo.kernels.sampling import sample_tokens

from . import oracle

INF = float("inf")
DRAWS = 20_000


def draw(row: Tensor, count: int = DRAWS, step: int = 0, **options: float) -> tuple[Tensor, Tensor]:
    """``count`` draws from one row of logits, with seeds 0, 1, 2, …"""
    seeds = torch.arange(count)
    parts = [
        sample_tokens(row.expand(len(s), -1), seeds=s, step=step, **options)
        for s in seeds.split(max(1, 10**6 // len(row)))
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprob for _, logprob in parts])


def fits(tokens: Tensor, p: Tensor) -> bool:
    """A chi-square test at 1e-4; tokens with fewer than 10 expected draws share a cell. Seeds are fixed."""
    expected, seen = p * len(tokens), torch.bincount(tokens, minlength=len(p)).double()
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    used = expected > 0
    assert seen[~used].sum() == 0
    return len(expected[used]) < 2 or stats.chisquare(seen[used], expected[used], sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [2, 5, 255, 256, 257, 600])
def test_draws_follow_the_softmax(vocab: int, temperature: float) -> None:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    tokens, logprob = draw(row, temperature=temperature)
    exact = torch.log_softmax(row.double() / temperature, 0)
    assert fits(tokens, exact.exp())
    assert oracle.error(logprob, exact[tokens]) < 1e-6


def test_draws_from_one_seed_over_many_steps_follow_the_softmax() -> None:
    row = torch.tensor([0.0, 1.0, -1.0, 2.0])
    tokens, _ = sample_tokens(row.expand(DRAWS, -1), seeds=torch.full((DRAWS,), 11), step=torch.arange(DRAWS))
    assert fits(tokens, torch.softmax(row.double(), 0))
    pairs = tokens[:-1:2] * 4 + tokens[1::2]  # neighbouring steps are independent
    p = torch.softmax(row.double(), 0)
    assert fits(pairs, torch.outer(p, p).view(-1))


def test_impossible_tokens_are_never_drawn() -> None:
    """−inf at both ends, around block ends and nearly everywhere; the rest in proportion."""
    row = torch.full((1024,), -INF)
    possible = [7, 255, 256, 600, 1000]
    row[possible] = torch.tensor([0.0, 1.0, 0.5, -2.0, 0.0])
    tokens, logprob = draw(row)
    assert set(tokens.tolist()) == set(possible) and logprob.isfinite().all()
    assert fits(tokens, torch.softmax(row.double(), 0))


@pytest.mark.parametrize("u", [2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("place", [0, 1, 255, 256, 511, 699])
def test_one_possible_token_is_drawn_at_any_random_number(u: float, place: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_uniform", lambda seeds, step: torch.full(seeds.shape, u, dtype=torch.float64))
    row = torch.full((1, 700), -200.0)  # probability 0 in fp32, but not −inf
    row[0, place] = 0.0
    tokens, logprob = sample_tokens(row, seeds=torch.tensor([3]), step=0)
    assert tokens.item() == place and logprob.item() == 0


def test_a_part_that_rounds_up_to_the_whole_block() -> None:
    """The threshold lies below the second block's end by one place, and both differences from the first block's end,
    ties, round to the same even number: 1 + 2·2⁻⁵². Only the first token of the second block has weight."""
    weights = torch.zeros(1, 2, module.BLOCK)
    weights[0, :, 0] = torch.tensor([2.0**-53, 1.0])
    cumulative = torch.tensor([[2.0**-53, 1 + 3 * 2.0**-52]], dtype=torch.float64)
    u = torch.tensor([[1 - 2.0**-52]], dtype=torch.float64)
    threshold = u * cumulative[:, 1:]
    assert threshold < cumulative[:, 1:] and threshold - 2.0**-53 == cumulative[:, 1:] - 2.0**-53
    assert module._invert(weights, cumulative, u).item() == module.BLOCK


@pytest.mark.parametrize("vocab", [700, 768])
def test_random_numbers_at_the_ends_and_at_block_borders(vocab: int, monkeypatch) -> None:
    """Random logits; u walks over the borders of the blocks' sums, where the two levels meet."""
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    row[:3] = row[250:262] = row[-5:] = -INF
    cumulative = torch.softmax(row.double(), 0).cumsum(0)
    near = cumulative[[255, 511, vocab - 1]].clamp(max=1 - 2.0**-53)
    us = torch.cat(
        [near + shift * 2.0**-53 for shift in range(-3000, 3001, 50)] + [torch.tensor([2.0**-53]).double()]
    )
    us = us.clamp(2.0**-53, 1 - 2.0**-53)
    monkeypatch.setattr(module, "_uniform", lambda seeds, step: us)
    tokens, logprob = sample_tokens(row.expand(len(us), -1), seeds=torch.zeros(len(us)).long(), step=0)
    assert logprob.isfinite().all() and (row[tokens] > -INF).all()
    exact = torch.searchsorted(cumulative, us, right=True).clamp(max=vocab - 1)
    # Within fp32's rounding of the sums the draw is the inverse of the exact distribution.
    assert ((cumulative[tokens] - cumulative[exact]).abs() < 1e-2).all()
    below = torch.where(tokens > 0, cumulative[tokens - 1], 0)
    assert ((us > below - 1e-6) & (us < cumulative[tokens] + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_rows(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack(
        [
            torch.zeros(5000),
            torch.randn(5000, generator=generator) * 1000,
            torch.linspace(-6e4, 6e4, 5000),
            torch.full((5000,), 3e4),
        ]
    ).to(dtype)
    for step in range(20):
        tokens, logprob = sample_tokens(rows, seeds=torch.arange(4), step=step)
        exact = torch.log_softmax(rows.double(), -1).gather(-1, tokens[:, None])[:, 0]
        assert oracle.error(logprob, exact) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [3, 257, 49_152])
def test_a_row_is_bitwise_the_same_alone_in_any_batch_and_twice(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(33, vocab, generator=generator) * 2).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (33,), generator=generator)
    steps, heat = torch.arange(33) * 7, torch.linspace(0, 2, 33)

    def run(rows: list[int]) -> tuple[Tensor, Tensor]:
        return sample_tokens(logits[rows], seeds=seeds[rows], step=steps[rows], temperature=heat[rows])

    every = run(list(range(33)))
    for rows in (list(range(33)), [0], [32], [4, 30, 4], list(range(20, 33))):
        for alone, whole in zip(run(rows), every, strict=True):
            assert torch.equal(alone, whole[rows])
    for row in (0, 1, 17):
        options = {"step": int(steps[row]), "temperature": float(heat[row])}
        tokens, logprob = sample_tokens(logits[row : row + 1], seeds=seeds[row : row + 1], **options)
        assert tokens == every[0][row] and logprob == every[1][row]


@pytest.mark.parametrize("heat", [0, 0.0, torch.zeros(3)])
def test_temperature_zero_is_greedy(heat: float | Tensor) -> None:
    """The first of equals, and its log-probability at temperature 1."""
    logits = torch.tensor([[0.0, 3.0, 3.0, -INF], [5.0, 1.0, 2.0, 3.0], [-2.0, -3.0, -1.0, -1.5]])
    tokens, logprob = sample_tokens(logits, seeds=torch.arange(3), step=0, temperature=heat)
    assert tokens.tolist() == [1, 0, 2]
    exact = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    assert oracle.error(logprob, exact) < 1e-6


def test_greedy_and_drawn_rows_in_one_batch() -> None:
    row = torch.randn(400, generator=torch.Generator().manual_seed(3))
    heat = torch.tensor([0.0, 0.7]).repeat(2000)
    tokens, logprob = sample_tokens(row.expand(4000, -1), seeds=torch.arange(4000), step=5, temperature=heat)
    assert (tokens[::2] == row.argmax()).all()
    exact = torch.log_softmax(row.double() / 0.7, 0)
    assert fits(tokens[1::2], exact.exp())
    assert oracle.error(logprob[1::2], exact[tokens[1::2]]) < 1e-6


def test_generator_is_splitmix64() -> None:
    """Published outputs of the generator with seed 1234567, then ours against Python's integers."""
    state, golden = 1234567, 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [oracle.splitmix64(state + i * golden) for i in range(4)] == published
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 1234567, -987654321]
    steps = [0, 1, 5, 2**40, 2**63 - 1, -3]
    for step in steps:
        expected = [
            ((oracle.splitmix64(oracle.splitmix64(seed % 2**64) + step * golden) >> 12) + 0.5) / 2**52
            for seed in seeds
        ]
        assert module._uniform(torch.tensor(seeds), step).tolist() == expected
        assert module._uniform(torch.tensor(seeds), torch.full((len(seeds),), step)).tolist() == expected


def test_random_numbers_are_uniform_and_unrelated() -> None:
    """Along seeds, along steps, and in the differences between neighbours of both; 0 and 1 are excluded."""
    seeds, steps = torch.arange(100_000), torch.arange(100_000)
    along_seeds = module._uniform(seeds, 0)
    along_steps = module._uniform(torch.zeros_like(seeds), steps)
    spaced = module._uniform(seeds * 2**40, 3)
    for u in (along_seeds, along_steps, spaced):
        assert u.min() > 0 and u.max() < 1 and u.unique().numel() == u.numel()
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
        assert stats.kstest(((u[1:] - u[:-1]) % 1).numpy(), "uniform").pvalue > 1e-4
        low_bits = (u * 2**20) % 1
        assert stats.kstest(low_bits.numpy(), "uniform").pvalue > 1e-4
    for other in (module._uniform(seeds, 1), module._uniform(seeds + 1, 0), along_steps):
        assert abs(torch.corrcoef(torch.stack([along_seeds, other]))[0, 1]) < 0.02


def test_the_hash_flips_half_the_bits() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-(2**63), 2**63 - 1, (2000,), generator=generator)
    for bit in range(64):
        changed = module._mix(x) ^ module._mix(x ^ module._signed(1 << bit))
        share = torch.stack([((changed >> i) & 1).double().mean() for i in range(64)])
        assert share.min() > 0.43 and share.max() < 0.57  # six standard deviations


def test_inputs_stay_as_they_are_and_there_is_no_gradient() -> None:
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(5), requires_grad=True)
    seeds, step, heat = torch.arange(3), torch.arange(3), torch.tensor([0.0, 0.5, 1.0])
    copies = [x.clone() for x in (logits, seeds, step, heat)]
    _, logprob = sample_tokens(logits, seeds=seeds, step=step, temperature=heat)
    assert not logprob.requires_grad
    assert all(
        torch.equal(x, y) and x._version == 0 for x, y in zip((logits, seeds, step, heat), copies, strict=True)
    )


def test_empty_batch_single_token_and_strides() -> None:
    tokens, logprob = sample_tokens(torch.zeros(0, 5), seeds=torch.zeros(0).long(), step=0)
    assert tokens.shape == logprob.shape == (0,)
    tokens, logprob = sample_tokens(torch.tensor([[-7.0]]), seeds=torch.tensor([9]), step=2)
    assert tokens.tolist() == [0] and logprob.tolist() == [0.0]
    logits = torch.randn(300, 4, generator=torch.Generator().manual_seed(6))
    strided = sample_tokens(logits.T, seeds=torch.arange(4), step=1)
    dense = sample_tokens(logits.T.contiguous(), seeds=torch.arange(4), step=1)
    assert all(torch.equal(x, y) for x, y in zip(strided, dense, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": torch.tensor([[0.0, float("nan")], [0.0, 0.0]])}, ValueError, "a row of logits holds NaN"),
        ({"logits": torch.tensor([[0.0, INF], [0.0, 0.0]])}, ValueError, "a row of logits holds NaN"),
        ({"logits": torch.tensor([[-INF, -INF], [0.0, 0.0]])}, ValueError, "a row of logits holds NaN"),
        ({"logits": torch.zeros(2, 3).long()}, TypeError, "logits must be floating"),
        ({"logits": torch.zeros(2)}, ValueError, r"logits must be \[B, V\]"),
        ({"seeds": torch.zeros(3).long()}, ValueError, r"seeds must be \[2\]"),
        ({"seeds": torch.zeros(2)}, TypeError, "seeds must be int64"),
        ({"step": torch.zeros(2)}, TypeError, "step must be int64"),
        ({"step": torch.zeros(1).long()}, ValueError, r"step must be \[2\]"),
        ({"temperature": -0.1}, ValueError, "not negative"),
        ({"temperature": torch.tensor([1.0, INF])}, ValueError, "finite"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature must be a float or \[2\]"),
    ],
)
def test_what_is_refused(arguments: dict, error: type[Exception], message: str) -> None:
    inputs = {"logits": torch.zeros(2, 3), "seeds": torch.zeros(2).long(), "step": 0} | arguments
    with pytest.raises(error, match=message):
        sample_tokens(inputs.pop("logits"), **inputs)

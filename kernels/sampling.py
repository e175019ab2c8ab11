"""Exact sampling from ``softmax(logits / temperature)`` with random numbers that belong to the row.

A row's uniform number is a hash of its seed and step. It needs no generator's state, so a row draws the same token
alone, in any batch and in any order, and a run that resumes goes on as if it had not stopped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metagrpo.kernels.backend import choose, register
from metagrpo.kernels.triton import refusal
from metagrpo.kernels.vocabulary import check_floating, check_indices, require

BLOCK = 256
"""Probabilities of which one sum is taken: the draw picks a block, then a token in it, so that only [B, V / BLOCK]
and [B, BLOCK] numbers are added up in order."""

register("sample_tokens", "torch", __name__)
register("sample_tokens", "triton", "metagrpo.kernels.triton.sampling", refusal)


@torch.no_grad()
def sample_tokens(
    logits: Tensor, *, seeds: Tensor, step: int | Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw a token from each row, by inversion of its cumulative distribution.

    A token of probability 0 (a logit of −inf, or one that far below the maximum) is never drawn. Temperature 0 takes
    the first of the largest logits.

    Args:
        logits: ``[B, V]``, float16, bfloat16 or float32.
        seeds: int64 ``[B]``, any values.
        step: the position that is sampled, an int or int64 ``[B]``. A pair of seed and step is one random number.
        temperature: not negative, one for all or a tensor ``[B]``; 0 is greedy.

    Returns:
        Tokens int64 ``[B]`` and their fp32 log-probabilities ``[B]`` in nats under the distribution they were drawn
        from; of greedy rows, under ``softmax(logits)``.

    Raises:
        TypeError: logits that are not floating point, seeds or steps that are not int64.
        ValueError: shapes that do not match, a negative temperature, or a row that is no distribution: a NaN, a
            +inf, or −inf alone. On a GPU the checks of values are device-side assertions.
    """
    check_floating(logits, "logits")
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [B, V] with V >= 1, got {list(logits.shape)}")
    check_indices(seeds, "seeds", logits.shape[:1])
    if isinstance(step, Tensor):
        check_indices(step, "step", logits.shape[:1])
    temperature = _check_temperature(temperature, logits)

    return choose("sample_tokens", logits).draw(logits, seeds, step, temperature)


def draw(logits: Tensor, seeds: Tensor, step: int | Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs ``[B]``."""
    z = _padded(logits)
    if isinstance(temperature, Tensor):
        greedy = temperature == 0
        temperature = temperature.masked_fill(greedy, 1).unsqueeze(-1)
        z.div_(temperature)
        any_greedy = greedy.is_cuda or bool(greedy.any())  # on a GPU looking costs more than the arg max
    else:
        any_greedy = temperature == 0
        greedy = torch.full_like(seeds, any_greedy, dtype=torch.bool)
        temperature = temperature or 1.0
        if temperature != 1:
            z.div_(temperature)
    largest = None
    if any_greedy:
        top, largest = z.max(-1, keepdim=True)
    else:
        top = z.amax(-1, keepdim=True)  # many times as fast as with the index
    weights = z.sub_(top).exp_().unflatten(-1, (-1, BLOCK))
    cumulative = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    check_weights(total)

    tokens = _invert(weights, cumulative, _uniform(seeds, step).unsqueeze(-1))
    if largest is not None:
        tokens = torch.where(greedy.unsqueeze(-1), largest, tokens)
    logprob = (logits.gather(-1, tokens).float() / temperature - top) - total.log()
    return tokens.squeeze(-1), logprob.squeeze(-1).float()


def check_weights(total: Tensor) -> None:
    """Raise unless each row's weight ``Σ exp(z − max z)`` is that of a distribution."""
    # The largest logit alone weighs 1.
    require((total >= 1).all(), "a row of logits holds NaN or +inf, or nothing but -inf")


def _padded(logits: Tensor) -> Tensor:
    """A copy in fp32, filled up with −inf to whole blocks."""
    batch, vocab = logits.shape
    z = logits.new_empty((batch, -(-vocab // BLOCK) * BLOCK), dtype=torch.float32)
    z[:, :vocab] = logits
    z[:, vocab:] = -torch.inf
    return z


def _invert(weights: Tensor, cumulative: Tensor, u: Tensor) -> Tensor:
    """The first token ``[B, 1]`` up to which more than a part ``u`` ``[B, 1]`` of a row's weight lies.

    ``weights`` are ``[B, blocks, BLOCK]`` in fp32, ``cumulative`` the float64 running sums of the blocks'. A running
    sum that first exceeds a number has just grown, so no weight of 0 is ever taken as long as the number lies below
    the sum's end: u ≤ 1 − 2⁻⁵³ sees to it for the blocks.
    """
    threshold = u * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, threshold, right=True)
    before = cumulative.gather(-1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0)
    part = (threshold - before) / (cumulative.gather(-1, block) - before)
    # The block's own weights add up to its fp32 sum but for rounding, so the rest is a part of them, not a number.
    rows = torch.arange(block.shape[0], device=block.device)
    within = weights[rows, block.squeeze(-1)].cumsum(-1, dtype=torch.float64)
    end = within[:, -1:]
    rest = torch.minimum(part * end, torch.nextafter(end, torch.zeros_like(end)))  # part may round up to 1
    return block * BLOCK + torch.searchsorted(within, rest, right=True)


# Random numbers: the outputs of splitmix64 (Steele, Lea, Flood 2014), number ``step`` of the generator whose state is
# a hash of the seed, in int64 arithmetic, which wraps around as the unsigned one does.


def _signed(x: int) -> int:
    """The int64 with the low 64 bits of ``x``."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = _signed(0x9E3779B97F4A7C15)


def _uniform(seeds: Tensor, step: int | Tensor) -> Tensor:
    """Float64 ``[B]`` in (0, 1), ends excluded: the middles of 2⁵² equal intervals."""
    advance = step * GOLDEN + GOLDEN if isinstance(step, Tensor) else _signed((step + 1) * GOLDEN)
    bits = _mix(_mix(seeds + GOLDEN) + advance)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of 64 bits in which every input bit flips each output bit half the time."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own copies the sign down."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _check_temperature(temperature: float | Tensor, logits: Tensor) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {temperature}")
        return float(temperature)
    if temperature.shape != logits.shape[:1]:
        raise ValueError(f"temperature must be a float or [{logits.shape[0]}], got {list(temperature.shape)}")
    require(((temperature >= 0) & temperature.isfinite()).all(), "temperature must be finite and not negative")
    return temperature.float()

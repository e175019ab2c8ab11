"""Log-prob, entropy and advantages against TRL 1.16's functions, which compute them padded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metagrpo.kernels.advantages import group_advantages
from metagrpo.kernels.head import linear_logprob
from metagrpo.kernels.logprob import token_logprob

from . import trl_reference as reference

pytestmark = reference.MARKS

# Rows of the logits, and their columns.
SHAPES = [((1, 1), 1), ((3, 7), 2), ((2, 5), 129), ((5, 1), 1000)]


def random_case(shape: tuple[int, ...], vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits, some of them confident, and targets."""
    generator = torch.Generator().manual_seed(vocabulary)
    scale = torch.logspace(-1, 1, shape[-1], dtype=torch.float64).unsqueeze(-1)
    logits = torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64) * scale
    return logits.to(dtype).requires_grad_(), torch.randint(vocabulary, shape, generator=generator)


def backward(outputs: list[Tensor], *leaves: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of the leaves under an upstream gradient of its own for each output."""
    upstream = [torch.linspace(-1 - k, 2, value.numel()).view_as(value).to(value) for k, value in enumerate(outputs)]
    return [*(value.detach() for value in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(("shape", "vocabulary"), SHAPES)
def test_token_logprob_is_selective_log_softmax_and_entropy_from_logits(shape, vocabulary, temperature):
    logits, targets = random_case(shape, vocabulary, torch.float64)
    theirs = [
        reference.selective_log_softmax(logits, targets, temperature=temperature),
        reference.entropy_from_logits(logits / temperature),
    ]
    ours = token_logprob(logits, targets, temperature=temperature, return_entropy=True)
    for expected, value in zip(backward(theirs, logits), backward(list(ours), logits), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("shape", "vocabulary"), SHAPES)
def test_in_fp32_ours_is_as_close_to_float64(shape, vocabulary):
    logits, targets = random_case(shape, vocabulary, torch.float32)
    exact = logits.detach().double().requires_grad_()
    truth = backward([reference.selective_log_softmax(exact, targets), reference.entropy_from_logits(exact)], exact)
    theirs = backward(
        [reference.selective_log_softmax(logits, targets), reference.entropy_from_logits(logits)], logits
    )
    ours = backward(list(token_logprob(logits, targets, return_entropy=True)), logits)
    assert_as_close(truth, theirs, ours)


def assert_as_close(truth: list[Tensor], theirs: list[Tensor], ours: list[Tensor]) -> None:
    """The largest error of ours against float64 is at most twice that of theirs, or a few roundings of fp32."""
    for exact, their, our in zip(truth, theirs, ours, strict=True):
        rounding = torch.finfo(torch.float32).eps * exact.abs().max().clamp(min=1)
        their_error, our_error = ((value.double() - exact).abs().max() for value in (their, our))
        assert our_error <= 2 * their_error + 4 * rounding


def test_an_ignored_target_is_a_row_that_trl_masks():
    logits, targets = random_case((3, 5), 17, torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])
    theirs = backward(list(reference.selective_log_softmax_and_entropy(logits, targets, row_mask=mask)), logits)
    ignored = targets.masked_fill(mask == 0, -100)
    ours = backward(list(token_logprob(logits, ignored, return_entropy=True)), logits)
    for expected, value in zip(theirs, ours, strict=True):
        assert (expected[mask == 0] == 0).all()
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"temperature": 0.7}, {"softcap": 4.0}], ids=str)
def test_linear_logprob_is_as_close_to_float64_as_trls_fused_head(settings):
    """TRL's head folds chunks of 16 columns here, an odd last one included."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 24, generator=generator) / 24**0.5 * 4 for n in (13, 75))
    bias = torch.randn(75, generator=generator) if settings.get("bias") else None
    targets = torch.randint(75, (13,), generator=generator)
    temperature, softcap = settings.get("temperature", 1.0), settings.get("softcap")
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(*exact)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    truth = backward(
        [reference.selective_log_softmax(logits, targets), reference.entropy_from_logits(logits)], *exact
    )
    theirs = reference.fused_head(hidden, weight, bias, targets, temperature, 16, softcap, 1.0, ("entropy",))[:2]
    ours = linear_logprob(
        hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, return_entropy=True
    )
    assert_as_close(truth, backward(list(theirs), *leaves), backward(list(ours), *leaves))


# Groups of four: ordinary; one reward alone; none scored; two left; all equal, which TRL gets right where the value
# is dyadic; far from zero.
REWARDS = [
    *(0.1, 0.9, -0.4, 0.35), *(None, None, 2.0, None), *(None,) * 4, *(1.0, None, -1.0, None), *(0.5,) * 4,
    *(99.99, 100.01, 100.0, 100.02),
]  # fmt: skip
GROUPS = torch.arange(6).repeat_interleave(4)


def completions() -> tuple[reference.Rollout, Tensor]:
    """A rollout with these rewards, and the rewards as TRL rounds them."""
    rollout = reference.make_rollout(0, (2,) * len(REWARDS), group=4, rewards=REWARDS)
    return rollout, torch.tensor([float("nan") if reward is None else reward for reward in REWARDS])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_grpos(scale):
    rollout, rewards = completions()
    expected = reference.grpo(rollout, scale_rewards=scale).score()["advantages"]
    advantages = group_advantages(rewards, GROUPS, scale=scale, eps=1e-4)
    assert expected.count_nonzero() == 10
    torch.testing.assert_close(advantages, expected.float(), rtol=1e-6, atol=0.0)


def test_leave_one_out_advantages_are_rloos():
    rollout, rewards = completions()
    expected = reference.rloo(rollout, normalize_advantages=False).score()["advantages"]
    advantages = group_advantages(rewards, GROUPS, baseline="leave_one_out", scale="none")
    assert expected.count_nonzero() == 10
    torch.testing.assert_close(advantages, expected.float(), rtol=1e-6, atol=0.0)

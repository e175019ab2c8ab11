"""KL estimators: values and gradients worked by hand, and the expectation they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from metagrpo.kernels.kl import KL_ESTIMATORS, MAX_LOG_RATIO, kl_estimate

# π = 1/2, π_ref = 1/4: x = log(1/4) − log(1/2) = −log 2. Columns: value, derivative with respect to log π.
LOG2 = math.log(2)
BY_HAND = {
    "k1": (LOG2, 1.0),
    "abs": (LOG2, 1.0),
    "k2": (LOG2**2 / 2, LOG2),
    "k3": (0.5 + LOG2 - 1, 1 - 0.5),
    "k1+": (LOG2, LOG2),
    "abs+": (LOG2, LOG2),
    "k3+": (0.5 + LOG2 - 1, LOG2),
}


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_value_and_gradient_by_hand(estimator):
    logprob = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([math.log(0.25)], dtype=torch.float64)
    value = kl_estimate(logprob, ref, estimator)
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert (value.item(), slope.item()) == pytest.approx(BY_HAND[estimator], rel=1e-12)


def test_every_estimator_is_covered_by_hand():
    assert set(BY_HAND) == set(KL_ESTIMATORS)


def test_sign_of_the_bounded_estimator():
    value = kl_estimate(torch.tensor([-3.0, -1.0]), torch.tensor([-1.0, -3.0]), "abs")
    assert value.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_kl(estimator):
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    kl = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    expectation = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    assert expectation.item() == pytest.approx(kl, rel=1e-12)


def test_expected_gradient_of_k2_is_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprob = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logprob.exp() * (logprob - reference)).sum(), logits, retain_graph=True)
    policy = logprob.detach().exp()
    (estimated,) = torch.autograd.grad((policy * kl_estimate(logprob, reference, "k3+")).sum(), logits)
    torch.testing.assert_close(estimated, true, rtol=1e-12, atol=1e-14)


def test_k3_is_accurate_for_small_differences_in_fp32():
    x = torch.tensor([1e-3, -1e-3, 1e-4])
    value = kl_estimate(torch.zeros(3), x, "k3").double()
    exact = torch.expm1(x.double()) - x.double()
    torch.testing.assert_close(value, exact, rtol=2e-3, atol=0.0)


def test_k3_never_overflows():
    logprob = torch.tensor([-1e4], requires_grad=True)
    value = kl_estimate(logprob, torch.zeros(1), "k3")
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(MAX_LOG_RATIO) - MAX_LOG_RATIO - 1, rel=1e-6)
    assert logprob.grad.item() == 0.0


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'k3\\+'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k3++")

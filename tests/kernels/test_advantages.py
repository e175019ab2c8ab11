"""``group_advantages`` against exact statistics."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.kernels.advantages import group_advantages

from . import oracle

NAN = float("nan")
EPS = 1e-6


def test_hand_worked_group() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, unbiased variance 4 · (1/4) / 3 = 1/3."""
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4).long(), eps=0.0)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([math.sqrt(0.75) * s for s in (1, -1, -1, 1)], rel=1e-6)


def test_leave_one_out_by_hand() -> None:
    """Rewards 3, 0, 6: the others' means are 3, 4.5 and 1.5."""
    rewards = torch.tensor([3.0, 0.0, 6.0])
    advantages = group_advantages(rewards, torch.zeros(3).long(), baseline="leave_one_out", scale="none")
    assert advantages.tolist() == [0.0, -4.5, 4.5]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_unequal_interleaved_groups_with_unscored_samples(baseline: str, scale: str) -> None:
    rng = random.Random(7)
    groups = [rng.choice([-5, 0, 3, 10**12]) for _ in range(40)] + [77]  # one group of one
    rewards = [rng.choice([0.0, 1.0, 0.5, rng.gauss(0, 2), NAN]) for _ in groups]
    rewards[-1] = 2.5
    tensor = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(tensor, torch.tensor(groups), baseline=baseline, scale=scale, eps=EPS)
    expected = oracle.advantages(rewards, groups, baseline, scale, EPS)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert all(a == 0 for a, r in zip(advantages.tolist(), rewards, strict=True) if math.isnan(r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize(("value", "count"), [(0.7, 12), (123.456, 12), (0.1, 3), (-1e6, 7), (5.0, 1)])
def test_identical_rewards_give_exactly_zero(value, count, baseline, scale, dtype) -> None:
    """Beside a group that does vary, so that the batch has a deviation to divide by."""
    rewards = torch.tensor([value] * count + [1.0, 2.0], dtype=dtype)
    groups = torch.tensor([0] * count + [1, 1])
    advantages = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    assert (advantages[:count] == 0).all() and (advantages[count:] != 0).all()


def test_a_group_without_spread_is_not_divided_by_eps() -> None:
    rewards = torch.tensor([0.7, 0.7, 3.0])
    groups = torch.tensor([0, 0, 1])
    assert group_advantages(rewards, groups, baseline="none").tolist() == [0, 0, 0]
    assert group_advantages(rewards, groups, baseline=torch.zeros(3)).tolist() == [0, 0, 0]
    assert group_advantages(rewards, groups, baseline="none", scale="none").tolist() == rewards.tolist()


@pytest.mark.parametrize(("offset", "step"), [(100.0, 0.01), (5000.0, 1.0)])
def test_small_differences_on_a_large_offset(offset: float, step: float) -> None:
    values = [offset - step, offset, offset + step, offset + step]
    rewards = torch.tensor(values)
    advantages = group_advantages(rewards, torch.zeros(4).long())
    expected = oracle.advantages(rewards.tolist(), [0] * 4, "mean", "group", EPS)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_tensor_as_baseline() -> None:
    rewards, values = torch.tensor([1.0, 2.0, 4.0, NAN]), torch.tensor([0.5, 3.0, 1.0, 9.0])
    groups = torch.tensor([2, 2, 2, 2])
    advantages = group_advantages(rewards, groups, baseline=values, scale="none")
    assert advantages.tolist() == [0.5, -1.0, 3.0, 0.0]
    scaled = group_advantages(rewards, groups, baseline=values, eps=0.0)  # the variance of 1, 2, 4 is 7/3
    assert scaled.tolist() == pytest.approx([a / math.sqrt(7 / 3) for a in (0.5, -1.0, 3.0, 0.0)], rel=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[], [NAN], [NAN, NAN], [3.0], [NAN, 3.0]])
def test_too_few_scored_samples_give_zero(rewards: list[float], scale: str) -> None:
    groups = torch.zeros(len(rewards)).long()
    for baseline in ("mean", "leave_one_out"):
        advantages = group_advantages(torch.tensor(rewards), groups, baseline=baseline, scale=scale)
        assert advantages.tolist() == [0.0] * len(rewards)


def test_no_gradient_and_inputs_unchanged() -> None:
    rewards = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    groups = torch.tensor([1, 1, 1])
    assert not group_advantages(rewards, groups).requires_grad
    assert rewards.isnan().tolist() == [False, True, False] and rewards._version == 0 and groups._version == 0


@settings(max_examples=50, deadline=None)
@given(
    data=st.lists(
        st.tuples(st.integers(-2, 2), st.one_of(st.just(NAN), st.floats(-100, 100, width=32))),
        min_size=1,
        max_size=20,
    ),
    order=st.randoms(use_true_random=False),
)
def test_advantages_sum_to_zero_in_each_group_and_do_not_depend_on_the_order(data, order) -> None:
    groups, rewards = (torch.tensor(column) for column in zip(*data, strict=True))
    for baseline in ("mean", "leave_one_out"):
        advantages = group_advantages(rewards, groups, baseline=baseline, scale="none")
        for group in groups.unique():
            assert abs(advantages[groups == group].double().sum()) <= 1e-5 * 100 * len(data)
        permutation = torch.tensor(order.sample(range(len(data)), len(data)))
        permuted = group_advantages(rewards[permutation], groups[permutation], baseline=baseline, scale="none")
        torch.testing.assert_close(permuted, advantages[permutation], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rewards": torch.tensor([1, 2])}, TypeError, "rewards must be floating"),
        ({"groups": torch.tensor([0.0, 1.0])}, TypeError, "groups must be integers"),
        ({"groups": torch.tensor([True, False])}, TypeError, "groups must be integers"),
        ({"groups": torch.tensor([0])}, ValueError, r"must both be \[N\]"),
        ({"rewards": torch.ones(2, 1)}, ValueError, r"must both be \[N\]"),
        ({"rewards": torch.tensor([1.0, float("inf")])}, ValueError, "infinite"),
        ({"baseline": "median"}, ValueError, "median"),
        ({"baseline": torch.ones(3)}, ValueError, r"baseline must be \[2\]"),
        ({"scale": "std"}, ValueError, "std"),
    ],
)
def test_what_is_refused(arguments: dict, error: type[Exception], message: str) -> None:
    inputs = {"rewards": torch.ones(2), "groups": torch.zeros(2).long()} | arguments
    with pytest.raises(error, match=message):
        group_advantages(inputs.pop("rewards"), inputs.pop("groups"), **inputs)

"""Rollout correction weights against their definitions, and its sequences and bounds by hand."""

from __future__ import annotations

import math

import pytest
import torch

from metagrpo.kernels.correction import ROLLOUT_CORRECTIONS, rollout_weights
from metagrpo.kernels.sequences import Sequences

from .loss_oracle import correction, make_case


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def sequences_of(ids):
    return Sequences.from_ids(torch.tensor(ids), torch.float64)


@pytest.mark.parametrize("floor", [None, 0.7])
@pytest.mark.parametrize("cap", [1.15, 2.0])
@pytest.mark.parametrize("mode", ROLLOUT_CORRECTIONS)
def test_weights_against_the_oracle(mode, cap, floor):
    case = make_case(1, [1, 2, 3, 6, 4])
    weights = rollout_weights(
        tensor(case.old), tensor(case.rollout), sequences_of(case.ids), mode=mode, cap=cap, floor=floor
    )
    two_sided = mode in ("icepop", "geometric_mask")
    lowest = floor if floor is not None else 1 / cap if two_sided else 0.0
    expected = correction(mode, case.old, case.rollout, list(case.sequences().values()), cap, lowest)
    torch.testing.assert_close(weights, tensor(expected), rtol=1e-12, atol=0.0)


# Token ratios π_old / π_rollout of two interleaved sequences, (3, 0.6) and (0.25, 1.5); cap 2.
RATIOS = [3.0, 0.25, 0.6, 1.5]
IDS = [0, 1, 0, 1]
BY_HAND = {
    "none": [1, 1, 1, 1],
    "token_truncate": [2, 0.25, 0.6, 1.5],
    "token_mask": [0, 0.25, 0.6, 1.5],
    "icepop": [0, 0, 0.6, 1.5],  # floor 1/2
    "sequence_truncate": [1.8, 0.375, 1.8, 0.375],
    "sequence_mask": [1.8, 0.375, 1.8, 0.375],
    "geometric_mask": [1, 1, 1, 1],  # √1.8 = 1.34 and √0.375 = 0.61 lie in [1/2, 2]
}


@pytest.mark.parametrize("mode", ROLLOUT_CORRECTIONS)
def test_weights_by_hand(mode):
    old = tensor([math.log(r) for r in RATIOS])
    weights = rollout_weights(old, torch.zeros(4, dtype=torch.float64), sequences_of(IDS), mode=mode, cap=2.0)
    assert weights.tolist() == pytest.approx(BY_HAND[mode], rel=1e-12)


def test_sequence_mask_drops_the_whole_sequence():
    old = tensor([math.log(1.6), math.log(1.5), 0.0])
    weights = rollout_weights(old, torch.zeros(3).double(), sequences_of([7, 7, 9]), mode="sequence_mask", cap=2.0)
    assert weights.tolist() == [0.0, 0.0, 1.0]


def test_geometric_mean_does_not_depend_on_the_length():
    for length in (1, 10, 200):
        old = torch.full((length,), math.log(1.01), dtype=torch.float64)
        ids = sequences_of([3] * length)
        kept = rollout_weights(old, torch.zeros_like(old), ids, mode="geometric_mask", cap=1.02)
        dropped = rollout_weights(old, torch.zeros_like(old), ids, mode="geometric_mask", cap=1.005)
        assert kept.min() == 1 and dropped.max() == 0


def test_equal_logprobs_give_weight_one_in_every_mode():
    values = torch.randn(6)
    for mode in ROLLOUT_CORRECTIONS:
        weights = rollout_weights(
            values, values, Sequences.from_ids(torch.tensor([0, 0, 1, 1, 1, 2]), torch.float32), mode=mode
        )
        assert weights.tolist() == [1.0] * 6


def test_weights_carry_no_gradient_and_are_finite_at_extremes():
    old = torch.tensor([0.0, -1e4, 1e4], requires_grad=True)
    rollout = torch.tensor([-1e4, 0.0, -1e4])
    for mode in ROLLOUT_CORRECTIONS:
        weights = rollout_weights(old, rollout, Sequences.from_ids(torch.tensor([0, 1, 2]), torch.float32), mode=mode)
        assert not weights.requires_grad
        assert torch.isfinite(weights).all()


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'token_truncate'"):
        rollout_weights(torch.zeros(1), torch.zeros(1), sequences_of([0]), mode="token_trunc")


@pytest.mark.parametrize(("cap", "floor"), [(2.0, 2.0), (2.0, -0.1), (0.5, None)])
def test_bounds_out_of_order_are_refused(cap, floor):
    with pytest.raises(ValueError, match="floor < cap"):
        rollout_weights(torch.zeros(1), torch.zeros(1), sequences_of([0]), mode="icepop", cap=cap, floor=floor)


def test_sequences_of_arbitrary_interleaved_ids():
    ids = torch.tensor([-3, 2**62, 5, -3, 5, -3, -(2**62)])
    sequences = Sequences.from_ids(ids, torch.float32)
    assert sequences.count.item() == 4
    assert sequences.length.tolist() == [3, 1, 2, 3, 2, 3, 1]
    assert sequences.sum(torch.tensor([1.0, 2, 3, 4, 5, 6, 7])).tolist() == [11, 2, 8, 11, 8, 11, 7]
    assert sequences.mean(torch.tensor([1.0, 2, 3, 4, 5, 7, 7])).tolist() == [4, 2, 4, 4, 4, 4, 7]
    flags = torch.tensor([True, True, True, True, False, True, False])
    assert sequences.count_all(flags).item() == 2


def test_ids_a_whole_integer_range_apart_are_two_sequences():
    limits = torch.iinfo(torch.int64)
    sequences = Sequences.from_ids(torch.tensor([limits.max, limits.min, limits.max]), torch.float32)
    assert sequences.count.item() == 2
    assert sequences.length.tolist() == [2, 1, 2]


def test_sequences_of_nothing():
    sequences = Sequences.from_ids(torch.zeros(0, dtype=torch.int64), torch.float32)
    assert sequences.count.item() == 0
    assert sequences.sum(torch.zeros(0)).shape == (0,)

"""Metrics of a step's samples, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from metagrpo.trainer.outcomes import sample_metrics
from metagrpo.trainer.sample import Sample

from .tiny import make_sample


def sample(group: int, reward: float, length: int = 2, **fields: Any) -> Sample:
    ids = [5, 6, 7] + [8] * length
    return make_sample(ids, [False] * 3 + [True] * length, group=group, reward=reward, prompt_length=3, **fields)


def test_rewards_and_groups() -> None:
    metrics = sample_metrics(
        [sample(0, 1.0), sample(0, 3.0), sample(1, 2.0), sample(1, 2.0), sample(2, math.nan), sample(2, 5.0)]
    )
    assert metrics["reward"] == pytest.approx(13 / 5)
    # Unbiased: √2 in group 0; group 1 is all equal; group 2 has one reward that was scored.
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 3)
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)


def test_equal_rewards_have_no_residue() -> None:
    # 0.1 + 0.2 thrice: their mean need not be the same number.
    metrics = sample_metrics([sample(0, 0.1 + 0.2) for _ in range(3)])
    assert metrics["reward_std"] == 0.0 and metrics["frac_reward_zero_std"] == 1.0


def test_each_functions_values() -> None:
    metrics = sample_metrics(
        [
            sample(0, 1.0, rewards={"maths": 1.0, "format": 0.5, "broken": None}),
            sample(0, 0.0, rewards={"maths": 0.0, "format": None, "broken": None}),
            sample(0, 0.0, rewards={"maths": 0.5, "format": None, "broken": None}),
        ]
    )
    assert metrics["rewards/maths/mean"] == pytest.approx(0.5)
    assert metrics["rewards/maths/std"] == pytest.approx(0.5)
    assert metrics["rewards/format/mean"] == 0.5 and metrics["rewards/format/std"] == 0.0
    assert not any("broken" in name for name in metrics)


def test_lengths() -> None:
    metrics = sample_metrics(
        [sample(0, 1.0, 4), sample(0, 0.0, 1), sample(1, math.nan, 9, finish_reason="length"), sample(1, 0.0, 2)]
    )
    lengths = {name: value for name, value in metrics.items() if name.startswith("completions/")}
    assert lengths == {
        "completions/mean_length": 4.0,
        "completions/min_length": 1.0,
        "completions/max_length": 9.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": pytest.approx(7 / 3),
    }


def test_a_mean_over_nothing_is_left_out() -> None:
    assert sample_metrics([]) == {}
    metrics = sample_metrics([sample(0, math.nan, finish_reason="length")])
    assert metrics.keys() == {
        "completions/mean_length",
        "completions/min_length",
        "completions/max_length",
        "completions/clipped_ratio",
    }

"""Weighted sums against TRL's own formula, and the shares."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.trainer.rewards import RewardResult
from metagrpo.trainer.rewards.result import weighted_sum


@given(
    st.integers(1, 4).flatmap(
        lambda functions: st.tuples(
            st.lists(st.floats(-4, 4), min_size=functions, max_size=functions),
            st.lists(
                st.lists(st.none() | st.floats(-9, 9), min_size=functions, max_size=functions), min_size=1, max_size=6
            ),
        )
    )
)
@settings(deadline=None)
def test_weighted_sum_is_a_nansum(case):
    weights, rows = case
    table = torch.tensor([[math.nan if v is None else v for v in row] for row in rows], dtype=torch.float64)
    expected = (table * torch.tensor(weights, dtype=torch.float64)).nansum(dim=1)
    expected[table.isnan().all(dim=1)] = math.nan
    names = [f"f{index}" for index in range(len(weights))]
    values = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    actual = torch.tensor(weighted_sum(values, dict(zip(names, weights, strict=True))), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-12, atol=1e-12)


def test_shares():
    result = RewardResult(
        values={"f": [1.0, None, None, None], "g": [0.0, None, 2.0, 3.0]},
        status={"f": ["ok", "timeout", "error", "error"], "g": ["ok", "none", "ok", "ok"]},
    )
    assert result.metrics() == {"reward/timeout_frac": 1 / 8, "reward/error_frac": 2 / 8, "reward/none_frac": 1 / 8}

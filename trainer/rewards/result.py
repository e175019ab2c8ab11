"""What grading a batch gave: values, their weighted sum, and how each sample fared in each function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "none", "timeout", "error"]


@dataclass(slots=True)
class RewardResult:
    """Rewards of a batch of N samples, in the order they were given.

    Attributes:
        values: for each function ``[N]``; ``None`` unless the status is ``"ok"``.
        status: for each function ``[N]``: ``"ok"`` a finite number; ``"none"`` the function returned ``None``,
            it does not score this sample; ``"timeout"`` it was killed; ``"error"`` it raised, ended its process,
            or returned something else than a list of finite numbers.
        reward: ``[N]``, the weighted sum of the values that are there; NaN where none is.
        errors: for each function that failed, what happened to its first failed sample, in one line.
    """

    values: dict[str, list[float | None]]
    status: dict[str, list[Status]]
    reward: list[float] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Shares of all (sample, function) pairs that timed out, failed, or were not scored; 0 of none."""
        flat = [status for column in self.status.values() for status in column]
        return {
            f"reward/{status}_frac": flat.count(status) / len(flat) if flat else 0.0
            for status in ("timeout", "error", "none")
        }


def weighted_sum(values: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float]:
    """``Σ_f w_f v_f`` for each sample over the functions that scored it (TRL's ``nansum``); NaN where none did."""
    totals = []
    for row in zip(*values.values(), strict=True):
        terms = [weight * value for weight, value in zip(weights.values(), row, strict=True) if value is not None]
        totals.append(sum(terms) if terms else math.nan)
    return totals

"""The order of the data, a function of seed and step alone: resuming needs no state."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from metagrpo.trainer.rollout.protocol import request_seed


def batch_indices(num_problems: int, prompts_per_step: int, seed: int, step: int) -> list[int]:
    """The problems of one step, ``prompts_per_step`` indices below ``num_problems``.

    Every epoch is a permutation of its own. The steps, counted from 0, cut the endless row of permutations into
    slices of equal length; a slice may span epochs, so no problem is left out and no step is short.
    """
    if num_problems < 1 or prompts_per_step < 1 or step < 0:
        raise ValueError(f"no batch {step} of {prompts_per_step} out of {num_problems} problems")
    start = step * prompts_per_step
    positions = (divmod(position, num_problems) for position in range(start, start + prompts_per_step))
    return [int(_permutation(num_problems, seed, epoch)[offset]) for epoch, offset in positions]


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Shape ``[size]``. Sorts raw bits, which NumPy keeps from version to version, as it does not its shuffles."""
    keys = np.random.PCG64(request_seed("data order", seed, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable")

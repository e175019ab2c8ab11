"""Requests that make no sense are refused; seeds belong to what they are named by."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from metagrpo.trainer.rollout.protocol import Request, request_seed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": []}, "'x' has an empty prompt"),
        ({"max_tokens": 0}, "'x' asks for 0 tokens"),
        ({"temperature": -0.1}, "'x' has temperature -0.1"),
    ],
)
def test_requests_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"id": "x", "prompt_ids": [1], "max_tokens": 1, "seed": 0, "stop_ids": frozenset()}
    Request(**whole)
    with pytest.raises(ValueError, match=message):
        Request(**{**whole, **fields})


def test_a_seed_has_63_bits_and_none_is_idle() -> None:
    seeds = [request_seed(0, step, 0, 0) for step in range(2000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert abs(ones - 1000) < 5 * 0.5 * 2000**0.5, bit  # five standard deviations of a fair coin


def test_seeds_are_far_apart() -> None:
    # vLLM derives a request's children by counting up from its seed.
    seeds = sorted(request_seed(0, step, group, n) for step in range(20) for group in range(20) for n in range(20))
    assert min(b - a for a, b in pairwise(seeds)) > 10**6


def test_parts_are_not_run_together() -> None:
    names = [(1, 23), (12, 3), (123,), ("1", 23), (1, "23"), ("1", "23"), (1, 2, 3), (0, 1, 23), (-1, 23)]
    assert len({request_seed(*parts) for parts in names}) == len(names)


def test_a_seed_is_the_same_in_every_process() -> None:
    code = "from metagrpo.trainer.rollout.protocol import request_seed; print(request_seed(3, 'eval', 7))"
    for hash_seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(result.stdout) == request_seed(3, "eval", 7)

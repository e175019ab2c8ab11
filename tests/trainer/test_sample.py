"""The record: lengths that belong together, and one advantage a trained token."""

from __future__ import annotations

import math

import pytest

from metagrpo.trainer.sample import Sample


def test_what_a_sample_counts() -> None:
    sample = Sample("a", [1, 2, 3, 4, 5], [False, True, False, True, True], [-1.0, -2.0, -3.0], 0, prompt_length=2)
    assert sample.num_trained == 3
    assert sample.completion_length == 3
    assert math.isnan(sample.reward)


def test_one_advantage_for_all_or_one_for_each() -> None:
    sample = Sample("a", [1, 2, 3, 4], [False, True, False, True], [-1.0, -2.0], 0, advantage=0.5)
    assert sample.advantages() == [0.5, 0.5]
    sample.advantage = [1.0, -1.0]
    assert sample.advantages() == [1.0, -1.0]
    sample.advantage = [1.0]
    with pytest.raises(ValueError, match="'a': 1 advantages for 2"):
        sample.advantages()


@pytest.mark.parametrize(
    ("trained", "logprobs", "message"),
    [
        ([False, True], [-1.0], "'x': 2 flags for 3 tokens"),
        ([True, False, True], [-1.0, -1.0], "'x': the first token"),
        ([False, True, True], [-1.0], "'x': 1 log-probs for 2"),
        ([False, False, False], [-1.0], "'x': 1 log-probs for 0"),
    ],
)
def test_what_does_not_fit_is_refused(trained: list[bool], logprobs: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample("x", [1, 2, 3], trained, logprobs, 0)


def test_an_end_token_that_is_also_the_pad_is_trained() -> None:
    # Pitfall 10: the mask is the sample's own, whatever the ids are.
    pad = 2
    sample = Sample("a", [pad, 5, 6, pad], [False, False, True, True], [-0.1, -0.2], 0)
    assert sample.num_trained == 2

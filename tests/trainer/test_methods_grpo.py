"""GRPO: each completion against its own group, paired by id, with seeds of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from metagrpo.trainer.config import RewardConfig
from metagrpo.trainer.data.prompts import Problem
from metagrpo.trainer.methods.base import Rollout
from metagrpo.trainer.methods.grpo import GRPO
from metagrpo.trainer.rewards import RewardPool
from metagrpo.trainer.rollout.protocol import Completion, Request

from .tiny import Grades, Script, tiny_config, tiny_context

PROBLEMS = [
    Problem(4, "one", [10, 11, 12], {"answer": "21"}),
    Problem(9, "two", [10, 13], {"answer": "22", "level": 3}),
]


def generation(request: Request) -> int:
    return int(request.id.rsplit("/", 1)[1])


def answer(request: Request) -> Completion:
    """Generation g of a prompt: the tokens 20 + g and, but for the last, a stop token."""
    place = generation(request)
    if place == 2:
        return Completion(request.id, [20 + place] * request.max_tokens, [-0.5] * request.max_tokens, "length")
    return Completion(request.id, [20 + place, 2], [-0.1 * (place + 1), -0.2], "stop")


def exact(prompt: Any, completion: str, ids: list[int], row: dict[str, Any]) -> list[float | None]:
    return [float(completion == row["answer"]), None if "22" in completion else 0.5]


def collect(grade: Any = exact, step: int = 3, problems: list[Problem] = PROBLEMS, **sections: Any) -> Rollout:
    context = tiny_context(tiny_config(**sections), Script(answer), Grades(["exact", "half"], grade, [2.0, 1.0]))
    return GRPO().collect(step, problems, context)


def test_a_step_worked_by_hand() -> None:
    samples = collect(rollout={"num_generations": 3, "max_completion_length": 4}).samples
    assert [sample.id for sample in samples] == ["3/0/0", "3/0/1", "3/0/2", "3/1/0", "3/1/1", "3/1/2"]
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert samples[1].token_ids == [10, 11, 12, 21, 2]
    assert samples[1].trained == [False, False, False, True, True]
    assert samples[1].logprobs == [-0.2, -0.2]
    assert samples[2].token_ids == [10, 11, 12, 22, 22, 22, 22]
    assert [sample.finish_reason for sample in samples] == ["stop", "stop", "length"] * 2
    assert [sample.prompt_length for sample in samples] == [3] * 3 + [2] * 3
    assert [sample.completion_length for sample in samples] == [2, 2, 4] * 2
    # 21 is right for the first problem; the second function does not score 22.
    assert [sample.rewards for sample in samples[:3]] == [
        {"exact": 0.0, "half": 0.5},
        {"exact": 1.0, "half": 0.5},
        {"exact": 0.0, "half": None},
    ]
    assert [sample.reward for sample in samples] == [0.5, 2.5, 0.0, 0.5, 0.5, 0.0]
    # Group one: mean 1, deviations −½, 3/2, −1, so the unbiased variance is 7/4.
    std = math.sqrt(7 / 4)
    assert [sample.advantage for sample in samples[:3]] == pytest.approx([-0.5 / std, 1.5 / std, -1 / std], rel=1e-5)
    # Group two: mean ⅓, deviations ⅙, ⅙, −⅓, so the variance is 1/12.
    std = math.sqrt(1 / 12)
    assert [sample.advantage for sample in samples[3:]] == pytest.approx(
        [1 / 6 / std, 1 / 6 / std, -1 / 3 / std], rel=1e-5
    )
    assert samples[4].info == {"prompt": "two", "completion": "21", "answer": "22", "level": 3}


def test_the_settings_of_the_advantage() -> None:
    samples = collect(
        rollout={"num_generations": 3, "max_completion_length": 4},
        method={"baseline": "leave_one_out", "scale_rewards": "none"},
    ).samples
    # Each against the mean of the two others: 0.5 − 1.25, 2.5 − 0.25, 0 − 1.5.
    assert [sample.advantage for sample in samples[:3]] == pytest.approx([-0.75, 2.25, -1.5])


def test_what_is_asked_of_the_sampler() -> None:
    sampler = Script(answer)
    config = tiny_config(rollout={"num_generations": 3, "max_completion_length": 4, "temperature": 0.7})
    GRPO().collect(
        1, PROBLEMS, tiny_context(config, sampler, Grades(["exact", "half"], exact, [1.0, 1.0]), "default")
    )
    assert [list(request.prompt_ids) for request in sampler.requests] == [[10, 11, 12]] * 3 + [[10, 13]] * 3
    for request in sampler.requests:
        assert (request.max_tokens, request.temperature, request.adapter) == (4, 0.7, "default")
        assert request.stop_ids == frozenset({2})


def seeds(seed: int, step: int, problems: list[Problem] = PROBLEMS) -> list[int]:
    sampler = Script(answer)
    context = tiny_context(tiny_config(train={"seed": seed}), sampler, Grades(["exact", "half"], exact, [1.0, 1.0]))
    GRPO().collect(step, problems, context)
    return [request.seed for request in sampler.requests]


def test_a_seed_a_request() -> None:
    # A problem that comes twice in a step, at the turn of an epoch, is sampled anew.
    twice = [PROBLEMS[0], PROBLEMS[1], PROBLEMS[0]]
    every = [value for run in range(3) for step in range(1, 20) for value in seeds(run, step, twice)]
    assert len(set(every)) == len(every) == 3 * 19 * 9
    assert seeds(1, 5) == seeds(1, 5)
    # The seed belongs to the place, not to the problem that happens to be there.
    assert seeds(1, 5) == seeds(1, 5, PROBLEMS[::-1])


@pytest.mark.parametrize("masked", [True, False])
def test_truncated_completions(masked: bool) -> None:
    samples = collect(rollout={"max_completion_length": 4}, loss={"mask_truncated_completions": masked}).samples
    for sample in samples:
        is_trained = sample.finish_reason == "stop" or not masked
        assert sample.num_trained == (sample.completion_length if is_trained else 0)
        assert len(sample.logprobs) == sample.num_trained
        assert sample.trained[: sample.prompt_length] == [False] * sample.prompt_length
    # A masked one still counts in its group: its reward is part of what the others are measured against.
    assert [sample.reward for sample in samples[:3]] == [0.5, 2.5, 0.0]
    assert samples[1].advantage == pytest.approx(1.5 / math.sqrt(7 / 4), rel=1e-5)


def test_a_completion_that_nobody_scores_trains_nothing() -> None:
    def grade(prompt: str, completion: str, ids: list[int], row: dict[str, Any]) -> list[float | None]:
        return [None, None] if completion == "21" else [float(completion == "20"), None]

    samples = collect(grade, rollout={"max_completion_length": 4}).samples
    for unscored in (samples[1], samples[4]):
        assert math.isnan(unscored.reward) and unscored.advantage == 0.0
        assert unscored.num_trained == 0 and unscored.logprobs == []
        assert unscored.rewards == {"exact": None, "half": None}
    # The others are compared among themselves: 2 and 0, mean 1, unbiased standard deviation √2.
    assert [samples[0].advantage, samples[2].advantage] == pytest.approx(
        [1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5
    )


def test_a_group_that_nobody_scores() -> None:
    samples = collect(lambda *_: [None, None]).samples
    assert all(sample.advantage == 0.0 and sample.num_trained == 0 for sample in samples)


def test_equal_rewards_have_no_advantage() -> None:
    samples = collect(lambda *_: [0.7, 0.1]).samples
    assert [sample.advantage for sample in samples] == [0.0] * 6


def test_a_group_of_one_has_no_advantage() -> None:
    samples = collect(rollout={"num_generations": 1}).samples
    assert [sample.advantage for sample in samples] == [0.0, 0.0]


class Shuffled(Script):
    """A sampler that answers in the order in which completions end, which is another one."""

    def generate(self, requests: Any) -> list[Completion]:
        return super().generate(requests)[::-1]


class Forgetful(Script):
    """A sampler that loses a request."""

    def generate(self, requests: Any) -> list[Completion]:
        return super().generate(requests)[:-1]


@pytest.mark.parametrize("kind", [Shuffled, Forgetful])
def test_completions_that_do_not_belong_to_the_requests(kind: type[Script]) -> None:
    context = tiny_context(tiny_config(), kind(answer), Grades(["exact", "half"], exact, [1.0, 1.0]))
    with pytest.raises(RuntimeError, match="do not belong to the requests"):
        GRPO().collect(1, PROBLEMS, context)


def test_a_conversation_is_graded_as_one() -> None:
    seen = []

    def grade(prompt: Any, completion: Any, ids: list[int], row: dict[str, Any]) -> list[float | None]:
        seen.append((prompt, completion, ids, row))
        return [1.0, 0.0]

    messages = [{"role": "user", "content": "one"}]
    collect(grade, problems=[Problem(0, messages, [5], {"answer": "1"}), PROBLEMS[1]])
    assert seen[0] == (messages, [{"role": "assistant", "content": "20"}], [20, 2], {"answer": "1", "level": None})
    assert seen[3] == ("two", "20", [20, 2], {"answer": "22", "level": 3})


@pytest.mark.slow
def test_with_the_real_pool() -> None:
    config = tiny_config(reward={"functions": [{"path": "last_number", "weight": 0.5}], "workers": 1})
    with RewardPool(RewardConfig.model_validate(config.reward.model_dump())) as pool:
        rollout = GRPO().collect(1, PROBLEMS, tiny_context(config, Script(answer), pool))
    # 20, 21 and 22 22 22 …, against 21 and 22.
    assert [sample.reward for sample in rollout.samples] == [0.0, 0.5, 0.0, 0.0, 0.0, 0.5]
    assert rollout.metrics == {"reward/timeout_frac": 0.0, "reward/error_frac": 0.0, "reward/none_frac": 0.0}

"""Held-out evaluation, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from metagrpo.trainer.config import EvalConfig
from metagrpo.trainer.data.prompts import Problem
from metagrpo.trainer.evaluation import Evaluation, evaluate
from metagrpo.trainer.rollout.protocol import Completion, Request

from .tiny import Grades, Script, tiny_config, tiny_context

PROBLEMS = [Problem(index, f"p{index}", [10 + index], {"answer": str(20 + index)}) for index in range(4)]


def answer(request: Request) -> Completion:
    """Each problem gets its prompt's token + 10, the right answer, but the third is cut off."""
    right = request.prompt_ids[0] + 10
    if request.prompt_ids[0] == 12:
        return Completion(request.id, [right] * 5, [-0.1] * 5, "length")
    return Completion(request.id, [right, 2], [-0.1] * 2, "stop")


def exact(prompt: Any, completion: str, ids: list[int], row: dict[str, Any]) -> list[float | None]:
    """2 for the right answer, ½ beside it for its length; the last problem is not scored."""
    if prompt == "p3":
        return [None, None]
    return [2.0 if completion == row["answer"] else 0.99, len(ids) / 2]


def evaluated(grade: Any = exact, **settings: Any) -> tuple[Evaluation, list[Request]]:
    sampler = Script(answer)
    context = tiny_context(
        tiny_config(train={"seed": 5}), sampler, Grades(["exact", "length"], grade, [1.0, 0.1]), "a"
    )
    return evaluate(PROBLEMS, context, EvalConfig(**settings)), sampler.requests


def test_an_evaluation_worked_by_hand() -> None:
    evaluation, _ = evaluated()
    # Two of four have at least 1 in the first function; the one that was not scored is not right.
    assert evaluation.accuracy == 0.5
    # 2 + 0.1 · 1, the same, and 0.99 + 0.1 · 2.5, over those that were scored.
    assert evaluation.reward == pytest.approx((2.1 + 2.1 + 1.24) / 3)
    assert evaluation.mean_length == (2 + 2 + 5 + 2) / 4
    assert evaluation.clipped_ratio == 0.25
    assert evaluation.problems == 4
    assert evaluation.summary() == {
        "accuracy": 0.5,
        "reward": evaluation.reward,
        "mean_length": 2.75,
        "clipped_ratio": 0.25,
        "problems": 4,
    }
    assert evaluation.completions[2] == {
        "id": "eval/2/0",
        "prompt": "p2",
        "completion": "22 22 22 22 22",
        "rewards": {"exact": 0.99, "length": 2.5},
        "length": 5,
        "finish_reason": "length",
        "answer": "22",
    }


def test_what_is_asked_of_the_sampler() -> None:
    _, requests = evaluated()
    assert [request.id for request in requests] == [f"eval/{index}/0" for index in range(4)]
    for request, problem in zip(requests, PROBLEMS, strict=True):
        assert request.prompt_ids == problem.token_ids
        # Greedy, with the rollout's limit, by default.
        assert (request.temperature, request.max_tokens, request.adapter) == (0.0, 12, "a")
        assert request.stop_ids == frozenset({2})
    _, requests = evaluated(temperature=0.6, max_completion_length=99, num_generations=3)
    assert [request.id for request in requests][:4] == ["eval/0/0", "eval/0/1", "eval/0/2", "eval/1/0"]
    assert {(request.temperature, request.max_tokens) for request in requests} == {(0.6, 99)}


def test_two_evaluations_draw_the_same_numbers() -> None:
    first, second = (evaluated(num_generations=3)[1] for _ in range(2))
    assert [request.seed for request in first] == [request.seed for request in second]
    assert len({request.seed for request in first}) == 12


def test_several_completions_a_problem() -> None:
    def grade(prompt: str, completion: str, ids: list[int], row: dict[str, Any]) -> list[float | None]:
        return [float(prompt == "p1"), 0.0]

    evaluation, _ = evaluated(grade, num_generations=3)
    assert (evaluation.accuracy, evaluation.problems, len(evaluation.completions)) == (0.25, 4, 12)


def test_nothing_scored() -> None:
    evaluation, _ = evaluated(lambda *_: [None, None])
    assert evaluation.accuracy == 0.0 and math.isnan(evaluation.reward)

"""Held-out evaluation: sample, grade, count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from metagrpo.trainer.config import EvalConfig
from metagrpo.trainer.data.prompts import Problem
from metagrpo.trainer.methods.base import Context
from metagrpo.trainer.rollout.protocol import Request, request_seed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome on a set of problems.

    Attributes:
        accuracy: mean over problems of the share of completions that the first reward function gives at least 1;
            one that could not be scored is not right.
        reward: mean of the weighted rewards of those that were scored; NaN where none was.
        mean_length: completion tokens.
        clipped_ratio: share of completions that ended at the limit.
        problems: how many.
        completions: one row each: id, prompt, completion, rewards, length, finish reason.
    """

    accuracy: float
    reward: float
    mean_length: float
    clipped_ratio: float
    problems: int
    completions: list[dict[str, Any]]

    def summary(self) -> dict[str, float]:
        """The numbers without the completions."""
        return {
            "accuracy": self.accuracy,
            "reward": self.reward,
            "mean_length": self.mean_length,
            "clipped_ratio": self.clipped_ratio,
            "problems": self.problems,
        }


def evaluate(problems: Sequence[Problem], context: Context, settings: EvalConfig) -> Evaluation:
    """Sample ``settings.num_generations`` completions a problem and grade them with the run's rewards.

    The seeds depend on the problem alone, so that two evaluations of a run draw the same random numbers.
    """
    limit = settings.max_completion_length or context.config.rollout.max_completion_length
    requests = [
        Request(
            id=f"eval/{problem.index}/{generation}",
            prompt_ids=problem.token_ids,
            max_tokens=limit,
            seed=request_seed(context.config.train.seed, "eval", problem.index, generation),
            stop_ids=context.stop_ids,
            temperature=settings.temperature,
            adapter=context.adapter,
        )
        for problem in problems
        for generation in range(settings.num_generations)
    ]
    repeated = [problem for problem in problems for _ in range(settings.num_generations)]
    completions = context.sample(requests, phase="eval")
    texts = context.texts(completions)
    result = context.score(repeated, texts, completions, phase="eval")
    first = next(iter(result.values.values()))
    right = sum(value is not None and value >= 1 for value in first)
    scored = [reward for reward in result.reward if reward == reward]
    rows = [
        {
            "id": completion.id,
            "prompt": problem.prompt,
            "completion": text,
            "rewards": {name: values[index] for name, values in result.values.items()},
            "length": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            **problem.columns,
        }
        for index, (problem, text, completion) in enumerate(zip(repeated, texts, completions, strict=True))
    ]
    count = len(completions)
    return Evaluation(
        accuracy=right / count,
        reward=sum(scored) / len(scored) if scored else float("nan"),
        mean_length=sum(row["length"] for row in rows) / count,
        clipped_ratio=sum(row["finish_reason"] == "length" for row in rows) / count,
        problems=len(problems),
        completions=rows,
    )

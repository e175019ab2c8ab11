"""GRPO (DeepSeekMath, arXiv:2402.03300): G completions a prompt, each compared with its group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from metagrpo.kernels import group_advantages
from metagrpo.trainer.data.prompts import Problem
from metagrpo.trainer.methods.base import Context, Rollout
from metagrpo.trainer.rollout.protocol import Request, request_seed
from metagrpo.trainer.sample import Sample


class GRPO:
    """One group a problem; a completion's advantage is its reward against the group's."""

    def collect(self, step: int, problems: Sequence[Problem], context: Context) -> Rollout:
        """See :class:`~metagrpo.trainer.methods.base.Method`."""
        config = context.config
        generations = config.rollout.num_generations
        requests = [
            Request(
                # A problem may come twice in a step, at the turn of an epoch: the place names it, not the problem.
                id=f"{step}/{group}/{generation}",
                prompt_ids=problem.token_ids,
                max_tokens=config.rollout.max_completion_length,
                seed=request_seed(config.train.seed, step, group, generation),
                stop_ids=context.stop_ids,
                temperature=config.rollout.temperature,
                adapter=context.adapter,
            )
            for group, problem in enumerate(problems)
            for generation in range(generations)
        ]
        repeated = [problem for problem in problems for _ in range(generations)]
        completions = context.sample(requests)
        texts = context.texts(completions)
        result = context.score(repeated, texts, completions)
        advantages = group_advantages(
            torch.tensor(result.reward),
            torch.arange(len(problems)).repeat_interleave(generations),
            baseline=config.method.baseline,
            scale=config.method.scale_rewards,
        ).tolist()
        samples = []
        for index, (problem, completion) in enumerate(zip(repeated, completions, strict=True)):
            prompt_length, length = len(problem.token_ids), len(completion.token_ids)
            truncated = completion.finish_reason == "length"
            # Not scored, or cut off and to be masked: the completion is context that trains nothing.
            is_trained = not math.isnan(result.reward[index]) and not (
                truncated and config.loss.mask_truncated_completions
            )
            samples.append(
                Sample(
                    id=completion.id,
                    token_ids=[*problem.token_ids, *completion.token_ids],
                    trained=[False] * prompt_length + [is_trained] * length,
                    logprobs=completion.logprobs if is_trained else [],
                    group=index // generations,
                    advantage=advantages[index],
                    adapter=context.adapter,
                    rewards={name: values[index] for name, values in result.values.items()},
                    reward=result.reward[index],
                    finish_reason=completion.finish_reason,
                    prompt_length=prompt_length,
                    info={"prompt": problem.prompt, "completion": texts[index], **problem.columns},
                )
            )
        return Rollout(samples, result.metrics())

"""What a method is to the trainer, and what the trainer lends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from metagrpo.trainer.config import Config
from metagrpo.trainer.data.prompts import Problem
from metagrpo.trainer.perf import StepTimer
from metagrpo.trainer.rewards import RewardPool, RewardResult
from metagrpo.trainer.rollout.protocol import Completion, Request, Sampler
from metagrpo.trainer.sample import Sample


@dataclass(slots=True)
class Rollout:
    """A step's samples, with their advantages, and the method's own metrics."""

    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Context:
    """What a method works with.

    Attributes:
        config: the run's.
        tokenizer: turns completions into text for the rewards.
        sampler: see :meth:`sample`.
        rewards: see :meth:`score`.
        timer: charges sampling and grading to their phases.
        stop_ids: ids that end a completion.
        adapter: the adapter that samples and is trained; ``None`` for full fine-tuning.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    sampler: Sampler
    rewards: RewardPool
    timer: StepTimer
    stop_ids: frozenset[int]
    adapter: str | None

    def sample(self, requests: Sequence[Request], phase: str = "rollout") -> list[Completion]:
        """Completions, paired with their requests by id; the time is charged to ``phase``.

        Raises:
            RuntimeError: the sampler answered something else than was asked.
        """
        with self.timer.phase(phase):
            completions = self.sampler.generate(requests)
        if [completion.id for completion in completions] != [request.id for request in requests]:
            raise RuntimeError("the sampler's completions do not belong to the requests")
        return completions

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        """The completions as text, special tokens left out."""
        return self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)

    def score(
        self,
        problems: Sequence[Problem],
        texts: Sequence[str],
        completions: Sequence[Completion],
        phase: str = "reward",
    ) -> RewardResult:
        """Grade one completion for each entry of ``problems``; a conversation's is an assistant message."""
        with self.timer.phase(phase):
            names = list(dict.fromkeys(name for problem in problems for name in problem.columns))
            return self.rewards.score(
                [problem.prompt for problem in problems],
                [
                    text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
                    for problem, text in zip(problems, texts, strict=True)
                ],
                [completion.token_ids for completion in completions],
                {name: [problem.columns.get(name) for problem in problems] for name in names},
            )


class Method(Protocol):
    """Plans rollouts and turns their outcomes into advantages."""

    def collect(self, step: int, problems: Sequence[Problem], context: Context) -> Rollout:
        """Sample and grade the problems of step ``step``."""
        ...

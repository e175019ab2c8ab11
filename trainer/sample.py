"""The record that a method hands to the trainer: token ids, which of them are trained, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field

from metagrpo.trainer.rollout.protocol import FinishReason


@dataclass(slots=True)
class Sample:
    """One sequence of the policy's update.

    ``token_ids[i]`` is trained where ``trained[i]`` is true: its log-probability given ``token_ids[:i]`` enters
    the loss. Context (prompt, forced text, another agent's answer) is false. Masks come from lengths and finish
    reasons, never from ids, so a pad id that equals EOS does no harm.

    Attributes:
        id: names the sample over the whole run; rollouts, rewards and metrics are paired by it.
        token_ids: prompt and completion, as sampled.
        trained: one flag a token; the first token has no context and cannot be trained.
        logprobs: the sampler's log-probability of each trained token, in order.
        advantage: one for all trained tokens, or one for each of them in order.
        group: samples whose rewards are compared share it.
        adapter: the LoRA adapter that sampled it and is trained on it; ``None`` for full fine-tuning.
        rewards: each reward function's value, ``None`` where it could not score.
        reward: their weighted sum; NaN where nothing scored, which keeps the sample out of the statistics.
        finish_reason: how sampling ended.
        prompt_length: number of leading prompt tokens, for length metrics.
        info: what else the method wants in the rollout log.
    """

    id: str
    token_ids: list[int]
    trained: list[bool]
    logprobs: list[float]
    group: int
    advantage: float | list[float] = 0.0
    adapter: str | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = float("nan")
    finish_reason: FinishReason = "stop"
    prompt_length: int = 0
    info: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.trained) != len(self.token_ids):
            raise ValueError(f"sample {self.id!r}: {len(self.trained)} flags for {len(self.token_ids)} tokens")
        if self.trained and self.trained[0]:
            raise ValueError(f"sample {self.id!r}: the first token has no context and cannot be trained")
        if len(self.logprobs) != self.num_trained:
            raise ValueError(
                f"sample {self.id!r}: {len(self.logprobs)} log-probs for {self.num_trained} trained tokens"
            )

    @property
    def num_trained(self) -> int:
        """Number of tokens that enter the loss."""
        return sum(self.trained)

    @property
    def completion_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length

    def advantages(self) -> list[float]:
        """The advantage of each trained token, in order; shape ``[num_trained]``."""
        if isinstance(self.advantage, list):
            if len(self.advantage) != self.num_trained:
                raise ValueError(
                    f"sample {self.id!r}: {len(self.advantage)} advantages for {self.num_trained} trained tokens"
                )
            return self.advantage
        return [self.advantage] * self.num_trained

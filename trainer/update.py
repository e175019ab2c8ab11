"""One step's update: from samples to new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from metagrpo.kernels import policy_loss
from metagrpo.kernels.loss_types import get_loss, select_tokens
from metagrpo.kernels.losses import loss_normalizer, mean_metrics, merge_metrics
from metagrpo.trainer.config import Config, LossConfig
from metagrpo.trainer.model import Policy
from metagrpo.trainer.optimizer import Optimizer
from metagrpo.trainer.packing import MicroBatch, micro_batches
from metagrpo.trainer.perf import StepTimer
from metagrpo.trainer.sample import Sample


@dataclass(slots=True)
class Counts:
    """Tokens of a step's passes with a gradient, and without."""

    trained: int = 0
    """Tokens of the samples that passed the model, each in full, once a pass."""
    forwarded: int = 0
    """Tokens the model was fed in those passes; a shared prefix once."""
    scored: int = 0
    """Tokens fed in passes without a gradient."""


@dataclass(slots=True)
class Update:
    """What an update reports: its metrics, and its token counts."""

    metrics: dict[str, float]
    counts: Counts


@dataclass(slots=True)
class _Batch:
    """A micro-batch on the device, with what its loss needs beside the model, one entry a trained token."""

    packed: MicroBatch
    advantages: Tensor
    rollout_logprob: Tensor
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    selected: Tensor | None = None


@dataclass(slots=True)
class _Minibatch:
    """The samples of one optimizer step."""

    normalizer: Tensor
    batches: list[_Batch]
    places: Tensor
    """int64 ``[M]``: where the tokens of the samples, in the samples' order, lie in the micro-batches' order."""


class Updater:
    """Trains a policy on a step's samples.

    Args:
        policy: the model.
        optimizer: over its trained parameters.
        config: the run's.
    """

    def __init__(self, policy: Policy, optimizer: Optimizer, config: Config) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.config = config
        self.selects = get_loss(config.loss.loss_type).select is not None

    def update(self, samples: Sequence[Sample], step: int, timer: StepTimer) -> Update:
        """Take ``num_iterations · minibatches`` optimizer steps on the samples of step ``step``, counted from 1.

        Raises:
            RunError: a gradient is not finite.
        """
        train = self.config.train
        counts = Counts()
        minibatches = [self._minibatch(part) for part in split_groups(samples, train.minibatches)]
        with timer.phase("logprobs"):
            self._score(minibatches, counts)
        sums: dict[str, Tensor] = {}
        losses, norms, rate = [], [], 0.0
        updates = train.num_iterations * train.minibatches
        for index in range(updates):
            minibatch = minibatches[index % train.minibatches]
            if self.selects and minibatch.batches:
                with timer.phase("logprobs"):
                    self._select(minibatch, counts)
            self.policy.model.train()
            with timer.phase("train"):
                self.optimizer.zero_grad()
                loss = torch.zeros((), device=self.policy.device)
                for batch in minibatch.batches:
                    part, part_sums = self._loss(batch, minibatch.normalizer)
                    part.backward()
                    loss += part.detach()
                    sums = merge_metrics(sums, part_sums)
                    counts.trained += batch.packed.logical_tokens
                    counts.forwarded += batch.packed.tree.size
                losses.append(loss)
            with timer.phase("optimizer"):
                norm, rate = self.optimizer.step((step - 1) * updates + index)
                norms.append(norm)
        means = mean_metrics(sums)
        metrics = {
            name: value for name, value in means.items() if name not in ("tokens", "sequences", "sampling/tokens")
        }
        metrics["loss"] = torch.stack(losses).mean().item()
        metrics["grad_norm"] = sum(norms) / len(norms)
        metrics["learning_rate"] = rate
        return Update(metrics, counts)

    def _minibatch(self, samples: Sequence[Sample]) -> _Minibatch:
        """Pack the samples of one optimizer step; its denominator counts all of them, trained through or not."""
        device = self.policy.device
        lengths = torch.tensor([sample.num_trained for sample in samples], dtype=torch.int64)
        normalizer = loss_normalizer(
            self.config.loss.loss_type,
            lengths,
            max_completion_length=self.config.rollout.max_completion_length,
        )
        passing = [sample for sample in samples if self._passes(sample)]
        batches = [
            _Batch(
                packed=packed.to(device),
                advantages=_flat([sample.advantages() for sample in packed.samples], device),
                rollout_logprob=_flat([sample.logprobs for sample in packed.samples], device),
            )
            for packed in micro_batches(passing, self.config.train.token_budget, self.policy.shares_prefixes)
        ]
        order = {sample.id: index for index, sample in enumerate(samples)}
        owners = torch.tensor(
            [order[sample.id] for batch in batches for sample in batch.packed.samples], dtype=torch.int64
        )
        places = owners.repeat_interleave(lengths[owners]).argsort(stable=True)
        return _Minibatch(normalizer.to(device), batches, places.to(device))

    def _passes(self, sample: Sample) -> bool:
        """Whether a sample passes the model; without an advantage it may have nothing to add to the gradient.

        A loss that selects tokens looks at all of them, and its term on a selected one need not vanish with the
        advantage, so there every sample passes.
        """
        loss = self.config.loss
        if not self.config.train.skip_zero_advantage or loss.beta > 0 or loss.entropy_coef != 0 or self.selects:
            return True
        return any(sample.advantages())

    @torch.no_grad()
    def _score(self, minibatches: list[_Minibatch], counts: Counts) -> None:
        """Log-probs of the policy before the update, where it takes several steps, and of the reference."""
        train, loss = self.config.train, self.config.loss
        several = train.num_iterations * train.minibatches > 1
        self.policy.model.eval()
        for batch in (batch for minibatch in minibatches for batch in minibatch.batches):
            if several:
                batch.old_logprob = self._logprob(batch, counts)
            if loss.beta > 0:
                with self.policy.using(None):
                    batch.ref_logprob = self._logprob(batch, counts)

    @torch.no_grad()
    def _select(self, minibatch: _Minibatch, counts: Counts) -> None:
        """Let the loss choose its tokens at the current weights, once over all tokens of the optimizer step.

        It sees them in the order of the samples, which the packing does not change, so a random choice is the same
        however the samples are cut.
        """
        self.policy.model.eval()
        batches, places = minibatch.batches, minibatch.places
        logprob = torch.cat([self._logprob(batch, counts) for batch in batches])[places]
        advantages = torch.cat([batch.advantages for batch in batches])[places]
        options = cast(dict[str, Any], self.config.loss.options)
        chosen = select_tokens(self.config.loss.loss_type, logprob, advantages, **options)
        selected = torch.empty_like(chosen)
        selected[places] = chosen
        parts = selected.split([batch.advantages.numel() for batch in batches])
        for batch, part in zip(batches, parts, strict=True):
            batch.selected = part

    def _logprob(self, batch: _Batch, counts: Counts) -> Tensor:
        """Log-probs of a micro-batch's trained tokens in a pass without a gradient, ``[M]``."""
        counts.scored += batch.packed.tree.size
        return self.policy.logprobs(batch.packed, self.config.rollout.temperature)[0]

    def _loss(self, batch: _Batch, normalizer: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logprob, entropy = self.policy.logprobs(batch.packed, self.config.rollout.temperature, with_entropy=True)
        options = cast(dict[str, Any], self.config.loss.options)
        if batch.selected is not None:
            options = {**options, "selected": batch.selected}
        return policy_loss(
            logprob,
            batch.advantages,
            sequence_ids=batch.packed.sequence_ids,
            normalizer=normalizer,
            old_logprob=batch.old_logprob,
            ref_logprob=batch.ref_logprob,
            rollout_logprob=batch.rollout_logprob,
            entropy=entropy,
            **loss_settings(self.config.loss),
            **options,
        )


def loss_settings(loss: LossConfig) -> dict[str, Any]:
    """The arguments of ``policy_loss`` that are settings of every loss type; ``loss.options`` are beside them."""
    return {
        "loss_type": loss.loss_type,
        "epsilon": loss.epsilon,
        "epsilon_high": loss.epsilon_high,
        "delta": loss.delta,
        "dual_clip": loss.dual_clip,
        "importance": loss.importance,
        "beta": loss.beta,
        "kl_estimator": loss.kl_estimator,
        "bias_corrected_kl": loss.bias_corrected_kl,
        "entropy_coef": loss.entropy_coef,
        "rollout_correction": loss.rollout_correction,
        "rollout_cap": loss.rollout_cap,
        "rollout_floor": loss.rollout_floor,
    }


def split_groups(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Part samples into optimizer steps of equally many groups; no group is torn.

    Raises:
        ValueError: the groups cannot be shared out evenly.
    """
    groups = list(dict.fromkeys(sample.group for sample in samples))
    if len(groups) % parts:
        raise ValueError(f"{len(groups)} groups do not part into {parts} minibatches")
    size = len(groups) // parts
    part_of = {group: index // size for index, group in enumerate(groups)}
    result: list[list[Sample]] = [[] for _ in range(parts)]
    for sample in samples:
        result[part_of[sample.group]].append(sample)
    return result


def _flat(values: list[list[float]], device: torch.device) -> Tensor:
    """One float32 entry a trained token, in the order of the samples."""
    return torch.tensor([value for row in values for value in row], dtype=torch.float32, device=device)

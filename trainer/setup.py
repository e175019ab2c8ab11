"""What a run needs before its first step: problems, tokenizer and model, each checked where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from metagrpo.kernels import policy_loss
from metagrpo.trainer.config import Config, DataConfig
from metagrpo.trainer.data.holdout import exclude_held_out
from metagrpo.trainer.data.prompts import Problem, build_prompts, stop_ids
from metagrpo.trainer.data.sources import load_rows
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.model import Policy, add_lora, load_base, load_model_config, load_tokenizer
from metagrpo.trainer.rewards.load import resolve
from metagrpo.trainer.rollout.protocol import request_seed
from metagrpo.trainer.rollout.record import recorded_file
from metagrpo.trainer.trackers import check_installed
from metagrpo.trainer.update import loss_settings


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained on.

    Attributes:
        tokenizer: the model's.
        train: training problems; none equals or mirrors a held-out one.
        held_out: problems of ``eval.data``.
        overlong: training problems left out for their length.
        mirrored: training problems left out since they equal or mirror a held-out one.
    """

    tokenizer: PreTrainedTokenizerBase
    train: list[Problem]
    held_out: list[Problem]
    overlong: int
    mirrored: int = 0

    @property
    def left_out(self) -> str:
        """How many training problems are not used, and why, in words."""
        mirrored = f", {self.mirrored} held out as well" if self.mirrored else ""
        return f"{self.overlong} overlong{mirrored}, left out"

    def stop_ids(self, policy: Policy) -> frozenset[int]:
        """Every id that ends a completion of this model."""
        return stop_ids(self.tokenizer, policy.base.generation_config, policy.config)


def check_names(config: Config) -> None:
    """Refuse what pydantic cannot: names that only their registries know, losses that do not fit, missing records.

    Raises:
        ConfigError: an unknown loss type, loss option or reward function, settings that a loss type does not go
            with, a tracker that is not installed, or a step that ``rollout.replay`` lacks.
    """
    nothing = torch.zeros(0)
    try:
        policy_loss(
            nothing,
            nothing,
            sequence_ids=torch.zeros(0, dtype=torch.int64),
            normalizer=torch.ones(()),
            ref_logprob=nothing,
            rollout_logprob=nothing,
            entropy=nothing,
            **loss_settings(config.loss),
            **cast(dict[str, Any], config.loss.options),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"loss: {error}") from error
    resolve(config.reward.functions)
    check_installed(config.log.backends)
    if config.rollout.replay:
        for step in range(1, config.train.steps + 1):
            recorded_file(config.rollout.replay, step)


def load_workload(config: Config) -> Workload:
    """Read the data and turn it into prompts.

    Raises:
        ConfigError: a file, column or task is missing, nothing is left, or a prompt leaves the model no room.
    """
    check_names(config)
    rows = load_rows(config.data)
    held_out_rows = load_rows(config.eval.data) if config.eval.data else []
    mirrored = 0
    if held_out_rows:
        rows, mirrored = exclude_held_out(rows, held_out_rows)
    model_config = load_model_config(config.model)
    tokenizer = load_tokenizer(config.model)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", 1 << 30)
    room = positions - config.rollout.max_completion_length
    if room < 1:
        raise ConfigError(
            f"rollout.max_completion_length {config.rollout.max_completion_length} leaves no room for a prompt: "
            f"the model has {positions} positions"
        )
    train, overlong = build_prompts(rows, config.data, tokenizer, room)
    held_out: list[Problem] = []
    if config.eval.data:
        length = config.eval.max_completion_length or config.rollout.max_completion_length
        data = DataConfig.model_validate({**config.data.model_dump(), **config.eval.data.model_dump()})
        held_out, left_out = build_prompts(held_out_rows, data, tokenizer, positions - length)
        if left_out:
            raise ConfigError(
                f"eval.data: {left_out} held-out prompts are too long for the model or max_prompt_length"
            )
    return Workload(tokenizer, train, held_out, overlong, mirrored)


def load_policy(config: Config, weights: Path | None = None) -> Policy:
    """The model with fresh adapters, or from a checkpoint's weights, ready to train.

    Args:
        config: the run's.
        weights: a directory to load the whole model from, in place of ``model.path``.

    Raises:
        ConfigError: the model cannot be loaded, or does not go with the settings.
    """
    source = (
        config.model if weights is None else config.model.model_copy(update={"path": str(weights), "revision": None})
    )
    torch.manual_seed(request_seed(config.train.seed, "initialisation"))
    base = load_base(source)
    model = add_lora(base, config.lora) if config.lora.enabled else base
    if config.train.gradient_checkpointing:
        recompute_activations(base)
    return Policy(model, config.model.attention, shares_prefixes=config.rollout.num_generations > 1)


def recompute_activations(base: PreTrainedModel) -> None:
    """Keep each layer's input alone and compute the rest of it again in the backward pass."""
    settings = {"use_reentrant": False}
    if hasattr(base, "activation_checkpointing_enable"):
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:  # transformers before 5.24
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)

"""What a run needs before its first step: problems, tokenizer and model, each checked where it is made."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from metagrpo.kernels.losses import loss_names, loss_options
from metagrpo.trainer.config import Config, DataConfig
from metagrpo.trainer.data.holdout import exclude_held_out
from metagrpo.trainer.data.prompts import Problem, build_prompts, stop_ids
from metagrpo.trainer.data.sources import load_rows
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.model import Policy, add_lora, load_base, load_tokenizer
from metagrpo.trainer.pretrained import resolve_model
from metagrpo.trainer.rewards.load import resolve
from metagrpo.trainer.rollout.protocol import request_seed


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained on.

    Attributes:
        tokenizer: the model's.
        train: training problems; none equals or mirrors a held-out one.
        held_out: problems of ``eval.data``.
        overlong: training problems left out for their length.
    """

    tokenizer: PreTrainedTokenizerBase
    train: list[Problem]
    held_out: list[Problem]
    overlong: int

    def stop_ids(self, policy: Policy) -> frozenset[int]:
        """Every id that ends a completion of this model."""
        return stop_ids(self.tokenizer, policy.base.generation_config, policy.config)


def check_names(config: Config) -> None:
    """Refuse names that only their registries know.

    Raises:
        ConfigError: an unknown loss type, loss option or reward function.
    """
    loss = config.loss
    if loss.loss_type not in loss_names():
        nearest = difflib.get_close_matches(loss.loss_type, loss_names(), n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown loss.loss_type {loss.loss_type}, did you mean {nearest}?")
    known = loss_options(loss.loss_type)
    for name in loss.options:
        if name not in known:
            raise ConfigError(
                f"loss.options: {loss.loss_type} has no option {name}; it has {', '.join(known) or 'none'}"
            )
    resolve(config.reward.functions)


def load_workload(config: Config) -> Workload:
    """Read the data and turn it into prompts.

    Raises:
        ConfigError: a file, column or task is missing, nothing is left, or a prompt leaves the model no room.
    """
    check_names(config)
    rows = load_rows(config.data)
    held_out_rows = load_rows(config.eval.data) if config.eval.data else []
    if held_out_rows:
        rows, _ = exclude_held_out(rows, held_out_rows)
    tokenizer = load_tokenizer(config.model)
    model_config = AutoConfig.from_pretrained(
        resolve_model(config.model.path),
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
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
    return Workload(tokenizer, train, held_out, overlong)


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
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model, config.model.attention)

"""Adapters and models on disk, in PEFT's and Hugging Face's layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from metagrpo.trainer.checkpoint import MANIFEST
from metagrpo.trainer.config import Config
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.model import ADAPTER, Policy, add_lora, choose_dtype, is_peft, load_base, load_tokenizer


def save_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the adapter (or the whole model) and the tokenizer, as ``from_pretrained`` loads them."""
    if is_peft(policy.model):
        # "auto" would ask the hub whether the vocabulary grew; it never does here.
        policy.model.save_pretrained(directory, save_embedding_layers=False)  # type: ignore[operator]
    else:
        policy.base.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def export_model(config: Config, checkpoint: Path, directory: Path, *, merge: bool) -> None:
    """Write a checkpoint in the layout that ``transformers`` (a model) or ``peft`` (an adapter) loads.

    A merged model is computed in float32 and rounded once to the base's type.
    """
    tokenizer = load_tokenizer(config.model)
    if config.lora.enabled and not merge:
        shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("state.*", MANIFEST))
        return
    if not config.lora.enabled:
        model = load_base(
            config.model.model_copy(update={"path": str(checkpoint), "revision": None, "device": "cpu"})
        )
    else:
        base = load_base(config.model.model_copy(update={"dtype": "float32", "device": "cpu"}))
        adapted = add_lora(base, config.lora)
        load_adapter(adapted, checkpoint)
        model = adapted.merge_and_unload().to(choose_dtype(config.model))  # type: ignore[operator]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def load_adapter(model: nn.Module, directory: Path) -> None:
    """Put an adapter's saved weights in place of the model's own.

    Raises:
        ConfigError: its shapes or modules are others.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(str(directory), device="cpu")
    try:
        outcome: Any = set_peft_model_state_dict(model, weights, adapter_name=ADAPTER)
    except RuntimeError as error:
        raise ConfigError(f"the adapter in {directory} does not fit the lora section: {error}") from error
    missing = [name for name in outcome.missing_keys if "lora_" in name]
    if missing or outcome.unexpected_keys:
        raise ConfigError(
            f"the adapter in {directory} does not fit the lora section: {[*missing, *outcome.unexpected_keys][0]}"
        )

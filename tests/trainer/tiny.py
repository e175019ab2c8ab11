"""Tiny models of the shapes we serve, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "gemma": (GemmaConfig, {}),
    "gemma2": (Gemma2Config, {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 6, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
}


def tiny_model(name: str, attention: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the named shape; equal seeds give equal weights."""
    config_class, extra = CONFIGS[name]
    config = config_class(**{**SIZES, **extra, **changes})
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_class](config)
    # Weights large enough that a leak between sequences cannot hide in rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()

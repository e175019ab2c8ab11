"""Tiny models of the shapes we serve, samples for them, and what plain transformers says about both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from metagrpo.trainer.attention import ATTENTION
from metagrpo.trainer.config import Config, LoraSection, parse_config
from metagrpo.trainer.methods.base import Context
from metagrpo.trainer.model import Policy, add_lora
from metagrpo.trainer.perf import StepTimer
from metagrpo.trainer.rewards import RewardResult
from metagrpo.trainer.rollout.protocol import Completion, Request
from metagrpo.trainer.sample import Sample

VOCABULARY = 97
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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
# Gemma's caps are low enough to bend these models' scores.
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "gemma": (GemmaConfig, {}),
    "gemma2": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (Gemma3TextConfig, {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
    # Values are narrower than keys, and every token takes its own two experts.
    "deepseek": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def tiny_model(name: str, attention: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of the named shape; equal seeds give equal weights."""
    config_class, extra = CONFIGS[name]
    config = config_class(**{**SIZES, **extra, **changes})
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    model = model_class(config)
    # Weights large enough that a leak between sequences cannot hide in rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def with_adapter(model: PreTrainedModel, seed: int = 0, spread: float = 0.1) -> nn.Module:
    """The model in PEFT's LoRA; equal seeds give equal adapters. B, 0 in a new adapter, has ``spread``."""
    torch.manual_seed(seed)
    adapted = add_lora(model, LoraSection(r=4, lora_alpha=8.0))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=spread)
    return adapted.eval()


def tiny_policy(name: str, *, lora: bool = False, spread: float = 0.1, shares: bool = True, **changes: Any) -> Policy:
    """A policy over a tiny model; :func:`plain_model` is the same model without any code of ours."""
    base = tiny_model(name, ATTENTION, **changes)
    return Policy(with_adapter(base, spread=spread) if lora else base, shares_prefixes=shares)


def plain_model(name: str, *, lora: bool = False, spread: float = 0.1, **changes: Any) -> nn.Module:
    """The model of :func:`tiny_policy` with transformers' eager attention."""
    base = tiny_model(name, "eager", **changes)
    return with_adapter(base, spread=spread) if lora else base


def plain_logits(model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """Logits after each token of one sequence, float64 ``[T, V]``, with their graph."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].double()


def plain_logprobs(model: nn.Module, sample: Sample, temperature: float = 1.0) -> Tensor:
    """``log softmax(logits / temperature)`` of a sample's trained tokens, float64 ``[num_trained]``, with graph."""
    ids = torch.tensor(sample.token_ids)
    logprobs = (plain_logits(model, sample.token_ids) / temperature).log_softmax(-1)
    every = logprobs[:-1].gather(-1, ids[1:, None])[:, 0]
    return every[torch.tensor(sample.trained[1:])]


def set_rollout_logprobs(samples: Sequence[Sample], model: nn.Module, temperature: float = 1.0) -> None:
    """What a sampler that agrees with the model would have reported."""
    with torch.no_grad():
        for sample in samples:
            sample.logprobs = plain_logprobs(model, sample, temperature).tolist()


def make_sample(token_ids: Sequence[int], trained: Sequence[bool], **fields: Any) -> Sample:
    """A sample with log-probs of 0."""
    fields = {"id": "a", "group": 0, **fields}
    return Sample(token_ids=list(token_ids), trained=list(trained), logprobs=[0.0] * sum(trained), **fields)


def group_samples(seed: int = 0, prompts: int = 2, generations: int = 3, **fields: Any) -> list[Sample]:
    """GRPO's shape: completions of 1 to 12 tokens a prompt of 5 to 9, advantages that are not 0."""
    rng = random.Random(seed)
    samples = []
    for group in range(prompts):
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(5, 9))]
        for generation in range(generations):
            length = rng.randint(1, 12)
            samples.append(
                make_sample(
                    [*prompt, *(rng.randrange(3, VOCABULARY) for _ in range(length))],
                    [False] * len(prompt) + [True] * length,
                    id=f"1/{group}/{generation}",
                    group=group,
                    advantage=rng.choice((-1, 1)) * rng.uniform(0.3, 2.0),
                    prompt_length=len(prompt),
                    **fields,
                )
            )
    return samples


def branch_samples(seed: int = 0, **fields: Any) -> list[Sample]:
    """MRT's shape: a trajectory of four episodes, and at the end of each two answers branch off.

    Trained tokens lie on both sides of forced ones; one answer is there twice, and one sample is a prefix of another.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    ids, trained = tokens(6), [False] * 6
    samples = []
    for episode in range(4):
        ids, trained = ids + tokens(5), trained + [True] * 5
        for answer in range(2):
            forced, free = [90, 91], tokens(3)
            samples.append(
                make_sample(
                    [*ids, *forced, *free],
                    [*trained, False, False, True, True, True],
                    id=f"1/0/{episode}/{answer}",
                    advantage=[rng.uniform(-2, 2) for _ in range(sum(trained) + 3)],
                    **fields,
                )
            )
    twin = samples[3]
    samples.append(make_sample(twin.token_ids, twin.trained, id="twin", advantage=0.7, **fields))
    samples.append(make_sample(ids[:14], trained[:14], id="prefix", advantage=-0.4, **fields))
    return samples


def tiny_config(**sections: Any) -> Config:
    """A run's configuration with short limits, full fine-tuning and no clipping, and the given sections on top."""
    defaults: dict[str, Any] = {
        "model": {"path": "tiny"},
        "lora": {"enabled": False},
        "data": {"source": "tiny.jsonl"},
        "rollout": {"num_generations": 3, "max_completion_length": 12},
        "train": {"prompts_per_step": 2, "steps": 10, "learning_rate": 1e-3, "max_grad_norm": 0.0},
    }
    return parse_config({name: {**defaults.get(name, {}), **sections.get(name, {})} for name in defaults | sections})


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``‖actual − expected‖ / ‖expected‖``."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


class Words:
    """Stands in for a tokenizer: a token is written as its number."""

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Numbers with blanks between them; 0, 1 and 2 are special."""
        return [" ".join(str(i) for i in ids if i > 2 or not skip_special_tokens) for ids in sequences]


class Script:
    """Stands in for a sampler: answers requests with completions that ``answer`` makes of them."""

    def __init__(self, answer: Callable[[Request], Completion]) -> None:
        self.answer = answer
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See :class:`~metagrpo.trainer.rollout.protocol.Sampler`."""
        self.requests += requests
        return [self.answer(request) for request in requests]

    def sync(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Grades:
    """Stands in for a reward pool: ``grade(prompt, completion, ids, row)`` is each function's value, ``[F]``."""

    def __init__(self, names: Sequence[str], grade: Callable[..., Sequence[float | None]], weights: Sequence[float]):
        self.names, self.grade, self.weights = names, grade, weights

    def score(self, prompts: Any, completions: Any, completion_ids: Any, columns: Any) -> RewardResult:
        """See :class:`~metagrpo.trainer.rewards.RewardPool`."""
        rows = [
            self.grade(prompt, completion, ids, {name: values[index] for name, values in columns.items()})
            for index, (prompt, completion, ids) in enumerate(zip(prompts, completions, completion_ids, strict=True))
        ]
        values = {name: [row[place] for row in rows] for place, name in enumerate(self.names)}
        status: Any = {name: ["none" if value is None else "ok" for value in values[name]] for name in self.names}
        totals = []
        for row in rows:
            terms = [weight * value for weight, value in zip(self.weights, row, strict=True) if value is not None]
            totals.append(sum(terms) if terms else float("nan"))
        return RewardResult(values, status, totals)


def tiny_context(config: Config, sampler: Any, rewards: Any, adapter: str | None = None) -> Context:
    """What a method works with, over stand-ins; 2 ends a completion."""
    tokenizer: Any = Words()
    return Context(config, tokenizer, sampler, rewards, StepTimer(torch.device("cpu")), frozenset({2}), adapter)

"""The native sampler beside ``model.generate``: same model, prompts, dtype and length, in one run, by turns.

``metagrpo bench sampler`` prints tokens per second of both and their ratio.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from metagrpo.trainer.config import DataConfig, ModelConfig
from metagrpo.trainer.data.prompts import build_prompts
from metagrpo.trainer.data.sources import load_rows
from metagrpo.trainer.model import Policy, load_base, load_tokenizer
from metagrpo.trainer.pretrained import resolve_model
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rollout.protocol import Request


def compare(model: str, dtype: str, batch: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Time both on ``batch`` distinct prompts, every completion ``new_tokens`` long, after a warm-up of each.

    Returns:
        Median tokens per second of each, the rounds behind it, and the ratio of the medians.
    """
    config = ModelConfig.model_validate({"path": model, "dtype": dtype})
    data = DataConfig.model_validate(
        {"source": "reasoning_gym:letter_counting", "options": {"min_words": 3, "max_words": 15}, "size": batch}
    )
    tokenizer = load_tokenizer(config)
    prompts = [problem.token_ids for problem in build_prompts(load_rows(data), data, tokenizer, 1 << 20)[0]]
    contenders = {
        "native": _native(config, prompts, new_tokens),
        "generate": _generate(config, tokenizer, prompts, new_tokens),
    }
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: [batch * new_tokens / s for s in values] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "model": model,
        "dtype": dtype,
        "batch": batch,
        "new_tokens": new_tokens,
        "threads": torch.get_num_threads(),
        "tok_s": medians,
        "rounds": rates,
        "ratio": medians["native"] / medians["generate"],
    }


def _native(config: ModelConfig, prompts: list[list[int]], new_tokens: int) -> Callable[[], Any]:
    sampler = NativeSampler(Policy(load_base(config)), max_batch_size=len(prompts))
    requests = [Request(str(i), ids, new_tokens, seed=i, stop_ids=frozenset()) for i, ids in enumerate(prompts)]
    return lambda: sampler.generate(requests)


def _generate(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], new_tokens: int
) -> Callable[[], Any]:
    # transformers' own choice of attention, not ours.
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(config.path), dtype=getattr(torch, config.dtype))
    tokenizer.padding_side = "left"
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return lambda: model.generate(**inputs, **options)


def to_json(result: dict[str, Any]) -> str:
    """The result with what it was measured on."""
    machine = {"cpu": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    return json.dumps({**result, "machine": machine}, indent=2)

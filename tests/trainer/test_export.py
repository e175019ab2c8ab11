"""Exports load in transformers and peft, and compute what the trained weights compute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from metagrpo.trainer import commands
from metagrpo.trainer.cli import app

from .tiny_run import load_tensors, write_recipe

IDS = torch.tensor([[7, 80, 81, 82, 33, 200, 17, 5, 99]])
R, ALPHA = 4, 8
CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"lora__use_rslora": True},
    "dora": {"lora__use_dora": True},
    "bfloat16": {"model__dtype": "bfloat16"},
    "full": {"lora__enabled": False, "train__learning_rate": 1e-3},
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tiny_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A run of two steps, with a checkpoint of each."""
    output = tmp_path_factory.mktemp(request.param) / "run"
    recipe = write_recipe(
        output.parent / "recipe.yaml", tiny_home, output, checkpoint__every=1, **CASES[request.param]
    )
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    return request.param, output


def trained_weights(name: str, run: Path, home: Path, step: int = 2) -> dict[str, Tensor]:
    """The model's weights in float64, from the formula of LoRA (arXiv:2106.09685), rsLoRA and DoRA."""
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    if name == "full":
        return {key: value.double() for key, value in load_file(checkpoint / "model.safetensors").items()}
    weights = {key: value.double() for key, value in load_file(home / "model" / "model.safetensors").items()}
    adapter = {
        key.removeprefix("base_model.model."): value.double()
        for key, value in load_file(checkpoint / "adapter_model.safetensors").items()
    }
    scale = ALPHA / (math.sqrt(R) if name == "rslora" else R)
    for key, a in adapter.items():
        if not key.endswith(".lora_A.weight"):
            continue
        module = key.removesuffix(".lora_A.weight")
        weight = weights[f"{module}.weight"] + scale * adapter[f"{module}.lora_B.weight"] @ a
        if name == "dora":
            weight *= (adapter[f"{module}.lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
        weights[f"{module}.weight"] = weight
    return weights


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits.double()


def oracle(name: str, run: Path, home: Path, step: int = 2) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float64, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(trained_weights(name, run, home, step), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return logits(model)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def test_the_merged_model_loads_and_has_the_trained_logits(
    case: tuple[str, Path], tiny_home: Path, tmp_path: Path
) -> None:
    name, run = case
    output = tmp_path / "merged"
    commands.export(run, output, step=None, merge=True)
    assert "metagrpo" not in (output / "config.json").read_text()  # it names no attention function of ours
    assert not (output / "state.safetensors").exists() and not (output / "adapter_config.json").exists()
    expected = oracle(name, run, tiny_home)
    if name == "bfloat16":
        # Rounded once: each weight is the nearest bfloat16 of the float64 sum, or its neighbour where float32
        # arithmetic lands on the other side of a tie.
        saved = load_tensors(output)
        for key, weight in trained_weights(name, run, tiny_home).items():
            assert saved[key].dtype == torch.bfloat16
            assert ((saved[key].double() - weight).abs() <= weight.abs() * 2**-8 * 1.001).all(), key
    else:
        torch.testing.assert_close(logits(load(output)), expected, rtol=1e-4, atol=1e-4)
    changed = (expected - logits(load(tiny_home / "model"))).norm() / expected.norm()
    assert changed > 1e-3  # training has moved the logits by more than the tolerance
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.decode(tokenizer("2 + 3")["input_ids"]) == "2 + 3" and tokenizer.chat_template
    stops = json.loads((output / "generation_config.json").read_text())["eos_token_id"]
    assert stops == json.loads((tiny_home / "model" / "generation_config.json").read_text())["eos_token_id"]


def test_the_adapter_loads_in_peft_and_has_the_trained_logits(
    case: tuple[str, Path], tiny_home: Path, tmp_path: Path
) -> None:
    name, run = case
    output = tmp_path / "adapter"
    commands.export(run, output, step=None, merge=False)
    if name == "full":  # there is no adapter: the model is what there is to export
        torch.testing.assert_close(logits(load(output)), oracle(name, run, tiny_home), rtol=1e-4, atol=1e-4)
        return
    assert {path.name for path in output.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not {path.name for path in output.iterdir()} & {"state.safetensors", "state.json", "manifest.json"}
    assert json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tiny_home / "model"
    )
    model = PeftModel.from_pretrained(load(tiny_home / "model"), output)
    torch.testing.assert_close(logits(model), oracle(name, run, tiny_home), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["lora", "full"], indirect=True)
def test_an_earlier_step(case: tuple[str, Path], tiny_home: Path, tmp_path: Path) -> None:
    name, run = case
    commands.export(run, tmp_path / "first", step=1, merge=True)
    expected = oracle(name, run, tiny_home, step=1)
    torch.testing.assert_close(logits(load(tmp_path / "first")), expected, rtol=1e-4, atol=1e-4)
    assert (expected - oracle(name, run, tiny_home, step=2)).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_what_cannot_be_exported(case: tuple[str, Path], tmp_path: Path) -> None:
    _, run = case
    (tmp_path / "there").mkdir()
    for arguments, code, part in (
        ([run, tmp_path / "there"], 2, "exists: name another directory"),
        ([run, tmp_path / "out", "--step", "7"], 2, "holds no checkpoint of step 7; it has 1, 2"),
        ([tmp_path, tmp_path / "out"], 2, "is no run"),
        ([run, tmp_path / "a" / "b" / "out"], 0, "of step_000002"),
    ):
        result = CliRunner().invoke(app, ["export", *map(str, arguments)])
        assert result.exit_code == code, result.output
        assert part in (result.stderr if code else result.stdout)
        assert not (tmp_path / "out").exists() and list((tmp_path / "there").iterdir()) == []
        assert not list(tmp_path.glob(".tmp*"))
    assert (tmp_path / "a" / "b" / "out").is_dir()


@pytest.mark.parametrize("case", ["lora"], indirect=True)
def test_an_export_that_fails_leaves_nothing(
    case: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = case

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"run error: cannot write {tmp_path / 'out'}: No space left on device"
    assert list(tmp_path.iterdir()) == []

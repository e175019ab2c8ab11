"""Errors a person can act on: one line, an exit code, no stack trace, nothing left behind."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.logging import disable_progress_bar, enable_progress_bar
from typer.testing import CliRunner

from metagrpo.trainer import commands
from metagrpo.trainer.cli import app
from metagrpo.trainer.errors import RunError
from metagrpo.trainer.loop import Trainer
from metagrpo.trainer.rundir import read_jsonl

from .tiny_run import environment, metagrpo, write_problems, write_recipe


@dataclass
class Place:
    """Where a test's recipe, data and run lie."""

    home: Path
    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def write(self, **changes: Any) -> None:
        write_recipe(self.recipe, self.home, self.output, **changes)

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def model_without(self, *names: str) -> str:
        copy = self.folder / "model"
        shutil.copytree(self.home / "model", copy)
        for name in names:
            (copy / name).unlink()
        return str(copy)

    def problems(self, *problems: str) -> str:
        write_problems(self.folder / "data.jsonl", list(problems))
        return str(self.folder / "data.jsonl")


@pytest.fixture
def place(tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    disable_progress_bar()  # as the command does where stderr is no terminal
    yield Place(tiny_home, tmp_path)
    enable_progress_bar()


CONFIG_ERRORS: dict[str, tuple[Callable[[Place], dict[str, Any]], tuple[str, ...]]] = {
    # name: what the recipe says, parts of the line
    "unknown key": (lambda p: {"train__learning_rat": 1}, ("train.learning_rat", "did you mean train.learning_rate")),
    "unknown section": (lambda p: {"trainer__steps": 1}, ("trainer", "did you mean train")),
    "wrong value": (lambda p: {"train__steps": 0}, ("train.steps",)),
    "missing data file": (lambda p: {"data__source": str(p.folder / "no.jsonl")}, ("no file", "no.jsonl")),
    "missing column": (lambda p: {"data__prompt_column": "question"}, ("no column 'question'", "prompt, answer")),
    "missing answer": (lambda p: {"data__answer_column": "gold"}, ("no column 'gold'", "answer_column")),
    "empty data": (lambda p: {"data__source": p.file("e.jsonl", "")}, ("e.jsonl holds no problems",)),
    "invalid line": (lambda p: {"data__source": p.file("b.jsonl", '{"prompt": "1"}\n{')}, ("b.jsonl", "line 2")),
    "unknown task": (
        lambda p: {"data__source": "reasoning_gym:chain_sums"},
        ("no task 'chain_sums'", "did you mean chain_sum"),
    ),
    "minibatches": (lambda p: {"train__minibatches": 3}, ("train.minibatches 3", "train.prompts_per_step 4")),
    "group of one": (
        lambda p: {"method__baseline": "leave_one_out", "rollout__num_generations": 1},
        ("leave_one_out", "at least 2"),
    ),
    "all overlong": (
        lambda p: {"data__source": p.problems("1 + " + "2" * 600)},
        ("no prompt has at most 500 tokens", "the shortest of 1"),  # 512 positions, 12 for the completion
    ),
    "no room": (lambda p: {"rollout__max_completion_length": 512}, ("max_completion_length 512", "512 positions")),
    "held-out overlong": (
        lambda p: {"eval__data": {"source": p.problems("1 + " + "2" * 600)}},
        ("no prompt has at most 500 tokens",),
    ),
    "all held out": (
        lambda p: {"eval__data": {"source": p.problems("1 + 2")}, "data__source": p.problems("2 + 1")},
        ("each of the 1 training problems", "held-out"),
    ),
    "unknown model path": (lambda p: {"model__path": "/no/such/model"}, ("no model directory /no/such/model",)),
    "unknown model id": (lambda p: {"model__path": "nobody/nothing"}, ("model.path: cannot load nobody/nothing",)),
    "model that is a file": (lambda p: {"model__path": p.file("m", "")}, ("is a file",)),
    "model without config": (
        lambda p: {"model__path": p.model_without("config.json")},
        ("model.path: cannot load", "config.json"),
    ),
    "model without tokenizer": (
        lambda p: {"model__path": p.model_without("tokenizer.json", "tokenizer_config.json")},
        ("model.path: no tokenizer at",),
    ),
    "model without weights": (
        lambda p: {"model__path": p.model_without("model.safetensors")},
        ("model.path: cannot load", "model.safetensors"),
    ),
    "damaged weights": (
        lambda p: {"model__path": damage(p.model_without())},
        ("model.path: cannot load", "header"),
    ),
    "unknown device": (lambda p: {"model__device": "abacus"}, ("model.device: abacus",)),
    "attention": (lambda p: {"model__attention": "flex"}, ("model.attention", "sdpa")),
    "lora target": (lambda p: {"lora__target_modules": ["q_prog"]}, ("lora.target_modules", "q_prog")),
    "lora head": (lambda p: {"lora__target_modules": ["lm_head"]}, ("lora.target_modules", "lm_head")),
    "unknown loss": (lambda p: {"loss__loss_type": "dapoo"}, ("unknown loss type 'dapoo'", "did you mean 'dapo'")),
    "loss option": (
        lambda p: {"loss__loss_type": "cispo", "loss__options": {"ratio_maxx": 2.0}},
        ("no option 'ratio_maxx'", "did you mean 'ratio_max'"),
    ),
    "loss setting as option": (lambda p: {"loss__options": {"epsilon": 0.1}}, ("loss", "epsilon")),
    "loss combination": (lambda p: {"loss__loss_type": "cispo", "loss__delta": 4.0}, ("'cispo' has no delta",)),
    "unknown reward": (
        lambda p: {"reward__functions": [{"path": "mth"}]},
        ("reward 'mth' is no built-in", "did you mean math"),
    ),
    "unknown function": (
        lambda p: {"reward__functions": [{"path": f"{p.home / 'rewards.py'}:spred"}]},
        ("no function spred", "did you mean spread"),
    ),
    "reward file": (lambda p: {"reward__functions": [{"path": "no.py:f"}]}, ("no file", "no.py")),
    "reward option": (
        lambda p: {"reward__functions": [{"path": "last_number", "options": {"answer_": 1}}]} | no_answers(p),
        ("last_number needs answer",),
    ),
    "reward column": (
        lambda p: {"reward__functions": [{"path": f"{p.file('r.py', PICKY)}:picky"}]},
        ("picky", "does not take answer", "**kwargs"),
    ),
    "tracker": (lambda p: {"log__backends": ["trackio"]}, ("trackio, which is not installed", "pip install trackio")),
    "no record": (lambda p: {"rollout__replay": str(p.folder)}, ("no record of step 1",)),
    "top_p": (lambda p: {"rollout__top_p": 0.9}, ("rollout", "top_p")),
    "kl without adapter": (lambda p: {"loss__beta": 0.1, "lora__enabled": False}, ("loss.beta", "lora.enabled")),
}
PICKY = "def picky(prompts, completions, completion_ids):\n    return [0.0] * len(completions)\n"


def damage(model: str) -> str:
    Path(model, "model.safetensors").write_bytes(b"nonsense")
    return model


def no_answers(place: Place) -> dict[str, Any]:
    return {"data__source": place.file("no_answers.jsonl", '{"prompt": "1 + 1"}\n')}


def one_line(stderr: str, kind: str) -> str:
    """The line on stderr, which is all there is."""
    (line,) = stderr.splitlines()
    assert line.startswith(f"{kind} error: "), stderr
    return line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_a_config_error_is_one_line_and_leaves_nothing(name: str, place: Place) -> None:
    if name == "tracker" and importlib.util.find_spec("trackio"):
        pytest.skip("trackio is installed")
    changes, parts = CONFIG_ERRORS[name]
    place.write(**changes(place))
    before = sorted(place.folder.rglob("*"))
    result = CliRunner().invoke(app, ["train", str(place.recipe)])
    assert result.exit_code == 2, result.output
    line = one_line(result.stderr, "config")
    for part in parts:
        assert part in line
    assert sorted(place.folder.rglob("*")) == before and result.stdout == ""


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_an_overwriting_run_leaves_the_old_one(place: Place) -> None:
    place.write()
    assert commands.train(place.recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    before = {path: path.stat().st_mtime_ns for path in sorted(place.output.rglob("*"))}
    for override in ("lora.target_modules=[q_prog]", "model.path=/no/such/model", "reward.functions=[{path: a:b}]"):
        result = CliRunner().invoke(app, ["train", str(place.recipe), override, "--overwrite"])
        assert result.exit_code == 2, result.output
        one_line(result.stderr, "config")
    assert {path: path.stat().st_mtime_ns for path in sorted(place.output.rglob("*"))} == before


def test_recipes_that_cannot_be_read(place: Place) -> None:
    cases = {
        "none.yaml": (None, "cannot read the recipe"),
        "bad.yaml": ("model: [", "not valid YAML"),
        "list.yaml": ("- 1", "no mapping"),
        "empty.yaml": ("", "no mapping"),
        "short.yaml": ("data: {source: x.jsonl}", "model is required"),
    }
    for name, (text, part) in cases.items():
        if text is not None:
            place.file(name, text)
        result = CliRunner().invoke(app, ["train", str(place.folder / name)])
        assert result.exit_code == 2
        assert part in one_line(result.stderr, "config")
    result = CliRunner().invoke(app, ["train", place.file("ok.yaml", "{}"), "steps"])
    assert result.exit_code == 2
    assert "key.sub=value" in one_line(result.stderr, "config")


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_is_there_or_is_not(place: Place) -> None:
    place.write()
    result = CliRunner().invoke(app, ["train", str(place.recipe), "--resume"])
    assert result.exit_code == 2 and "no run to resume" in one_line(result.stderr, "config")
    assert not place.output.exists()
    assert commands.train(place.recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    before = (place.output / "metrics.jsonl").read_bytes(), (place.output / "config.yaml").read_bytes()
    for flags, part in (
        ([], "--resume or --overwrite"),
        (["--dry-run", "train.seed=9"], "--resume or --overwrite"),
        (["--resume", "--overwrite"], "exclude each other"),
    ):
        result = CliRunner().invoke(app, ["train", str(place.recipe), *flags])
        assert result.exit_code == 2
        assert part in one_line(result.stderr, "config")
    assert ((place.output / "metrics.jsonl").read_bytes(), (place.output / "config.yaml").read_bytes()) == before


def test_several_ranks_are_refused_not_trained_apart(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write()
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["train", str(place.recipe)])
    assert result.exit_code == 2 and "several ranks" in one_line(result.stderr, "config")
    assert not place.output.exists()


@pytest.mark.slow
def test_the_real_command_prints_one_line(place: Place) -> None:
    place.write(train__learning_rat=1)
    result = metagrpo("train", place.recipe)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == ("config error: unknown key train.learning_rat, did you mean train.learning_rate?\n")
    assert not place.output.exists()


@pytest.mark.parametrize("arguments", [["train"], ["eval"], ["train", "--resume"]], ids=" ".join)
def test_a_mistyped_key_is_reported_before_the_libraries_are_imported(place: Place, arguments: list[str]) -> None:
    place.write(train__learning_rat=1)
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from metagrpo.trainer.cli import app\n"
        "result = CliRunner().invoke(app, sys.argv[1:])\n"
        "print(result.exit_code, *sorted({'torch', 'transformers', 'peft', 'datasets'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, *arguments, str(place.recipe)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert (result.stdout, result.stderr) == ("2\n", "")


def test_with_debug_it_is_the_trace(place: Place) -> None:
    place.write(lora__target_modules=["q_prog"])
    result = CliRunner().invoke(app, ["train", str(place.recipe), "--debug"])
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("metagrpo.trainer.errors.ConfigError: lora.target_modules")
    assert not place.output.exists()


def test_a_bug_keeps_its_trace(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    place.write()
    monkeypatch.setattr(Trainer, "step", broken)
    result = CliRunner().invoke(app, ["train", str(place.recipe)])
    assert isinstance(result.exception, ZeroDivisionError) and result.exit_code == 1


def test_an_error_in_the_run_exits_with_1(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RunError("the worker\nis gone")

    place.write()
    monkeypatch.setattr(Trainer, "step", failing)
    result = CliRunner().invoke(app, ["train", str(place.recipe)])
    assert result.exit_code == 1
    assert one_line(result.stderr, "run") == "run error: the worker is gone"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["eval", "{folder}"], "cannot read the recipe"),
        (["eval", "{recipe}"], "eval.data is not set"),
        (["eval", "{recipe}", "eval.data.source={held_out}", "--step", "1"], "--step needs a run's directory"),
        (["export", "{folder}", "{folder}/out"], "is no run"),
        (["show", "{folder}"], "holds no metrics"),
        (["show", "{folder}", "--step", "1"], "holds no rollouts of step 1; it has none"),
    ],
)
def test_the_other_commands_say_what_is_missing(arguments: list[str], part: str, place: Place) -> None:
    place.write()
    names = {"folder": place.folder, "recipe": place.recipe, "held_out": place.home / "held_out.jsonl"}
    before = sorted(place.folder.rglob("*"))
    result = CliRunner().invoke(app, [argument.format(**names) for argument in arguments])
    assert result.exit_code == 2
    assert part in one_line(result.stderr, "config")
    assert sorted(place.folder.rglob("*")) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    point = tmp_path / "disk"
    point.mkdir()
    if libc.mount(b"tmpfs", str(point).encode(), b"tmpfs", 0, b"size=1m"):
        pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    yield point
    assert libc.umount(str(point).encode()) == 0


@pytest.mark.slow
@pytest.mark.fault
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays_whole(place: Place, small_disk: Path) -> None:
    output = small_disk / "run"
    place.write(lora__enabled=False, train__output_dir=str(output), train__steps=9, checkpoint__every=1)
    # One checkpoint is about 0.7 MB, so the second finds no room before the first is deleted.
    result = metagrpo("train", place.recipe)
    assert result.returncode == 1, result.stderr
    assert result.stderr == (
        f"run error: cannot write {output / 'checkpoints' / 'step_000002'}: No space left on device\n"
    )
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["latest", "step_000001"]
    manifest = json.loads((output / "checkpoints" / "step_000001" / "manifest.json").read_text())
    for name, file in manifest["files"].items():
        assert (output / "checkpoints" / "step_000001" / name).stat().st_size == file["bytes"]
    # Step 2 was done and logged before its checkpoint failed; a resume from step 1 drops its line and runs it again.
    assert [row["step"] for row in read_jsonl(output / "metrics.jsonl")] == [1, 2]
    for path in output.rglob("*"):
        assert ".tmp" not in path.name

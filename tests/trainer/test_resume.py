"""Four steps at once = two + kill + resume + two, bit for bit; and what a signal does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from metagrpo.trainer import commands
from metagrpo.trainer.checkpoint import checkpoint_at, latest_checkpoint, save_checkpoint
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.loop import Trainer
from metagrpo.trainer.rewards import RewardPool
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rundir import RunDirectory, read_jsonl
from metagrpo.trainer.update import Updater

from .tiny_run import command_line, environment, load_tensors, metagrpo, write_recipe

SAMPLES_A_STEP = 16
CASES: dict[str, dict[str, Any]] = {
    "lora": {
        "lora__lora_dropout": 0.25,
        "train__num_iterations": 2,
        "train__minibatches": 2,
        "train__lr_scheduler_type": "cosine",
        "train__warmup_ratio": 0.2,
    },
    "full": {"lora__enabled": False, "train__learning_rate": 1e-3},
    "bfloat16": {"lora__enabled": False, "model__dtype": "bfloat16", "train__learning_rate": 1e-5},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """As many as the commands have that tests start, so that sums are taken in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(recipe: Path, resume: bool = False, overrides: tuple[str, ...] = ()) -> int:
    return commands.train(recipe, list(overrides), resume=resume, overwrite=False, dry_run=False)


def outcome(output: Path) -> dict[str, Any]:
    """All that a run leaves and that must not depend on when it was stopped."""
    run = RunDirectory(output)
    timing = ("time/", "perf/", "step_time")
    newest = latest_checkpoint(run.checkpoints)
    assert newest is not None
    return {
        "metrics": [
            {name: value for name, value in row.items() if not name.startswith(timing)}
            for row in read_jsonl(run.metrics)
        ],
        "rollouts": {path.name: read_jsonl(path) for path in sorted(run.rollouts.iterdir())},
        "eval": read_jsonl(run.eval / "eval.jsonl"),
        "checkpoint": newest.name,
        "tensors": load_tensors(newest),
        "state": (newest / "state.json").read_text(),
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = one["tensors"], other["tensors"]
    assert {**one, "tensors": None} == {**other, "tensors": None}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name


def recipe_of(case: str, home: Path, folder: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """A recipe of four steps and its run's directory."""
    output = folder / name
    common = {"train__steps": 4, "checkpoint__every": 2, "eval__data": {"source": str(home / "held_out.jsonl")}}
    path = write_recipe(folder / f"{name}.yaml", home, output, **{**common, **CASES[case], **changes})
    return path, output


def reward_functions(home: Path, marker: Path, after: int) -> str:
    """An override: a reward, and the function that holds the run as it grades sample ``after + 1``."""
    file = home / "rewards.py"
    hold = {"path": f"{file}:hold", "weight": 0.0, "options": {"after": after, "marker": str(marker)}}
    return f"reward.functions={[{'path': f'{file}:spread'}, hold]}"


def start_and_hold(home: Path, recipe: Path, folder: Path, steps: int) -> subprocess.Popen[str]:
    """Start the real command and wait until it grades the step after ``steps``, where it stays."""
    marker = folder / "held"
    held_out = 3  # graded before the first step
    functions = reward_functions(home, marker, after=held_out + SAMPLES_A_STEP * steps)
    process = subprocess.Popen(
        command_line("train", recipe, functions),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + 120
    while not marker.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run did not reach step {steps + 1}: {process.communicate()[0]}")
        time.sleep(0.05)
    return process


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(case: str, tiny_home: Path, tmp_path: Path) -> None:
    whole, whole_dir = recipe_of(case, tiny_home, tmp_path, "whole")
    parts, parts_dir = recipe_of(case, tiny_home, tmp_path, "parts")
    process = start_and_hold(tiny_home, parts, tmp_path, steps=2)
    assert len(read_jsonl(parts_dir / "metrics.jsonl")) == 2
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    functions = reward_functions(tiny_home, tmp_path / "held", after=0)  # the marker is there: it holds no more
    assert train(whole, overrides=(functions,)) == 0
    if case == "lora":  # once with nothing but the real command
        resumed = metagrpo("train", parts, "--resume", functions)
        assert resumed.returncode == 0, resumed.stderr
    else:
        assert train(parts, resume=True, overrides=(functions,)) == 0
    result = outcome(whole_dir)
    assert result["checkpoint"] == "step_000004"
    assert [row["step"] for row in result["metrics"]] == [1, 2, 3, 4]
    assert [row["step"] for row in result["eval"]] == [0, 4]
    assert_same(result, outcome(parts_dir))


def test_the_steps_differ_so_that_equality_means_something(tiny_home: Path, tmp_path: Path) -> None:
    recipe, output = recipe_of("lora", tiny_home, tmp_path, "run", checkpoint__keep_last=9)
    assert train(recipe) == 0
    result = outcome(output)
    prompts = [[row["prompt"] for row in rows] for rows in result["rollouts"].values()]
    assert len(prompts) == 4 and all(prompts[0] != later for later in prompts[1:])
    two, four = (load_tensors(checkpoint_at(output / "checkpoints", step)) for step in (2, 4))
    changed = [name for name in two if not torch.equal(two[name], four[name])]
    assert any("lora_" in name for name in changed) and any(name.startswith("exp_avg.") for name in changed)
    assert {float(value) for name, value in four.items() if name.startswith("step.")} == {4.0 * 2 * 2}


def kill_self(patch: pytest.MonkeyPatch, place: type, method: str, number: int, step: int, call: int) -> None:
    """Have this process send itself a signal at the ``call``-th call of a method within a step."""
    real_step, real_method = Trainer.step, getattr(place, method)
    now = {"step": 0, "call": 0}

    def stepping(self: Trainer, step: int) -> dict[str, float]:
        now.update(step=step, call=0)
        return real_step(self, step)

    def calling(self: Any, *args: Any) -> Any:
        now["call"] += 1
        if now == {"step": step, "call": call}:
            os.kill(os.getpid(), number)
        return real_method(self, *args)

    patch.setattr(Trainer, "step", stepping)
    patch.setattr(place, method, calling)


@pytest.fixture(scope="module")
def whole(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four steps of full fine-tuning at once leave."""
    recipe, output = recipe_of("full", tiny_home, tmp_path_factory.mktemp("whole"), "run")
    assert train(recipe) == 0
    return outcome(output)


@pytest.mark.parametrize(
    ("place", "method", "call", "number", "finished"),
    [
        (NativeSampler, "_step", 6, signal.SIGTERM, 2),
        (RewardPool, "score", 1, signal.SIGINT, 2),
        (Updater, "_loss", 2, signal.SIGTERM, 3),  # in the midst of an update, which is finished first
        (NativeSampler, "sync", 1, signal.SIGINT, 3),
    ],
)
def test_a_signal_in_step_3_saves_the_last_finished_step(
    place: type, method: str, call: int, number: int, finished: int, tiny_home: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: dict[str, Any],
) -> None:  # fmt: skip
    recipe, output = recipe_of("full", tiny_home, tmp_path, "parts", checkpoint__every=0)
    handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
    with monkeypatch.context() as patch:
        kill_self(patch, place, method, number, step=3, call=call)
        assert train(recipe) == (0 if number == signal.SIGTERM else 130)
    assert [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)] == handlers
    assert [row["step"] for row in read_jsonl(output / "metrics.jsonl")] == list(range(1, finished + 1))
    newest = latest_checkpoint(output / "checkpoints")
    assert newest is not None and newest.name == f"step_{finished:06d}"
    assert f"stopped by {signal.Signals(number).name} after step {finished};" in capsys.readouterr().out
    assert train(recipe, resume=True) == 0
    assert_same(whole, outcome(output))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_from_outside_ends_the_command(number: int, code: int, tiny_home: Path, tmp_path: Path) -> None:
    recipe, output = recipe_of("lora", tiny_home, tmp_path, "run", checkpoint__every=0)
    process = start_and_hold(tiny_home, recipe, tmp_path, steps=1)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)  # the grader alone would hold it for 600 s
    assert process.returncode == code, printed
    assert printed.splitlines()[-1] != "" and "Traceback" not in printed
    assert f"stopped by {signal.Signals(number).name} after step 1; go on with --resume" in printed
    assert [path.name for path in sorted((output / "checkpoints").iterdir())] == ["latest", "step_000001"]


def test_a_checkpoint_never_holds_a_step_that_is_not_logged(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, output = recipe_of("lora", tiny_home, tmp_path, "run", checkpoint__every=1)
    logged = []

    def spy(root: Path, step: int, *args: Any, **options: Any) -> Path:
        logged.append((step, len((output / "metrics.jsonl").read_text().splitlines())))
        return save_checkpoint(root, step, *args, **options)

    monkeypatch.setattr("metagrpo.trainer.loop.save_checkpoint", spy)
    assert train(recipe) == 0
    assert logged == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_run_stopped_in_its_first_step_starts_over(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any]
) -> None:
    recipe, output = recipe_of("full", tiny_home, tmp_path, "parts")
    with monkeypatch.context() as patch:
        kill_self(patch, RewardPool, "score", signal.SIGTERM, step=1, call=1)
        assert train(recipe) == 0
    assert latest_checkpoint(output / "checkpoints") is None
    assert train(recipe, resume=True) == 0
    assert_same(whole, outcome(output))  # the evaluation of step 0 is there once


def test_a_finished_run_resumes_to_nothing(tiny_home: Path, tmp_path: Path) -> None:
    recipe, output = recipe_of("full", tiny_home, tmp_path, "run")
    assert train(recipe) == 0
    before = outcome(output)
    assert train(recipe, resume=True) == 0
    assert_same(before, outcome(output))


def test_a_checkpoint_of_other_adapters_is_refused(tiny_home: Path, tmp_path: Path) -> None:
    recipe, output = recipe_of("lora", tiny_home, tmp_path, "run")
    assert train(recipe) == 0
    before = outcome(output)
    for other in ("lora.r=8", "lora.target_modules=[q_proj]"):
        with pytest.raises(ConfigError, match="does not fit the lora section"):
            train(recipe, resume=True, overrides=(other,))
    assert_same(before, outcome(output))

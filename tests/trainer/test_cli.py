"""The real command, end to end on a tiny model: what it prints and what it leaves."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from metagrpo.trainer import cli, commands, loop
from metagrpo.trainer.config import load_config
from metagrpo.trainer.data.holdout import mirror_key
from metagrpo.trainer.metrics import metric_spec, step_line
from metagrpo.trainer.perf import PHASES
from metagrpo.trainer.rundir import read_jsonl

from .tiny_run import PROBLEMS, load_tensors, metagrpo, write_problems, write_recipe

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora__enabled": False, "train__learning_rate": 1e-3},
    "bfloat16": {"lora__enabled": False, "model__dtype": "bfloat16", "train__learning_rate": 1e-3},
}
STEPS, PROMPTS, GENERATIONS = 3, 4, 4


@dataclass
class Finished:
    """A run that has come to its end."""

    kind: str
    recipe: Path
    output: Path
    printed: list[str]
    metrics: list[dict[str, Any]]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return read_jsonl(self.output / "rollouts" / f"step_{step:06d}.jsonl")


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """LoRA, full fine-tuning, and that in bfloat16, with an evaluation."""
    folder = tmp_path_factory.mktemp(request.param)
    output = folder / "run"
    recipe = write_recipe(
        folder / "recipe.yaml",
        tiny_home,
        output,
        **KINDS[request.param],
        train__steps=STEPS,
        eval__data={"source": str(tiny_home / "held_out.jsonl")},
        eval__every=2,
    )
    arguments = ["train", recipe, f"rollout.save={folder / 'record'}"]
    if request.param == "lora":
        result = metagrpo(*arguments, cwd=folder)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        printed = result.stdout
    else:
        printed = in_process(*arguments)
    return Finished(request.param, recipe, output, printed.splitlines(), read_jsonl(output / "metrics.jsonl"))


def in_process(*arguments: object) -> str:
    """What the command prints; quicker, where a process of its own proves nothing more."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_output_tree_is_the_specified_one(run: Finished) -> None:
    names = {path.name for path in run.output.iterdir()} - {".lock"}
    assert names == {
        "config.yaml", "env.json", "metrics.jsonl", "rollouts", "checkpoints", "logs", "eval", "report",
    }  # fmt: skip
    assert sorted(path.name for path in (run.output / "rollouts").iterdir()) == [
        f"step_{step:06d}.jsonl" for step in (1, 2, 3)
    ]
    checkpoints = run.output / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000002", "step_000003"]
    assert (checkpoints / "latest").read_text().strip() == "step_000003"
    files = {path.name for path in (checkpoints / "step_000003").iterdir()}
    weights = {"adapter_config.json", "adapter_model.safetensors"} if run.kind == "lora" else {
        "config.json", "model.safetensors",
    }  # fmt: skip
    assert weights | {"tokenizer.json", "state.safetensors", "state.json", "manifest.json"} <= files
    assert sorted(path.name for path in (run.output / "eval").glob("step_*")) == [
        f"step_{step:06d}.jsonl" for step in (0, 2, 3)
    ]
    plots = {path.name for path in (run.output / "report").iterdir()}
    assert plots == {"reward.png", "length.png", "time.png", "accuracy.png"}
    for path in run.output.rglob("*"):
        assert ".tmp" not in path.name


def test_the_resolved_config_is_the_recipe_with_its_overrides(run: Finished) -> None:
    resolved = load_config(run.output / "config.yaml", [])
    assert resolved == load_config(run.recipe, [f"rollout.save={run.recipe.parent / 'record'}"])
    environment = json.loads((run.output / "env.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__


def test_every_logged_name_is_defined_and_the_expected_ones_are_there(run: Finished) -> None:
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    for row in run.metrics:
        for name in row.keys() - {"step"}:
            assert metric_spec(name).formula
            assert row[name] is not None and math.isfinite(row[name]), name
    always = """
        reward reward_std rewards/spread/mean rewards/spread/std frac_reward_zero_std loss entropy grad_norm
        learning_rate num_tokens step_time completions/mean_length completions/min_length completions/max_length
        completions/clipped_ratio clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean ratio/mean
        mismatch_kl sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/mean
        sampling/masked_mean sampling/masked_sequences_mean sampling/dropped_mean reward/timeout_frac
        reward/error_frac reward/none_frac data/overlong perf/tok_s perf/train_tok_s perf/rollout_tok_s
        perf/forwarded_tok_s perf/pad_frac perf/prefix_saved_frac perf/peak_mem_gb
    """
    for row in run.metrics:
        assert set(always.split()) <= row.keys()
        assert {f"time/{phase}" for phase in PHASES} <= row.keys()
    assert ["eval/accuracy" in row for row in run.metrics] == [False, True, True]


def test_times_sum_to_the_step(run: Finished) -> None:
    for row in run.metrics:
        assert math.fsum(row[f"time/{phase}"] for phase in PHASES) == row["step_time"]
        for phase in ("data", "rollout", "reward", "train", "optimizer", "log"):
            assert row[f"time/{phase}"] > 0, phase
        assert (row["time/eval"] > 0) == (row["step"] in (2, 3))  # the one before step 1 is no part of it
        assert (row["time/checkpoint"] > 0) == (row["step"] == 3)


def test_tokens_and_rewards_are_those_of_the_rollouts(run: Finished) -> None:
    total = 0
    ends: set[bool] = set()
    for step, row in enumerate(run.metrics, start=1):
        record = read_jsonl(run.recipe.parent / "record" / f"step_{step:06d}.jsonl")
        logged = run.rollouts(step)
        assert [sample["id"] for sample in record] == [sample["id"] for sample in logged]
        assert len({sample["id"] for sample in logged}) == PROMPTS * GENERATIONS
        total += sum(len(sample["token_ids"]) for sample in record)
        assert row["num_tokens"] == total
        lengths = [len(sample["token_ids"]) - sample["prompt_length"] for sample in record]
        assert lengths == [sample["length"] for sample in logged]
        assert row["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert row["perf/tok_s"] * row["step_time"] == pytest.approx(
            sum(len(sample["token_ids"]) for sample in record)
        )
        for sample, shown in zip(record, logged, strict=True):
            # The reward, from the ids that were sampled: nothing was decoded and encoded again.
            ids = sample["token_ids"][sample["prompt_length"] :]
            assert shown["reward"] == shown["rewards"]["spread"] == sum(ids) % 17 / 17
            assert sum(map(int, shown["prompt"].split(" + "))) == int(shown["answer"])  # they are still together
            assert sample["trained"] == [False] * sample["prompt_length"] + [True] * len(ids)
        assert row["reward"] == pytest.approx(sum(sample["reward"] for sample in logged) / len(logged))
        cut = [sample["finish_reason"] == "length" for sample in logged]
        assert row["completions/clipped_ratio"] == pytest.approx(sum(cut) / len(cut))
        ends |= set(cut)
        assert all(sample["length"] == 12 for sample, is_cut in zip(logged, cut, strict=True) if is_cut)
    assert ends == {True, False}


def test_groups_share_a_problem_and_an_epoch_holds_each_once(run: Finished) -> None:
    prompts = []
    for step in (1, 2, 3):
        rows = run.rollouts(step)
        groups = [{row["prompt"] for row in rows if row["group"] == group} for group in range(PROMPTS)]
        assert all(len(group) == 1 for group in groups)
        prompts += [prompt for group in groups for prompt in group]
        advantages = [[row["advantage"] for row in rows if row["group"] == group] for group in range(PROMPTS)]
        assert all(abs(sum(group)) < 1e-4 for group in advantages)
    assert sorted(prompts) == sorted(PROBLEMS)  # 3 steps of 4 are one epoch of 12


def test_the_lines_for_a_person(run: Finished) -> None:
    first = run.printed[0]
    trained = "LoRA r 4" if run.kind == "lora" else "full fine-tuning"
    dtype = "bfloat16" if run.kind == "bfloat16" else "float32"
    for part in ("grpo on", "attention sdpa", "sampler native", trained, dtype, "12 problems", "3 held out"):
        assert part in first
    lines = [line for line in run.printed if re.match(r"step \d+  reward", line)]
    assert lines == [step_line(row["step"], row) for row in run.metrics]
    assert any(line.startswith("held-out accuracy") and "after 3 steps (3 problems)" in line for line in run.printed)
    assert [line.split()[1].rpartition("/")[2] for line in run.printed if line.startswith("plot ")] == [
        "reward.png", "length.png", "time.png", "accuracy.png",
    ]  # fmt: skip


def test_on_policy_the_ratio_is_one_and_the_sampler_agrees_with_the_trainer(run: Finished) -> None:
    for row in run.metrics:
        assert row["ratio/mean"] == 1
        assert row["clip_ratio/region_mean"] == 0
        assert row["mismatch_kl"] < (1e-2 if run.kind == "bfloat16" else 1e-8)
        assert row["sampling/dropped_mean"] == 0
        assert row["grad_norm"] > 0


def test_only_what_is_trained_changes(run: Finished, tiny_home: Path) -> None:
    base = load_tensors(tiny_home / "model")
    tensors = load_tensors(run.output / "checkpoints" / "step_000003")
    if run.kind == "lora":
        assert not any(name.startswith("base_model") and "lora_" not in name for name in tensors)
        assert all(tensors[name].abs().max() > 0 for name in tensors if name.endswith("lora_B.weight"))
        return
    saved = {name: tensors[name] for name in base}
    assert all(not torch.equal(saved[name].float(), base[name]) for name in base)
    if run.kind == "bfloat16":
        # Each weight is the rounded master, and the master has more bits than that.
        masters = {name.removeprefix("master."): value for name, value in tensors.items() if "master." in name}
        assert masters.keys() == base.keys()
        for name, master in masters.items():
            assert master.dtype == torch.float32 and saved[name].dtype == torch.bfloat16
            assert torch.equal(master.bfloat16(), saved[name])
        assert any(not torch.equal(masters[name], saved[name].float()) for name in masters)


def test_evaluation_is_of_the_held_out_problems_alone(run: Finished) -> None:
    rows = read_jsonl(run.output / "eval" / "step_000003.jsonl")
    assert [row["prompt"] for row in rows] == ["9 + 11", "12 + 13", "14 + 15"]
    summary = read_jsonl(run.output / "eval" / "eval.jsonl")
    assert [row["step"] for row in summary] == [0, 2, 3] and {row["problems"] for row in summary} == {3}
    assert summary[-1]["reward"] == pytest.approx(sum(row["rewards"]["spread"] for row in rows) / 3)
    assert summary[-1]["accuracy"] == sum(row["rewards"]["spread"] >= 1 for row in rows) / 3


def test_eval_of_a_run_gives_what_the_run_itself_found(run: Finished, tmp_path: Path) -> None:
    for step in (2, 3):
        output = tmp_path / "new" / f"{step}.json"
        commands.evaluate(run.output, [], step=step, output=output)
        result = json.loads(output.read_text())
        assert result["model"].endswith(f"step_{step:06d}")
        (logged,) = (row for row in read_jsonl(run.output / "eval" / "eval.jsonl") if row["step"] == step)
        assert {name: result[name] for name in logged.keys() - {"step"}} == {
            name: value for name, value in logged.items() if name != "step"
        }
        assert result["completions"] == read_jsonl(run.output / "eval" / f"step_{step:06d}.jsonl")


@pytest.mark.slow
def test_eval_of_a_recipe_is_the_untrained_model(run: Finished, tmp_path: Path) -> None:
    output = tmp_path / "eval.json"
    if run.kind == "lora":
        result = metagrpo("eval", run.recipe, "--output", output)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        printed = result.stdout
    else:
        printed = in_process("eval", run.recipe, "--output", output)
    assert "accuracy" in printed and "mean_length" in printed
    written = json.loads(output.read_text())
    assert written["completions"] == read_jsonl(run.output / "eval" / "step_000000.jsonl")


def test_a_dry_run_prints_and_writes_the_config_and_leaves_the_rest_to_the_run(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tiny_home, tmp_path / "run")
    printed = in_process("train", recipe, "lora.r=3", "train.seed=7", "--dry-run")
    (tmp_path / "printed.yaml").write_text(printed)
    expected = load_config(recipe, ["lora.r=3", "train.seed=7"])
    assert load_config(tmp_path / "printed.yaml", []) == expected
    assert expected.lora.r == 3 and expected.train.seed == 7
    assert load_config(tmp_path / "run" / "config.yaml", []) == expected
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]

    def no_weights(*_: Any, **__: Any) -> None:
        pytest.fail("a dry run loads weights")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "load_policy", no_weights)
        assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=True) == 0
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2


def test_held_out_problems_and_their_mirrors_are_not_trained_on(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    write_problems(data, ["1 + 2", "3 + 4", "2 + 1", "5 + 6", "7 + 8"])
    write_problems(held_out, ["1 + 2", "8 + 7"])
    recipe = write_recipe(
        tmp_path / "r.yaml", tiny_home, tmp_path / "run", data__source=str(data),
        eval__data={"source": str(held_out)}, train__prompts_per_step=2, train__steps=1,
    )  # fmt: skip
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    assert "2 problems (0 overlong, 3 held out as well, left out), 2 held out" in capsys.readouterr().out
    trained = {row["prompt"] for row in read_jsonl(tmp_path / "run" / "rollouts" / "step_000001.jsonl")}
    assert trained == {"3 + 4", "5 + 6"}
    assert mirror_key("8 + 7") == mirror_key("7 + 8")


def test_overlong_prompts_are_left_out_and_counted(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.jsonl"
    write_problems(data, ["1 + 2", "3 + 4", "5 + " + "0" * 600, "7 + " + "0" * 480 + "8"])
    recipe = write_recipe(
        tmp_path / "r.yaml", tiny_home, tmp_path / "run", data__source=str(data), train__prompts_per_step=2
    )
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    assert "2 problems (2 overlong, left out)" in capsys.readouterr().out.splitlines()[0]
    assert [row["data/overlong"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [2, 2]


def test_overwrite_replaces_the_results_and_nothing_else(tiny_home: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", tiny_home, tmp_path / "run")
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=False) == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert commands.train(recipe, ["train.steps=1"], resume=False, overwrite=True, dry_run=False) == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert [path.name for path in (tmp_path / "run" / "rollouts").iterdir()] == ["step_000001.jsonl"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_step_leaves_nothing(
    number: int, code: int, tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", tiny_home, tmp_path / "run")
    monkeypatch.setattr(loop, "load_policy", lambda *_, **__: os.kill(os.getpid(), number))
    result = CliRunner().invoke(cli.app, ["train", str(recipe)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output and not (tmp_path / "run").exists()


def test_a_recipe_may_be_a_mapping_of_required_keys_alone(tiny_home: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"path": str(tiny_home / "model")},
                "data": {"source": str(tiny_home / "train.jsonl")},
                "train": {"output_dir": str(tmp_path / "run")},
            }
        )
    )
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=True) == 0

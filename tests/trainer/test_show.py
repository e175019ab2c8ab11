"""``metagrpo show``: metrics as a table, completions as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from metagrpo.trainer.cli import app


def show(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["show", *map(str, arguments)])


def row(step: int, **metrics: Any) -> str:
    return json.dumps({"step": step, "reward": 0.5 + step / 100, "reward_std": 0.25, **metrics}) + "\n"


def rollout(group: int, generation: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"2/{group}/{generation}", "group": group, "prompt": f"What is 1 + {group}? [bold]",
        "completion": f"It is {group + 1}. [/red]", "answer": str(group + 1), "rewards": {"math": 1.0, "style": None},
        "reward": 0.75, "advantage": -1.25, "length": 7, "finish_reason": "length", **changes,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    large = {
        "eval/accuracy": 0.512, "completions/mean_length": 1234.56, "completions/clipped_ratio": 0.25, "entropy": 1.5,
        "mismatch_kl": 1.23e-13, "grad_norm": 0.0123, "perf/tok_s": 123456.7, "step_time": 98.76,
    }  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(row(step) for step in range(1, 30)) + row(30, **large))
    (tmp_path / "rollouts").mkdir()
    rows = [rollout(group, generation) for group in range(3) for generation in range(2)]
    rows[1]["prompt"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Last words?"}]
    rows[1] |= {"reward": None, "advantage": [0.5, 0.25, -2.0]}
    (tmp_path / "rollouts" / "step_000002.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    (tmp_path / "rollouts" / "step_000004.jsonl").write_text(json.dumps(rollout(0, 0)) + "\n")
    return tmp_path


def test_the_table_fits_80_columns_uncut(run: Path) -> None:
    result = show(run, "--count", 3)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "step reward std accuracy length clipped entropy mismatch grad tok/s seconds",
        "28 0.780 0.25 — — — — — — — —",
        "29 0.790 0.25 — — — — — — — —",
        "30 0.800 0.25 0.512 1234.6 0.25 1.50 1e-13 0.012 123457 98.8",
    ]
    assert max(map(len, result.stdout.splitlines())) <= 80 and "…" not in result.stdout


def test_the_last_twenty_steps_by_default(run: Path) -> None:
    lines = show(run).stdout.splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == list(range(11, 31))


def test_completions_of_a_step(run: Path) -> None:
    result = show(run, "--step", 2)
    assert result.exit_code == 0
    for part in ("2/0/0", "2/2/1", "reward 0.75 (math 1, style —)", "advantage -1.25", "7 tokens, length; answer 3"):
        assert part in result.stdout
    # What looks like markup is text of the model, and is shown.
    assert "What is 1 + 2? [bold]" in result.stdout and "It is 3. [/red]" in result.stdout
    # Of a conversation the last message; no reward; an advantage a token.
    assert "Last words?" in result.stdout and "Be brief." not in result.stdout
    assert "2/0/1  reward — " in result.stdout and "advantage 0.5…-2" in result.stdout


def test_count_limits_the_completions(run: Path) -> None:
    shown = show(run, "--step", 2, "--count", 2).stdout
    assert "2/0/1" in shown and "2/1/0" not in shown


def test_a_missing_step_names_those_that_are_there(run: Path) -> None:
    result = show(run, "--step", 9)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == f"config error: {run} holds no rollouts of step 9; it has 2 to 4\n"


def test_a_damaged_log_is_one_line(run: Path) -> None:
    (run / "metrics.jsonl").write_text("{\n{}\n")
    result = show(run)
    assert result.exit_code == 1
    assert result.stderr == f"run error: {run / 'metrics.jsonl'}, line 1 is not JSON\n"

"""Look at a run: its metrics as a table, a step's completions as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rundir import RunDirectory, read_jsonl

COLUMNS = {
    "step": "step",
    "reward": "reward",
    "reward_std": "std",
    "eval/accuracy": "accuracy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "clipped",
    "entropy": "entropy",
    "mismatch_kl": "mismatch",
    "grad_norm": "grad",
    "perf/tok_s": "tok/s",
    "step_time": "seconds",
}


def show_metrics(path: Path, count: int) -> None:
    """Print the last ``count`` steps of a run.

    Raises:
        ConfigError: there is no run, or it has made no step.
    """
    rows = read_jsonl(RunDirectory(path).metrics)
    if not rows:
        raise ConfigError(f"{path} holds no metrics")
    table = Table(*COLUMNS.values(), title=str(path))
    for row in rows[-count:]:
        table.add_row(*(_number(row.get(name)) for name in COLUMNS))
    Console().print(table)


def show_rollouts(path: Path, step: int, count: int) -> None:
    """Print the first ``count`` completions of a step, each with its rewards and advantage.

    Raises:
        ConfigError: that step was not logged; the ones that were are named.
    """
    run = RunDirectory(path)
    file = run.rollout_file(step)
    if not file.exists():
        logged = sorted(int(found.stem.removeprefix("step_")) for found in run.rollouts.glob("step_*.jsonl"))
        span = f"it has {logged[0]} to {logged[-1]}" if logged else "it has none"
        raise ConfigError(f"{path} holds no rollouts of step {step}; {span}")
    console = Console()
    for row in read_jsonl(file)[:count]:
        rewards = ", ".join(f"{name} {_number(value)}" for name, value in row["rewards"].items())
        title = f"{row['id']}  reward {_number(row['reward'])} ({rewards})  advantage {_number(row['advantage'])}"
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        body = f"[dim]{escape(prompt)}[/dim]\n\n{escape(row['completion'])}"
        footer = f"{row['length']} tokens, {row['finish_reason']}; answer {row.get('answer')}"
        console.print(Panel(body, title=escape(title), subtitle=escape(footer), title_align="left"))


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.3g}…{value[-1]:.3g}" if value else "—"
    return "—" if value is None else f"{value:.4g}"

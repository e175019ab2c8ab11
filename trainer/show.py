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

# Title and format by metric; together they fit 80 columns, which is what a pipe gets.
COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "reward_std": ("std", ".2f"),
    "eval/accuracy": ("accuracy", ".3f"),
    "completions/mean_length": ("length", ".1f"),
    "completions/clipped_ratio": ("clipped", ".2f"),
    "entropy": ("entropy", ".2f"),
    "mismatch_kl": ("mismatch", ".0e"),
    "grad_norm": ("grad", ".2g"),
    "perf/tok_s": ("tok/s", ".0f"),
    "step_time": ("seconds", ".1f"),
}


def show_metrics(path: Path, count: int) -> None:
    """Print the last ``count`` steps of a run.

    Raises:
        ConfigError: there is no run, or it has made no step.
    """
    rows = read_jsonl(RunDirectory(path).metrics)
    if not rows:
        raise ConfigError(f"{path} holds no metrics")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows[-count:]:
        table.add_row(*(_number(row.get(name), form) for name, (_, form) in COLUMNS.items()))
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


def _number(value: Any, form: str = ".4g") -> str:
    if isinstance(value, list):
        return f"{value[0]:.3g}…{value[-1]:.3g}" if value else "—"
    return "—" if value is None else f"{value:{form}}"

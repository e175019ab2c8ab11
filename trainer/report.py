"""Plots of a run, out of its ``metrics.jsonl`` and ``eval/eval.jsonl``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metagrpo.trainer.perf import PHASES
from metagrpo.trainer.rundir import RunDirectory, disk_errors, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, Any]]

BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#8a8f98"
# Okabe and Ito's palette, which colour-blind readers can tell apart, with greys for the small phases.
PHASE_COLOURS = {
    "rollout": "#0072b2",
    "train": "#e69f00",
    "reward": "#009e73",
    "logprobs": "#56b4e9",
    "optimizer": "#d55e00",
    "sync": "#cc79a7",
    "eval": "#f0e442",
    "checkpoint": "#7a5195",
    "data": "#4d4d4d",
    "log": "#999999",
    "other": "#d0d0d0",
}
MOST_POINTS = 200  # beyond, neighbouring steps are averaged: a finer line is noise on a plot of this size
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "xtick.color": "#4a4f57",
    "ytick.color": "#4a4f57",
    "legend.frameon": False,
}


def write_report(run_dir: Path) -> list[Path]:
    """Draw ``report/{reward,accuracy,length,time}.png`` of a run that has made at least one step.

    Accuracy needs an evaluation, and is left out without one. Values that are null leave a gap.

    Returns:
        The paths written; empty where the run has logged nothing.

    Raises:
        RunError: the disk is full or read-only, or a log is corrupt.
    """
    run = RunDirectory(run_dir)
    steps = read_jsonl(run.metrics)
    evaluations = read_jsonl(run.eval / "eval.jsonl")
    written = []
    if steps:
        size = math.ceil(len(steps) / MOST_POINTS)
        points, axis = _means(steps, size), f"step (means of {size})" if size > 1 else "step"
        for name, plot in (("reward", _reward), ("length", _length), ("time", _time)):
            written.append(_draw(run, name, plot, points, axis))
    if evaluations:
        written.append(_draw(run, "accuracy", _accuracy, evaluations, "step"))
    return written


def _draw(run: RunDirectory, name: str, plot: Callable[[Axes, Rows], None], rows: Rows, axis: str) -> Path:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    path = run.report / f"{name}.png"
    temporary = run.report / f".{name}.tmp.png"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        plot(axes, rows)
        axes.set_xlabel(axis)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        with disk_errors(path):
            run.report.mkdir(exist_ok=True)
            try:
                figure.savefig(temporary, dpi=150)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    return path


def _means(rows: Rows, size: int) -> Rows:
    """The mean of every ``size`` rows, metric by metric, over the values that are there."""
    points = []
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        point = {}
        for name in dict.fromkeys(itertools.chain.from_iterable(chunk)):
            values = [row[name] for row in chunk if row.get(name) is not None]
            point[name] = math.fsum(values) / len(values) if values else None
        points.append(point)
    return points


def _column(rows: Rows, name: str) -> list[float]:
    values = (row.get(name) for row in rows)
    return [math.nan if value is None else float(value) for value in values]


def _reward(axes: Axes, rows: Rows) -> None:
    steps = _column(rows, "step")
    mean, std = _column(rows, "reward"), _column(rows, "reward_std")
    low = [m - s for m, s in zip(mean, std, strict=True)]
    high = [m + s for m, s in zip(mean, std, strict=True)]
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="± std within a group")
    axes.plot(steps, mean, color=BLUE, linewidth=1.8, marker=_marker(rows), markersize=4, label="mean")
    axes.set_title("Training reward")
    axes.set_ylabel("reward")
    axes.legend(loc="best")


def _accuracy(axes: Axes, rows: Rows) -> None:
    accuracy = [100 * value for value in _column(rows, "accuracy")]
    steps = _column(rows, "step")
    axes.plot(steps, accuracy, color=ORANGE, linewidth=1.8, marker=_marker(rows), markersize=5, clip_on=False)
    for step, value in {(steps[0], accuracy[0]), (steps[-1], accuracy[-1])}:
        axes.annotate(f"{value:.1f}%", (step, value), (0, 8), textcoords="offset points", ha="center")
    axes.set_title(f"Held-out accuracy on {rows[-1]['problems']} problems")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(0, 100)


def _length(axes: Axes, rows: Rows) -> None:
    steps = _column(rows, "step")
    low, high = _column(rows, "completions/min_length"), _column(rows, "completions/max_length")
    mean = _column(rows, "completions/mean_length")
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="shortest to longest")
    axes.plot(steps, mean, color=BLUE, linewidth=1.8, marker=_marker(rows), markersize=4, label="mean")
    axes.set_title("Completion length")
    axes.set_ylabel("length (tokens)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def _time(axes: Axes, rows: Rows) -> None:
    """Stacked bars, the longest phase at the bottom; a phase that never ran has no entry."""
    edges = _bar_edges(_column(rows, "step"))
    times = {
        name: [0.0 if math.isnan(value) else value for value in _column(rows, f"time/{name}")] for name in PHASES
    }
    totals = {name: math.fsum(values) for name, values in times.items()}
    base = [0.0] * len(rows)
    for name in sorted(PHASES, key=lambda name: -totals[name]):
        if totals[name] == 0:
            continue
        top = [below + value for below, value in zip(base, times[name], strict=True)]
        share = 100 * totals[name] / math.fsum(totals.values())
        label = f"{name} {share:.0f}%" if share >= 1 else f"{name} <1%"
        axes.stairs(top, edges, baseline=base, fill=True, color=PHASE_COLOURS[name], label=label)
        base = top
    axes.set_title("Step time by phase")
    axes.set_ylabel("time (s)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)


def _bar_edges(steps: Sequence[float]) -> list[float]:
    """Edges of bars that meet half-way between neighbouring steps."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(left + right) / 2 for left, right in itertools.pairwise(steps)]
    return [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]


def _marker(rows: Rows) -> str:
    """Dots while single steps can be told apart; the one step of a short run would be no line at all."""
    return "o" if len(rows) <= 40 else ""

"""What the commands do, once their arguments are read.

Torch and transformers take seconds to import, so a command brings them in only once its configuration holds: a
mistyped key is reported at once.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from metagrpo.trainer.config import dump_config, load_config
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rundir import RunDirectory, disk_errors, read_jsonl, write_text
from metagrpo.trainer.signals import exit_code


def train(recipe: Path, overrides: list[str], *, resume: bool, overwrite: bool, dry_run: bool) -> int:
    """Run a recipe; returns the exit code."""
    config = load_config(recipe, overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("several ranks are not served: start one process, without torchrun")
    path = config.train.output_dir
    RunDirectory.check(path, resume=resume, overwrite=overwrite)

    from metagrpo.trainer.loop import Trainer
    from metagrpo.trainer.setup import load_workload

    workload = load_workload(config)
    if dry_run:
        print(dump_config(config), end="")
        path.mkdir(parents=True, exist_ok=True)
        write_text(RunDirectory(path).config, dump_config(config))
        print(f"# {len(workload.train)} problems ({workload.left_out}); {path / 'config.yaml'} written")
        return 0
    run = RunDirectory(path)
    with ExitStack() as stack:
        # A checkpoint is read under the run's lock. A new directory is made, and an old run deleted, only once
        # nothing is left that could be refused.
        if resume:
            run = stack.enter_context(RunDirectory.create(path, resume=True))
        trainer = stack.enter_context(Trainer(config, workload, run, resume))
        if not resume:
            run = stack.enter_context(RunDirectory.create(path, overwrite=overwrite))
        run.record(config)
        stopped = trainer.train()
        _closing_lines(run)
    return 0 if stopped is None else exit_code(stopped)


def evaluate(source: Path, overrides: list[str], *, step: int | None, output: Path | None) -> None:
    """Evaluate a run's checkpoint or a recipe's model, and print a table."""
    run = RunDirectory(source) if source.is_dir() else None
    config = load_config(run.config if run else source, overrides)
    if config.eval.data is None:
        raise ConfigError("eval.data is not set: there is nothing to evaluate on")
    if run is None and step is not None:
        raise ConfigError("--step needs a run's directory")

    from metagrpo.trainer.adapters import load_adapter
    from metagrpo.trainer.checkpoint import checkpoint_at
    from metagrpo.trainer.evaluation import evaluate as run_evaluation
    from metagrpo.trainer.methods.base import Context
    from metagrpo.trainer.perf import StepTimer
    from metagrpo.trainer.rewards import RewardPool
    from metagrpo.trainer.rollout.native import NativeSampler
    from metagrpo.trainer.setup import load_policy, load_workload

    checkpoint = checkpoint_at(run.checkpoints, step) if run else None
    workload = load_workload(config)
    policy = load_policy(config, weights=None if config.lora.enabled else checkpoint)
    if checkpoint and config.lora.enabled:
        load_adapter(policy.model, checkpoint)
    policy.check()
    with RewardPool(config.reward) as rewards:
        context = Context(
            config=config,
            tokenizer=workload.tokenizer,
            sampler=NativeSampler(policy, config.rollout.max_batch_size),
            rewards=rewards,
            timer=StepTimer(policy.device),
            stop_ids=workload.stop_ids(policy),
            adapter=policy.adapter,
        )
        evaluation = run_evaluation(workload.held_out, context, config.eval)
    summary = {"model": str(checkpoint or config.model.path), **evaluation.summary()}
    if output:
        with disk_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            output, json.dumps({**summary, "completions": evaluation.completions}, indent=2, default=str) + "\n"
        )
    table = Table("measure", "value")
    for name, value in summary.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def export(run_path: Path, output: Path, *, step: int | None, merge: bool) -> None:
    """Write a checkpoint as a model or adapter; ``output`` appears whole or not at all."""
    if output.exists():
        raise ConfigError(f"{output} exists: name another directory")
    run = RunDirectory(run_path)
    if not run.config.exists():
        raise ConfigError(f"{run_path} is no run: it has no config.yaml")
    config = load_config(run.config, [])

    from metagrpo.trainer.adapters import export_model
    from metagrpo.trainer.checkpoint import checkpoint_at

    checkpoint = checkpoint_at(run.checkpoints, step)
    temporary = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_errors(output):
            export_model(config, checkpoint, temporary, merge=merge)
            temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{output}: {'adapter' if config.lora.enabled and not merge else 'model'} of {checkpoint.name}")


def _closing_lines(run: RunDirectory) -> None:
    """What a run came to: accuracy before and after, rate, plots."""
    from metagrpo.trainer.report import write_report

    plots = write_report(run.path)
    evaluations = read_jsonl(run.eval / "eval.jsonl")
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        print(
            f"held-out accuracy {first['accuracy']:.3f} before, {last['accuracy']:.3f} after {last['step']} steps "
            f"({last['problems']} problems)"
        )
    steps = read_jsonl(run.metrics)
    if steps:
        seconds = sum(row["step_time"] - row["time/eval"] - row["time/checkpoint"] for row in steps)
        tokens = sum(row["perf/tok_s"] * row["step_time"] for row in steps)
        print(f"{tokens / seconds:.0f} tokens/s (prompt and completion, end to end) over {len(steps)} steps")
    for plot in plots:
        print(f"plot {plot}")

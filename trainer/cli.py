"""The command line: train, eval, export, show."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from metagrpo.bench.cli import app as bench_app
from metagrpo.trainer.errors import ConfigError, MetagrpoError
from metagrpo.trainer.signals import Interrupted, exit_code

app = typer.Typer(
    name="metagrpo",
    help="Post-train language models to reason: GRPO on fused kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app)

Recipe = Annotated[Path, typer.Argument(help="YAML recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.sub=value, values in YAML.", show_default=False)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that lies there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, check, print and write the config.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model by a recipe."""
    with report_errors(debug):
        from metagrpo.trainer import commands

        raise typer.Exit(commands.train(recipe, overrides or [], resume=resume, overwrite=overwrite, dry_run=dry_run))


@app.command(name="eval")
def evaluate(
    source: Annotated[Path, typer.Argument(help="A run's directory, or a recipe for the model as it is.")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint of the run; the newest by default.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write JSON with every completion here.")] = None,
    debug: Debug = False,
) -> None:
    """Evaluate a run's checkpoint, or a recipe's untrained model, on the recipe's eval.data."""
    with report_errors(debug):
        from metagrpo.trainer import commands

        commands.evaluate(source, overrides or [], step=step, output=output)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    output: Annotated[Path, typer.Argument(help="Directory to make.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint; the newest by default.")] = None,
    merge: Annotated[bool, typer.Option("--merge/--adapter", help="Merged model, or the adapter alone.")] = True,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a model or adapter that transformers and peft load."""
    with report_errors(debug):
        from metagrpo.trainer import commands

        commands.export(run, output, step=step, merge=merge)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    step: Annotated[int | None, typer.Option(help="Show this step's completions.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Most completions, or steps, to show.")] = 20,
    debug: Debug = False,
) -> None:
    """Show a run's metrics, or a step's rollouts."""
    with report_errors(debug):
        from metagrpo.trainer import show as view

        if step is None:
            view.show_metrics(run, count)
        else:
            view.show_rollouts(run, step, count)


@contextlib.contextmanager
def report_errors(debug: bool) -> Iterator[None]:
    """One line and an exit code for an error a person can act on; the rest is a bug and keeps its trace."""
    try:
        yield
    except MetagrpoError as error:
        if debug:
            traceback.print_exc()
        else:
            kind = "config" if isinstance(error, ConfigError) else "run"
            print(f"{kind} error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except Interrupted as interruption:  # before the first step, or at a second signal: there is nothing to save
        raise typer.Exit(exit_code(interruption.number)) from None
    except KeyboardInterrupt:
        raise typer.Exit(exit_code(signal.SIGINT)) from None


def main() -> None:
    """Entry point of ``metagrpo`` and of ``python -m metagrpo.trainer``."""
    # Before the first large allocation and before transformers is imported.
    from metagrpo.trainer.allocator import keep_freed_memory

    keep_freed_memory()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a step's line reaches a pipe at once
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    for category in (FutureWarning, DeprecationWarning):  # of the libraries: nothing a user of ours can act on
        warnings.simplefilter("ignore", category)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    app()

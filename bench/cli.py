"""``metagrpo bench``: measurements, each beside what it is compared with."""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure kernels and sampler.", no_args_is_help=True)


class Dtype(str, Enum):
    """Type of the weights and of the compute."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@app.callback()
def bench() -> None:
    """Measure kernels and sampler."""


@app.command()
def static(
    json: Annotated[Path | None, typer.Option("--json", help="Write the report here as JSON too.")] = None,
) -> None:
    """Compile every Triton kernel for every target, without a GPU; exit code 1 if one spills registers, takes too
    much shared memory or leaves the tensor cores idle."""
    if find_spec("triton") is None:
        typer.echo("triton is not installed", err=True)
        raise typer.Exit(1)
    from metagrpo.bench.static import report, table, to_json

    result = report()
    if json is not None:
        json.write_text(to_json(result) + "\n")
    typer.echo(table(result))
    raise typer.Exit(1 if result.faults else 0)


@app.command()
def sampler(
    model: Annotated[str, typer.Option(help="As model.path of a recipe.")] = "smollm2",
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights and of the compute.")] = Dtype.bfloat16,
    batch: Annotated[int, typer.Option(min=1, help="Prompts.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of every completion.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 5,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result here as JSON too.")] = None,
) -> None:
    """Time the native sampler beside ``model.generate``, by turns."""
    from metagrpo.trainer.cli import report_errors  # which mounts this app

    with report_errors(debug=False):
        from metagrpo.bench.sampler import compare, to_json

        result = compare(model, dtype.value, batch, new_tokens, rounds)
    if json is not None:
        json.write_text(to_json(result) + "\n")
    typer.echo(
        f"{model} {dtype.value}, batch {batch}, {new_tokens} new tokens, {result['threads']} threads: native "
        f"{result['tok_s']['native']:.0f} tok/s, generate {result['tok_s']['generate']:.0f} tok/s, "
        f"ratio {result['ratio']:.2f}"
    )

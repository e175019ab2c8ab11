"""``metagrpo bench``: measurements of the kernels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure the kernels.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure the kernels."""


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

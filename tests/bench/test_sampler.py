"""The sampler's bench runs both contenders on the same work and reports what it timed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from metagrpo.bench.sampler import _generate, _native
from metagrpo.trainer.cli import app
from metagrpo.trainer.config import ModelConfig
from metagrpo.trainer.model import load_tokenizer

PROMPTS = [[5, 6, 7], [5, 6, 8, 9, 10], [11]]


def test_both_contenders_draw_as_many_tokens(tiny_home: Path) -> None:
    config = ModelConfig(path=str(tiny_home / "model"), dtype="float32", device="cpu")
    native = _native(config, PROMPTS, 6)()
    assert [len(completion.token_ids) for completion in native] == [6, 6, 6]
    # Left-padded to the longest prompt, and six more: no row ends early.
    assert _generate(config, load_tokenizer(config), PROMPTS, 6)().shape == (3, 5 + 6)


def test_the_report_holds_the_rounds_behind_its_ratio(tiny_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "sampler.json"
    arguments = ["--model", str(tiny_home / "model"), "--dtype", "float32", "--batch", "3", "--new-tokens", "4"]
    result = CliRunner().invoke(app, ["bench", "sampler", *arguments, "--rounds", "3", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    medians = {name: statistics.median(report["rounds"][name]) for name in ("native", "generate")}
    assert [len(rounds) for rounds in report["rounds"].values()] == [3, 3]
    assert report["tok_s"] == medians
    assert report["ratio"] == medians["native"] / medians["generate"]
    assert f"ratio {report['ratio']:.2f}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"), [(["--model", "./none"], "no model directory"), (["--dtype", "int8"], "int8")]
)
def test_an_error_is_no_stack_trace(arguments: list[str], part: str) -> None:
    result = CliRunner().invoke(app, ["bench", "sampler", *arguments])
    assert result.exit_code == 2
    assert part in result.stderr and "Traceback" not in result.stderr

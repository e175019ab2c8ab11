"""Record a step's samples and train on them again without a sampler."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rundir import read_jsonl, write_jsonl
from metagrpo.trainer.sample import Sample


def record_file(folder: Path, step: int) -> Path:
    """``step_000123.jsonl`` in ``folder``."""
    return folder / f"step_{step:06d}.jsonl"


def save_samples(folder: Path, step: int, samples: list[Sample]) -> None:
    """Write a step's samples, all that training needs of them.

    Raises:
        RunError: the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(record_file(folder, step), map(dataclasses.asdict, samples))


def recorded_file(folder: Path, step: int) -> Path:
    """The file of a step that was recorded.

    Raises:
        ConfigError: it was not.
    """
    path = record_file(folder, step)
    if not path.exists():
        raise ConfigError(f"rollout.replay: {folder} holds no record of step {step}")
    return path


def load_samples(folder: Path, step: int) -> list[Sample]:
    """The samples that :func:`save_samples` wrote; a reward or log-prob that was NaN comes back as NaN.

    Raises:
        ConfigError: the step was not recorded.
    """
    return [
        Sample(**{**row, "reward": _number(row["reward"]), "logprobs": [_number(value) for value in row["logprobs"]]})
        for row in read_jsonl(recorded_file(folder, step))
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no NaN

"""Rows of problems from a generator, a file or the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from metagrpo.trainer.config import DataSource
from metagrpo.trainer.data.holdout import problem_text
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rollout.protocol import request_seed

Row = dict[str, Any]

_GENERATOR = "reasoning_gym:"
_DEFAULT_SIZE = 1000
# Problems drawn under one seed of the generator. Some tasks prepare `size` problems at once, and item i of
# reasoning-gym depends on seed + i, so the seeds of two rounds must lie far apart.
_ROUND = 1000


def load_rows(source: DataSource) -> list[Row]:
    """All problems of a source, or its first ``size`` distinct ones.

    Every row has the same columns. ``prompt`` is the problem, a string or a list of messages with ``role`` and
    ``content``; ``answer`` is the reference, where the source has one; the other columns keep their names. A row
    of reasoning-gym has besides ``task``, its name, and ``metadata``, a JSON string. The generator's own seed is a
    hash of task and ``source.seed``: reasoning-gym's item i depends on seed + i, so two neighbouring seeds would
    give nearly the same problems.

    Raises:
        ConfigError: nothing can be read (missing file, invalid line, unknown task, option or data set, no
            network), a column is missing, a prompt is empty or of the wrong type, there are no rows, or fewer
            distinct problems than ``size``.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    for number, raw in enumerate(_read(source), start=1):
        row = _rename(raw, source, number)
        if source.size is not None:
            text = problem_text(row["prompt"])
            if text in seen:
                continue
            seen.add(text)
        rows.append(row)
        if len(rows) == source.size:
            break
    if not rows:
        raise ConfigError(f"{source.source} holds no problems")
    if source.size is not None and len(rows) < source.size:
        raise ConfigError(
            f"{source.source} holds {len(rows)} distinct problems, fewer than the {source.size} that size asks for"
        )
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if source.answer_column != "answer" and "answer" not in columns:
        raise ConfigError(_missing_column(source, source.answer_column, columns, "answer_column"))
    return [{column: row.get(column) for column in columns} for row in rows]


def _read(source: DataSource) -> Iterable[Row]:
    if source.source.startswith(_GENERATOR):
        return _generate(source, source.source.removeprefix(_GENERATOR))
    if source.source.endswith((".jsonl", ".parquet")):
        if source.options:
            raise ConfigError(f"a file takes no options, {source.source} has {', '.join(source.options)}")
        path = Path(source.source).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {source.source}")
        return _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    return _load_hub(source)


def _generate(source: DataSource, task: str) -> Iterator[Row]:
    """Distinct problems, at most ``size``; fewer where the task repeats itself for long enough."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task!r}{_did_you_mean(task, DATASETS)}")
    options = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    for option in source.options:
        if option in ("seed", "size"):
            raise ConfigError(f"{option} is a key beside options, not one of them")
        if option not in options:
            raise ConfigError(
                f"the reasoning-gym task {task} has no option {option!r}{_did_you_mean(option, options)}"
            )
    wanted = source.size or _DEFAULT_SIZE
    seen: set[str] = set()
    repeats = 0
    for number in itertools.count():
        seed = request_seed(_GENERATOR, task, source.seed, number) >> 32
        try:
            problems = reasoning_gym.create_dataset(task, seed=seed, size=_ROUND, **source.options)
        except Exception as error:  # a task checks its options with asserts and whatever else fails on them
            raise ConfigError(f"the reasoning-gym task {task} rejects its options: {_one_line(error)}") from error
        for entry in (problems[index] for index in range(_ROUND)):
            if entry["question"] in seen:
                repeats += 1
                # With one of n equally likely problems still to come, 10 n draws miss it with probability e⁻¹⁰.
                if repeats >= max(_ROUND, 10 * len(seen)):
                    return
                continue
            repeats = 0
            seen.add(entry["question"])
            metadata = json.dumps(entry["metadata"], default=str)
            yield {"prompt": entry["question"], "answer": entry["answer"], "task": task, "metadata": metadata}
            if len(seen) == wanted:
                return


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{path}, line {number} is not valid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}, line {number} is no JSON object")
                yield row
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path}: {_one_line(error)}") from error


def _load_hub(source: DataSource) -> Iterable[Row]:
    import datasets
    from datasets.exceptions import DatasetsError

    for option in source.options:
        if option != "name":
            raise ConfigError(f"a Hugging Face data set has no option {option!r}, only name (its configuration)")
    try:
        return datasets.load_dataset(source.source, name=source.options.get("name"), split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # what datasets raises for a wrong name
        raise ConfigError(f"cannot load the data set {source.source}: {_one_line(error)}") from error


def _rename(raw: Row, source: DataSource, number: int) -> Row:
    """The row under our column names, its prompt checked."""
    if source.prompt_column not in raw:
        raise ConfigError(_missing_column(source, source.prompt_column, raw, "prompt_column"))
    row = {"prompt": raw[source.prompt_column]}
    if source.answer_column in raw:
        row["answer"] = raw[source.answer_column]
    taken = {"prompt", "answer", source.prompt_column, source.answer_column}
    row.update((column, value) for column, value in raw.items() if column not in taken)
    where = f"{source.source}, row {number}: the prompt"
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where} is empty")
    elif not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        raise ConfigError(f"{where} is neither a string nor a list of messages with role and content")
    return row


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _missing_column(source: DataSource, name: str, columns: Iterable[str], key: str) -> str:
    return f"{source.source} has no column {name!r}; set {key} to one of: {', '.join(columns)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f", did you mean {nearest[0]}?" if nearest else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

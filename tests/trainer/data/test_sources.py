"""Rows from generators, files and data sets, and the errors a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from metagrpo.trainer.config import DataSource
from metagrpo.trainer.data.sources import load_rows
from metagrpo.trainer.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1", "answer": "2", "level": 1},
    {"prompt": "2 + 2", "answer": "4", "level": 2},
    {"prompt": "1 + 1", "answer": "2", "level": 1},
]
ONE_DIGIT = {"min_digits": 1, "max_digits": 1}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(params=["jsonl", "parquet", "directory"])
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``ROWS`` in each kind of store; a directory is read by ``datasets.load_dataset``, as a hub id is."""
    if request.param == "jsonl":
        return jsonl(tmp_path / "rows.jsonl", ROWS)
    if request.param == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
        return str(tmp_path / "rows.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    jsonl(tmp_path / "rows" / "train.jsonl", ROWS)
    return str(tmp_path / "rows")


def refused(**fields: Any) -> str:
    """The message of the error, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        load_rows(DataSource(**fields))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_row_without_a_size(stored: str) -> None:
    assert load_rows(DataSource(source=stored)) == ROWS


def test_size_takes_the_first_distinct_problems(stored: str) -> None:
    assert load_rows(DataSource(source=stored, size=2)) == ROWS[:2]
    assert "holds 2 distinct problems, fewer than the 3" in refused(source=stored, size=3)


def test_a_missing_column_lists_the_columns(stored: str) -> None:
    assert "no column 'question'; set prompt_column to one of: prompt, answer, level" in refused(
        source=stored, prompt_column="question"
    )
    assert "no column 'gold'; set answer_column" in refused(source=stored, answer_column="gold")


def test_columns_are_renamed_and_the_others_kept(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "é?", "gold": 3, "prompt": "old", "id": 7}])
    source = DataSource(source=path, prompt_column="question", answer_column="gold")
    assert load_rows(source) == [{"prompt": "é?", "answer": 3, "id": 7}]


def test_rows_with_different_columns_get_the_same_ones(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "answer": "2"}])
    assert load_rows(DataSource(source=path)) == [
        {"prompt": "a", "x": 1, "answer": None},
        {"prompt": "b", "x": None, "answer": "2"},
    ]


def test_an_answer_is_optional(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "Write a poem."}])
    assert load_rows(DataSource(source=path)) == [{"prompt": "Write a poem."}]


def test_chat_messages_are_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": chat}, {"prompt": "Hi"}, {"prompt": "Bye"}])
    rows = load_rows(DataSource(source=path, size=2))
    assert [row["prompt"] for row in rows] == [chat, "Bye"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not valid JSON"),
        ('{"prompt": "a"}\n["b"]\n', "line 2 is no JSON object"),
        ("\n", "holds no problems"),
        ('{"prompt": " "}\n', "row 1: the prompt is empty"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "row 2: the prompt is neither a string nor a list of messages"),
        ('{"prompt": []}\n', "row 1: the prompt is neither"),
        ('{"prompt": [{"role": "user"}]}\n', "row 1: the prompt is neither"),
    ],
)
def test_bad_jsonl_says_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text, encoding="utf-8")
    assert message in refused(source=str(tmp_path / "bad.jsonl"))


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    assert "is not UTF-8" in refused(source=str(tmp_path / "latin.jsonl"))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    assert "cannot read" in refused(source=str(tmp_path / "bad.parquet"))
    assert "there is no file" in refused(source=str(tmp_path / "missing.jsonl"))
    assert "a file takes no options" in refused(source="x.jsonl", options={"name": "main"})


def test_a_data_set_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "cannot load the data set nobody/nothing" in refused(source="nobody/nothing")
    assert "no option 'nam', only name" in refused(source="nobody/nothing", options={"nam": "main"})


def test_a_data_set_without_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    jsonl(tmp_path / "rows" / "train.jsonl", ROWS)
    assert "tset" in refused(source=str(tmp_path / "rows"), split="tset")


def test_generated_problems_are_distinct_and_right() -> None:
    rows = load_rows(DataSource(source="reasoning_gym:chain_sum", options={"max_terms": 3}, size=300))
    assert len({row["prompt"] for row in rows}) == 300
    for row in rows:
        assert set(row) == {"prompt", "answer", "task", "metadata"}
        assert row["task"] == "chain_sum"
        expression = json.loads(row["metadata"])["expression"]
        assert expression in row["prompt"]
        assert int(row["answer"]) == eval(expression)


def test_a_generator_that_repeats_itself_is_drawn_until_all_is_found() -> None:
    """There are 100 products of two digits."""
    source = {"source": "reasoning_gym:products", "options": ONE_DIGIT}
    rows = load_rows(DataSource(**source, size=100))
    factors = [json.loads(row["metadata"])["expression"] for row in rows]
    assert sorted(factors) == sorted(f"{a} * {b}" for a in range(10) for b in range(10))
    assert "holds 100 distinct problems, fewer than the 101" in refused(**source, size=101)
    assert len(load_rows(DataSource(**source))) == 100


def test_the_seed_decides_and_neighbours_share_nothing() -> None:
    def draw(seed: int, size: int = 200) -> list[str]:
        options = {"min_digits": 5, "max_digits": 5}
        rows = load_rows(DataSource(source="reasoning_gym:products", options=options, size=size, seed=seed))
        return [row["prompt"] for row in rows]

    assert draw(7) == draw(7)
    assert draw(7, size=20) == draw(7)[:20]
    # 8.1e9 ordered pairs: a chance meeting within 3 × 200 draws has probability 1.5e-5.
    assert not set(draw(7)) & set(draw(8))
    assert not set(draw(-1)) & set(draw(8))


@pytest.mark.parametrize("task", ["acre", "list_functions", "gsm_symbolic"])
def test_tasks_that_prepare_all_their_problems_at_once(task: str) -> None:
    rows = load_rows(DataSource(source=f"reasoning_gym:{task}", size=5))
    assert len({row["prompt"] for row in rows}) == 5


def test_a_generator_gives_a_thousand_by_default() -> None:
    assert len(load_rows(DataSource(source="reasoning_gym:chain_sum"))) == 1000


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "has no task 'chain_sums', did you mean chain_sum?"),
        ("chain_sum", {"min_term": 2}, "has no option 'min_term', did you mean min_terms?"),
        ("chain_sum", {"seed": 2}, "seed is a key beside options"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "rejects its options: "),
        ("chain_sum", {"min_terms": "two"}, "rejects its options: "),
    ],
)
def test_bad_generators(task: str, options: dict[str, Any], message: str) -> None:
    assert message in refused(source=f"reasoning_gym:{task}", options=options)

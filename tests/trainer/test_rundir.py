"""The run directory: who may write, and writes that are whole or absent."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.trainer.config import parse_config
from metagrpo.trainer.errors import ConfigError, RunError
from metagrpo.trainer.rundir import (
    RunDirectory,
    append_jsonl,
    disk_errors,
    environment,
    read_jsonl,
    rewind_jsonl,
    write_jsonl,
    write_text,
)

CONFIG = parse_config({"model": {"path": "some/model"}, "data": {"source": "rows.jsonl"}})


def test_a_new_run_has_its_folders_and_records_what_it_depends_on(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "deep" / "run") as run:
        run.record(CONFIG)
        assert all((run.path / name).is_dir() for name in ("rollouts", "checkpoints", "logs", "eval", "report"))
        assert yaml.safe_load(run.config.read_text())["model"]["path"] == "some/model"
        recorded = json.loads(run.env.read_text())
        assert recorded["python"] == ".".join(map(str, sys.version_info[:3]))
        assert set(recorded["packages"]) >= {"metagrpo", "torch", "transformers", "peft"}
        assert run.rollout_file(123) == run.path / "rollouts" / "step_000123.jsonl"


def test_environment_leaves_secrets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    recorded = environment()
    assert recorded["env"]["OMP_NUM_THREADS"] == "3"
    assert "hf_secret" not in json.dumps(recorded["env"])


def test_git_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["git"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], check=True, cwd=tmp_path)
    recorded = environment()["git"]
    assert len(recorded["commit"]) == 40 and recorded["modified"] is False
    (tmp_path / "file").write_text("two")
    assert environment()["git"]["modified"] is True


def test_an_existing_run_needs_a_flag(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as run:
        run.record(CONFIG)
        append_jsonl(run.metrics, {"step": 0})
    with pytest.raises(ConfigError, match="--resume or --overwrite"):
        RunDirectory.create(tmp_path)
    with pytest.raises(ConfigError, match="exclude"):
        RunDirectory.create(tmp_path, resume=True, overwrite=True)
    with RunDirectory.create(tmp_path, resume=True) as run:
        assert read_jsonl(run.metrics) == [{"step": 0}]


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as run:
        (run.checkpoints / "step_000001").mkdir()
        append_jsonl(run.metrics, {"step": 0})
    (tmp_path / "notes.txt").write_text("mine")
    with RunDirectory.create(tmp_path, overwrite=True) as run:
        assert not run.metrics.exists()
        assert list(run.checkpoints.iterdir()) == []
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}])
def test_somebody_elses_directory_is_left_alone(tmp_path: Path, flags: dict[str, bool]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.txt").write_text("mine")
    for _ in range(2):  # the refusal must not make it look like a run
        with pytest.raises(ConfigError, match=r"not a run|no run to resume"):
            RunDirectory.create(tmp_path, **flags)
    assert [path.name for path in tmp_path.rglob("*")] == ["logs", "mine.txt"]


def test_resume_needs_a_run_and_a_dry_runs_config_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDirectory.create(tmp_path, resume=True)
    RunDirectory.create(tmp_path).close()


def test_a_file_in_the_way_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        RunDirectory.create(tmp_path / "run")


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from metagrpo.trainer.rundir import RunDirectory\n"
        "run = RunDirectory.create(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError, match=f"in use by process {holder.pid}$"):
                RunDirectory.create(tmp_path, **flags)
    finally:
        holder.kill()
        holder.wait()
    RunDirectory.create(tmp_path, resume=True).close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from metagrpo.trainer.rundir import RunDirectory\n"
        "run = RunDirectory.create(Path(sys.argv[1]))\n"
        "if os.fork(): os._exit(0)\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert parent.wait() == 0
        RunDirectory.create(tmp_path, resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_write_text_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    write_text(path, "größer")
    assert path.read_bytes() == "größer".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(st.characters(), min_size=1), json_values, max_size=4), max_size=4))
def test_jsonl_round_trip_whatever_the_text(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_jsonl(path, rows)
    assert read_jsonl(path) == rows
    path.unlink()
    for row in rows:
        append_jsonl(path, row)
    assert read_jsonl(path) == rows


def test_a_lone_surrogate_survives(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a\ud800b"}])
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"text": "a\ud800b"}]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    row = {"a": float("nan"), "b": [1.5, float("-inf")], "c": {"d": (float("inf"), 2)}}
    append_jsonl(tmp_path / "rows.jsonl", row)
    assert (tmp_path / "rows.jsonl").read_text() == '{"a": null, "b": [1.5, null], "c": {"d": [null, 2]}}\n'


@settings(max_examples=50, deadline=None)
@given(steps=st.integers(0, 6), resumed=st.integers(0, 8), torn=st.integers(0, 40))
def test_rewind_keeps_the_steps_before_and_no_torn_line(
    tmp_path_factory: pytest.TempPathFactory, steps: int, resumed: int, torn: int
) -> None:
    path = tmp_path_factory.mktemp("rewind") / "metrics.jsonl"
    for step in range(steps):
        append_jsonl(path, {"step": step, "loss": step / 3})
    last = json.dumps({"step": steps, "loss": steps / 3, "more": "x" * 9}).encode()
    with open(path, "ab") as file:
        file.write(last[:torn])
    assert read_jsonl(path) == [{"step": step, "loss": step / 3} for step in range(steps)]
    rewind_jsonl(path, resumed)
    kept = [{"step": step, "loss": step / 3} for step in range(min(steps, resumed))]
    append_jsonl(path, {"step": resumed})
    assert read_jsonl(path) == [*kept, {"step": resumed}]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        read_jsonl(tmp_path / "rows.jsonl")


def test_only_errors_of_the_disk_are_translated(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path):
        (tmp_path / "absent").read_text()


@pytest.mark.parametrize("text", ["No space left on device (os error 28)", "Os { code: 28, kind: StorageFull }"])
def test_a_full_disk_under_a_rust_library_is_understood(tmp_path: Path, text: str) -> None:
    with pytest.raises(RunError, match=r"No space left on device$"), disk_errors(tmp_path):
        raise Exception(f"Error while serializing: {text}")


def run_with_file_limit(limit: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process whose files cannot grow beyond ``limit`` bytes: a real refusal of the disk."""

    def set_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", code, *arguments], preexec_fn=set_limit, capture_output=True, text=True
    )


@pytest.mark.fault
def test_a_full_disk_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    code = (
        "import sys; from pathlib import Path; from metagrpo.trainer.errors import RunError\n"
        "from metagrpo.trainer.rundir import write_text\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 100_000)\n"
        "except RunError as error: print(error)"
    )
    result = run_with_file_limit(50_000, code, str(path))
    assert result.stdout == f"cannot write {path}: File too large\n", result.stderr
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.fault
def test_a_full_disk_never_tears_the_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path; from metagrpo.trainer.errors import RunError\n"
        "from metagrpo.trainer.rundir import append_jsonl\n"
        "try:\n"
        "    for step in range(100): append_jsonl(Path(sys.argv[1]), {'step': step, 'text': 'x' * 100})\n"
        "except RunError as error: print(error)"
    )
    result = run_with_file_limit(1000, code, str(path))
    assert result.stdout == f"cannot write {path}: File too large\n", result.stderr
    line = len(json.dumps({"step": 0, "text": "x" * 100})) + 1
    assert [row["step"] for row in read_jsonl(path)] == list(range(1000 // line))
    assert path.read_bytes().endswith(b"\n")

"""Trackers: found by name, refused with a remedy. Each is stood in for by a module that records its calls."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metagrpo.trainer.config import LogConfig
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.trackers import TRACKERS, open_trackers

STAND_IN = """
calls = []

class Run:
    def __init__(self, id):
        self.id = id or "new"

    def log(self, metrics, step):
        calls.append(["log", metrics, step])

    def finish(self):
        calls.append(["finish"])

def init(**options):
    calls.append(["init", options])
    return Run(options.get("id"))
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path for stand-ins."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    kept = {name: sys.modules.pop(name) for name in TRACKERS if name in sys.modules}
    yield folder
    for name in TRACKERS:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_the_names_of_the_config_are_the_trackers() -> None:
    field = LogConfig.model_json_schema()["properties"]["backends"]
    assert set(field["items"]["enum"]) == TRACKERS.keys()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_run_and_its_steps(name: str, modules: Path, tmp_path: Path) -> None:
    (modules / f"{name}.py").write_text(STAND_IN)
    (tracker,) = open_trackers([name], project="p", run="r", config={"a": 1}, logs=tmp_path)
    tracker.log(3, {"loss": 0.5})
    tracker.close()
    calls = sys.modules[name].calls
    assert calls[1:] == [["log", {"loss": 0.5}, 3], ["finish"]]
    assert {"project": "p", "name": "r", "config": {"a": 1}}.items() <= calls[0][1].items()


def test_a_resumed_run_goes_on_and_a_new_one_does_not(modules: Path, tmp_path: Path) -> None:
    for name in ("wandb", "trackio"):
        (modules / f"{name}.py").write_text(STAND_IN)
    for first_step in (0, 5, 0):
        names = ["wandb", "trackio"]
        open_trackers(names, project="p", run="r", config={}, logs=tmp_path, first_step=first_step)
    assert [call[1]["id"] for call in sys.modules["wandb"].calls] == [None, "new", None]
    assert [call[1]["resume"] for call in sys.modules["trackio"].calls] == ["never", "allow", "never"]


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(["tensorboard"], project="p", run="r", config={}, logs=tmp_path)
    tracker.log(3, {"loss": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_missing_tracker_names_its_remedy_before_another_starts(
    name: str, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "wandb" if name != "wandb" else "trackio"
    (modules / f"{other}.py").write_text("raise AssertionError('started')")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else find_spec(asked))
    with pytest.raises(ConfigError, match=f"asks for {name}, which is not installed: pip install {name}$"):
        open_trackers([other, name], project="p", run="r", config={}, logs=tmp_path)


def test_nothing_is_imported_unasked() -> None:
    code = (
        "import json, sys; import metagrpo.trainer.metrics, metagrpo.trainer.report\n"
        "print(json.dumps([name for name in sys.argv[1:] if name in sys.modules]))"
    )
    names = [*TRACKERS, "matplotlib"]
    result = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []

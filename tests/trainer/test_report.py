"""The plots: written whole, for runs of any length, with their axes named and the numbers of the log in them."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from metagrpo.trainer.errors import RunError
from metagrpo.trainer.perf import PHASES
from metagrpo.trainer.report import MOST_POINTS, write_report
from metagrpo.trainer.rundir import write_jsonl


def row(step: int, **more: Any) -> dict[str, Any]:
    times = dict.fromkeys((f"time/{phase}" for phase in PHASES), 0.0)
    times |= {"time/rollout": 3.0 + step, "time/train": 1.0}
    return {
        "step": step,
        "reward": step / 10,
        "reward_std": 0.2,
        "completions/mean_length": 20.0 + step,
        "completions/min_length": 10,
        "completions/max_length": 40 + step,
        "step_time": math.fsum(times.values()),
        **times,
        **more,
    }


def make_run(path: Path, rows: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Path:
    (path / "eval").mkdir()
    write_jsonl(path / "metrics.jsonl", rows)
    write_jsonl(path / "eval" / "eval.jsonl", evaluations)
    return path


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every figure that is saved, by file name."""
    saved: dict[str, Any] = {}
    savefig = Figure.savefig

    def keep(self: Figure, path: Path, **options: Any) -> None:
        saved[Path(path).name.split(".")[1]] = self
        savefig(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def test_four_plots_with_named_axes_and_units(tmp_path: Path, figures: dict[str, Any]) -> None:
    run = make_run(
        tmp_path,
        [row(step) for step in range(5)],
        [{"step": step, "accuracy": 0.1 * step + 0.2, "mean_length": 20, "problems": 100} for step in (0, 5)],
    )
    paths = write_report(run)
    assert {path.name for path in paths} == {"reward.png", "length.png", "time.png", "accuracy.png"}
    assert sorted(path.name for path in (run / "report").iterdir()) == sorted(path.name for path in paths)
    assert all(size_of_png(path) == (1080, 600) for path in paths)
    labels = {name: (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) for name, figure in figures.items()}
    assert labels == {
        "reward": ("step", "reward"),
        "length": ("step", "length (tokens)"),
        "time": ("step", "time (s)"),
        "accuracy": ("step", "accuracy (%)"),
    }
    assert all(figure.axes[0].get_title(loc="left") for figure in figures.values())


def test_the_numbers_of_the_log_are_drawn(tmp_path: Path, figures: dict[str, Any]) -> None:
    run = make_run(
        tmp_path,
        [row(0), row(1, reward=None), row(2)],
        [{"step": 0, "accuracy": 0.2, "mean_length": 20, "problems": 120}],
    )
    write_report(run)
    (line,) = figures["reward"].axes[0].lines
    assert line.get_xdata().tolist() == [0, 1, 2]
    assert line.get_ydata()[[0, 2]].tolist() == [0.0, 0.2] and math.isnan(line.get_ydata()[1])
    (line,) = figures["accuracy"].axes[0].lines
    assert line.get_ydata().tolist() == [20.0]
    assert "120 problems" in figures["accuracy"].axes[0].get_title(loc="left")
    rollout, train = (patch.get_data() for patch in figures["time"].axes[0].patches)
    assert rollout.values.tolist() == [3.0, 4.0, 5.0] and list(rollout.baseline) == [0.0, 0.0, 0.0]
    assert train.values.tolist() == [4.0, 5.0, 6.0] and list(train.baseline) == [3.0, 4.0, 5.0]
    assert rollout.edges.tolist() == [-0.5, 0.5, 1.5, 2.5]


def test_a_long_run_is_averaged_and_says_so(tmp_path: Path, figures: dict[str, Any]) -> None:
    write_report(make_run(tmp_path, [row(step) for step in range(2 * MOST_POINTS)], []))
    (line,) = figures["reward"].axes[0].lines
    assert line.get_xdata().tolist() == [2 * point + 0.5 for point in range(MOST_POINTS)]
    assert line.get_ydata().tolist() == pytest.approx([0.2 * point + 0.05 for point in range(MOST_POINTS)])
    assert figures["reward"].axes[0].get_xlabel() == "step (means of 2)"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path: Path, steps: int) -> None:
    paths = write_report(make_run(tmp_path, [row(step) for step in range(steps)], []))
    assert len(paths) == 3 * steps


def test_a_run_with_an_evaluation_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [{"step": 0, "accuracy": 0.2, "mean_length": 20, "problems": 120}])
    assert [path.name for path in write_report(run)] == ["accuracy.png"]


def test_no_run_at_all(tmp_path: Path) -> None:
    assert write_report(tmp_path / "absent") == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Figure, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    run = make_run(tmp_path, [row(0)], [])
    with pytest.raises(RunError, match=r"reward\.png: No space left on device"):
        write_report(run)
    assert list((run / "report").iterdir()) == []

"""Trackers by name: Weights & Biases, TensorBoard, trackio. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rundir import write_text


class Tracker(Protocol):
    """Takes a copy of every line of ``metrics.jsonl``."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class WandbTracker:
    """A run of Weights & Biases, its local files in the run's ``logs``; a resumed run goes on under its old id."""

    def __init__(self, project: str, run: str, config: dict[str, Any], logs: Path, first_step: int) -> None:
        import wandb

        id_file = logs / "wandb_run_id"
        old_id = id_file.read_text() if first_step > 0 and id_file.exists() else None
        self._run = wandb.init(project=project, name=run, config=config, dir=str(logs), id=old_id, resume="allow")
        write_text(id_file, self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Event files in the run's ``logs/tensorboard``; steps that are run again replace what was there."""

    def __init__(self, project: str, run: str, config: dict[str, Any], logs: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(logs / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class TrackioTracker:
    """A run of trackio, which keeps its data on this machine; a resumed run goes on under its name."""

    def __init__(self, project: str, run: str, config: dict[str, Any], logs: Path, first_step: int) -> None:
        import trackio

        resume = "allow" if first_step > 0 else "never"
        self._run = trackio.init(project=project, name=run, config=config, resume=resume)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[WandbTracker] | type[TensorBoardTracker] | type[TrackioTracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
}


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker that is missing before anything slow is done; nothing is imported.

    Raises:
        ConfigError: the line holds the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.backends asks for {name}, which is not installed: pip install {name}")


def open_trackers(
    names: Sequence[str], *, project: str, run: str, config: dict[str, Any], logs: Path, first_step: int = 0
) -> list[Tracker]:
    """Start the trackers of ``log.backends``.

    Args:
        names: keys of ``TRACKERS``.
        project: the tracker's project.
        run: the run's name there.
        config: the resolved configuration.
        logs: the run's ``logs`` folder.
        first_step: the first step that will be logged, above 0 after a resume.

    Raises:
        ConfigError: a tracker is not installed; the line holds the command that installs it.
    """
    check_installed(names)
    return [TRACKERS[name](project, run, config, logs, first_step) for name in names]

"""Fixtures that several folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, data and rewards, for reading only: see ``tests/trainer/tiny_run.py``."""
    from .trainer.tiny_run import make_tiny_home

    return make_tiny_home(tmp_path_factory.mktemp("home"))

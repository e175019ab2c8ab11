"""``rollout.save`` and ``rollout.replay``: record once, train on it again without a sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from metagrpo.trainer import commands
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.rewards import RewardPool
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rundir import read_jsonl

from .tiny_run import load_tensors, write_recipe

CASES: dict[str, dict[str, Any]] = {
    "lora": {"train__num_iterations": 2, "train__minibatches": 2, "lora__lora_dropout": 0.2},
    "full": {"lora__enabled": False, "loss__mask_truncated_completions": True},
}


def train(recipe: Path) -> None:
    assert commands.train(recipe, [], resume=False, overwrite=False, dry_run=False) == 0


def forbidden(*_: Any, **__: Any) -> None:
    pytest.fail("a replay samples or grades")


@pytest.mark.parametrize("case", CASES)
def test_a_replay_trains_the_same_weights(
    case: str, tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record"
    common = {"train__steps": 3, **CASES[case]}
    train(write_recipe(tmp_path / "a.yaml", tiny_home, tmp_path / "recorded", rollout__save=str(record), **common))
    assert sorted(path.name for path in record.iterdir()) == [f"step_{step:06d}.jsonl" for step in (1, 2, 3)]
    monkeypatch.setattr(NativeSampler, "generate", forbidden)
    monkeypatch.setattr(RewardPool, "score", forbidden)
    train(write_recipe(tmp_path / "b.yaml", tiny_home, tmp_path / "replayed", rollout__replay=str(record), **common))
    one, other = (load_tensors(tmp_path / name / "checkpoints" / "step_000003") for name in ("recorded", "replayed"))
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
    # The metrics of samples and update too; what only a sampler or grader knows is left out, and no rate is made up.
    rows = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("recorded", "replayed")]
    absent = {"reward/timeout_frac", "reward/error_frac", "reward/none_frac", "perf/rollout_tok_s"}
    for recorded, replayed in zip(*rows, strict=True):
        assert recorded.keys() - replayed.keys() == absent
        for name in replayed:
            if not name.startswith(("time/", "perf/", "step_time")):
                assert replayed[name] == recorded[name], name
        assert replayed["time/rollout"] == replayed["time/reward"] == 0


def test_a_record_that_ends_before_the_run_is_refused_at_the_start(tiny_home: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    train(write_recipe(tmp_path / "a.yaml", tiny_home, tmp_path / "recorded", rollout__save=str(record)))
    recipe = write_recipe(
        tmp_path / "b.yaml", tiny_home, tmp_path / "replayed", rollout__replay=str(record), train__steps=3
    )
    with pytest.raises(ConfigError, match=r"rollout\.replay: .* holds no record of step 3"):
        train(recipe)
    assert not (tmp_path / "replayed").exists()

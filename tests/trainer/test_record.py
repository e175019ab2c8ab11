"""What is recorded comes back as it was, and trains the same."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.optimizer import Optimizer
from metagrpo.trainer.perf import StepTimer
from metagrpo.trainer.rollout.record import load_samples, record_file, save_samples
from metagrpo.trainer.sample import Sample
from metagrpo.trainer.update import Updater

from .tiny import branch_samples, group_samples, plain_model, set_rollout_logprobs, tiny_config, tiny_policy


def fields(sample: Sample) -> dict[str, object]:
    """All fields; NaN, which equals nothing, by name."""

    def named(value: object) -> object:
        if isinstance(value, list):
            return [named(item) for item in value]
        return "NaN" if isinstance(value, float) and math.isnan(value) else value

    return {name: named(value) for name, value in dataclasses.asdict(sample).items()}


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    samples = [
        Sample(
            id="12/0/1",
            token_ids=[1, 2, 3, 150_000],
            trained=[False, False, True, True],
            logprobs=[-0.1 - 0.2, -1e-30],
            group=3,
            advantage=1 / 3,
            adapter="default",
            rewards={"maths": 0.1, "broken": None},
            reward=0.1,
            finish_reason="length",
            prompt_length=2,
            info={"prompt": [{"role": "user", "content": "ü\n1"}], "answer": None, "level": 2},
        ),
        Sample("b", [1, 2], [False, False], [], 0),
        Sample("c", [1, 2, 3], [False, True, True], [math.nan, -1.0], 0, advantage=[0.25, -0.5]),
    ]
    expected = [fields(sample) for sample in samples]
    save_samples(tmp_path / "new" / "folder", 12, samples)
    assert [fields(sample) for sample in load_samples(tmp_path / "new" / "folder", 12)] == expected


def test_a_record_trains_as_the_samples_do(tmp_path: Path) -> None:
    samples = [*group_samples(), *branch_samples()]
    set_rollout_logprobs(samples, plain_model("llama"))
    save_samples(tmp_path, 1, samples)
    weights = []
    for given in (samples, load_samples(tmp_path, 1)):
        policy, config = tiny_policy("llama"), tiny_config(train={"num_iterations": 2})
        Updater(policy, Optimizer(policy.trainable(), config.train, 20), config).update(
            given, 1, StepTimer(policy.device)
        )
        weights.append(policy.trainable())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_each_step_has_its_file(tmp_path: Path) -> None:
    assert record_file(tmp_path, 123) == tmp_path / "step_000123.jsonl"
    for step in (1, 2):
        save_samples(tmp_path, step, [Sample(f"{step}", [1, 2], [False, True], [-1.0], 0)])
    assert [load_samples(tmp_path, step)[0].id for step in (1, 2)] == ["1", "2"]


def test_a_step_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.replay: .* step 3"):
        load_samples(tmp_path, 3)

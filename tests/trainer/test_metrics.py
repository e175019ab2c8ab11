"""The table of metrics, the log, and the line of a step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.kernels import policy_loss
from metagrpo.kernels.loss_metrics import COUNTS, mean_metrics
from metagrpo.kernels.loss_types import loss_names
from metagrpo.trainer.metrics import METRICS, MetricsLog, metric_spec, metrics_markdown, step_line
from metagrpo.trainer.perf import PHASES, perf_metrics
from metagrpo.trainer.rundir import RunDirectory, read_jsonl

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class Recorder:
    """A tracker that keeps what it is sent."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_the_docs_are_the_table() -> None:
    assert DOCS.read_text() == metrics_markdown(), (
        'write docs/metrics.md again: python -c "from metagrpo.trainer.metrics import metrics_markdown; '
        "print(metrics_markdown(), end='')\" > docs/metrics.md"
    )


def test_every_row_of_the_docs_has_five_cells_and_no_metric_is_missing() -> None:
    rows = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(METRICS)
    for row in rows:
        cells = row.replace("\\|", "").strip("|").split("|")
        assert len(cells) == 5 and all(cell.strip() for cell in cells), row


def test_the_names_of_the_specification_are_defined() -> None:
    names = """
        reward reward_std rewards/math/mean rewards/math/std frac_reward_zero_std
        completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
        kl entropy clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean
        sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/max
        sampling/masked_mean sampling/masked_sequences_mean sampling/dropped_mean data/overlong
        grad_norm learning_rate num_tokens step_time mismatch_kl
        perf/tok_s perf/train_tok_s perf/rollout_tok_s perf/forwarded_tok_s perf/pad_frac
        perf/prefix_saved_frac perf/peak_mem_gb perf/mfu
        reward/timeout_frac reward/error_frac reward/none_frac
    """
    for name in names.split():
        assert metric_spec(name).formula
    with pytest.raises(KeyError):
        metric_spec("reward/made_up")


@pytest.mark.parametrize("loss_type", loss_names())
def test_what_a_loss_type_reports_is_defined(loss_type: str) -> None:
    values = torch.tensor([-1.0, -2.0, -0.5])
    _, sums = policy_loss(
        values.clone().requires_grad_(),
        torch.tensor([1.0, -1.0, 0.5]),
        sequence_ids=torch.tensor([0, 0, 1]),
        normalizer=torch.tensor(3),
        loss_type=loss_type,
        old_logprob=values,
        ref_logprob=values,
        rollout_logprob=values,
        entropy=values,
    )
    for name in mean_metrics(sums).keys() - set(COUNTS):
        assert metric_spec(name).formula


def test_times_and_rates_are_defined() -> None:
    assert {name for name in METRICS if name.startswith("time/")} == {f"time/{phase}" for phase in PHASES}
    rates = perf_metrics(
        {**dict.fromkeys((f"time/{phase}" for phase in PHASES), 1.0), "step_time": 11.0},
        logical_tokens=4,
        generated_tokens=1,
        trained_tokens=4,
        forwarded_tokens=2,
        computed_tokens=3,
        flops=1.0,
        peak=1.0,
    )
    assert rates.keys() == {name for name in METRICS if name.startswith("perf/")} - {"perf/peak_mem_gb"}


def test_reward_functions_with_slashes_in_their_names() -> None:
    assert metric_spec("rewards/a/b.py:f/std") is METRICS["rewards/<fn>/std"]


def test_the_log_is_a_line_a_step_and_trackers_get_what_is_finite(tmp_path: Path) -> None:
    tracker = Recorder()
    with RunDirectory.create(tmp_path) as run:
        log = MetricsLog(run, [tracker])
        log.write(0, {"loss": 0.5, "kl": math.nan, "num_tokens": 7})
        log.write(1, {"loss": math.inf, "num_tokens": 9})
        log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "loss": 0.5, "kl": None, "num_tokens": 7},
        {"step": 1, "loss": None, "num_tokens": 9},
    ]
    assert tracker.rows == [(0, {"loss": 0.5, "num_tokens": 7}), (1, {"num_tokens": 9})]
    assert tracker.closed


def test_a_resumed_log_equals_one_that_never_stopped(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as run:
        log = MetricsLog(run)
        for step in range(6):
            log.write(step, {"loss": step / 7})
        whole = run.metrics.read_bytes()
        with open(run.metrics, "ab") as file:
            file.write(b'{"step": 6, "lo')  # what a crash of the machine may leave
        log = MetricsLog(run)
        log.rewind(4)
        assert [row["step"] for row in read_jsonl(run.metrics)] == [0, 1, 2, 3]
        for step in range(4, 6):
            log.write(step, {"loss": step / 7})
        assert run.metrics.read_bytes() == whole


def test_rewind_without_a_log_does_nothing(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as run:
        MetricsLog(run).rewind(3)
        assert not run.metrics.exists()


def test_the_line_of_a_step() -> None:
    metrics = {
        "reward": 0.41234, "reward_std": 0.3149, "eval/accuracy": 0.51, "completions/mean_length": 23.6,
        "perf/tok_s": 1234.5, "grad_norm": 0.8123, "learning_rate": 5e-4, "mismatch_kl": 1.23e-4,
        "step_time": 9.84, "time/rollout": 6.1, "time/train": 2.94, "time/reward": 0.7, "time/log": 0.1,
    }  # fmt: skip
    assert step_line(12, metrics) == (
        "step 12  reward 0.412 ±0.31  acc 0.510  len 24  tok/s 1234  grad 0.81  lr 0.0005  mismatch 0.0001"
        "  9.8s rollout 6.1 train 2.9 reward 0.7"
    )
    assert step_line(3, {}) == "step 3"


positive = st.floats(0, 1e9) | st.just(math.nan)


@settings(max_examples=200, deadline=None)
@given(
    step=st.integers(0, 999_999),
    metrics=st.fixed_dictionaries(
        {
            "reward": st.floats(-1e9, 1e9),
            "reward_std": positive,
            "eval/accuracy": st.floats(0, 1),
            "completions/mean_length": st.floats(0, 1e6),
            "perf/tok_s": st.floats(0, 1e7),
            "grad_norm": positive,
            "learning_rate": positive,
            "kl": positive,
            "mismatch_kl": positive,
        }
    ),
    times=st.lists(st.floats(0, 1e4), min_size=len(PHASES), max_size=len(PHASES)),
)
def test_the_line_fits_140_columns(step: int, metrics: dict[str, float], times: list[float]) -> None:
    phases = {f"time/{phase}": value for phase, value in zip(PHASES, times, strict=True)}
    line = step_line(step, {**metrics, **phases, "step_time": min(math.fsum(times), 99_999.0)})
    assert len(line) <= 140 and "\n" not in line
    assert line.startswith(f"step {step}  reward ")

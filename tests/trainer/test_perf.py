"""Time that sums to the step, and rates that follow from counts worked by hand."""

import math
import time
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metagrpo.trainer import perf
from metagrpo.trainer.perf import PHASES, StepTimer, peak_flops, peak_memory_gb, perf_metrics, training_flops

CPU = torch.device("cpu")


class Clock:
    """A clock in nanoseconds that moves when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000_007

    def __call__(self) -> int:
        return self.now


# A step is a list of waits (nanoseconds, charged to the open phase) and inner phases.
trees = st.recursive(
    st.lists(st.integers(0, 10**12), max_size=3),
    lambda children: st.lists(st.integers(0, 10**12) | st.tuples(st.sampled_from(PHASES), children), max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(trees, min_size=1, max_size=3))
def test_every_nanosecond_is_charged_once_to_the_innermost_phase(steps: list[list]) -> None:
    clock = Clock()

    def walk(timer: StepTimer, tree: list, name: str, expected: dict[str, int]) -> None:
        for item in tree:
            if isinstance(item, int):
                clock.now += item
                expected[name] += item
            else:
                with timer.phase(item[0]):
                    walk(timer, item[1], item[0], expected)

    with mock.patch.object(time, "perf_counter_ns", clock):
        timer = StepTimer(CPU)
        for tree in steps:
            expected = dict.fromkeys(PHASES, 0)
            start = clock.now
            walk(timer, tree, "other", expected)
            times = timer.finish()
            step_time = times.pop("step_time")
            assert times == {f"time/{name}": nanoseconds / 1e9 for name, nanoseconds in expected.items()}
            assert step_time == math.fsum(times.values())
            assert step_time == pytest.approx((clock.now - start) / 1e9, rel=1e-14)


def test_a_phase_that_raises_is_closed_and_charged() -> None:
    clock = Clock()
    with mock.patch.object(time, "perf_counter_ns", clock):
        timer = StepTimer(CPU)
        with pytest.raises(KeyError), timer.phase("rollout"):
            clock.now += 3 * 10**9
            raise KeyError
        clock.now += 10**9
        times = timer.finish()
    assert (times["time/rollout"], times["time/other"], times["step_time"]) == (3.0, 1.0, 4.0)


def test_real_time_passes() -> None:
    timer = StepTimer(CPU)
    with timer.phase("train"):
        time.sleep(0.01)
    assert timer.finish()["time/train"] >= 0.01


def test_misuse_is_refused() -> None:
    timer = StepTimer(CPU)
    with pytest.raises(ValueError, match="no phase 'forward'"), timer.phase("forward"):
        pass
    with timer.phase("train"), pytest.raises(RuntimeError, match="'train' is still open"):
        timer.finish()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_is_charged_to_the_phase_that_launched_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    timer = StepTimer(device)
    with timer.phase("train"):
        begin.record()
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(-1, 1)
        end.record()
    times = timer.finish()
    assert times["time/train"] >= begin.elapsed_time(end) / 1e3


SECONDS = {f"time/{name}": 0.0 for name in PHASES} | {
    "time/rollout": 4.0, "time/logprobs": 1.0, "time/train": 2.5, "time/optimizer": 0.5, "step_time": 10.0,
}  # fmt: skip


def test_rates_of_a_step_worked_by_hand() -> None:
    # 2 groups of 4 completions: prompts of 10 tokens, completions of 5: 8 · 15 = 120 tokens, 40 of them sampled.
    # One group has equal rewards and is skipped: 60 tokens pass, fed as 10 + 4 · 5 = 30, in rows of 32.
    metrics = perf_metrics(
        SECONDS,
        logical_tokens=120,
        generated_tokens=40,
        trained_tokens=60,
        forwarded_tokens=30,
        computed_tokens=32,
        flops=training_flops(1000, forwarded_tokens=30, frozen_base=True),
        peak=300_000.0,
    )
    assert metrics == {
        "perf/tok_s": 12.0,
        "perf/rollout_tok_s": 10.0,
        "perf/train_tok_s": 15.0,
        "perf/forwarded_tok_s": 7.5,
        "perf/prefix_saved_frac": 0.5,
        "perf/pad_frac": 0.0625,
        "perf/mfu": pytest.approx(4 * 1000 * 30 / 4.0 / 300_000),
    }


def test_what_did_not_run_has_no_rate() -> None:
    nothing = dict.fromkeys(SECONDS, 0.0)
    counts = {
        "logical_tokens": 0,
        "generated_tokens": 0,
        "trained_tokens": 0,
        "forwarded_tokens": 0,
        "computed_tokens": 0,
    }
    assert perf_metrics(nothing, **counts) == {}
    assert "perf/mfu" not in perf_metrics(SECONDS, **counts, flops=1.0)


def test_training_flops() -> None:
    assert training_flops(7, forwarded_tokens=10) == 6 * 7 * 10
    assert training_flops(7, forwarded_tokens=10, frozen_base=True) == 4 * 7 * 10
    assert training_flops(7, forwarded_tokens=10, scored_tokens=3) == 6 * 7 * 10 + 2 * 7 * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA Unheard-of", None),
    ],
)
def test_peak_flops_by_name(name: str, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == expected


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(CPU) is None


def test_no_device_name_is_hidden_behind_a_shorter_one() -> None:
    names = list(perf.PEAK_FLOPS)
    for index, name in enumerate(names):
        assert not any(name.startswith(earlier) for earlier in names[:index])


def test_peak_memory_counts_what_was_held() -> None:
    before = peak_memory_gb(CPU)
    held = torch.ones(100_000_000)  # 0.4 · 10⁹ bytes, touched
    assert peak_memory_gb(CPU) >= 0.4
    del held
    assert before > 0

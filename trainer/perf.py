"""Where a step's time goes, and the rates, memory and utilisation that follow from it."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

PHASES = (
    "data", "rollout", "reward", "logprobs", "train", "optimizer", "sync", "checkpoint", "eval", "log", "other",
)  # fmt: skip

# Dense bfloat16 matrix FLOP/s by device name, from the vendors' data sheets. The first prefix that fits counts.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "AMD Instinct MI325X": 1307e12,
    "AMD Instinct MI300X": 1307e12,
}


class StepTimer:
    """Splits the wall-clock time of a step into phases, each moment counted once.

    A phase within a phase stops the outer one while it runs; what no phase covers is ``time/other``. At every
    boundary the timer waits for the GPU, so that work is charged to the phase that launched it: phases are
    coarse, a handful of boundaries a micro-batch at most.

    Args:
        device: the device to wait for; nothing is waited for on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running = ["other"]
        self._nanoseconds = dict.fromkeys(PHASES, 0)
        self._last = time.perf_counter_ns()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time within the block to ``name``, one of ``PHASES``.

        Raises:
            ValueError: there is no such phase.
        """
        if name not in self._nanoseconds:
            raise ValueError(f"no phase {name!r}: the phases are {', '.join(PHASES)}")
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def finish(self) -> dict[str, float]:
        """End the step and begin the next: ``time/<phase>`` of every phase and ``step_time``, in seconds.

        ``step_time`` is ``math.fsum`` of the others.

        Raises:
            RuntimeError: a phase is still open.
        """
        if len(self._running) > 1:
            raise RuntimeError(f"phase {self._running[-1]!r} is still open")
        self._charge()
        times = {f"time/{name}": count / 1e9 for name, count in self._nanoseconds.items()}
        self._nanoseconds = dict.fromkeys(PHASES, 0)
        return {**times, "step_time": math.fsum(times.values())}

    def _charge(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter_ns()
        self._nanoseconds[self._running[-1]] += now - self._last
        self._last = now


def perf_metrics(
    seconds: Mapping[str, float],
    *,
    logical_tokens: int,
    generated_tokens: int,
    trained_tokens: int,
    forwarded_tokens: int,
    computed_tokens: int,
    flops: float | None = None,
    peak: float | None = None,
) -> dict[str, float]:
    """The ``perf/*`` rates of one step: tokens over seconds, over real tokens, padding never counted.

    Training time is ``time/logprobs + time/train + time/optimizer``. Passes without a gradient (old or reference
    log-probs) cost time there and add no token, so they lower a rate and never raise it. Where a phase did not
    run, or a count is 0, what would be divided by it is left out.

    Args:
        seconds: what :meth:`StepTimer.finish` returned.
        logical_tokens: prompt and completion of every sample of the step, each in full.
        generated_tokens: completion tokens that the sampler drew in this step.
        trained_tokens: prompt and completion of the samples that passed the model with a gradient, each in full,
            once a pass.
        forwarded_tokens: tokens the model was fed in those passes; a shared prefix counts once.
        computed_tokens: rows the model computed in those passes, padding included.
        flops: :func:`training_flops` of this step.
        peak: :func:`peak_flops` of the device; without it there is no ``perf/mfu``.
    """
    train_seconds = seconds["time/logprobs"] + seconds["time/train"] + seconds["time/optimizer"]
    metrics = {}
    if seconds["step_time"] > 0:
        metrics["perf/tok_s"] = logical_tokens / seconds["step_time"]
    if seconds["time/rollout"] > 0:
        metrics["perf/rollout_tok_s"] = generated_tokens / seconds["time/rollout"]
    if train_seconds > 0:
        metrics["perf/train_tok_s"] = trained_tokens / train_seconds
        metrics["perf/forwarded_tok_s"] = forwarded_tokens / train_seconds
        if flops is not None and peak is not None:
            metrics["perf/mfu"] = flops / train_seconds / peak
    if trained_tokens:
        metrics["perf/prefix_saved_frac"] = 1 - forwarded_tokens / trained_tokens
    if computed_tokens:
        metrics["perf/pad_frac"] = 1 - forwarded_tokens / computed_tokens
    return metrics


def training_flops(
    parameters: int, *, forwarded_tokens: int, scored_tokens: int = 0, frozen_base: bool = False
) -> float:
    """FLOPs that a step's training needs: 6 a parameter and token, as in Kaplan et al. (2020), §2.1.

    2 are the forward pass, 2 the gradient of the activations, 2 that of the weights; a frozen base (LoRA) needs
    no gradient of its weights, so 4. Recomputation, attention scores and the adapters themselves are not counted.

    Args:
        parameters: weights that multiply a token: all but the input embedding, the head included.
        forwarded_tokens: tokens fed to the model in passes with a gradient.
        scored_tokens: tokens fed to it in passes without one: 2 a parameter.
        frozen_base: whether the base's weights have no gradient.
    """
    return float(parameters * ((4 if frozen_base else 6) * forwarded_tokens + 2 * scored_tokens))


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its data sheet; ``None`` for a CPU or a GPU that the table lacks."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for prefix, flops in PEAK_FLOPS.items() if name.startswith(prefix)), None)


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held at once so far, in 10⁹ bytes: tensors on a GPU, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB

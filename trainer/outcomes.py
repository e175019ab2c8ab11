"""Metrics of a step's samples: rewards, groups and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from metagrpo.trainer.sample import Sample


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """TRL's names; a mean over nothing is left out. Samples that could not be scored count in lengths alone."""
    metrics: dict[str, float] = {}
    rewards = [sample.reward for sample in samples if not math.isnan(sample.reward)]
    if rewards:
        metrics["reward"] = fmean(rewards)
    for name in dict.fromkeys(name for sample in samples for name in sample.rewards):
        values = [value for sample in samples if (value := sample.rewards.get(name)) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = fmean(values)
            metrics[f"rewards/{name}/std"] = stdev(values) if len(values) > 1 else 0.0
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if not math.isnan(sample.reward):
            groups.setdefault(sample.group, []).append(sample.reward)
    deviations = [stdev(group) if max(group) != min(group) else 0.0 for group in groups.values()]
    if deviations:
        metrics["reward_std"] = fmean(deviations)
        metrics["frac_reward_zero_std"] = deviations.count(0.0) / len(deviations)
    lengths = [sample.completion_length for sample in samples]
    if lengths:
        metrics["completions/mean_length"] = fmean(lengths)
        metrics["completions/min_length"] = float(min(lengths))
        metrics["completions/max_length"] = float(max(lengths))
        truncated = [sample.finish_reason == "length" for sample in samples]
        metrics["completions/clipped_ratio"] = fmean(truncated)
        ended = [length for length, cut in zip(lengths, truncated, strict=True) if not cut]
        if ended:
            metrics["completions/mean_terminated_length"] = fmean(ended)
    return metrics

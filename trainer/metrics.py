"""What every metric means, the log they are written to, and the line a step prints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metagrpo.trainer.rundir import RunDirectory, append_jsonl, rewind_jsonl
from metagrpo.trainer.trackers import Tracker


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The definition of one metric.

    Attributes:
        unit: of the value.
        formula: what is computed, over what.
        good: the range of a healthy run.
        bad: what a value outside it means.
    """

    unit: str
    formula: str
    good: str
    bad: str


SECTIONS: dict[str, dict[str, MetricSpec]] = {
    "Reward": {
        "reward": MetricSpec(
            "reward", "mean over the scored samples of Σ weight · reward function", "rises over tens of steps",
            "flat: nothing is learnt (see frac_reward_zero_std, grad_norm); a jump to the top: the reward is gamed"),
        "reward_std": MetricSpec(
            "reward", "mean over groups of the unbiased standard deviation of the group's rewards",
            "well above 0 until the task is solved", "near 0: groups agree, so there is nothing to learn from"),
        "rewards/<fn>/mean": MetricSpec(
            "reward", "mean of one reward function, unweighted, over the samples it scored", "rises",
            "one falls while another rises: the functions pull against each other"),
        "rewards/<fn>/std": MetricSpec(
            "reward", "unbiased standard deviation of the same values over the step", "above 0",
            "0: the function is constant and adds nothing"),
        "frac_reward_zero_std": MetricSpec(
            "share of groups", "groups whose rewards are all equal (their advantages are 0; their tokens stay in "
            "the loss's denominator) ÷ groups", "below 0.5",
            "near 1: the problems are too easy or too hard, and the loss is close to 0 for that reason"),
        "reward/timeout_frac": MetricSpec(
            "share of gradings", "gradings (a sample in one function) killed at reward.timeout ÷ gradings", "0",
            "above 0.01: a grader hangs; its samples are not scored"),
        "reward/error_frac": MetricSpec(
            "share of gradings", "gradings that raised, died or returned no number ÷ gradings", "0",
            "above 0: a bug in a reward function; its samples are not scored"),
        "reward/none_frac": MetricSpec(
            "share of gradings", "gradings that returned None ÷ gradings", "what the data explains",
            "rises: answers or references cannot be parsed"),
    },
    "Completions": {
        "completions/mean_length": MetricSpec(
            "tokens", "mean completion length, stop token included", "moves slowly",
            "runs to the limit: rambling; collapses: the reward pays for short answers"),
        "completions/min_length": MetricSpec(
            "tokens", "shortest completion", "above 1", "1: the model stops at once"),
        "completions/max_length": MetricSpec(
            "tokens", "longest completion", "below the limit", "the limit: see clipped_ratio"),
        "completions/clipped_ratio": MetricSpec(
            "share of samples", "completions that ended at max_completion_length ÷ completions", "below 0.1",
            "near 1: raise max_completion_length, or the model never learnt to stop"),
        "completions/mean_terminated_length": MetricSpec(
            "tokens", "mean length of the completions that ended by a stop token", "near mean_length",
            "far below mean_length: the limit cuts the long answers"),
        "data/overlong": MetricSpec(
            "problems", "problems left out at the start since their prompt is longer than data.max_prompt_length",
            "0, or a small part of the data", "many: raise the limit, or the template is too long"),
    },
    "Policy": {
        "loss": MetricSpec(
            "nats", "the objective of the step, summed over its micro-batches", "any; it is no measure of progress",
            "0 throughout: every advantage is 0; NaN: the run is broken"),
        "entropy": MetricSpec(
            "nats a token", "mean over trained tokens of −Σ p·log p at the sampling temperature", "falls slowly",
            "near 0: exploration has collapsed; rises without end: the policy dissolves"),
        "kl": MetricSpec(
            "nats a token", "mean over trained tokens of the KL estimator (loss.kl_estimator) to the reference; "
            "only with loss.beta above 0", "below 0.1", "large: the policy has left the reference, lower the rate"),
        "ratio/mean": MetricSpec(
            "ratio", "mean over trained tokens of π / π_old", "1 ± 0.01; exactly 1 on policy",
            "far from 1: too many iterations or too high a learning rate"),
        "clip_ratio/low_mean": MetricSpec(
            "share of tokens", "trained tokens with a negative advantage and ratio < 1 − ε ÷ trained tokens",
            "0 on policy, below 0.1 off policy", "high: the step is too large, and those tokens give no gradient"),
        "clip_ratio/high_mean": MetricSpec(
            "share of tokens", "trained tokens with a positive advantage and ratio > 1 + ε_high ÷ trained tokens",
            "0 on policy, below 0.1 off policy", "high: as above"),
        "clip_ratio/region_mean": MetricSpec(
            "share of tokens", "low_mean + high_mean", "0 on policy, below 0.2 off policy", "high: as above"),
        "cispo_clip_ratio": MetricSpec(
            "share of tokens", "loss type cispo: trained tokens with a positive advantage and ratio > ratio_max ÷ "
            "trained tokens", "0 on policy, below 0.1 off policy", "high: the step is too large"),
        "vespo/phi_seq_mean": MetricSpec(
            "weight", "loss type vespo: mean over trained tokens of the sequence's weight φ", "near 1",
            "near 0: hardly any sequence has a say"),
        "cov/selected_mean": MetricSpec(
            "share of tokens", "loss types clip_cov and kl_cov: trained tokens that were selected by their "
            "covariance ÷ trained tokens", "the share that was asked for",
            "above it: a step of so few tokens that the one selected at least is more"),
    },
    "Sampler against trainer": {
        "mismatch_kl": MetricSpec(
            "nats a token", "mean over trained tokens of r − 1 − log r, r = π_trainer ÷ π_sampler before the "
            "update: an estimate of KL(π_sampler ‖ π_trainer)", "below 1e-3 in bfloat16",
            "above 1e-2: the sampler runs other weights, another temperature or another precision"),
        "sampling/sampling_logp_difference/mean": MetricSpec(
            "nats", "mean over trained tokens of |log π_trainer − log π_sampler|", "below 0.02", "as mismatch_kl"),
        "sampling/sampling_logp_difference/max": MetricSpec(
            "nats", "largest of them", "below 1", "large alone: a few tokens differ; with the mean: as mismatch_kl"),
        "sampling/importance_sampling_ratio/mean": MetricSpec(
            "ratio", "mean of the correction weights (loss.rollout_correction), capped", "1 ± 0.02",
            "far from 1: the update is biased towards what the sampler likes"),
        "sampling/importance_sampling_ratio/min": MetricSpec(
            "ratio", "smallest of them", "above 0.1", "near 0: a sequence or token has no say"),
        "sampling/importance_sampling_ratio/max": MetricSpec(
            "ratio", "largest of them", "at most rollout_cap", "at the cap all the time: as mismatch_kl"),
        "sampling/masked_mean": MetricSpec(
            "share of tokens", "trained tokens that the correction gave weight 0 ÷ trained tokens with a finite "
            "sampler's log-prob", "below 0.01", "high: the update ignores much of what was sampled"),
        "sampling/masked_sequences_mean": MetricSpec(
            "share of sequences", "sequences whose every token has weight 0 ÷ sequences", "below 0.01; not far "
            "from masked_mean", "far below masked_mean: it is the long answers that are dropped"),
        "sampling/dropped_mean": MetricSpec(
            "share of tokens", "tokens dropped since the sampler's log-prob was not finite ÷ trained tokens", "0",
            "above 0: a fault in the sampler"),
    },
    "Optimisation": {
        "grad_norm": MetricSpec(
            "norm", "L2 norm of the gradient before clipping, mean over the step's optimizer steps",
            "steady; below max_grad_norm mostly", "spikes: lower the rate; 0: no gradient reaches the weights"),
        "learning_rate": MetricSpec(
            "1", "of the step's last optimizer step", "as scheduled", "other: the schedule was stepped wrongly"),
        "num_tokens": MetricSpec(
            "tokens", "prompt and completion tokens of all samples since the start of the run", "grows steadily",
            "falls: a resume lost its state"),
    },
    "Speed and memory": {
        "perf/tok_s": MetricSpec(
            "tokens/s", "prompt and completion tokens of all samples, each in full ÷ step_time", "steady",
            "falls: see time/*"),
        "perf/rollout_tok_s": MetricSpec(
            "tokens/s", "completion tokens sampled ÷ time/rollout", "steady",
            "falls: longer answers, or few rows left in the batch"),
        "perf/train_tok_s": MetricSpec(
            "tokens/s", "prompt and completion tokens of the samples that passed the model, each in full, once a "
            "pass ÷ (time/logprobs + time/train + time/optimizer)", "steady", "falls: token_budget is too small"),
        "perf/forwarded_tok_s": MetricSpec(
            "tokens/s", "tokens fed to the model in those passes, a shared prefix once ÷ the same time", "steady",
            "falls: the device is slower, or shared"),
        "perf/prefix_saved_frac": MetricSpec(
            "share of tokens", "1 − tokens fed ÷ tokens of the samples that passed, each in full",
            "(G − 1)/G of the prompt's share", "0: nothing is shared, G is 1 or the groups are torn apart"),
        "perf/pad_frac": MetricSpec(
            "share of rows", "1 − tokens fed ÷ rows computed", "below 0.1", "high: the budget fits the rows badly"),
        "perf/peak_mem_gb": MetricSpec(
            "10⁹ bytes", "most held at once since the start: tensors on a GPU, the whole process on a CPU",
            "steady after the first steps", "creeps up: a leak"),
        "perf/mfu": MetricSpec(
            "share of peak", "FLOPs of training ÷ its time ÷ the GPU's dense bfloat16 peak. FLOPs: 6 · parameters · "
            "tokens fed, 4 with a frozen base (LoRA), 2 for passes without a gradient; attention and recomputation "
            "are not counted. Left out where the peak is unknown, as on a CPU",
            "0.3–0.6 on large models", "low: small micro-batches, or the host is the bottleneck"),
    },
    "Time": {
        "step_time": MetricSpec(
            "s", "wall-clock time of the step, the sum of time/*", "steady", "grows: see which phase does"),
        "time/data": MetricSpec("s", "choosing problems, planning requests", "near 0", "slow storage"),
        "time/rollout": MetricSpec(
            "s", "sampling completions", "half or more of the step", "see perf/rollout_tok_s"),
        "time/reward": MetricSpec(
            "s", "grading", "well below rollout", "slow graders: raise reward.workers, see reward/timeout_frac"),
        "time/logprobs": MetricSpec(
            "s", "old and reference log-probs, passes without a gradient", "0 on policy without a reference",
            "above 0 there: a needless pass"),
        "time/train": MetricSpec("s", "forward and backward", "below rollout", "see perf/train_tok_s"),
        "time/optimizer": MetricSpec("s", "gradient norm, clipping, update", "near 0", "large: full fine-tuning"),
        "time/sync": MetricSpec("s", "handing the weights to the sampler", "near 0", "slow transfer"),
        "time/checkpoint": MetricSpec("s", "writing the last step's checkpoint", "0 in most steps", "slow disk"),
        "time/eval": MetricSpec("s", "held-out evaluation", "0 in most steps", "evaluate less often"),
        "time/log": MetricSpec("s", "rollouts, metrics and trackers", "near 0", "slow disk or network"),
        "time/other": MetricSpec("s", "what no phase covers", "near 0", "unmeasured work"),
    },
    "Held-out evaluation": {
        "eval/accuracy": MetricSpec(
            "share of problems", "mean over held-out problems of the share of their completions that are right",
            "rises with reward", "flat while reward rises: the reward is gamed or the data memorised"),
        "eval/reward": MetricSpec(
            "reward", "mean reward over the held-out completions", "rises", "as eval/accuracy"),
        "eval/mean_length": MetricSpec(
            "tokens", "mean completion length", "as in training", "differs: another temperature or limit"),
        "eval/clipped_ratio": MetricSpec(
            "share of samples", "completions that ended at the limit ÷ completions", "below 0.1", "raise the limit"),
        "eval/problems": MetricSpec("problems", "held-out problems", "100 or more", "few: accuracy is noise"),
    },
}  # fmt: skip

METRICS: dict[str, MetricSpec] = {name: spec for section in SECTIONS.values() for name, spec in section.items()}


def metric_spec(name: str) -> MetricSpec:
    """The definition of a logged name, such as ``rewards/math/mean`` for ``rewards/<fn>/mean``.

    Raises:
        KeyError: the table lacks it.
    """
    return METRICS[re.sub(r"^rewards/.+/(mean|std)$", r"rewards/<fn>/\1", name)]


def metrics_markdown() -> str:
    """The table as ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "`metrics.jsonl` holds one JSON object a step: `step` and the metrics below. A value that is NaN or",
        "infinite is written as `null`; one that has no meaning in a step is absent. Rates count real, logical",
        "tokens and never padding. The `time/*` of a step sum to its `step_time`.",
    ]
    for title, section in SECTIONS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | unit | definition | good | otherwise |",
            "|---|---|---|---|---|",
        ]
        for name, spec in section.items():
            cells = [f"`{name}`", spec.unit, spec.formula, spec.good, spec.bad]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


class MetricsLog:
    """Appends a line a step to ``metrics.jsonl`` and sends it to the trackers.

    Args:
        run: the run's directory.
        trackers: see :func:`metagrpo.trainer.trackers.open_trackers`.
    """

    def __init__(self, run: RunDirectory, trackers: Sequence[Tracker] = ()) -> None:
        self._path = run.metrics
        self._trackers = trackers

    def rewind(self, step: int) -> None:
        """Drop the lines of ``step`` and later, which will be run again, and a last line torn by a crash."""
        rewind_jsonl(self._path, step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step; NaN and infinities become null in the file and are not sent to trackers.

        Raises:
            RunError: the disk is full; the file holds whole lines only.
        """
        append_jsonl(self._path, {"step": step, **metrics})
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """One step in at most 140 columns: reward, accuracy, length, rate, gradient, gap to the sampler, time.

    Metrics that are absent are left out; of the phases, those of at least 5% of the step, the longest first, as
    far as they fit. Lengths up to 10⁶ tokens, rates up to 10⁷ tokens/s and steps of up to a day fit.
    """
    parts = [f"step {step}"]
    if "reward" in metrics:
        parts.append(f"reward {metrics['reward']:.3g} ±{metrics.get('reward_std', math.nan):.2g}")
    for label, name, form in (
        ("acc", "eval/accuracy", ".3f"),
        ("len", "completions/mean_length", ".0f"),
        ("tok/s", "perf/tok_s", ".0f"),
        ("grad", "grad_norm", ".2g"),
        ("lr", "learning_rate", ".2g"),
        ("kl", "kl", ".1g"),
        ("mismatch", "mismatch_kl", ".1g"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    line = "  ".join(parts)
    if "step_time" in metrics:
        line += f"  {metrics['step_time']:.1f}s"
        phases = {name[5:]: value for name, value in metrics.items() if name.startswith("time/")}
        for name, value in sorted(phases.items(), key=lambda item: -item[1]):
            more = f" {name} {value:.1f}"
            if value < 0.05 * metrics["step_time"] or len(line) + len(more) > 140:
                break
            line += more
    return line

"""Metrics of policy_loss: values by hand, and that sums over micro-batches give the means of the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

from metagrpo.kernels.losses import loss_names, mean_metrics, merge_metrics, metric_reduction, policy_loss

from . import loss_oracle as oracle

LOG2 = math.log(2)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def metrics_of(ratios, advantages, **arguments):
    """Means of one batch of one-token sequences with these ratios and ε = 0.2."""
    old = torch.full((len(ratios),), -3.0, dtype=torch.float64)
    arguments = {"sequence_ids": torch.arange(len(ratios)), "normalizer": 1.0, "old_logprob": old, **arguments}
    return mean_metrics(policy_loss(old + tensor(ratios).log(), tensor(advantages), **arguments)[1])


def test_clip_ratios_by_hand():
    """Low: below 0.8 with A < 0. High: above 1.2 with A > 0. A clip on the other side does not bind."""
    means = metrics_of([0.5, 0.5, 1.5, 1.5, 1.5, 1.0, 0.9, 2.0], [-1, 1, 1, 1, -1, 1, -1, 0])
    assert means["clip_ratio/low_mean"] == 1 / 8
    assert means["clip_ratio/high_mean"] == 2 / 8
    assert means["clip_ratio/region_mean"] == 3 / 8
    assert means["ratio/mean"] == pytest.approx(9.4 / 8)
    assert means["tokens"] == 8 and means["sequences"] == 8


def test_clip_ratios_of_the_other_types():
    assert metrics_of([6, 6, 4], [1, -1, 1], loss_type="cispo")["cispo_clip_ratio"] == pytest.approx(1 / 3)
    means = metrics_of([1.3, 0.7, 1.1, 0.7], [1, -1, 1, 1], loss_type="gmpo", epsilon=0.2)
    assert (means["clip_ratio/low_mean"], means["clip_ratio/high_mean"]) == (0.25, 0.25)
    # π_old = e^-3 = 0.0498: ratio 5 moves the probability by 0.199, ratio 3 by 0.0996
    means = metrics_of([5, 3, 5], [1, 1, -1], loss_type="dppo")
    assert (means["clip_ratio/low_mean"], means["clip_ratio/high_mean"]) == (0, pytest.approx(1 / 3))
    phi = 2.0**2 * math.exp(3 * (1 - 2))
    assert metrics_of([1, 2], [1, 1], loss_type="vespo")["vespo/phi_seq_mean"] == pytest.approx((1 + phi) / 2)


def test_kl_and_entropy_by_hand():
    means = metrics_of([1.0, 1.0], [1, 1], ref_logprob=tensor([-3.0, -3.0 - LOG2]), entropy=tensor([1.0, 2.0]))
    assert means["kl"] == pytest.approx((0.5 + LOG2 - 1) / 2)  # k3 at x = 0 and x = −log 2
    assert means["entropy"] == 1.5


def test_sampling_metrics_by_hand():
    """Token ratios π_old / π_rollout: (4, 1/2) and (1,), and a token without a sampler's log-prob; cap 3."""
    rollout = tensor([-3 - 2 * LOG2, -3 + LOG2, -3.0, float("nan")])
    given = {"rollout_logprob": rollout, "sequence_ids": torch.tensor([0, 0, 1, 2])}
    means = metrics_of([1.0] * 4, [1.0] * 4, rollout_correction="token_mask", rollout_cap=3.0, **given)
    assert means["sampling/tokens"] == 3
    assert means["sampling/dropped_mean"] == 1 / 4
    assert means["sampling/sampling_logp_difference/mean"] == pytest.approx(LOG2)
    assert means["sampling/sampling_logp_difference/max"] == pytest.approx(2 * LOG2)
    assert means["sampling/importance_sampling_ratio/mean"] == pytest.approx((0 + 0.5 + 1) / 3)
    assert means["sampling/importance_sampling_ratio/min"] == 0
    assert means["sampling/importance_sampling_ratio/max"] == 1
    assert means["sampling/masked_mean"] == pytest.approx(1 / 3)
    assert means["sampling/masked_sequences_mean"] == 0
    k3 = (4 - 2 * LOG2 - 1) + (0.5 + LOG2 - 1)
    assert means["mismatch_kl"] == pytest.approx(k3 / 3)

    means = metrics_of([1.0] * 4, [1.0] * 4, rollout_correction="none", **given)
    assert means["sampling/importance_sampling_ratio/mean"] == pytest.approx((4 + 0.5 + 1) / 3)
    assert means["sampling/importance_sampling_ratio/max"] == pytest.approx(4)
    assert means["sampling/masked_mean"] == 0

    means = metrics_of([1.0] * 4, [1.0] * 4, rollout_correction="sequence_mask", rollout_cap=1.5, **given)
    assert means["sampling/masked_mean"] == pytest.approx(2 / 3)
    assert means["sampling/masked_sequences_mean"] == pytest.approx(1 / 3)  # of three sequences the first


def test_a_dropped_token_is_not_counted_as_masked_but_its_sequence_is():
    """Sequence 0 has the ratios (4, none) and is masked at cap 2."""
    means = metrics_of(
        [1.0] * 3, [1.0] * 3, rollout_logprob=tensor([-3 - 2 * LOG2, float("nan"), -3.0]),
        sequence_ids=torch.tensor([0, 0, 1]), rollout_correction="sequence_mask",
    )  # fmt: skip
    assert means["sampling/masked_mean"] == 1 / 2
    assert means["sampling/masked_sequences_mean"] == 1 / 2
    assert means["sampling/dropped_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", loss_names())
def test_sums_of_micro_batches_give_the_means_of_the_batch(kind):
    case = oracle.make_case(21, [3, 1, 5, 4])
    given = {
        "sequence_ids": torch.tensor(case.ids), "old_logprob": tensor(case.old), "ref_logprob": tensor(case.ref),
        "rollout_logprob": tensor(case.rollout), "entropy": tensor(case.entropy),
    }  # fmt: skip
    given["rollout_logprob"][2] = float("nan")
    extra = {"loss_type": kind, "rollout_correction": "token_mask", "rollout_cap": 1.1}
    if "cov" in kind:
        given["selected"] = torch.arange(13) % 3 == 0

    def sums(keep):
        taken = {name: value[keep] for name, value in given.items()}
        return policy_loss(
            tensor(case.logprob)[keep], tensor(case.advantages)[keep], normalizer=1.0, **taken, **extra
        )[1]

    ids = given["sequence_ids"]
    first = torch.isin(ids, torch.tensor(sorted(set(case.ids))[:2]))
    nothing = torch.zeros_like(first)
    whole = sums(torch.ones_like(first))
    merged = merge_metrics(merge_metrics(sums(first), sums(nothing)), sums(~first))
    assert merged.keys() == whole.keys() == sums(nothing).keys()
    assert mean_metrics(merged) == pytest.approx(mean_metrics(whole), rel=1e-12)
    assert all(
        value.dtype == torch.float64 and value.dim() == 0 and not value.requires_grad for value in whole.values()
    )


def test_reductions():
    assert metric_reduction("sampling/sampling_logp_difference/max") == "max"
    assert metric_reduction("sampling/importance_sampling_ratio/min") == "min"
    assert metric_reduction("clip_ratio/low_mean") == "sum"
    a = {"tokens": tensor(1.0), "x/max": tensor(3.0), "x/min": tensor(3.0), "only_a": tensor(4.0)}
    b = {"tokens": tensor(3.0), "x/max": tensor(5.0), "x/min": tensor(-1.0)}
    merged = {name: value.item() for name, value in merge_metrics(a, b).items()}
    assert merged == {"tokens": 4.0, "x/max": 5.0, "x/min": -1.0, "only_a": 4.0}
    assert mean_metrics(merge_metrics(a, b)) == {"tokens": 4.0, "x/max": 5.0, "x/min": -1.0, "only_a": 1.0}
    assert mean_metrics({}) == {}


def test_means_of_nothing_are_left_out():
    nothing = torch.zeros(0)
    _, sums = policy_loss(
        nothing, nothing, sequence_ids=nothing.long(), normalizer=0, rollout_logprob=nothing, entropy=nothing
    )
    assert mean_metrics(sums) == {"tokens": 0.0, "sequences": 0.0, "sampling/tokens": 0.0}

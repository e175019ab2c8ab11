"""Value, gradient and metrics of every loss type and option of TRL 1.16, against TRL's own code in float64.

Where the two are meant to differ is in ``test_trl_differences.py``. TRL's ``top_entropy_quantile``,
``off_policy_mask_threshold``, adaptive entropy and router loss have no counterpart in ``policy_loss``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from metagrpo.kernels.logprob import token_logprob
from metagrpo.kernels.losses import loss_normalizer, policy_loss

from . import trl_reference as reference
from .trl_reference import CLIPPED, LOSSES, TOKEN_AVERAGED, Rollout, assert_same, compare, make_rollout

pytestmark = reference.MARKS

LENGTHS = (7, 3, 11, 1, 6, 4)
SHAPES = (LENGTHS, (1, 9, 2), (13, 13, 5, 8, 1, 2, 3, 3, 15))


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_defaults(kind, lengths):
    assert_same(*compare(make_rollout(1, lengths), kind, {}, {}))


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy(kind):
    """TRL then keeps no old log-probs."""
    assert_same(*compare(make_rollout(2, LENGTHS), kind, {"num_iterations": 1}, {"old_logprob": None}))


@pytest.mark.parametrize("kind", LOSSES)
def test_masks(kind):
    """Tokens of tools inside completions, and a truncated completion, of which no token is trained."""
    rollout = make_rollout(3, LENGTHS, tools=True, truncated=(2,))
    theirs, ours = compare(rollout, kind, {}, {})
    assert_same(theirs, ours)
    assert torch.equal(theirs.logprob_grad != 0, (theirs.logprob_grad != 0) & rollout.trained())


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "luspo"])
def test_an_advantage_for_each_token(kind):
    advantages = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_same(*compare(make_rollout(4, LENGTHS), kind, {}, {}, advantages))


@pytest.mark.parametrize(
    "options",
    [{"epsilon": 0.1}, {"epsilon": 0.3, "epsilon_high": 0.05}, {"delta": 1.25}, {"epsilon_high": 0.1, "delta": 1.15}],
    ids=str,
)
@pytest.mark.parametrize("kind", CLIPPED)
def test_clip_options(kind, options):
    rollout = make_rollout(5, (2, 1, 1, 7, 3, 11, 1, 1, 2))  # short ones, so that luspo's ratios leave the range too
    theirs, ours = compare(rollout, kind, options, options)
    assert_same(theirs, ours)
    default, _ = compare(rollout, kind, {}, {})
    assert theirs.loss != default.loss  # the option acts here


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        ("cispo", {"epsilon_high": 0.9}, {"ratio_max": 0.9}),
        (
            "sapo",
            {"sapo_temperature_pos": 1.3, "sapo_temperature_neg": 2.1},
            {"temperature_pos": 1.3, "temperature_neg": 2.1},
        ),
        (
            "vespo",
            {"vespo_k_pos": 1.1, "vespo_lambda_pos": 1.7, "vespo_k_neg": 2.3, "vespo_lambda_neg": 0.6},
            {"k_pos": 1.1, "lambda_pos": 1.7, "k_neg": 2.3, "lambda_neg": 0.6},
        ),
    ],
    ids=["cispo", "sapo", "vespo"],
)
def test_options_of_one_type(kind, theirs, ours):
    assert_same(*compare(make_rollout(6, LENGTHS), kind, theirs, ours))


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_sequence_level_ratio(kind):
    theirs, ours = {"importance_sampling_level": "sequence"}, {"importance": "sequence"}
    assert_same(*compare(make_rollout(7, LENGTHS), kind, theirs, ours))


def test_gspo_is_grpo_at_sequence_level():
    theirs = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    ours = {"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}
    assert_same(*compare(make_rollout(8, LENGTHS), "grpo", theirs, ours))


def test_luspo_at_token_level_is_a_sum_over_tokens():
    """TRL's default level for luspo: our dapo, with sequences for its denominator."""
    theirs, ours = {"importance_sampling_level": "token"}, {"loss_type": "dapo", "normalizer": len(LENGTHS)}
    assert_same(*compare(make_rollout(9, LENGTHS), "luspo", theirs, ours))


@pytest.mark.parametrize("kind", LOSSES)
def test_kl(kind):
    rollout = make_rollout(10, LENGTHS)
    theirs, ours = compare(rollout, kind, {"beta": 0.1}, {"beta": 0.1, "ref_logprob": rollout.ref})
    assert_same(theirs, ours)
    assert ours.metrics["kl"] == pytest.approx(theirs.metrics["kl"], rel=1e-6)  # TRL divides its metrics in fp32


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "luspo"])
def test_bias_corrected_kl(kind):
    rollout = make_rollout(11, LENGTHS)
    theirs, ours = compare(
        rollout,
        kind,
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"beta": 0.1, "bias_corrected_kl": True, "ref_logprob": rollout.ref},
    )
    assert_same(theirs, ours)
    assert ours.metrics["kl"] == pytest.approx(theirs.metrics["kl"], rel=1e-6)


@pytest.mark.parametrize("kind", TOKEN_AVERAGED)
def test_entropy_bonus(kind):
    """Of the other types too TRL averages the bonus over tokens; ours is averaged as the type averages."""
    theirs, ours = compare(make_rollout(12, LENGTHS), kind, {"entropy_coef": 0.3}, {"entropy_coef": 0.3})
    assert theirs.entropy_grad.count_nonzero() == sum(LENGTHS)
    assert_same(theirs, ours)


# TRL's mode, floor and cap, and our mode.
CORRECTIONS: dict[str, tuple[str, float | None, float | None, str]] = {
    "token_truncate": ("token_truncate", None, 1.2, "token_truncate"),
    "token_truncate_between": ("token_truncate", 0.8, 1.2, "token_truncate"),
    "token_truncate_below": ("token_truncate", 0.8, None, "token_truncate"),
    "token_mask": ("token_mask", None, 1.2, "token_mask"),
    "token_mask_between": ("token_mask", 0.8, 1.2, "token_mask"),
    "icepop": ("token_mask", 1 / 1.25, 1.25, "icepop"),
    "sequence_truncate": ("sequence_truncate", None, 1.1, "sequence_truncate"),
    "sequence_truncate_between": ("sequence_truncate", 0.9, 1.1, "sequence_truncate"),
    "sequence_mask": ("sequence_mask", None, 1.1, "sequence_mask"),
    "sequence_mask_between": ("sequence_mask", 0.6, 1.7, "sequence_mask"),
}
# Ours does not put luspo's sequence ratio under a token's weight as TRL does (see test_trl_differences.py), and vespo
# takes the correction into a weight of the whole sequence, token by token alone.
CORRECTED = [
    (kind, name)
    for kind in LOSSES
    for name, (mode, *_) in CORRECTIONS.items()
    if not mode.startswith({"luspo": "token", "vespo": "sequence"}.get(kind, "-"))
]


def correction(rollout: Rollout, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of TRL's trainer and of ``policy_loss``."""
    mode, floor, cap, ours = CORRECTIONS[name]
    config = {
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": floor,
        "vllm_importance_sampling_clip_max": cap,
    }
    arguments = {
        "rollout_correction": ours,
        "rollout_logprob": rollout.sampler,
        "rollout_cap": math.inf if cap is None else cap,
        "rollout_floor": None if ours == "icepop" else floor,
    }
    return config, arguments


@pytest.mark.parametrize(("kind", "name"), CORRECTED)
def test_rollout_correction(kind, name):
    rollout = make_rollout(13, LENGTHS, tools=True)
    config, arguments = correction(rollout, name)
    arguments |= {"beta": 0.1, "ref_logprob": rollout.ref}
    theirs, ours = compare(rollout, kind, {"beta": 0.1, **config}, arguments)
    assert_same(theirs, ours)


def test_rollout_correction_switched_off():
    rollout = make_rollout(14, LENGTHS)
    theirs = {"use_vllm": True, "vllm_importance_sampling_correction": False}
    assert_same(*compare(rollout, "dapo", theirs, {"rollout_logprob": rollout.sampler}))


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "bnpo"])
def test_an_optimizer_step_of_micro_batches(kind):
    """TRL's micro-batches add up to ours of the whole step under the step's one normaliser."""
    rollout = make_rollout(15, LENGTHS)
    trainer = reference.grpo(rollout, loss_type=kind, micro_batches=3, **reference.TRL_TYPE.get(kind, {}))
    logprob = rollout.logprob.clone().requires_grad_()
    inputs = trainer.score()
    expected = trainer.step(inputs, logprob, rollout.entropy, 3)

    mask = rollout.trained()
    normalizer = loss_normalizer(kind, mask.sum(1), max_completion_length=reference.BUDGET)
    loss, _ = policy_loss(
        logprob[mask],
        inputs["advantages"][rollout.rows()],
        sequence_ids=rollout.rows(),
        normalizer=normalizer,
        old_logprob=rollout.old[mask],
        loss_type=kind,
        **reference.OUR_TYPE.get(kind, {}),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, logprob)[0] for value in (loss, expected)), rtol=1e-11, atol=1e-14
    )


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
def test_two_optimizer_steps_a_generation_batch(kind):
    """TRL's denominator is then half the batch's tokens."""
    rollout = make_rollout(16, LENGTHS)
    trainer = reference.grpo(rollout, loss_type=kind, steps_per_generation=2, **reference.TRL_TYPE.get(kind, {}))
    logprob = rollout.logprob[:3].clone().requires_grad_()
    inputs = trainer.score()
    expected = trainer.loss(reference.split(inputs, 2)[0], logprob, rollout.entropy[:3])

    mask = rollout.trained()[:3]
    ids = mask.nonzero()[:, 0]
    loss, _ = policy_loss(
        logprob[mask],
        inputs["advantages"][ids],
        sequence_ids=ids,
        normalizer=sum(LENGTHS) / 2,
        old_logprob=rollout.old[:3][mask],
        loss_type=kind,
        **reference.OUR_TYPE.get(kind, {}),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradient_of_the_logits(kind):
    """From logits at a temperature, by TRL's log-softmax and entropy and by ours, through loss, KL and bonus."""
    rollout = make_rollout(17, LENGTHS)
    logits = torch.randn(6, 11, 19, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = torch.randint(19, (6, 11), generator=torch.Generator().manual_seed(2))
    logits.requires_grad_()
    bonus = 0.3 if kind in TOKEN_AVERAGED else 0.0

    settings = reference.TRL_TYPE.get(kind, {})
    trainer = reference.grpo(rollout, loss_type=kind, beta=0.1, entropy_coef=bonus, **settings)
    inputs = trainer.score()
    expected = trainer.loss(
        inputs,
        reference.selective_log_softmax(logits, targets, temperature=0.7),
        reference.entropy_from_logits(logits / 0.7),
    )

    mask = rollout.trained()
    logprob, entropy = token_logprob(logits[mask], targets[mask], temperature=0.7, return_entropy=True)
    loss, _ = policy_loss(
        logprob,
        inputs["advantages"][rollout.rows()],
        sequence_ids=rollout.rows(),
        normalizer=reference.denominator(kind, mask),
        old_logprob=rollout.old[mask],
        ref_logprob=rollout.ref[mask],
        entropy=entropy,
        beta=0.1,
        entropy_coef=bonus,
        loss_type=kind,
        **reference.OUR_TYPE.get(kind, {}),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, logits)[0] for value in (loss, expected)), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("kind", LOSSES)
def test_metrics_of_the_loss(kind):
    """Means over tokens; TRL's are over sequences for a quantity of whole sequences, so all are of one length."""
    lengths = (5,) * 6 if kind in ("luspo", "vespo") else LENGTHS
    theirs, ours = compare(make_rollout(18, lengths), kind, {"epsilon": 0.02}, {"epsilon": 0.02})
    names = {"cispo": ["cispo_clip_ratio"], "sapo": [], "vespo": ["vespo/phi_seq_mean"]}.get(
        kind, [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")]
    )
    for name in names:
        assert 0 < theirs.metrics[name] < (math.inf if kind == "vespo" else 1)
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6)
    assert ours.metrics["entropy"] == pytest.approx(theirs.metrics["entropy"], rel=1e-6)
    assert {name for name in theirs.metrics if name.startswith(("clip", "cispo", "vespo", "sapo"))} <= {
        *names, "clip_ratio/low_min", "clip_ratio/high_max"
    }  # fmt: skip


@pytest.mark.parametrize("name", CORRECTIONS)
def test_metrics_of_the_sampler(name):
    """TRL's ratio is one a sequence in its sequence modes, so all are of one length there."""
    rollout = make_rollout(19, (5,) * 6 if name.startswith("sequence") else LENGTHS)
    config, arguments = correction(rollout, name)
    theirs, ours = compare(rollout, "dapo", config, arguments)
    logged = {name: value for name, value in theirs.metrics.items() if name.startswith("sampling/")}
    assert len(logged) == 5
    assert {name: ours.metrics[name] for name in logged} == pytest.approx(logged, rel=1e-6)
    unbounded = {**config, "vllm_importance_sampling_clip_min": 0.0, "vllm_importance_sampling_clip_max": 1e9}
    assert theirs.loss != compare(rollout, "dapo", unbounded, {})[0].loss  # the bounds act here

"""Where ours differs from TRL 1.16 on purpose: what TRL's installed code does, and the right value by formula.

First the cases that TRL gets wrong, then those where its definition is another one.
"""

from __future__ import annotations

import math

import pytest
import torch

from metagrpo.kernels.advantages import group_advantages
from metagrpo.kernels.head import BLOCK, linear_logprob
from metagrpo.kernels.logprob import token_logprob
from metagrpo.kernels.losses import loss_normalizer, policy_loss

from . import trl_reference as reference
from .trl_reference import Rollout, assert_same, compare, make_rollout

pytestmark = reference.MARKS

LENGTHS = (7, 3, 11, 1, 6, 4)


def test_one_masked_logit_makes_trls_entropy_nan():
    """Of a quarter and three quarters, ``log 4 − (3/4) log 3``."""
    logits = torch.tensor([[[0.0, -math.inf, math.log(3.0)]]])
    targets = torch.tensor([[0]])
    assert reference.entropy_from_logits(logits).isnan().all()
    logprob, entropy = token_logprob(logits, targets, return_entropy=True)
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-6)
    assert logprob.item() == pytest.approx(-math.log(4), rel=1e-6)


def test_a_first_block_of_masked_logits_makes_trls_fused_head_nan():
    """A bias of −inf masks all of the vocabulary but its last two entries, of a quarter and three quarters."""
    hidden, weight = torch.zeros(1, 8), torch.zeros(BLOCK + 2, 8)
    bias = torch.cat((torch.full((BLOCK,), -math.inf), torch.tensor([0.0, math.log(3.0)]))).requires_grad_()
    targets = torch.tensor([BLOCK])
    theirs = reference.fused_head(hidden, weight, bias, targets, 1.0, BLOCK, None, 1.0, ("entropy",))
    assert theirs[0].isnan().all() and theirs[1].isnan().all()

    logprob, entropy = linear_logprob(hidden, weight, targets, bias=bias, return_entropy=True)
    assert logprob.item() == pytest.approx(-math.log(4), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(4) - 0.75 * math.log(3), rel=1e-6)
    (grad,) = torch.autograd.grad(logprob.sum(), bias)
    torch.testing.assert_close(grad, torch.cat((torch.zeros(BLOCK), torch.tensor([0.75, -0.75]))))


def test_trl_rounds_log_probs_of_bf16_logits_to_bf16():
    """bf16 has 8 bits: at a log-prob of −11 the nearest one may be 1/32 away, 3% of a ratio."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 64, 1024, generator=generator).mul(2).bfloat16()
    targets = torch.randint(1024, (1, 64), generator=generator)
    exact = logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert (reference.selective_log_softmax(logits, targets) - exact).abs().max() > 1 / 64
    torch.testing.assert_close(token_logprob(logits, targets).double(), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.7, 123.456])
def test_trl_gives_equal_rewards_an_advantage(reward, scale):
    """The fp32 mean of twelve equal rewards is another number, and the residue is divided by 1e-4."""
    rollout = make_rollout(0, (1,) * 12, group=12, rewards=[reward] * 12).astype(torch.float32)
    theirs = reference.grpo(rollout, scale_rewards=scale).score()["advantages"]
    assert theirs.count_nonzero() == 12
    if scale != "none":
        assert theirs.abs().min() > (0.1 if reward > 1 else 0.001)
    ours = group_advantages(torch.full((12,), reward), torch.zeros(12, dtype=torch.int64), scale=scale, eps=1e-4)
    assert torch.equal(ours, torch.zeros(12))


@pytest.mark.parametrize("kind", ["grpo", "dapo", "sapo"])
def test_a_ratio_that_overflows_makes_trls_gradient_nan(kind):
    """A token of advantage 0, 100 nats from the old policy, beside one on policy of advantage 1: a mean of half."""
    rollout = make_rollout(0, (1, 1), group=2).astype(torch.float32)
    rollout.logprob.copy_(torch.tensor([[-1.0], [-2.0]]))
    rollout.old.copy_(torch.tensor([[-101.0], [-2.0]]))
    theirs, ours = compare(rollout, kind, {}, {}, torch.tensor([0.0, 1.0]))
    assert theirs.logprob_grad[0].isnan()
    assert theirs.loss.isnan() or kind == "sapo"
    term = -2.0 if kind == "sapo" else -1.0  # −(4/τ) σ(0) and −1
    assert ours.loss.item() == pytest.approx(term / 2)
    torch.testing.assert_close(ours.logprob_grad, torch.tensor([[0.0], [-0.5]]))


def test_trls_bnpo_depends_on_the_cut_into_micro_batches():
    """Its mean is over a micro-batch's tokens; ours is dapo's, over those of the step, however it is cut."""
    rollout = make_rollout(20, (1, 2, 1, 9, 12, 7))

    def trl_gradient(kind: str, parts: int) -> torch.Tensor:
        trainer = reference.grpo(rollout, loss_type=kind, micro_batches=parts)
        logprob = rollout.logprob.clone().requires_grad_()
        loss = trainer.step(trainer.score(), logprob, rollout.entropy, parts)
        return torch.autograd.grad(loss, logprob)[0]

    whole = trl_gradient("bnpo", 1)
    assert (trl_gradient("bnpo", 2) / whole).nan_to_num(1).max() > 3  # the short half's tokens
    torch.testing.assert_close(trl_gradient("dapo", 2), whole, rtol=1e-11, atol=1e-14)

    mask, ids = rollout.trained(), rollout.rows()
    logprob = rollout.logprob.clone().requires_grad_()
    advantages = reference.grpo(rollout).score()["advantages"][ids]
    for half in (ids < 3, ids >= 3):
        policy_loss(
            logprob[mask][half], advantages[half], sequence_ids=ids[half], old_logprob=rollout.old[mask][half],
            normalizer=loss_normalizer("bnpo", mask.sum(1)), loss_type="bnpo",
        )[0].backward()  # fmt: skip
    torch.testing.assert_close(logprob.grad, whole, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", ["grpo", "sapo", "dr_grpo", "luspo"])
def test_trl_counts_a_masked_completion_as_a_sequence(kind):
    """A completion without a trained token scales TRL's loss by 5/6; ours is that of the other five."""
    rollout = make_rollout(21, LENGTHS, truncated=(2,))
    mask = rollout.trained()
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counted = {"normalizer": loss_normalizer(kind, mask.sum(1), max_completion_length=reference.BUDGET)}
    theirs, ours = compare(rollout, kind, {}, counted, advantages)

    kept = [0, 1, 3, 4, 5]
    names = ("logprob", "old", "ref", "sampler", "entropy")
    others = Rollout(
        [LENGTHS[row] for row in kept],
        **{name: getattr(rollout, name)[kept][:, :7] for name in names},
        rewards=[0.0] * 5,
        group=5,
    )
    five, _ = compare(others, kind, {}, {}, advantages[kept])
    torch.testing.assert_close(theirs.loss, five.loss * 5 / 6, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(ours.loss, five.loss, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(ours.logprob_grad[kept][:, :7], five.logprob_grad, rtol=1e-11, atol=1e-14)


def test_trl_trains_a_token_that_the_sampler_failed_on():
    """TRL takes 1 for the weight of a NaN; ours drops the token, as if its advantage were 0, and counts it."""
    rollout = make_rollout(22, LENGTHS)
    rollout.sampler[2, 4] = math.nan
    advantages = torch.ones(6, 11, dtype=torch.float64)
    config = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    arguments = {
        "rollout_logprob": rollout.sampler, "rollout_correction": "token_truncate", "rollout_cap": 3.0,
    }  # fmt: skip
    kept, ours = compare(
        rollout, "dapo", {**config, "epsilon_high": 99.0}, {**arguments, "epsilon_high": 99.0}, advantages
    )
    ratio = (rollout.logprob - rollout.old)[2, 4].exp()
    torch.testing.assert_close(kept.logprob_grad[2, 4], -ratio / 32, rtol=1e-12, atol=0.0)
    assert ours.logprob_grad[2, 4] == 0
    assert ours.metrics["sampling/dropped_mean"] == 1 / 32

    advantages[2, 4] = 0
    assert_same(*compare(rollout, "dapo", config, arguments, advantages))


@pytest.mark.parametrize("kind", ["grpo", "luspo"])
def test_trl_spreads_a_tokens_weight_over_its_sequence(kind):
    """Under a sequence ratio ``s``, with a weight ``w_t`` a token.

    TRL differentiates ``s Σ_t w_t A`` through the whole of ``s``, so every token gets the mean weight; as a token's
    own weight ours multiplies its own gradient, ``w_t s A``, which is GSPO-token's form. Values, and the sum of the
    gradient over a sequence, are the same.
    """
    rollout = make_rollout(23, LENGTHS)
    clip = {"epsilon": 0.9, "epsilon_high": 9.0}
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = {
        "importance_sampling_level": "sequence", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate",
    }  # fmt: skip
    arguments = {
        "importance": "sequence", "rollout_logprob": rollout.sampler, "rollout_correction": "token_truncate",
        "rollout_cap": 3.0,
    }  # fmt: skip
    theirs, ours = compare(rollout, kind, {**config, **clip}, {**arguments, **clip}, advantages)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0.0)

    weight = (rollout.old - rollout.sampler).exp().clamp(max=3)
    for row, length in enumerate(LENGTHS):
        here = (row, slice(0, length))
        ratio = (rollout.logprob - rollout.old)[here].mean().exp()
        scale = -ratio * advantages[row] / (6 * length if kind == "grpo" else 6)
        torch.testing.assert_close(ours.logprob_grad[here], scale * weight[here], rtol=1e-10, atol=0.0)
        torch.testing.assert_close(
            theirs.logprob_grad[here], (scale * weight[here].mean()).expand(length), rtol=1e-10, atol=0.0
        )


def test_trl_spreads_the_ratio_of_a_corrected_kl_over_its_sequence():
    """``β s k_t``, ``k_t`` the k3 estimate: as above, a token's own in ours, the sequence's mean in TRL."""
    rollout = make_rollout(24, LENGTHS)
    theirs, ours = compare(
        rollout,
        "grpo",
        {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
        {"importance": "sequence", "beta": 0.1, "bias_corrected_kl": True, "ref_logprob": rollout.ref},
        torch.zeros(6, dtype=torch.float64),
    )
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0.0)
    x = rollout.ref - rollout.logprob
    kl, own = x.exp() - x - 1, 1 - x.exp()  # and its derivative by log π
    for row, length in enumerate(LENGTHS):
        here = (row, slice(0, length))
        scale = 0.1 * (rollout.logprob - rollout.old)[here].mean().exp() / (6 * length)
        torch.testing.assert_close(ours.logprob_grad[here], scale * (kl + own)[here], rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(
            theirs.logprob_grad[here], scale * (kl[here].mean() + own[here]), rtol=1e-9, atol=1e-14
        )


def test_trl_averages_the_entropy_bonus_over_tokens_whatever_the_type():
    """Ours is a term of each token like the others: in ``grpo``, a mean of the means of sequences."""
    theirs, ours = compare(make_rollout(25, LENGTHS), "grpo", {"entropy_coef": 0.3}, {"entropy_coef": 0.3})
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(theirs.entropy_grad[row, :length], torch.full((length,), -0.3 / 32).double())
        torch.testing.assert_close(ours.entropy_grad[row, :length], torch.full((length,), -0.3 / 6 / length).double())


def test_trl_counts_clipped_sequences_and_ours_their_tokens():
    """One token clipped, a sequence of three not."""
    rollout = make_rollout(26, (1, 3), group=2)
    rollout.old.copy_(rollout.logprob)
    rollout.old[0, 0] -= 1
    theirs, ours = compare(rollout, "luspo", {}, {}, torch.ones(2, dtype=torch.float64))
    assert theirs.metrics["clip_ratio/high_mean"] == 1 / 2
    assert ours.metrics["clip_ratio/high_mean"] == 1 / 4

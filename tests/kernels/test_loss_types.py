"""Each loss type against the oracle and against numbers worked by hand, and the registry."""

from __future__ import annotations

import math

import pytest
import torch

from metagrpo.kernels.loss_types import _REGISTRY, covariance, get_loss, select_tokens, top_covariance
from metagrpo.kernels.losses import loss_names, loss_normalizer, loss_options, policy_loss, register_loss

from . import loss_oracle as oracle
from .loss_runs import LOSSES, SELECTED, run, tensor

STOP_GRADIENT = ("cispo", "vespo", "dppo", "dppo_kl", "clip_cov")  # value and gradient belong to different functions


def check(kind, case, extra=None, weights=None, **arguments):
    """Value and gradient against the oracle."""
    case.options = {"selected": SELECTED} if kind in ("clip_cov", "kl_cov") else {}
    logprob = tensor(case.logprob).requires_grad_()
    loss, _ = run(kind, case, logprob, **arguments)
    (gradient,) = torch.autograd.grad(loss, logprob)
    expected = oracle.loss(kind, case, case.logprob, case.logprob, extra, weights)
    slope = oracle.gradient(lambda x: oracle.loss(kind, case, x, case.logprob, extra, weights), case.logprob)
    assert loss.item() == pytest.approx(expected, rel=1e-11)
    torch.testing.assert_close(gradient, tensor(slope), rtol=1e-6, atol=1e-8)


def test_all_types_are_tested():
    assert set(loss_names()) == set(LOSSES)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient_against_the_oracle(kind, seed):
    check(kind, oracle.make_case(seed, [3, 1, 5, 4, 2]))


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "vespo"])
def test_weighted_with_kl_and_entropy_against_the_oracle(kind):
    case = oracle.make_case(5, [3, 1, 5, 4, 2])
    groups = list(case.sequences().values())
    weights = oracle.correction("token_truncate", case.old, case.rollout, groups, 1.2, 0.0)

    def extra(i, logprob):
        x = case.ref[i] - logprob[i]
        return 0.3 * (math.exp(x) - x - 1) - 0.05 * case.entropy[i]

    check(
        kind, case, extra, weights,
        ref_logprob=tensor(case.ref), rollout_logprob=tensor(case.rollout), entropy=tensor(case.entropy),
        beta=0.3, entropy_coef=0.05, rollout_correction="token_truncate", rollout_cap=1.2,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate", "sequence_mask", "icepop", "geometric_mask"])
def test_corrections_weight_the_terms(mode):
    case = oracle.make_case(8, [3, 1, 5, 4, 2])
    floor = 1 / 1.1 if mode in ("icepop", "geometric_mask") else 0.0
    weights = oracle.correction(mode, case.old, case.rollout, list(case.sequences().values()), 1.1, floor)
    assert 0.0 in weights or mode == "sequence_truncate"  # the case has something to mask
    check(
        "grpo", case, None, weights,
        rollout_logprob=tensor(case.rollout), rollout_correction=mode, rollout_cap=1.1,
    )  # fmt: skip


def test_vespo_takes_the_correction_into_its_weight():
    case = oracle.make_case(7, [2, 3])
    logprob = tensor(case.logprob).requires_grad_()
    loss, _ = run(
        "vespo", case, logprob,
        rollout_logprob=tensor(case.rollout), rollout_correction="token_truncate", rollout_cap=1.2,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, logprob)
    for members in case.sequences().values():
        weight = math.prod(
            math.exp(case.logprob[i] - case.old[i]) * min(math.exp(case.old[i] - case.rollout[i]), 1.2)
            for i in members
        )
        for i in members:
            k, lam = (2.0, 3.0) if case.advantages[i] >= 0 else (3.0, 2.0)
            expected = -(weight**k) * math.exp(lam * (1 - weight)) * case.advantages[i] / case.normalizer
            assert gradient[i].item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["gspo", "luspo", "gmpo"])
def test_gradient_is_that_of_the_true_sequence_objective(kind):
    """GSPO, LUSPO and GMPO with one advantage a sequence and nothing stopped."""
    case = oracle.make_case(8, [3, 1, 5, 2], one_advantage_a_sequence=True, spread=0.3)

    def objective(logprob):
        total = 0.0
        for members in case.sequences().values():
            advantage = case.advantages[members[0]]
            if kind == "gmpo":
                product = 1.0
                for i in members:
                    ratio, edge = math.exp(logprob[i] - case.old[i]), (-case.epsilon, case.epsilon_high)
                    clipped = min(max(ratio, math.exp(edge[0])), math.exp(edge[1]))
                    product *= abs(min(ratio * advantage, clipped * advantage)) / abs(advantage)
                total -= advantage * product ** (1 / len(members))
            else:
                term = oracle.surrogate(case, oracle.geometric_mean_ratio(case, logprob, members), advantage)
                total += term * (len(members) if kind == "luspo" else 1)
        return total / case.normalizer

    logprob = tensor(case.logprob).requires_grad_()
    loss, _ = run(kind, case, logprob)
    (gradient,) = torch.autograd.grad(loss, logprob)
    assert loss.item() == pytest.approx(objective(case.logprob), rel=1e-11)
    torch.testing.assert_close(gradient, tensor(oracle.gradient(objective, case.logprob)), rtol=1e-6, atol=1e-8)


def test_sequence_importance_on_grpo_is_gspo():
    case = oracle.make_case(9, [3, 2, 4])
    logprob = tensor(case.logprob)
    assert torch.equal(run("grpo", case, logprob, importance="sequence")[0], run("gspo", case, logprob)[0])


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind not in STOP_GRADIENT])
def test_gradcheck(kind):
    """The types whose gradient is the derivative of their value; one advantage a sequence, as sequence ratios ask."""
    case = oracle.make_case(3, [3, 1, 4], one_advantage_a_sequence=True)
    ref, entropy = tensor(case.ref), tensor(case.entropy).requires_grad_()

    def function(logprob, entropy):
        return run(kind, case, logprob, ref_logprob=ref, beta=0.1, entropy=entropy, entropy_coef=0.2)[0]

    assert torch.autograd.gradcheck(function, (tensor(case.logprob).requires_grad_(), entropy))


@pytest.mark.parametrize("kind", ["cispo", "vespo", "dppo", "dppo_kl"])
def test_stop_gradient_types_have_the_paper_s_coefficient(kind):
    """On policy each of them is REINFORCE: the gradient is −A / normaliser."""
    case = oracle.make_case(4, [3, 1, 4])
    logprob = tensor(case.logprob).requires_grad_()
    loss, _ = run(kind, case, logprob, old_logprob=None)
    (gradient,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(gradient, -tensor(case.advantages) / case.normalizer, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_ratio_is_one_and_gradient_is_the_policy_gradient(kind):
    case = oracle.make_case(10, [3, 1, 5])
    logprob = tensor(case.logprob, torch.float32).requires_grad_()
    loss, sums = run(
        kind, case, logprob, old_logprob=None, **({"selected": torch.zeros(9).bool()} if "cov" in kind else {})
    )
    (gradient,) = torch.autograd.grad(loss, logprob)
    lengths = {name: len(members) for name, members in case.sequences().items()}
    share = [1 / lengths[name] if kind in oracle.GROUPED else 1.0 for name in case.ids]
    expected = [-a * c / case.normalizer for a, c in zip(case.advantages, share, strict=True)]
    torch.testing.assert_close(gradient.double(), tensor(expected), rtol=1e-6, atol=0.0)
    assert sums["ratio/mean"].item() == 9.0  # exactly 1 for each of nine tokens


# ratio r, advantage A, arguments -> loss, and its derivative with respect to log π (r·∂l/∂r); ε = 0.2, normaliser 1
BY_HAND = [
    (1.1, 2.0, {}, -2.2, -2.2),  # inside
    (1.5, 2.0, {}, -2.4, 0.0),  # clipped at 1.2
    (0.5, 2.0, {}, -1.0, -1.0),  # below the range, but pulling back up
    (0.9, -2.0, {}, 1.8, 1.8),  # inside
    (0.5, -2.0, {}, 1.6, 0.0),  # clipped at 0.8
    (1.5, -2.0, {}, 3.0, 3.0),  # above the range, pulling back down
    (1.25, 2.0, {"epsilon_high": 0.3}, -2.5, -2.5),  # clip-higher
    (10.0, -2.0, {}, 20.0, 20.0),  # unbounded
    (10.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
    (2.0, -2.0, {"dual_clip": 3.0}, 4.0, 4.0),
    (10.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),  # positive advantages have the plain clip
    (10.0, -2.0, {"delta": 4.0}, 8.0, 0.0),
    (3.0, -2.0, {"delta": 4.0}, 6.0, 6.0),
    (10.0, 2.0, {"delta": 4.0}, -2.4, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "arguments", "value", "slope"), BY_HAND)
def test_clip_by_hand(ratio, advantage, arguments, value, slope):
    logprob = tensor([math.log(ratio) - 3.0]).requires_grad_()
    loss, _ = policy_loss(
        logprob, tensor([advantage]), sequence_ids=torch.tensor([0]), normalizer=1.0, old_logprob=tensor([-3.0]),
        **arguments,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-12)
    assert logprob.grad.item() == pytest.approx(slope, rel=1e-12, abs=1e-15)


def test_options_reach_their_loss():
    arguments = {"sequence_ids": torch.tensor([0]), "normalizer": 1.0, "old_logprob": tensor([-2.0])}
    logprob, one = tensor([-2.0 + math.log(4.0)]), tensor([1.0])

    def loss(kind, **options):
        return policy_loss(logprob, one, loss_type=kind, **arguments, **options)[0].item()

    assert loss("cispo", ratio_max=3.0) == pytest.approx(-3.0 * logprob.item(), rel=1e-12)
    assert loss("cispo", ratio_min=4.5) == pytest.approx(-4.5 * logprob.item(), rel=1e-12)
    gate = 4 / 0.5 / (1 + math.exp(-0.5 * 3))
    assert loss("sapo", temperature_pos=0.5) == pytest.approx(-gate, rel=1e-12)
    phi = 4.0**1.5 * math.exp(0.5 * (1 - 4))
    assert loss("vespo", k_pos=1.5, lambda_pos=0.5) == pytest.approx(-phi * logprob.item(), rel=1e-12)
    moved = math.exp(logprob.item()) - math.exp(-2.0)
    assert loss("dppo", threshold_high=moved * 0.99) == 0.0
    assert loss("dppo", threshold_high=moved * 1.01, ratio_max=2.0) == pytest.approx(-2 * logprob.item(), rel=1e-12)
    assert loss("kl_cov", kl_coef=0.5) == pytest.approx(-4 + 0.5 * math.log(4), rel=1e-12)


def test_clip_cov_draws_its_share_between_the_bounds():
    """Covariances −1, 0 and 1 by hand: 300 tokens of each; of those in (0.5, 2) a tenth of the batch is drawn."""
    logprob = torch.tensor([-3.0, -2.0, -1.0]).repeat(300)
    advantages = torch.tensor([1.0, 0.0, 1.0]).repeat(300) - 1.0
    value = covariance(logprob, advantages)
    torch.testing.assert_close(value, torch.tensor([-1 / 3, 0.0, 1 / 3]).repeat(300))
    _, sums = policy_loss(
        logprob, advantages, sequence_ids=torch.arange(900), normalizer=900, loss_type="clip_cov", share=0.1,
        covariance_low=0.3, covariance_high=2.0,
    )  # fmt: skip
    assert sums["cov/selected_mean"].item() == 90
    _, sums = policy_loss(
        logprob, advantages, sequence_ids=torch.arange(900), normalizer=900, loss_type="clip_cov", share=0.1,
    )  # fmt: skip
    assert sums["cov/selected_mean"].item() == 0  # none lies between 1 and 5


def test_clip_cov_draws_only_eligible_tokens():
    logprob = torch.tensor([-3.0, -2.0, -1.0]).repeat(10).requires_grad_()
    advantages = torch.tensor([1.0, 0.5, 1.0]).repeat(10)
    loss, _ = policy_loss(
        logprob, advantages, sequence_ids=torch.arange(30), normalizer=1, loss_type="clip_cov", share=1.0,
        covariance_low=0.1, covariance_high=2.0,
    )  # fmt: skip
    loss.backward()
    # mean log π = −2, mean A = 5/6: covariances −1/6, 0, 1/6; all of the third kind are drawn
    assert logprob.grad.tolist() == [-1.0, -0.5, 0.0] * 10


def test_kl_cov_penalises_the_tokens_of_largest_covariance():
    logprob = tensor([-3.0, -2.0, -1.0, -2.0]).requires_grad_()
    old = logprob.detach() - tensor([0.1, 0.1, 0.1, 0.1])
    advantages = tensor([1.0, -1.0, 1.0, -1.0])  # covariances −1, 0, 1, 0
    loss, sums = policy_loss(
        logprob, advantages, sequence_ids=torch.arange(4), normalizer=1, loss_type="kl_cov", share=0.3,
        old_logprob=old,
    )  # fmt: skip
    loss.backward()
    r = math.exp(0.1)
    torch.testing.assert_close(logprob.grad, tensor([-r, r, -r + 1.0, r]))
    assert sums["cov/selected_mean"].item() == 1


def test_options_can_be_listed():
    assert loss_options("cispo") == {"ratio_min": 0.0, "ratio_max": 5.0}
    assert loss_options("dapo") == {}
    for name in loss_names():
        assert not set(loss_options(name)) & {"epsilon", "epsilon_high", "delta", "dual_clip"}


@pytest.fixture
def registry():
    saved = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(saved)


def test_a_user_s_loss_is_one_function(registry):
    @register_loss("halved", aggregation="sequence_mean")
    def halved(batch, *, epsilon_high, factor=0.5):
        return -factor * batch.ratio * batch.advantages, {"halved/bound": torch.full_like(batch.ratio, epsilon_high)}

    assert loss_options("halved") == {"factor": 0.5}
    logprob = torch.zeros(3, requires_grad=True)
    loss, sums = policy_loss(
        logprob, torch.tensor([1.0, 2.0, 4.0]), sequence_ids=torch.tensor([0, 0, 1]), normalizer=2.0,
        loss_type="halved", epsilon=0.3, factor=0.25,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(-0.25 * (1.5 + 4) / 2)
    assert logprob.grad.tolist() == pytest.approx([-0.0625, -0.125, -0.5])
    assert sums["halved/bound"].item() == pytest.approx(0.9, rel=1e-6)
    assert loss_normalizer("halved", torch.tensor([2, 1])).item() == 2


def test_bad_registrations_are_refused(registry):
    with pytest.raises(ValueError, match="already registered"):
        register_loss("dapo")(lambda batch: (batch.ratio, {}))
    with pytest.raises(TypeError, match="needs a default"):

        @register_loss("no_default")
        def no_default(batch, *, option): ...

    with pytest.raises(TypeError, match="keyword-only"):

        @register_loss("positional")
        def positional(batch, option=1.0): ...

    with pytest.raises(TypeError, match="its options must hold 'selected'"):

        @register_loss("flags_for_nobody", select=top_covariance)
        def flags_for_nobody(batch, *, share=0.1): ...

    with pytest.raises(TypeError, match="and those of top_covariance"):

        @register_loss("no_share", select=top_covariance)
        def no_share(batch, *, selected=None): ...

    assert set(loss_names()) == set(LOSSES)


def test_which_losses_select_tokens():
    assert {name for name in LOSSES if get_loss(name).select} == {"clip_cov", "kl_cov"}
    with pytest.raises(ValueError, match="'dapo' selects no tokens"):
        select_tokens("dapo", tensor([-1.0]), tensor([1.0]))


def test_select_tokens_has_the_loss_s_options_and_defaults():
    logprob, advantages = tensor([-3.0, -2.0, -1.0, -2.0]), tensor([1.0, -1.0, 1.0, -1.0])  # covariances −1, 0, 1, 0
    assert select_tokens("kl_cov", logprob, advantages).tolist() == [False, False, True, False]
    assert select_tokens("kl_cov", logprob, advantages, share=1.0, kl_coef=2.0).all()
    drawn = select_tokens("clip_cov", logprob, advantages, share=1.0, covariance_low=-0.5)
    assert drawn.tolist() == [False, True, True, True]
    assert not select_tokens("clip_cov", logprob, advantages, share=1.0).any()  # none lies between 1 and 5


def test_default_level_of_each_type():
    assert {name for name in LOSSES if get_loss(name).importance == "sequence"} == {"gspo", "luspo"}


def test_a_selection_over_the_whole_batch_makes_micro_batches_add_up():
    case = oracle.make_case(19, [3, 5, 4])
    logprob, advantages, ids = tensor(case.logprob), tensor(case.advantages), torch.tensor(case.ids)
    selected = select_tokens("kl_cov", logprob, advantages, share=0.25)
    ranked = covariance(logprob, advantages).sort(descending=True).indices
    assert set(selected.nonzero().flatten().tolist()) == set(ranked[:3].tolist())

    def loss(keep, **options):
        return policy_loss(
            logprob[keep], advantages[keep], sequence_ids=ids[keep], normalizer=12.0, loss_type="kl_cov",
            old_logprob=tensor(case.old)[keep], **options,
        )[0]  # fmt: skip

    everything = torch.ones(12, dtype=torch.bool)
    first = ids == case.ids[0]
    parts = sum(loss(keep, selected=selected[keep]) for keep in (first, ~first))
    torch.testing.assert_close(parts, loss(everything, share=0.25), rtol=1e-13, atol=0.0)

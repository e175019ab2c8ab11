"""policy_loss whatever the type: additivity, order, empty and faulty input, numerics, normalisers, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from metagrpo.kernels.kl import MAX_LOG_RATIO
from metagrpo.kernels.losses import loss_normalizer, policy_loss

from . import loss_oracle as oracle
from .loss_runs import LOSSES, options_of, run, tensor


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_add_up(kind):
    case = oracle.make_case(12, [3, 1, 5, 4, 2, 6])
    everything = {
        "old_logprob": tensor(case.old), "ref_logprob": tensor(case.ref), "rollout_logprob": tensor(case.rollout),
        "entropy": tensor(case.entropy), "sequence_ids": torch.tensor(case.ids), **options_of(kind, 21),
    }  # fmt: skip
    settings = {"beta": 0.1, "entropy_coef": 0.1, "rollout_correction": "token_truncate", "rollout_cap": 1.2}
    logprob = tensor(case.logprob).requires_grad_()

    def part(keep):
        taken = {name: value[keep] for name, value in everything.items()}
        return policy_loss(
            logprob[keep], tensor(case.advantages)[keep], normalizer=13, loss_type=kind, **taken, **settings
        )[0]

    ids = torch.tensor(case.ids)
    whole = part(torch.ones(21, dtype=torch.bool))
    names = sorted(set(case.ids))
    pieces = sum(part(torch.isin(ids, torch.tensor(names[i : i + 2]))) for i in range(0, 6, 2))
    torch.testing.assert_close(pieces, whole, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, logprob)[0] for loss in (pieces, whole)), rtol=1e-13, atol=1e-16
    )


@pytest.mark.parametrize("kind", ["grpo", "sapo", "dapo"])
def test_split_sequences_add_up_with_their_lengths(kind):
    case = oracle.make_case(13, [4, 6])
    logprob, ids = tensor(case.logprob), torch.tensor(case.ids)
    lengths = torch.tensor([case.ids.count(name) for name in case.ids])
    whole = run(kind, case, logprob)[0]
    halves = [
        policy_loss(
            logprob[cut], tensor(case.advantages)[cut], sequence_ids=ids[cut], normalizer=case.normalizer,
            old_logprob=tensor(case.old)[cut], sequence_lengths=lengths[cut], loss_type=kind, epsilon_high=0.28,
        )[0]
        for cut in (slice(0, 5), slice(5, 10))
    ]  # fmt: skip
    torch.testing.assert_close(sum(halves), whole, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("kind", LOSSES)
def test_order_of_tokens_does_not_matter(kind):
    case = oracle.make_case(14, [3, 1, 5, 4])
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    arguments = {
        "sequence_ids": torch.tensor(case.ids), "old_logprob": tensor(case.old),
        "rollout_logprob": tensor(case.rollout),
        **options_of(kind, 13),
    }  # fmt: skip
    losses = []
    for index in (torch.arange(13), order):
        moved = {name: value[index] for name, value in arguments.items()}
        losses.append(
            policy_loss(
                tensor(case.logprob)[index], tensor(case.advantages)[index], normalizer=7.0, loss_type=kind,
                rollout_correction="token_mask", **moved,
            )[0]
        )  # fmt: skip
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-13, atol=0.0)


def test_aggregations_by_hand():
    """On policy l_t = −A_t. Sequence a: A = 1, 2 tokens; sequence b: A = −3, 4 tokens; budget 10."""
    advantages = tensor([1.0] * 2 + [-3.0] * 4)
    lengths = torch.tensor([2, 4])
    expected = {
        "grpo": (-1 + 3) / 2, "gspo": (-1 + 3) / 2, "dapo": (-2 + 12) / 6, "bnpo": (-2 + 12) / 6,
        "dr_grpo": (-2 + 12) / 20, "luspo": (-2 + 12) / 2,
    }  # fmt: skip
    for kind, value in expected.items():
        normalizer = loss_normalizer(kind, lengths, max_completion_length=10)
        loss, _ = policy_loss(
            torch.full((6,), -1.0), advantages, sequence_ids=torch.tensor([4, 4, 2, 2, 2, 2]), normalizer=normalizer,
            loss_type=kind,
        )  # fmt: skip
        assert loss.item() == pytest.approx(value, rel=1e-6), kind


def test_normalizer_counts_only_what_is_trained_and_adds_over_ranks():
    lengths = torch.tensor([3, 0, 5, 1])
    assert loss_normalizer("dapo", lengths).item() == 9
    assert loss_normalizer("grpo", lengths).item() == 3
    assert loss_normalizer("luspo", lengths).item() == 3
    assert loss_normalizer("dr_grpo", lengths, max_completion_length=100).item() == 300
    for kind in LOSSES:
        halves = [loss_normalizer(kind, lengths[cut], max_completion_length=7) for cut in (slice(2), slice(2, 4))]
        assert torch.equal(halves[0] + halves[1], loss_normalizer(kind, lengths, max_completion_length=7))
    with pytest.raises(ValueError, match="max_completion_length"):
        loss_normalizer("dr_grpo", lengths)


@pytest.mark.parametrize("normalizer", [0, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("kind", LOSSES)
def test_no_tokens_give_a_zero_loss_with_a_graph(kind, normalizer):
    logprob = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    loss, sums = policy_loss(
        logprob, nothing, sequence_ids=torch.zeros(0, dtype=torch.int64), normalizer=normalizer, loss_type=kind,
        old_logprob=nothing, ref_logprob=nothing, rollout_logprob=nothing, entropy=nothing, beta=0.1,
        entropy_coef=0.1, rollout_correction="token_mask",
    )  # fmt: skip
    loss.backward()
    assert loss.item() == 0.0
    assert logprob.grad.shape == (0,)
    assert sums["tokens"].item() == 0 and sums["sequences"].item() == 0


@pytest.mark.parametrize("kind", LOSSES)
def test_zero_advantage_has_exactly_no_gradient_at_any_ratio(kind):
    logprob = torch.tensor([-1.0, -1e4, -0.1, 0.0], requires_grad=True)
    old = torch.tensor([-1.0, -0.1, -1e4, -1e30])
    loss, _ = policy_loss(
        logprob, torch.zeros(4), sequence_ids=torch.arange(4), normalizer=4.0, old_logprob=old, loss_type=kind,
        rollout_logprob=old, rollout_correction="token_truncate",
        **({"selected": torch.zeros(4).bool()} if "cov" in kind else {}),
    )  # fmt: skip
    loss.backward()
    assert loss.item() == 0.0
    assert logprob.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_ratios_stay_finite(kind):
    logprob = torch.tensor([-1.0, -500.0, -0.1, -0.0], requires_grad=True)
    old = torch.tensor([-500.0, -1.0, -300.0, -0.1])
    loss, _ = policy_loss(
        logprob, torch.tensor([1.0, -1.0, -2.0, 0.0]), sequence_ids=torch.tensor([0, 0, 1, 1]), normalizer=4.0,
        old_logprob=old, ref_logprob=old, beta=0.1, loss_type=kind,
    )  # fmt: skip
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(logprob.grad).all()


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_faulty_rollout_logprob_drops_its_token_alone(kind, fault):
    """Also where it stands in for the old log-prob; the others are as if it had ratio 1 in their sequence."""
    case = oracle.make_case(15, [3, 4, 2])
    rollout = tensor(case.old)
    broken = rollout.clone()
    broken[4] = fault
    results = []
    for values in (broken, torch.where(torch.arange(9) == 4, tensor(case.logprob), rollout)):
        logprob = tensor(case.logprob).requires_grad_()
        loss, sums = run(kind, case, logprob, old_logprob=values, rollout_logprob=values)
        results.append((loss, torch.autograd.grad(loss, logprob)[0], sums))
    (loss, gradient, sums), (_, whole, _) = results
    assert math.isfinite(loss.item())
    assert gradient[4] == 0
    others = torch.arange(9) != 4
    torch.testing.assert_close(gradient[others], whole[others], rtol=1e-12, atol=0.0)
    assert sums["sampling/dropped_mean"].item() == 1
    assert sums["sampling/tokens"].item() == 8


def test_a_dropped_token_leaves_kl_and_entropy_too():
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 0.7], requires_grad=True)
    loss, _ = policy_loss(
        logprob, torch.ones(2), sequence_ids=torch.zeros(2, dtype=torch.int64), normalizer=2.0,
        rollout_logprob=torch.tensor([float("nan"), -2.0]), ref_logprob=torch.zeros(2), beta=1.0, entropy=entropy,
        entropy_coef=1.0,
    )  # fmt: skip
    loss.backward()
    assert logprob.grad[0] == 0 and logprob.grad[1] != 0
    assert entropy.grad.tolist() == [0.0, -0.5]


def test_a_model_s_nan_is_not_hidden():
    ids = torch.tensor([0])
    loss, _ = policy_loss(torch.tensor([float("nan")]), torch.ones(1), sequence_ids=ids, normalizer=1.0)
    assert math.isnan(loss.item())
    old = torch.tensor([float("nan")])
    loss, _ = policy_loss(torch.zeros(1), torch.ones(1), sequence_ids=ids, normalizer=1.0, old_logprob=old)
    assert math.isnan(loss.item())


def test_bias_corrected_kl_is_the_kl_times_the_ratio():
    """π = 1/2, old = 2/5, reference 1/4: ratio 1.25, k2 = log²2 / 2; derivative of r·k2 is r·(k2 + log 2)."""
    logprob = tensor([math.log(0.5)]).requires_grad_()
    loss, sums = policy_loss(
        logprob, tensor([0.0]), sequence_ids=torch.tensor([0]), normalizer=1.0, old_logprob=tensor([math.log(0.4)]),
        ref_logprob=tensor([math.log(0.25)]), beta=2.0, kl_estimator="k2", bias_corrected_kl=True,
    )  # fmt: skip
    loss.backward()
    half_square = math.log(2) ** 2 / 2
    assert loss.item() == pytest.approx(2 * 1.25 * half_square, rel=1e-12)
    assert logprob.grad.item() == pytest.approx(2 * 1.25 * (half_square + math.log(2)), rel=1e-12)
    assert sums["kl"].item() == pytest.approx(1.25 * half_square, rel=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_half_precision_inputs_are_computed_in_fp32(kind):
    case = oracle.make_case(16, [3, 4])
    half = {name: tensor(getattr(case, name)).bfloat16() for name in ("logprob", "old", "advantages")}
    losses = []
    for cast in (torch.Tensor.bfloat16, torch.Tensor.float):
        loss, _ = policy_loss(
            cast(half["logprob"]), cast(half["advantages"]), sequence_ids=torch.tensor(case.ids),
            normalizer=tensor(3.0), old_logprob=cast(half["old"]), loss_type=kind, **options_of(kind, 7),
        )  # fmt: skip
        losses.append(loss)
    assert losses[0].dtype == torch.float32
    assert torch.equal(*losses)


def test_inputs_are_not_written_to():
    case = oracle.make_case(17, [3, 4])
    given = [tensor(v) for v in (case.logprob, case.old, case.ref, case.rollout, case.entropy)]
    before = [value.clone() for value in given]
    logprob, old, ref, rollout, entropy = given
    for kind in LOSSES:
        run(
            kind, case, logprob, old_logprob=old, ref_logprob=ref, rollout_logprob=rollout, entropy=entropy, beta=1.0,
            entropy_coef=1.0, rollout_correction="token_mask",
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def arguments(**changed):
    return {"sequence_ids": torch.tensor([0, 0]), "normalizer": 2.0, **changed}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"loss_type": "gpso"}, ValueError, "did you mean 'gspo'"),
        ({"loss_type": "sapo", "temprature_pos": 1.0}, TypeError, "did you mean 'temperature_pos'"),
        ({"loss_type": "dapo", "epsilon_hi": 0.3}, TypeError, "did you mean 'epsilon_high'"),
        ({"loss_type": "dapo", "ratio_max": 3.0}, TypeError, "'dapo' has no option 'ratio_max'"),
        ({"importance": "sentence"}, ValueError, "'token' or 'sequence'"),
        ({"loss_type": "gmpo", "importance": "sequence"}, ValueError, "not defined for importance"),
        ({"loss_type": "cispo", "delta": 4.0}, ValueError, "'cispo' has no delta"),
        ({"loss_type": "gmpo", "dual_clip": 3.0}, ValueError, "'gmpo' has no dual_clip"),
        ({"delta": 1.1}, ValueError, "above 1 \\+ epsilon_high"),
        ({"dual_clip": 0.9}, ValueError, "above 1"),
        ({"beta": 0.1}, ValueError, "needs ref_logprob"),
        ({"entropy_coef": 0.1}, ValueError, "needs entropy"),
        ({"rollout_correction": "token_mask"}, ValueError, "needs rollout_logprob"),
        ({"rollout_logprob": torch.zeros(2), "rollout_correction": "ice"}, ValueError, "did you mean 'icepop'"),
        ({"ref_logprob": torch.zeros(2), "kl_estimator": "k4"}, ValueError, "did you mean 'k"),
        (
            {"loss_type": "vespo", "rollout_logprob": torch.zeros(2), "rollout_correction": "sequence_mask"},
            ValueError,
            "into its own weight",
        ),
        ({"old_logprob": torch.zeros(3)}, ValueError, r"old_logprob has shape \[3\], logprob has \[2\]"),
        ({"normalizer": torch.ones(2)}, ValueError, "normalizer must be 0-d"),
    ],
)
def test_refusals(changed, error, message):
    with pytest.raises(error, match=message):
        policy_loss(torch.zeros(2), torch.ones(2), **arguments(**changed))


def test_padded_logprobs_are_refused():
    with pytest.raises(ValueError, match="must be flat"):
        policy_loss(torch.zeros(2, 3), torch.ones(2, 3), **arguments())


def test_ratio_is_constant_beyond_the_largest_exponent():
    logprob = torch.tensor([0.0, 0.0], requires_grad=True)
    old = torch.tensor([-MAX_LOG_RATIO - 5, -MAX_LOG_RATIO + 5])
    loss, _ = policy_loss(logprob, -torch.ones(2), sequence_ids=torch.arange(2), normalizer=1.0, old_logprob=old)
    loss.backward()
    assert logprob.grad.tolist() == pytest.approx([0.0, math.exp(MAX_LOG_RATIO - 5)], rel=1e-5)


@pytest.mark.slow
def test_compiles_whole_and_not_anew_for_each_length():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(policy_loss, fullgraph=True, backend=counter)
    graphs = []
    for lengths in ([3, 2], [4, 3], [1, 5, 2], [2, 2, 2, 3], [6, 7]):
        case = oracle.make_case(18, lengths)
        logprob = tensor(case.logprob).requires_grad_()
        arguments = {
            "sequence_ids": torch.tensor(case.ids), "normalizer": tensor(case.normalizer),
            "old_logprob": tensor(case.old), "ref_logprob": tensor(case.ref), "beta": 0.1, "loss_type": "grpo",
            "rollout_logprob": tensor(case.rollout), "rollout_correction": "sequence_mask",
        }  # fmt: skip
        losses = [function(logprob, tensor(case.advantages), **arguments)[0] for function in (compiled, policy_loss)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logprob)[0] for loss in losses), rtol=1e-12, atol=0.0)
        graphs.append(counter.frame_count)
    assert graphs[1:] == [graphs[0] + 1] * 4  # a second length makes the size dynamic; no other one compiles

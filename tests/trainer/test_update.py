"""The update: its gradients are those of the loss's formula over plain log-probs, however the samples are cut."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from metagrpo.kernels.losses import loss_names
from metagrpo.trainer.config import Config
from metagrpo.trainer.errors import RunError
from metagrpo.trainer.model import Policy
from metagrpo.trainer.optimizer import Optimizer
from metagrpo.trainer.perf import StepTimer
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rollout.protocol import Request
from metagrpo.trainer.sample import Sample
from metagrpo.trainer.setup import recompute_activations
from metagrpo.trainer.update import Update, Updater, split_groups

from .tiny import (
    branch_samples,
    group_samples,
    make_sample,
    plain_logits,
    plain_logprobs,
    plain_model,
    relative_error,
    set_rollout_logprobs,
    tiny_config,
    tiny_policy,
)

TEMPERATURE = 0.8
LIMIT = 12  # tiny_config's max_completion_length


class Still(Optimizer):
    """An optimizer that writes down each update's gradient and moves nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gradients: list[dict[str, Tensor]] = []

    def step(self, update: int) -> tuple[float, float]:
        self.gradients.append({name: master.grad.clone() for name, master in self._masters.items()})
        return 0.0, 0.0


class Wandering(Still):
    """Writes down each update's gradient and moves the weights, by the same noise whatever the gradient is."""

    @torch.no_grad()
    def step(self, update: int) -> tuple[float, float]:
        wander(list(self._masters.values()), update)
        return super().step(update)


@torch.no_grad()
def wander(weights: list[nn.Parameter], update: int) -> None:
    """Add the noise of that update."""
    generator = torch.Generator().manual_seed(update)
    for weight in weights:
        weight += 0.02 * torch.randn(weight.shape, generator=generator)


def train(policy: Policy, samples: list[Sample], config: Config, step: int = 1) -> Update:
    """An update that moves the weights."""
    updates = config.train.steps * config.train.num_iterations * config.train.minibatches
    updater = Updater(policy, Optimizer(policy.trainable(), config.train, updates), config)
    return updater.update(samples, step, StepTimer(policy.device))


def gradients(
    policy: Policy, samples: list[Sample], config: Config, optimizer_class: type[Still] = Still
) -> tuple[list[dict[str, Tensor]], Update]:
    """The gradient of each optimizer step, and the report; :class:`Still` has all of them at the same weights."""
    optimizer = optimizer_class(policy.trainable(), config.train, 1)
    update = Updater(policy, optimizer, config).update(samples, 1, StepTimer(policy.device))
    return optimizer.gradients, update


def config_of(**sections: Any) -> Config:
    sections["rollout"] = {"temperature": TEMPERATURE, "max_completion_length": LIMIT, **sections.get("rollout", {})}
    return tiny_config(**sections)


def sampled_by_another(samples: list[Sample], model: nn.Module, seed: int = 0) -> list[Sample]:
    """Give the samples the log-probs of a sampler that is off by up to 1 nat, so that corrections have to act."""
    set_rollout_logprobs(samples, model, TEMPERATURE)
    rng = random.Random(seed)
    for sample in samples:
        sample.logprobs = [logprob + rng.uniform(-1, 0.5) for logprob in sample.logprobs]
    return samples


def group_batch(model: nn.Module, **fields: Any) -> list[Sample]:
    return sampled_by_another(group_samples(prompts=4, **fields), model)


def formula(
    model: nn.Module, samples: list[Sample], normalizer: float, *, sequence_mean: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient on policy: ``Σ −w A r / normalizer`` with r = 1 and ``w = min(π / π_sampler, 2)``."""
    model.zero_grad()
    loss = 0.0
    for sample in samples:
        if not sample.num_trained:
            continue
        logprob = plain_logprobs(model, sample, TEMPERATURE)
        old, rollout = logprob.detach(), torch.tensor(sample.logprobs, dtype=torch.float64)
        weight = (old - rollout).exp().clamp(max=2.0)
        advantages = torch.tensor(sample.advantages(), dtype=torch.float64)
        terms = -weight * advantages * (logprob - old).exp()
        part = (terms.mean() if sequence_mean else terms.sum()) / normalizer
        part.backward()
        loss += part.item()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def count_trained(samples: list[Sample]) -> int:
    return sum(sample.num_trained for sample in samples)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(actual[name], gradient) < tolerance, name


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", ["llama", "qwen2", "gemma2"])
def test_the_gradient_is_that_of_the_formula_however_samples_are_cut(shape: str, lora: bool) -> None:
    model = plain_model(shape, lora=lora)
    samples = sampled_by_another([*group_samples(), *branch_samples()], model)
    loss, expected = formula(model, samples, count_trained(samples))
    for budget, shares in ((10**6, True), (60, True), (1, True), (10**6, False), (60, False)):
        policy = tiny_policy(shape, lora=lora, shares=shares)
        (gradient,), update = gradients(policy, samples, config_of(train={"token_budget": budget}))
        assert_same(gradient, expected)
        assert update.metrics["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_the_gradient_under_gradient_checkpointing(shape: str) -> None:
    model = plain_model(shape, lora=True)
    samples = group_batch(model)
    _, expected = formula(model, samples, count_trained(samples))
    policy = tiny_policy(shape, lora=True)
    recompute_activations(policy.base)
    (gradient,), _ = gradients(policy, samples, config_of(train={"token_budget": 60}))
    assert_same(gradient, expected)


@pytest.mark.parametrize("budget", [10**6, 60, 1])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_one_denominator_an_optimizer_step(loss_type: str, budget: int) -> None:
    model = plain_model("llama")
    samples = group_batch(model)
    # One group without a gradient, and one completion that was cut off and is masked, advantage and all.
    for sample in samples[3:6]:
        sample.advantage = 0.0
    cut = samples[7]
    samples[7] = make_sample(cut.token_ids, [False] * len(cut.token_ids), id="cut", group=cut.group, advantage=2.0)
    scored = len(samples) - 1  # sequences with a trained token
    normalizer = {"dapo": count_trained(samples), "grpo": scored, "dr_grpo": scored * LIMIT}[loss_type]
    loss, expected = formula(model, samples, normalizer, sequence_mean=loss_type == "grpo")
    forwarded = {}
    for skip in (True, False):
        config = config_of(loss={"loss_type": loss_type}, train={"token_budget": budget, "skip_zero_advantage": skip})
        (gradient,), update = gradients(tiny_policy("llama"), samples, config)
        assert_same(gradient, expected)
        assert update.metrics["loss"] == pytest.approx(loss, rel=1e-4)
        forwarded[skip] = update.counts.forwarded
    assert forwarded[True] < forwarded[False]


def test_skipped_samples_change_no_weight() -> None:
    samples = group_batch(plain_model("llama"))
    for sample in samples[:3]:
        sample.advantage = [0.0] * sample.num_trained
    weights = []
    for skip in (True, False):
        policy = tiny_policy("llama")
        train(policy, samples, config_of(train={"skip_zero_advantage": skip, "num_iterations": 3}))
        weights.append(policy.trainable())
    for name in weights[0]:
        # AdamW divides by the gradient's size, so a difference in its last bit can show.
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-5)


def test_gradients_of_minibatches_add_up() -> None:
    model = plain_model("llama")
    samples = group_batch(model)
    random.Random(0).shuffle(samples)
    (whole,), _ = gradients(tiny_policy("llama"), samples, config_of())
    config = config_of(train={"prompts_per_step": 4, "minibatches": 2, "token_budget": 40})
    parts, _ = gradients(tiny_policy("llama"), samples, config)
    minibatches = split_groups(samples, 2)
    assert len(parts) == 2
    counts = [count_trained(minibatch) for minibatch in minibatches]
    assert counts[0] != counts[1]
    for part, minibatch, count in zip(parts, minibatches, counts, strict=True):
        assert_same(part, formula(model, minibatch, count)[1])
    first, second = parts
    total = {name: (first[name] * counts[0] + second[name] * counts[1]) / sum(counts) for name in whole}
    assert_same(total, whole)


# So that a few of the tokens are selected, and neither all nor none can be.
SELECTIONS: dict[str, dict[str, float]] = {
    "clip_cov": {"share": 0.05, "covariance_low": 0.1, "covariance_high": 5.0},
    "kl_cov": {"share": 0.1},
}


@pytest.mark.parametrize("loss_type", loss_names())
def test_no_loss_depends_on_how_samples_are_cut(loss_type: str) -> None:
    """Two iterations over two minibatches, so on policy and off, in one micro-batch each, two, one a sample."""
    samples = group_batch(plain_model("llama"))
    for sample in samples[2:5]:
        sample.advantage = 0.0
    random.Random(0).shuffle(samples)
    expected: list[dict[str, Tensor]] = []
    passes = []
    for budget, shares in ((10**6, True), (40, True), (1, True), (10**6, False), (40, False)):
        config = config_of(
            loss={"loss_type": loss_type, "options": SELECTIONS.get(loss_type, {})},
            train={"prompts_per_step": 4, "num_iterations": 2, "minibatches": 2, "token_budget": budget},
        )
        policy = tiny_policy("llama", shares=shares)
        passes.append(count_forwards(policy))
        torch.manual_seed(3)
        found, _ = gradients(policy, samples, config, Wandering)
        assert len(found) == 4
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    assert len(passes[0]) < len(passes[1]) < len(passes[2])


def count_forwards(policy: Policy) -> list[int]:
    """A list that grows by one at each pass through the model."""
    forwards: list[int] = []
    layer: nn.Module = policy.decoder.layers[0]
    layer.register_forward_hook(lambda *_: forwards.append(1))
    return forwards


@pytest.mark.parametrize("budget", [10**6, 60, 1])
@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_over_the_whole_step_at_the_current_weights(loss_type: str, budget: int) -> None:
    """Both iterations by the formula in float64; a sample without an advantage belongs to the statistic."""
    share, low, high, kl_coef = 0.3, 0.1, 2.0, 0.7
    model = plain_model("llama")
    samples = group_batch(model)
    for sample in samples[2:5]:
        sample.advantage = 0.0
    old = {sample.id: plain_logprobs(model, sample, TEMPERATURE).detach() for sample in samples}
    advantages = torch.tensor([a for sample in samples for a in sample.advantages()], dtype=torch.float64)
    rollout = torch.tensor([value for sample in samples for value in sample.logprobs], dtype=torch.float64)
    before = torch.cat(list(old.values()))
    weight = (before - rollout).exp().clamp(max=2.0)
    expected, chosen = [], []
    for iteration in range(2):
        model.zero_grad()
        logprob = torch.cat([plain_logprobs(model, sample, TEMPERATURE) for sample in samples])
        x = logprob - before
        value = (logprob.detach() - logprob.detach().mean()) * (advantages - advantages.mean())
        if loss_type == "clip_cov":  # a share of 1 draws every token between the bounds
            selected = (value > low) & (value < high)
            terms = -torch.minimum(x.exp() * advantages, x.exp().clamp(0.8, 1.28) * advantages)
            terms = torch.where(selected, 0.0, terms)
        else:
            selected = value >= value.sort(descending=True).values[int(share * len(value)) - 1]
            terms = -x.exp() * advantages + kl_coef * torch.where(selected, x.abs(), 0.0)
        ((weight * terms).sum() / len(terms)).backward()
        expected.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        chosen.append(selected)
        wander(list(model.parameters()), iteration)
    assert not torch.equal(*chosen) and all(0 < selected.sum() < len(selected) / 2 for selected in chosen)
    if loss_type == "kl_cov":
        assert (chosen[1] & (advantages == 0)).any()  # such a token has a gradient: it is pulled back to π_old

    options = {
        "clip_cov": {"share": 1.0, "covariance_low": low, "covariance_high": high},
        "kl_cov": {"share": share, "kl_coef": kl_coef},
    }
    config = config_of(
        loss={"loss_type": loss_type, "options": options[loss_type]},
        train={"num_iterations": 2, "token_budget": budget},
    )
    found, update = gradients(tiny_policy("llama"), samples, config, Wandering)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert update.metrics["cov/selected_mean"] == pytest.approx(torch.cat(chosen).double().mean().item(), rel=1e-6)


def test_tokens_are_drawn_by_the_seed_of_the_step() -> None:
    samples = group_batch(plain_model("llama"))
    config = config_of(loss={"loss_type": "clip_cov", "options": SELECTIONS["clip_cov"]}, train={"token_budget": 60})
    found = []
    for seed in (1, 1, 2):
        policy = tiny_policy("llama")
        torch.manual_seed(seed)
        (gradient,), _ = gradients(policy, samples, config)
        found.append(torch.cat([value.flatten() for value in gradient.values()]))
    assert torch.equal(found[0], found[1])
    assert relative_error(found[2], found[0]) > 0.01


def test_groups_are_not_torn() -> None:
    samples = [
        make_sample([1, 2], [False, True], id=str(i), group=group) for i, group in enumerate([7, 3, 7, 9, 1, 3])
    ]
    parts = split_groups(samples, 2)
    assert [[sample.id for sample in part] for part in parts] == [["0", "1", "2", "5"], ["3", "4"]]
    assert split_groups(samples, 1) == [samples]
    with pytest.raises(ValueError, match="4 groups do not part into 3"):
        split_groups(samples, 3)


def test_the_first_update_is_on_policy_exactly() -> None:
    model = plain_model("llama")
    samples = group_batch(model)
    update = train(tiny_policy("llama"), samples, config_of(train={"token_budget": 60}))
    assert update.metrics["ratio/mean"] == 1.0
    assert {name: value for name, value in update.metrics.items() if name.startswith("clip_ratio")} == {
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": 0.0,
    }


def test_the_second_iteration_has_another_ratio() -> None:
    """The whole of two iterations by the formula: ratios, clipping, loss, and the old log-probs kept."""
    epsilon, epsilon_high = 0.2, 0.28
    model = plain_model("llama")
    samples = group_batch(model)
    normalizer = count_trained(samples)
    first_loss, _ = formula(model, samples, normalizer)
    old = {sample.id: plain_logprobs(model, sample, TEMPERATURE).detach() for sample in samples}

    once = tiny_policy("llama")
    config = config_of(train={"learning_rate": 0.01})
    train(once, samples, config)
    moved = plain_model("llama")
    moved.load_state_dict(once.model.state_dict())
    second_loss, ratios, low, high = 0.0, [], 0, 0
    with torch.no_grad():
        for sample in samples:
            logprob = plain_logprobs(moved, sample, TEMPERATURE)
            rows = zip(logprob.tolist(), old[sample.id].tolist(), sample.logprobs, sample.advantages(), strict=True)
            for new, before, rollout, advantage in rows:
                ratio, weight = math.exp(new - before), min(math.exp(before - rollout), 2.0)
                clipped = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
                second_loss -= weight * min(ratio * advantage, clipped * advantage) / normalizer
                ratios.append(ratio)
                low += advantage < 0 and ratio < 1 - epsilon
                high += advantage > 0 and ratio > 1 + epsilon_high
    assert low and high

    config = config_of(train={"learning_rate": 0.01, "num_iterations": 2, "token_budget": 60})
    update = train(tiny_policy("llama"), samples, config)
    assert update.metrics["loss"] == pytest.approx((first_loss + second_loss) / 2, rel=1e-3)
    # Means over the tokens of both iterations; in the first one every ratio is 1.
    assert update.metrics["ratio/mean"] == pytest.approx((1 + sum(ratios) / len(ratios)) / 2, rel=1e-3)
    assert update.metrics["clip_ratio/low_mean"] == pytest.approx(low / len(ratios) / 2)
    assert update.metrics["clip_ratio/high_mean"] == pytest.approx(high / len(ratios) / 2)


def test_the_schedule_goes_on_from_step_to_step() -> None:
    samples = group_batch(plain_model("llama"))
    config = config_of(
        train={
            "steps": 10,
            "prompts_per_step": 4,
            "num_iterations": 2,
            "minibatches": 2,
            "lr_scheduler_type": "linear",
            "learning_rate": 1e-3,
        }
    )
    # The fourth optimizer step of step 3 is number 11, from 0, of 40.
    update = train(tiny_policy("llama"), samples, config, step=3)
    assert update.metrics["learning_rate"] == pytest.approx(1e-3 * (1 - 11 / 40))


def untrained(kind: str) -> list[Sample]:
    """Samples without any gradient."""
    samples = group_samples()
    for sample in samples:
        if kind == "no advantage":
            sample.advantage = 0.0
        else:
            sample.trained, sample.logprobs = [False] * len(sample.token_ids), []
    return samples


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["no advantage", "all masked"])
def test_a_step_without_a_gradient_only_decays(kind: str, skip: bool, lora: bool) -> None:
    policy = tiny_policy("llama", lora=lora)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    config = config_of(train={"skip_zero_advantage": skip, "learning_rate": 0.1, "weight_decay": 0.01})
    update = train(policy, untrained(kind), config)
    assert all(math.isfinite(value) for value in update.metrics.values())
    assert update.metrics["loss"] == 0.0 and update.metrics["grad_norm"] == 0.0
    trained = policy.trainable()
    for name, parameter in policy.model.named_parameters():
        # AdamW's step is 0 / (√0 + ε), beside w ← w − 0.1 · 0.01 w.
        factor = 1 - 0.1 * 0.01 if name in trained else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)


def test_no_samples_at_all() -> None:
    policy = tiny_policy("llama")
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    update = train(policy, [], config_of())
    assert update.metrics["loss"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())


def test_a_token_without_the_samplers_logprob_is_dropped() -> None:
    model = plain_model("llama")
    samples = group_batch(model)
    normalizer = count_trained(samples)
    for sample in samples[:4]:
        # Where the advantage is 0 the formula has no term for the token, and it stays in the denominator.
        sample.advantage = [0.0, *sample.advantages()[1:]]
    _, expected = formula(model, samples, normalizer)
    for sample, value in zip(samples, (math.nan, -math.inf, math.nan, math.inf), strict=False):
        sample.advantage = [3.0, *sample.advantages()[1:]]
        sample.logprobs[0] = value
    (gradient,), update = gradients(tiny_policy("llama"), samples, config_of())
    assert_same(gradient, expected)
    assert update.metrics["sampling/dropped_mean"] == pytest.approx(4 / normalizer)
    assert all(math.isfinite(value) for value in update.metrics.values())


def test_the_kl_of_an_adapter_that_does_nothing_is_zero() -> None:
    samples = group_batch(plain_model("llama"))
    # B is 0 in a new adapter, so the policy is its own reference.
    policy = tiny_policy("llama", lora=True, spread=0.0)
    update = train(policy, samples, config_of(lora={"enabled": True}, loss={"beta": 0.1}))
    assert update.metrics["kl"] == 0.0


def test_the_kl_and_its_gradient_by_the_formula() -> None:
    beta = 0.3
    base, model = plain_model("qwen3"), plain_model("qwen3", lora=True)
    samples = group_batch(model)
    samples[0].advantage = 0.0  # it has a KL all the same
    normalizer = count_trained(samples)
    _, expected = formula(model, samples, normalizer)
    model.zero_grad()
    kl = 0.0
    for sample in samples:
        with torch.no_grad():
            reference = plain_logprobs(base, sample, TEMPERATURE)
        x = reference - plain_logprobs(model, sample, TEMPERATURE)
        part = (x.exp() - x - 1).sum() / normalizer  # k3
        part.backward()
        kl += part.item()
    assert kl > 1e-3
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected[name] += beta * parameter.grad
    for budget in (10**6, 60):
        config = config_of(lora={"enabled": True}, loss={"beta": beta}, train={"token_budget": budget})
        (gradient,), update = gradients(tiny_policy("qwen3", lora=True), samples, config)
        assert update.metrics["kl"] == pytest.approx(kl, rel=1e-4)
        assert_same(gradient, expected)


def test_the_entropy_bonus_and_its_gradient_by_the_formula() -> None:
    coefficient = 0.05
    model = plain_model("llama")
    samples = group_batch(model)
    samples[0].advantage = 0.0  # it has an entropy all the same
    normalizer = count_trained(samples)
    _, expected = formula(model, samples, normalizer)
    model.zero_grad()
    mean = 0.0
    for sample in samples:
        logprobs = (plain_logits(model, sample.token_ids) / TEMPERATURE).log_softmax(-1)[:-1]
        entropy = -(logprobs.exp() * logprobs).sum(-1)[torch.tensor(sample.trained[1:])]
        part = entropy.sum() / normalizer
        part.backward()
        mean += part.item()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # an embedding that no token uses
            expected[name] -= coefficient * parameter.grad
    (gradient,), update = gradients(tiny_policy("llama"), samples, config_of(loss={"entropy_coef": coefficient}))
    assert update.metrics["entropy"] == pytest.approx(mean, rel=1e-4)
    assert_same(gradient, expected)


def test_what_is_counted() -> None:
    # A prompt of 5 with completions of 4 and 3: 5 + 3 + 2 tokens in the trie, since the last ones are only
    # predicted; without sharing 8 + 7. The third sample has no advantage.
    prompt = [5, 6, 7, 8, 9]
    samples = [
        make_sample(prompt + ids, [False] * 5 + [True] * len(ids), id=str(ids), group=group, advantage=advantage)
        for ids, group, advantage in (([20] * 4, 0, 1.0), ([30] * 3, 0, -1.0), ([40] * 6, 1, 0.0))
    ]
    set_rollout_logprobs(samples, plain_model("llama"), TEMPERATURE)
    _, update = gradients(tiny_policy("llama"), samples, config_of())
    assert (update.counts.trained, update.counts.forwarded, update.counts.scored) == (15, 10, 0)
    config = config_of(train={"num_iterations": 3, "token_budget": 9}, lora={"enabled": True}, loss={"beta": 0.1})
    # With a KL all three pass, each alone for the budget: 8 + 7 + 10 tokens. The old and the reference's log-probs
    # cost a pass each.
    _, update = gradients(tiny_policy("llama", lora=True), samples, config)
    assert (update.counts.trained, update.counts.forwarded, update.counts.scored) == (3 * 25, 3 * 25, 2 * 25)
    # A loss that selects tokens looks at all three, before each optimizer step; the old log-probs are a pass more.
    config = config_of(train={"num_iterations": 3, "token_budget": 9}, loss={"loss_type": "kl_cov"})
    _, update = gradients(tiny_policy("llama"), samples, config)
    assert (update.counts.trained, update.counts.forwarded, update.counts.scored) == (3 * 25, 3 * 25, 4 * 25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_of_an_adapter_never_changes(dtype: torch.dtype) -> None:
    policy = tiny_policy("llama", lora=True)
    for parameter in policy.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    samples = group_batch(plain_model("llama", lora=True))
    config = config_of(lora={"enabled": True}, loss={"beta": 0.1}, train={"num_iterations": 2, "weight_decay": 0.1})
    sampler = NativeSampler(policy, 2)
    for step in range(3):
        for adapter in ("default", None):
            sampler.generate([Request("a", [4, 5, 6], 5, seed=step, stop_ids=frozenset(), adapter=adapter)])
        train(policy, samples, config, step + 1)
        sampler.sync(step + 1)
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            assert not torch.equal(parameter, before[name]), name
        else:
            assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_gradient_that_is_not_finite_stops_the_run(lora: bool) -> None:
    policy = tiny_policy("llama", lora=lora)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    samples = group_batch(plain_model("llama", lora=lora))
    samples[4].advantage = math.nan
    with pytest.raises(RunError, match="nan"):
        train(policy, samples, config_of())
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())


class NoLogits(TorchDispatchMode):
    """Fails on any result with as many numbers as all logits together."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.numel() >= self.limit:
                raise AssertionError(f"{func} made {list(tensor.shape)}")
        return result


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_logits_are_never_built(lora: bool) -> None:
    vocabulary = 20_000
    policy = tiny_policy("llama", lora=lora, vocab_size=vocabulary)
    samples = group_samples(prompts=4, generations=4)
    tokens = count_trained(samples)
    assert tokens > 3 * 32  # so that the logits are larger than the head, [V, 32], and its moments
    config = config_of(
        train={"num_iterations": 2}, lora={"enabled": lora}, loss={"beta": 0.1 if lora else 0.0, "entropy_coef": 0.1}
    )
    # A third of them would be refused too: nothing of that size is made in parts.
    mode = NoLogits(tokens * vocabulary // 3 + 1)
    with mode:
        train(policy, samples, config)
    plain = plain_model("llama", vocab_size=vocabulary)
    with mode, pytest.raises(AssertionError, match="made"):
        plain_logits(plain, [5] * tokens)

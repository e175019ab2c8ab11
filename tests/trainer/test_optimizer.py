"""The optimizer: AdamW by its formula, float32 whatever the model computes in, and the schedules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metagrpo.trainer.config import TrainConfig
from metagrpo.trainer.errors import RunError
from metagrpo.trainer.optimizer import Optimizer, learning_rate


def settings(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"learning_rate": 0.1, "max_grad_norm": 0.0, **fields})


def rates(updates: int, **fields: Any) -> list[float]:
    config = settings(**{"learning_rate": 1.0, **fields})
    return [learning_rate(config, update, updates) for update in range(updates)]


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1]),
        ("constant", 0.5, [1 / 3, 2 / 3, 1, 1, 1]),  # 2.5 updates round up to 3
        ("constant", 1.0, [0.2, 0.4, 0.6, 0.8, 1]),
        ("linear", 0.0, [1, 0.8, 0.6, 0.4, 0.2]),
        ("linear", 0.2, [1, 1, 0.75, 0.5, 0.25]),
        ("linear", 1.0, [0.2, 0.4, 0.6, 0.8, 1]),
        ("cosine", 0.2, [1, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),  # cos(π/4) = √½
        ("cosine", 0.4, [0.5, 1, 1, 0.75, 0.25]),  # cos(π/3) = ½
    ],
)
def test_schedules_worked_by_hand(kind: str, warmup: float, expected: list[float]) -> None:
    assert rates(5, lr_scheduler_type=kind, warmup_ratio=warmup) == pytest.approx(expected, abs=1e-12)


def test_the_peak_scales_the_schedule() -> None:
    assert rates(5, learning_rate=3e-4, lr_scheduler_type="linear") == pytest.approx(
        [3e-4, 2.4e-4, 1.8e-4, 1.2e-4, 6e-5]
    )


def test_the_warmup_is_not_lengthened_by_rounding() -> None:
    # In floating point 0.07 · 100 is 7.000000000000001.
    assert rates(100, warmup_ratio=0.07)[:8] == pytest.approx([n / 7 for n in range(1, 8)] + [1])
    assert rates(100, warmup_ratio=0.29)[28] == 1 and rates(100, warmup_ratio=0.29)[27] == pytest.approx(28 / 29)


def parameters(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{index}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for index, shape in enumerate(shapes)
    }


def give_gradients(weights: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    """Through a backward pass, as training does."""
    loss = sum((weights[name].float() * gradient).sum() for name, gradient in gradients.items())
    assert isinstance(loss, Tensor)
    loss.backward()


def random_gradients(weights: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_by_its_formula(max_grad_norm: float, weight_decay: float) -> None:
    config = settings(
        learning_rate=0.02,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        lr_scheduler_type="linear",
    )
    weights = parameters((3, 4), (5,))
    optimizer = Optimizer(weights, config, updates=6)
    w = {name: weight.detach().double().numpy() for name, weight in weights.items()}
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for update in range(6):
        gradients = random_gradients(weights, seed=update)
        optimizer.zero_grad()
        give_gradients(weights, gradients)
        norm, rate = optimizer.step(update)
        g = {name: gradient.double().numpy() for name, gradient in gradients.items()}
        expected_norm = math.sqrt(sum((value**2).sum() for value in g.values()))
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert rate == pytest.approx(0.02 * (1 - update / 6))
        scale = min(1.0, max_grad_norm / expected_norm) if max_grad_norm else 1.0
        for name in w:
            m[name] = 0.8 * m[name] + 0.2 * g[name] * scale
            v[name] = 0.95 * v[name] + 0.05 * (g[name] * scale) ** 2
            mean = m[name] / (1 - 0.8 ** (update + 1))
            square = v[name] / (1 - 0.95 ** (update + 1))
            w[name] = w[name] - rate * weight_decay * w[name] - rate * mean / (np.sqrt(square) + 1e-6)
            assert weights[name].detach().numpy() == pytest.approx(w[name], rel=1e-5, abs=1e-6)


def test_float32_weights_go_as_in_torch() -> None:
    ours, theirs = parameters((4, 3), (6,)), parameters((4, 3), (6,))
    optimizer = Optimizer(ours, settings(weight_decay=0.01), updates=9)
    reference = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.01)
    for update in range(9):
        optimizer.zero_grad()
        reference.zero_grad()
        for weights in (ours, theirs):
            give_gradients(weights, random_gradients(weights, seed=update))
        optimizer.step(update)
        reference.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_updates_below_bfloat16s_resolution_add_up() -> None:
    weights = {"w": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    optimizer = Optimizer(weights, settings(learning_rate=1e-4), updates=100)
    for update in range(100):
        optimizer.zero_grad()
        give_gradients(weights, {"w": torch.tensor([1.0, 1.0, -1.0, -1.0])})
        optimizer.step(update)
        if update == 0:
            # Below 1, bfloat16 has steps of 2⁻⁸, above it of 2⁻⁷: the first update is not seen.
            assert weights["w"].tolist() == [1.0] * 4
    # Under a constant gradient each of AdamW's updates is the learning rate: 1 ∓ 0.01 in the float32 copy.
    master = optimizer.state()["master.w"]
    assert master.dtype == torch.float32
    assert master.tolist() == pytest.approx([0.99, 0.99, 1.01, 1.01], abs=1e-5)
    # The nearest multiples of 2⁻⁸ and of 2⁻⁷.
    assert weights["w"].dtype == torch.bfloat16
    assert weights["w"].tolist() == [253 / 256, 253 / 256, 129 / 128, 129 / 128]


def test_micro_batches_add_up_in_float32() -> None:
    weights = {"w": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))}
    optimizer = Optimizer(weights, settings(), updates=2)
    for _ in range(2):
        optimizer.zero_grad()
        # 1 + 256 · 2⁻⁹ = 1.5; in bfloat16, 1 + 2⁻⁹ is 1.
        for gradient in [1.0] + [2.0**-9] * 256:
            give_gradients(weights, {"w": torch.tensor([gradient, -gradient])})
        assert weights["w"].grad is None  # nothing is held twice
        norm, _ = optimizer.step(0)
        assert norm == pytest.approx(1.5 * math.sqrt(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_no_micro_batch_reaches(dtype: torch.dtype) -> None:
    weights = parameters((3,), (3,), dtype=dtype)
    optimizer = Optimizer(weights, settings(), updates=2)
    before = weights["w1"].detach().clone()
    for update in range(2):
        optimizer.zero_grad()
        give_gradients(weights, {"w0": torch.ones(3)})
        norm, _ = optimizer.step(update)
        assert norm == pytest.approx(math.sqrt(3))
    assert torch.equal(weights["w1"], before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, max_grad_norm: float) -> None:
    weights = {**parameters((3,)), "half": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    optimizer = Optimizer(weights, settings(max_grad_norm=max_grad_norm), updates=3)
    optimizer.zero_grad()
    give_gradients(weights, random_gradients(weights, 0))
    optimizer.step(0)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    optimizer.zero_grad()
    give_gradients(weights, {"w0": torch.tensor([1.0, value, 1.0])})
    with pytest.raises(RunError, match="no weight was changed"):
        optimizer.step(1)
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert all(torch.equal(optimizer.state()[name], state[name]) for name in state)


def test_a_resumed_optimizer_goes_on_bit_for_bit() -> None:
    def fresh() -> tuple[dict[str, nn.Parameter], Optimizer]:
        weights = {**parameters((4, 3)), "half": nn.Parameter(torch.linspace(-1, 1, 6).to(torch.bfloat16))}
        return weights, Optimizer(weights, settings(lr_scheduler_type="cosine", weight_decay=0.1), updates=7)

    def step(weights: dict[str, nn.Parameter], optimizer: Optimizer, update: int) -> None:
        optimizer.zero_grad()
        give_gradients(weights, random_gradients(weights, update))
        optimizer.step(update)

    through, through_optimizer = fresh()
    for update in range(3):
        step(through, through_optimizer, update)
    saved_weights = {name: weight.detach().clone() for name, weight in through.items()}
    saved_state = {name: tensor.clone() for name, tensor in through_optimizer.state().items()}
    expected = {f"{key}.{name}" for name in through for key in ("step", "exp_avg", "exp_avg_sq")}
    assert saved_state.keys() == expected | {"master.half"}

    resumed, resumed_optimizer = fresh()
    with torch.no_grad():
        for name, weight in resumed.items():
            weight.copy_(saved_weights[name])
    resumed_optimizer.load_state(saved_state)
    for update in range(3, 7):
        step(through, through_optimizer, update)
        step(resumed, resumed_optimizer, update)
    assert all(torch.equal(through[name], resumed[name]) for name in through)
    assert resumed_optimizer.state().keys() == through_optimizer.state().keys()
    for name, tensor in through_optimizer.state().items():
        assert torch.equal(resumed_optimizer.state()[name], tensor), name


def test_a_state_before_the_first_update() -> None:
    weights = {**parameters((2,)), "half": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}
    state = Optimizer(weights, settings(), updates=1).state()
    assert state.keys() == {"master.half"}
    Optimizer(weights, settings(), updates=1).load_state(state)

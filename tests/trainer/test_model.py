"""The policy: packed and shared, log-probs and gradients are those of plain transformers, a sequence at a time."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, GraniteConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from metagrpo.trainer.attention import ATTENTION
from metagrpo.trainer.config import LoraSection, ModelConfig
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.model import Policy, add_lora, choose_device, choose_dtype, load_base, load_tokenizer
from metagrpo.trainer.packing import build_tree, micro_batches
from metagrpo.trainer.sample import Sample
from metagrpo.trainer.setup import recompute_activations

from .tiny import (
    CONFIGS,
    SIZES,
    branch_samples,
    group_samples,
    plain_logits,
    plain_logprobs,
    plain_model,
    relative_error,
    tiny_model,
    tiny_policy,
    with_adapter,
)

SHAPES = sorted(CONFIGS)
TEMPERATURE = 0.7


def all_samples() -> list[Sample]:
    """GRPO's groups and MRT's branches in one batch."""
    return [*group_samples(), *branch_samples()]


def coefficients(samples: list[Sample]) -> dict[str, Tensor]:
    """Random weights of each sample's log-probs, so that no two tokens could be exchanged unnoticed."""
    generator = torch.Generator().manual_seed(1)
    return {sample.id: torch.randn(sample.num_trained, generator=generator) for sample in samples}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By parameter; a parameter that nothing reached has none."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: nn.Module, samples: list[Sample]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each sample's log-probs by plain transformers, and the gradient of their weighted sum."""
    model.zero_grad()
    weights = coefficients(samples)
    logprobs: dict[str, Tensor] = {}
    for sample in samples:
        logprob = plain_logprobs(model, sample, TEMPERATURE)
        (logprob * weights[sample.id]).sum().backward()
        logprobs[sample.id] = logprob.detach()
    return logprobs, gradients(model)


def packed(policy: Policy, samples: list[Sample], budget: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The same by the policy, and the number of micro-batches."""
    policy.model.zero_grad()
    weights, count = coefficients(samples), 0
    logprobs: dict[str, Tensor] = {}
    for batch in micro_batches(samples, budget, policy.shares_prefixes):
        logprob, entropy = policy.logprobs(batch, TEMPERATURE)
        assert entropy is None and logprob.dtype == torch.float32
        (logprob * torch.cat([weights[sample.id] for sample in batch.samples])).sum().backward()
        parts = logprob.detach().split([sample.num_trained for sample in batch.samples])
        logprobs |= {sample.id: part for sample, part in zip(batch.samples, parts, strict=True)}
        count += 1
    return logprobs, gradients(policy.model), count


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    worst = max(expected, key=lambda name: relative_error(actual[name], expected[name]))
    assert relative_error(actual[worst], expected[worst]) < tolerance, worst


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_and_shared_is_alone(shape: str, lora: bool) -> None:
    samples = all_samples()
    expected_logprobs, expected_gradients = alone(plain_model(shape, lora=lora), samples)
    assert all(gradient.norm() > 0 for gradient in expected_gradients.values())
    policy = tiny_policy(shape, lora=lora)
    assert set(policy.trainable()) == set(expected_gradients)
    for budget, batches in ((10**6, 1), (80, 2), (30, 6), (1, len(samples))):
        logprobs, gradient, count = packed(policy, samples, budget)
        assert count == batches
        assert_same(logprobs, expected_logprobs)
        assert_same(gradient, expected_gradients)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_without_sharing_is_alone(shape: str) -> None:
    samples = all_samples()
    expected_logprobs, expected_gradients = alone(plain_model(shape), samples)
    logprobs, gradient, count = packed(tiny_policy(shape, shares=False), samples, 10**6)
    assert count == 1
    assert_same(logprobs, expected_logprobs)
    assert_same(gradient, expected_gradients)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_activations_are_recomputed_under_the_name_that_this_transformers_has(name: str) -> None:
    calls: list[dict[str, Any]] = []
    base: Any = SimpleNamespace(**{f"{name}_enable": lambda **arguments: calls.append(arguments)})
    recompute_activations(base)
    assert calls == [{f"{name}_kwargs": {"use_reentrant": False}}]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", ["llama", "qwen2", "gemma2"])
def test_gradient_checkpointing_changes_nothing(shape: str, lora: bool) -> None:
    samples = all_samples()
    expected_logprobs, expected_gradients = alone(plain_model(shape, lora=lora), samples)
    policy = tiny_policy(shape, lora=lora)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a name that transformers has renamed
        recompute_activations(policy.base)
    policy.model.train()  # it is off in evaluation
    forwards: list[int] = []
    layer: nn.Module = policy.decoder.layers[0].self_attn
    layer.register_forward_hook(lambda *_: forwards.append(1))
    logprobs, gradient, _ = packed(policy, samples, 10**6)
    assert len(forwards) == 2  # the second time in the backward pass
    assert_same(logprobs, expected_logprobs)
    assert_same(gradient, expected_gradients)


def test_entropies_are_those_of_the_plain_distribution() -> None:
    samples = branch_samples()
    (batch,) = micro_batches(samples, 10**6)
    _, entropy = tiny_policy("gemma2").logprobs(batch, TEMPERATURE, with_entropy=True)
    assert entropy is not None
    model, expected = plain_model("gemma2"), []
    for sample in batch.samples:
        logprobs = (plain_logits(model, sample.token_ids) / TEMPERATURE).log_softmax(-1)
        every = -(logprobs.exp() * logprobs).sum(-1)[:-1]
        expected.append(every[torch.tensor(sample.trained[1:])])
    torch.testing.assert_close(entropy.double(), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", ["llama", "gemma2"])
def test_the_logits_of_a_row_are_the_models(shape: str) -> None:
    policy, ids = tiny_policy(shape), [5, 9, 40, 41, 42, 43, 44, 45, 46]
    tree, _ = build_tree([ids])
    logits = policy.logits(policy.tree_states(tree))
    assert relative_error(logits, plain_logits(plain_model(shape), ids)) < 1e-4


def test_a_head_with_a_bias() -> None:
    policy, model = tiny_policy("llama"), plain_model("llama")
    bias = torch.linspace(-2, 2, SIZES["vocab_size"])
    for owner in (policy.base, model):
        owner.lm_head.bias = nn.Parameter(bias.clone())
    samples = group_samples()
    expected_logprobs, expected_gradients = alone(model, samples)
    logprobs, gradient, _ = packed(policy, samples, 10**6)
    assert_same(logprobs, expected_logprobs)
    assert_same(gradient, expected_gradients)


class OwnAttention(nn.Module):
    """An attention layer that knows nothing of attention functions: plain causal over the whole row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, SIZES["head_dim"])
        q, k, v = (
            getattr(self.layer, f"{name}_proj")(hidden_states).view(shape).transpose(1, 2) for name in ("q", "k", "v")
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.layer.o_proj(out.transpose(1, 2).flatten(2)), None  # type: ignore[operator]


class ScaledLogits(LlamaForCausalLM):
    """A head that is more than a matrix, in a way that no configuration field tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_we_serve_pass_the_check(shape: str, lora: bool) -> None:
    policy = tiny_policy(shape, lora=lora)
    policy.model.train()
    policy.check()
    assert policy.model.training
    tiny_policy(shape, lora=lora, shares=False).check()


def test_a_model_that_ignores_the_attention_function_is_refused() -> None:
    for ignoring in ([0], [2], [0, 1, 2]):
        policy = tiny_policy("llama")
        layers: nn.ModuleList = policy.decoder.layers
        for index in ignoring:
            layers[index].self_attn = OwnAttention(layers[index].self_attn)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="ignore the attention function"):
            policy.check()


@pytest.mark.parametrize("config", [GraniteConfig(**SIZES, logits_scaling=4.0), CohereConfig(**SIZES)], ids=type)
def test_a_model_that_scales_its_logits_is_refused(config: Any) -> None:
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with pytest.raises(ConfigError, match="head is not a plain one"):
        Policy(model(config).eval()).check()


def test_a_head_of_its_own_is_refused() -> None:
    policy = tiny_policy("llama")
    policy.base.__class__ = ScaledLogits
    with pytest.raises(ConfigError, match="ScaledLogits is not served"):
        policy.check()


def test_a_model_that_gives_nan_is_refused() -> None:
    policy = tiny_policy("llama")
    with torch.no_grad():
        policy.head.weight[7, 3] = float("nan")
    with pytest.raises(ConfigError, match="nan"):
        policy.check()


def test_the_base_is_used_with_the_adapter_off() -> None:
    policy, samples = tiny_policy("qwen3", lora=True), group_samples()
    base, adapted = plain_model("qwen3"), plain_model("qwen3", lora=True)
    (batch,) = micro_batches(samples, 10**6)
    expected = {
        name: torch.cat([plain_logprobs(model, sample).detach() for sample in batch.samples])
        for name, model in ((None, base), ("default", adapted))
    }
    assert relative_error(expected[None], expected["default"]) > 1e-2
    for adapter in ("default", None, "default"):
        with policy.using(adapter):
            logprob, _ = policy.logprobs(batch, 1.0)
        assert relative_error(logprob.detach(), expected[adapter]) < 1e-5
    with pytest.raises(ValueError, match="'other' is not active"):
        policy.using("other")
    with pytest.raises(ValueError, match="no adapter 'default'"):
        tiny_policy("llama").using("default")
    with tiny_policy("llama").using(None):
        pass


def test_what_is_trained() -> None:
    full, lora = tiny_policy("llama"), tiny_policy("llama", lora=True)
    assert full.adapter is None and lora.adapter == "default"
    assert full.trainable().keys() == dict(full.model.named_parameters()).keys()
    # Seven projections in three layers, A and B each, and nothing of the head or the embedding.
    assert len(lora.trainable()) == 3 * 7 * 2
    assert all("lora_" in name for name in lora.trainable())
    assert {p.dtype for p in lora.trainable().values()} == {torch.float32}


def test_adapters_of_a_bfloat16_base_are_float32() -> None:
    model = tiny_model("llama", ATTENTION).to(torch.bfloat16)
    policy = Policy(with_adapter(model))
    assert policy.dtype == torch.bfloat16
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 for name, p in policy.model.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize(("shape", "tied"), [("llama", False), ("qwen3", True)])
def test_parameter_counts(shape: str, tied: bool) -> None:
    vocabulary, hidden, inner, layers = (
        SIZES[f"{name}"] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    attention = hidden * (4 + 2 + 2) * 8 + 4 * 8 * hidden
    norms = 2 * hidden + (2 * 8 if shape == "qwen3" else 0)  # Qwen3 norms its queries and keys
    blocks = layers * (attention + 3 * hidden * inner + norms) + hidden
    embedding = vocabulary * hidden
    policy = tiny_policy(shape)
    assert policy.num_parameters() == blocks + embedding * (1 if tied else 2)
    # The input embedding multiplies nothing, but tied it is also the head.
    assert policy.matmul_parameters() == blocks + embedding
    adapted = tiny_policy(shape, lora=True)
    assert adapted.matmul_parameters() == blocks + embedding
    ranks = layers * 4 * ((hidden + 32) + 2 * (hidden + 16) + (32 + hidden) + 3 * (hidden + inner))
    assert adapted.num_parameters() == policy.num_parameters() + ranks


def test_the_longest_sequence() -> None:
    assert tiny_policy("llama").max_length == 512
    assert tiny_policy("llama", max_position_embeddings=64).max_length == 64


def test_an_adapter_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules"):
        add_lora(tiny_model("llama", ATTENTION), LoraSection(target_modules=["no_such_projection"]))
    for modules in (["q_proj", "lm_head"], "lm_head"):
        with pytest.raises(ConfigError, match="head stays frozen"):
            add_lora(tiny_model("llama", ATTENTION), LoraSection(target_modules=modules))


def test_a_model_comes_back_from_its_directory(tmp_path: Path) -> None:
    saved = tiny_model("gemma2", "eager")
    saved.save_pretrained(tmp_path)
    loaded = load_base(ModelConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    ids = [4, 5, 6, 7, 8, 9, 10, 11, 12]
    policy = Policy(loaded)
    policy.check()
    logits = policy.logits(policy.tree_states(build_tree([ids])[0]))
    assert relative_error(logits, plain_logits(saved, ids)) < 1e-4
    half = load_base(ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cpu"))
    assert half.dtype == torch.bfloat16
    Policy(half).check()


def test_a_path_without_a_model_is_an_error_of_one_line(tmp_path: Path) -> None:
    for load in (load_base, load_tokenizer):
        with pytest.raises(ConfigError, match=r"model\.path") as caught:
            load(ModelConfig(path=str(tmp_path)))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 450
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_base(ModelConfig(path=str(tmp_path)))


def test_the_device_and_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "no_such_device"):
        with pytest.raises(ConfigError, match=rf"model\.device: {name} cannot be used"):
            choose_device(name)
    assert choose_dtype(ModelConfig(path="x", dtype="float32")) == torch.float32
    assert choose_dtype(ModelConfig(path="x", dtype="bfloat16")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda", 3)

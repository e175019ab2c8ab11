"""The policy: a Hugging Face causal model, with adapters or without, that scores token trees.

Logits are never built for a whole batch: the decoder gives hidden states, and the head is folded into the
log-probabilities by :func:`metagrpo.kernels.linear_logprob`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from metagrpo.kernels import linear_logprob
from metagrpo.trainer.attention import ATTENTION, Layout, TreeLayout, choose_backend
from metagrpo.trainer.config import LoraSection, ModelConfig
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.packing import MicroBatch, TokenTree, build_tree
from metagrpo.trainer.pretrained import resolve_model
from metagrpo.trainer.upcast import multiplies_natively, upcast_linears

ADAPTER = "default"  # the name under which PEFT saves an adapter at the top of a directory


class Policy:
    """A model that is trained, and what it takes to score tokens with it.

    Attributes:
        model: what is saved: a ``PeftModel`` with LoRA, else the model itself.
        config: the model's configuration.
        device: where it is.
        attention: backend of the packed rows: ``sdpa``, ``flex`` or ``varlen``.
    """

    def __init__(self, model: nn.Module, attention: str = "auto", shares_prefixes: bool = True) -> None:
        self.model = model
        self.base = cast(PreTrainedModel, model.get_base_model() if is_peft(model) else model)  # type: ignore[operator]
        self.config = self.base.config
        self.decoder: nn.Module = self.base.get_decoder()
        self.device = self.base.device
        self.shares_prefixes = shares_prefixes and attention != "varlen"
        self.attention = choose_backend(attention, self.device, self.shares_prefixes)
        self.head: Any = self.base.get_output_embeddings()
        self.softcap: float | None = getattr(self.config.get_text_config(), "final_logit_softcapping", None)

    def hidden_states(self, token_ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Last hidden states, normed: ids and positions int64 ``[B, T]`` in, ``[B, T, H]`` out."""
        return self.decoder(
            input_ids=token_ids, position_ids=positions, layout=layout, use_cache=False
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of a few rows, soft-capped as the model does: ``[..., H]`` in, ``[..., V]`` out."""
        logits = self.head(hidden)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def tree_states(self, tree: TokenTree) -> Tensor:
        """Hidden states of a tree's nodes, ``[T, H]``."""
        layout = TreeLayout(tree, self.attention)
        return self.hidden_states(tree.token_ids[None], tree.positions[None], layout)[0]

    def logprobs(
        self, batch: MicroBatch, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities (and entropies) of a micro-batch's trained tokens, float32 ``[M]`` each."""
        hidden = self.tree_states(batch.tree)
        options: dict[str, Any] = {
            "rows": batch.rows,
            "bias": getattr(self.head, "bias", None),
            "temperature": temperature,
            "softcap": self.softcap,
        }
        if with_entropy:
            return linear_logprob(hidden, self.head.weight, batch.targets, **options, return_entropy=True)
        return linear_logprob(hidden, self.head.weight, batch.targets, **options), None

    def using(self, adapter: str | None) -> Any:
        """Context in which the named adapter is on; ``None`` is the base alone, which is also the reference.

        Raises:
            ValueError: the model has no such adapter.
        """
        if not is_peft(self.model):
            if adapter is not None:
                raise ValueError(f"the model has no adapter {adapter!r}")
            return nullcontext()
        if adapter is None:
            return self.model.disable_adapter()  # type: ignore[operator]
        if adapter != self.model.active_adapter:
            raise ValueError(f"adapter {adapter!r} is not active, {self.model.active_adapter!r} is")
        return nullcontext()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters with a gradient, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that is trained; ``None`` for full fine-tuning."""
        return ADAPTER if is_peft(self.model) else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the base weights."""
        return self.base.dtype

    def matmul_parameters(self) -> int:
        """Weights that multiply a token: all of the base but the input embedding, the head included."""
        embedding: Any = self.base.get_input_embeddings().weight
        tied = embedding is self.head.weight
        base = sum(p.numel() for name, p in self.base.named_parameters() if "lora_" not in name)
        return base - (0 if tied else embedding.numel())

    def num_parameters(self) -> int:
        """All parameters, adapters included."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def max_length(self) -> int:
        """Longest sequence that the model has positions for."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", 1 << 30))

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model that packing or the folded head would get wrong (pitfall 14).

        Two sequences that share a prefix and one that does not are scored packed; then each alone, by the model's own
        forward pass and head; then packed again with the others' tokens changed, which must not move the first.

        Raises:
            ConfigError: they differ by more than rounding, or the model cannot be called that way.
        """
        training = self.model.training
        self.model.eval()
        try:
            self._check()
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{type(self.base).__name__} is not served: {first_line(error)}") from error
        finally:
            self.model.train(training)

    def _check(self) -> None:
        vocabulary = self.head.weight.shape[0]
        first, *others = ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7, 8), (9, 8, 3))
        changed = ((1, 2, 3, 8, 9, 9), (7, 6, 4))
        packed, paths = self._packed_logits([first, *others], vocabulary)
        single = self.head.weight.dtype == torch.float32
        for sequence, path in zip((first, *others), paths, strict=True):
            alone = build_tree([_spread(sequence, vocabulary)])[0].to(self.device)
            ids, positions = alone.token_ids[None], alone.positions[None]
            layout = TreeLayout(alone, self.attention)
            own = self.base(input_ids=ids, position_ids=positions, layout=layout, use_cache=False).logits[0].float()
            self._compare("packed and alone", packed[path], own, 1e-3 if single else 0.1)
        again, new_paths = self._packed_logits([first, *changed], vocabulary)
        self._compare("beside other sequences", packed[paths[0]], again[new_paths[0]], 1e-5 if single else 1e-2)

    def _packed_logits(self, sequences: list[tuple[int, ...]], vocabulary: int) -> tuple[Tensor, list[Tensor]]:
        tree, paths = build_tree([_spread(sequence, vocabulary) for sequence in sequences], self.shares_prefixes)
        logits = self.logits(self.tree_states(tree.to(self.device))).float()
        return logits, [torch.from_numpy(path).to(self.device) for path in paths]

    def _compare(self, how: str, packed: Tensor, own: Tensor, tolerance: float) -> None:
        error = ((packed - own).norm() / own.norm()).item()
        if not error <= tolerance:
            raise ConfigError(
                f"{type(self.base).__name__} is not served: {how}, its logits differ by {error:.2g} of their norm; "
                "its layers ignore the attention function or its head is not a plain one"
            )


def _spread(sequence: tuple[int, ...], vocabulary: int) -> list[int]:
    """Digits 1 to 9 as token ids all over the vocabulary."""
    return [digit * vocabulary // 10 for digit in sequence]


def is_peft(model: nn.Module) -> bool:
    """Whether the model is PEFT's wrapper."""
    return hasattr(model, "get_base_model")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises:
        ConfigError: there is none at that path.
    """
    path = resolve_model(config.path)
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no tokenizer at {config.path}: {first_line(error)}") from error


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's configuration, without its weights.

    Raises:
        ConfigError: there is no such model, or none that transformers knows.
    """
    try:
        return AutoConfig.from_pretrained(
            resolve_model(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: cannot load {config.path}: {first_line(error)}") from error


def load_base(config: ModelConfig) -> PreTrainedModel:
    """The model's weights in ``config.dtype``, ready for packed attention.

    Raises:
        ConfigError: unknown model, or one that takes no attention function.
    """
    path, device = resolve_model(config.path), choose_device(config.device)
    options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=choose_dtype(config), attn_implementation=ATTENTION, **options
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model.path: cannot load {config.path}: {first_line(error)}") from error
    if config.liger_kernel:
        _apply_liger(model)
    if not multiplies_natively(model.dtype, device):
        upcast_linears(model)
    placed: Any = model  # its `to` is wrapped in a way that hides its signature
    return placed.to(device)


def add_lora(model: PreTrainedModel, section: LoraSection) -> nn.Module:
    """Wrap the model in PEFT's LoRA, its weights in float32, the base frozen.

    Raises:
        ConfigError: the target modules do not exist, or name the head, which the folded head cannot adapt.
    """
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type]  # PEFT divides by it, a float is fine
        lora_dropout=section.lora_dropout,
        target_modules=section.target_modules,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
    )
    try:
        peft_model = get_peft_model(model, lora, adapter_name=ADAPTER, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: {first_line(error)}") from error
    if hasattr(model.get_output_embeddings(), "lora_A"):
        raise ConfigError("lora.target_modules: the head stays frozen, leave lm_head out")
    return peft_model


def choose_device(name: str) -> torch.device:
    """``auto`` is this rank's GPU where there is one, else the CPU.

    Raises:
        ConfigError: the machine has no such device.
    """
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # the second where torch was built without that device
            raise ConfigError(f"model.device: {name} cannot be used: {first_line(error)}") from error
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def choose_dtype(config: ModelConfig) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and on a CPU that multiplies it natively; elsewhere a bfloat16 GEMM crawls."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if multiplies_natively(torch.bfloat16, choose_device(config.device)) else torch.float32


def first_line(error: BaseException) -> str:
    """An exception's message on one line, cut to what a person reads."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _apply_liger(model: PreTrainedModel) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("model.liger_kernel needs a GPU")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ConfigError("model.liger_kernel needs `pip install liger-kernel`") from error
    # The head and the loss are ours.
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)

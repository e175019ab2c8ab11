"""TRL's own GRPO and RLOO trainers, fed with log-probs and completions, and the same tokens put to ``policy_loss``.

A trainer is built by its own constructor from its own configuration. In place of a model's log-probs and a sampler's
completions it gets those of a rollout; from there on everything is TRL's: padding, masks, rewards, advantages, the
sampler's correction, the loss and its metrics. Where TRL makes a tensor of Python numbers it takes torch's default
dtype, which is set to the rollout's, so that float64 log-probs are computed with in float64 throughout.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

trl = pytest.importorskip("trl", reason="TRL is not installed")
if not trl.__version__.startswith("1.16."):
    pytest.skip(f"TRL 1.16 is compared with, TRL {trl.__version__} is installed", allow_module_level=True)

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl.kernels.chunked_logprob import ChunkedLogProbFunction  # noqa: E402
from trl.trainer.utils import (  # noqa: E402
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
    split_tensor_dict,
)

from metagrpo.kernels.losses import loss_normalizer, mean_metrics, policy_loss  # noqa: E402

__all__ = [
    "entropy_from_logits",
    "fused_head",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
]

MARKS = [pytest.mark.trl, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")]
"""Of every module that compares with TRL; the warning is for TRL, from transformers."""

fused_head = ChunkedLogProbFunction.apply

TOKEN, END, PAD = 0, 1, 2
BUDGET = 16
"""``max_completion_length``."""
_OUTPUT = tempfile.TemporaryDirectory()  # the trainers want a folder; they write nothing into it


@dataclass(frozen=True)
class Rollout:
    """A generation batch of ``B`` completions; ``[B, T]`` tensors are padded on the right, with noise.

    Attributes:
        lengths: tokens of each completion.
        logprob: log π ``[B, T]``, and likewise ``old``, ``ref``, ``sampler``: log-probs in nats; ``entropy`` in nats.
        rewards: one a completion; ``None`` is not scored.
        truncated: completions that ran out of tokens, which are masked whole here; all others end with EOS.
        tools: flags of the tokens that a tool wrote, a list a completion; they are not trained.
        group: completions a prompt.
    """

    lengths: list[int]
    logprob: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor
    rewards: list[float | None]
    truncated: tuple[int, ...] = ()
    tools: list[list[bool]] | None = None
    group: int = 3

    def trained(self) -> Tensor:
        """The tokens to train, bool ``[B, T]``: none of a truncated completion, none that a tool wrote."""
        mask = torch.zeros(self.logprob.shape, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            if row not in self.truncated:
                mask[row, :length] = True if self.tools is None else ~torch.tensor(self.tools[row])
        return mask

    def rows(self) -> Tensor:
        """The completion of each trained token, int64 ``[M]``."""
        return self.trained().nonzero()[:, 0]

    def astype(self, dtype: torch.dtype) -> Rollout:
        names = ("logprob", "old", "ref", "sampler", "entropy")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def make_rollout(seed: int, lengths: Sequence[int], *, tools: bool = False, **fields: Any) -> Rollout:
    """A reproducible float64 rollout, off policy by about a third in every direction."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(len(lengths), max(lengths), generator=generator, dtype=torch.float64)

    logprob = -0.1 - normal().abs()
    written = [[bool(flag) for flag in row[:length] > 0.5] for row, length in zip(normal(), lengths, strict=True)]
    old = logprob + 0.35 * normal()
    return Rollout(
        list(lengths),
        logprob,
        old,
        ref=logprob + 0.5 * normal(),
        sampler=old + 0.35 * normal(),
        entropy=normal().abs(),
        tools=written if tools else None,
        **{"rewards": torch.rand(len(lengths), generator=generator).tolist(), **fields},
    )


class _Fed:
    """What a trainer is fed with instead of a model and a sampler."""

    rollout: Rollout
    policy: tuple[Tensor, Tensor]

    def completions(self) -> tuple[list[list[int]], list[list[int]], list[str]]:
        ids = [[TOKEN] * (length - 1) + [END] for length in self.rollout.lengths]
        for row in self.rollout.truncated:
            ids[row][-1] = TOKEN
        return [[TOKEN]] * len(ids), ids, ["a"] * len(ids)

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, compute_entropy: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        if compute_entropy:
            return *self.policy, None
        return (self.rollout.ref if model is self.ref_model else self.rollout.old), None, None  # type: ignore[attr-defined]

    def score(self) -> dict[str, Tensor]:
        """The inputs that TRL makes of the rollout: masks, advantages, correction weights, the number of tokens."""
        prompts = [{"prompt": "a"} for _ in self.rollout.lengths]
        with _default_dtype(self.rollout.logprob.dtype):
            return self._generate_and_score_completions(prompts)  # type: ignore[attr-defined]

    def loss(self, inputs: dict[str, Tensor], logprob: Tensor, entropy: Tensor) -> Tensor:
        """TRL's loss of one micro-batch at the policy's log-probs and entropies ``[B, T]``."""
        self.policy = (logprob, entropy)
        with _default_dtype(self.rollout.logprob.dtype):
            return self.compute_loss(self.model, inputs)  # type: ignore[attr-defined]

    def step(self, inputs: dict[str, Tensor], logprob: Tensor, entropy: Tensor, parts: int) -> Tensor:
        """The sum of the losses of an optimizer step's micro-batches, ``parts`` equal ones, cut as TRL cuts them."""
        loss = logprob.new_zeros(())
        for part, *policy in zip(split(inputs, parts), logprob.chunk(parts), entropy.chunk(parts), strict=True):
            loss = loss + self.loss(part, *policy)
        return loss


class GRPO(_Fed, GRPOTrainer):
    def _generate(self, prompts: list) -> tuple:
        sampler = [row[:n].tolist() for row, n in zip(self.rollout.sampler, self.rollout.lengths, strict=True)]
        tools = self.rollout.tools
        trained = None if tools is None else [[int(not flag) for flag in row] for row in tools]
        prompt_ids, ids, texts = self.completions()
        return prompt_ids, ids, trained, texts, sampler, {}, None, None


class RLOO(_Fed, RLOOTrainer):
    def _generate(self, prompts: list) -> tuple:
        prompt_ids, ids, texts = self.completions()
        return prompt_ids, ids, texts


def grpo(
    rollout: Rollout, *, beta: float = 0.0, use_vllm: bool = False, micro_batches: int = 1, **config: Any
) -> GRPO:
    """TRL's GRPO trainer for one rollout; ``config`` is GRPOConfig's.

    ``num_iterations`` is 2, so that there are old log-probs; truncated completions are masked; the KL is not bias
    corrected, though TRL's default is that it is; a rollout is one optimizer step of ``micro_batches`` unless
    ``steps_per_generation`` says otherwise. A KL and vLLM are switched on in the built trainer, since its
    constructor would load a reference model and start an engine.
    """
    config = {
        "num_iterations": 2,
        "mask_truncated_completions": True,
        "use_bias_correction_kl": False,
        "max_completion_length": BUDGET,
        "gradient_accumulation_steps": micro_batches,
        **config,
    }
    steps = config.get("steps_per_generation", micro_batches)
    trainer = _build(GRPO, GRPOConfig, rollout, len(rollout.lengths) // steps, config)
    trainer.beta, trainer.use_vllm = beta, use_vllm
    trainer.ref_model = object()  # told apart from the policy by identity
    return trainer


def rloo(rollout: Rollout, **config: Any) -> RLOO:
    """TRL's RLOO trainer for one rollout; ``config`` is RLOOConfig's."""
    return _build(RLOO, RLOOConfig, rollout, len(rollout.lengths), {"beta": 0.0, **config})


def split(inputs: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """TRL's micro-batches of a generation batch."""
    batch: dict[str, Any] = dict(inputs)
    cut: list[dict[str, Any]] = split_tensor_dict(batch, parts)
    return cut


@dataclass(frozen=True)
class Outcome:
    """A 0-d loss, its gradients by the log-probs and the entropies ``[B, T]``, and what was logged by name."""

    loss: Tensor
    logprob_grad: Tensor
    entropy_grad: Tensor
    metrics: dict[str, float]


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
TOKEN_AVERAGED = ("bnpo", "dapo", "cispo", "vespo")

# What each type needs besides its name: TRL's spelling and ours. TRL's luspo is the paper's only at sequence level.
TRL_TYPE: dict[str, dict[str, Any]] = {
    "cispo": {"epsilon_high": 1.2},
    "luspo": {"importance_sampling_level": "sequence"},
}
OUR_TYPE: dict[str, dict[str, Any]] = {"cispo": {"ratio_max": 1.2}}


def compare(
    rollout: Rollout, kind: str, theirs: dict[str, Any], ours: dict[str, Any], advantages: Tensor | None = None
) -> tuple[Outcome, Outcome]:
    """One micro-batch that is a whole optimizer step: in TRL's trainer, padded, and in ``policy_loss``, flat.

    Args:
        kind: the loss type.
        theirs: arguments of :func:`grpo`.
        ours: arguments of ``policy_loss``; a ``[B, T]`` tensor is taken at the trained tokens. Old log-probs,
            entropies and TRL's denominator are passed unless given.
        advantages: ``[B]`` or ``[B, T]``, in place of TRL's own, which come from the rewards.
    """
    trainer = grpo(rollout, loss_type=kind, **{**TRL_TYPE.get(kind, {}), **theirs})
    inputs = trainer.score()
    if advantages is not None:
        inputs["advantages"] = advantages
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand_as(rollout.logprob)
    leaves = rollout.logprob.clone().requires_grad_(), rollout.entropy.clone().requires_grad_()
    loss = trainer.loss(inputs, *leaves)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    expected = Outcome(loss.detach(), *_gradients(loss, leaves), logged)

    mask = rollout.trained()
    arguments = {"old_logprob": rollout.old, "entropy": leaves[1], **OUR_TYPE.get(kind, {}), **ours}
    arguments = {
        name: value[mask] if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in arguments.items()
    }
    loss, sums = policy_loss(
        leaves[0][mask],
        advantages[mask],
        **{
            "sequence_ids": rollout.rows(),
            "normalizer": denominator(kind, mask),
            "loss_type": kind,
            **arguments,
        },
    )
    return expected, Outcome(loss.detach(), *_gradients(loss, leaves), mean_metrics(sums))


def denominator(kind: str, mask: Tensor) -> Tensor:
    """Ours for the trained tokens ``[B, T]``; but a completion without one counts as a sequence, as in TRL."""
    lengths = mask.sum(1)
    if kind not in TOKEN_AVERAGED:
        lengths = lengths.clamp(min=1)
    return loss_normalizer(kind, lengths, max_completion_length=BUDGET)


def _gradients(loss: Tensor, leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    first, second = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return first, second


def assert_same(theirs: Outcome, ours: Outcome) -> None:
    """Equal losses and gradients, to a few roundings of float64."""
    assert theirs.logprob_grad.count_nonzero() > 1  # a comparison of nothing would pass
    for name in ("loss", "logprob_grad", "entropy_grad"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-11, atol=1e-14)


def _build(trainer: type, configuration: type, rollout: Rollout, batch: int, config: dict[str, Any]) -> Any:
    tokens = models.WordLevel({"a": TOKEN, "<end>": END, "<pad>": PAD}, unk_token="a")
    arguments = configuration(
        output_dir=_OUTPUT.name,
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=batch,
        num_generations=rollout.group,
        **config,
    )
    built = trainer(
        model=LlamaForCausalLM(
            LlamaConfig(
                vocab_size=3,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        ),
        reward_funcs=[lambda **columns: rollout.rewards],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(tokens), eos_token="<end>", pad_token="<pad>"
        ),
    )
    built.rollout = rollout
    built.model.train()
    built.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps  # its training loop sets it
    return built


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""The policy losses: one function each, and the registry that :func:`metagrpo.kernels.losses.policy_loss` looks in.

Notation, for token ``t`` of sequence ``o`` with advantage ``A_t``: ``x_t = log π(t) − log π_old(t)``; the ratio
``r_t = exp(x_t)``, or at sequence level :func:`sequence_ratio`; ``ε, ε_high`` the clip range; ``sg`` stops the
gradient. Every function returns the terms ``l_t`` to be minimised; the aggregation sums and divides them. A token's
gradient reaches its own log-prob alone, whatever the level of the ratio: what a term takes from the rest of its
sequence is behind ``sg``.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .kl import MAX_LOG_RATIO
from .sequences import Sequences

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "budget_mean"]
"""How terms become the loss (numerator / normaliser over an optimizer step):

``token_mean``: ``Σ_t l_t`` / tokens; ``sequence_mean``: ``Σ_o (1/|o|) Σ_t l_t`` / sequences; ``sequence_sum``:
``Σ_t l_t`` / sequences; ``budget_mean``: ``Σ_t l_t`` / (sequences · max_completion_length).
"""

Terms = tuple[Tensor, dict[str, Tensor]]
"""The terms ``l_t`` ``[M]``, and per-token quantities ``[M]`` by the name under which their mean is logged."""

SHARED_PARAMETERS = ("epsilon", "epsilon_high", "delta", "dual_clip")
"""Keyword parameters that :func:`policy_loss` passes to a loss function whose signature names them."""


@dataclass(frozen=True)
class LossBatch:
    """What a loss function sees: ``M`` flat tokens, all ``[M]``, fp32 (fp64 where the log-probs are).

    Attributes:
        logprob: log π of the trained tokens; carries the gradient.
        old_logprob: log π_old.
        advantages: ``A_t``.
        log_ratio: ``x_t``, with gradient; 0 for a token without a sampler's log-prob.
        ratio: ``r_t`` at the level asked for, with gradient.
        weight: rollout correction. Multiplied onto the terms outside, unless the loss is registered with
            ``weighs_itself``.
        sequences: which tokens belong together.
    """

    logprob: Tensor
    old_logprob: Tensor
    advantages: Tensor
    log_ratio: Tensor
    ratio: Tensor
    weight: Tensor
    sequences: Sequences


@dataclass(frozen=True)
class LossType:
    """An entry of the registry; see :func:`register_loss`."""

    name: str
    function: Callable[..., Terms]
    aggregation: Aggregation
    importance: Literal["any", "token", "sequence"]
    weighs_itself: bool
    select: Callable[..., Tensor] | None
    shared: frozenset[str]
    options: dict[str, Any]


_REGISTRY: dict[str, LossType] = {}


def register_loss(
    name: str,
    *,
    aggregation: Aggregation = "token_mean",
    importance: Literal["any", "token", "sequence"] = "any",
    weighs_itself: bool = False,
    select: Callable[..., Tensor] | None = None,
) -> Callable[[Callable[..., Terms]], Callable[..., Terms]]:
    """Add a loss: ``function(batch: LossBatch, *, …) -> (terms [M], {metric name: [M]})``.

    Keyword-only parameters named as in :data:`SHARED_PARAMETERS` receive ``policy_loss``'s own arguments; the
    others need a default and are the options of this loss.

    Args:
        name: what ``loss_type`` selects it by.
        aggregation: how its terms are summed and divided.
        importance: the level of ``batch.ratio`` it is defined for: ``"sequence"`` always gets the sequence ratio,
            ``"token"`` refuses to be asked for it, ``"any"`` gets what the caller asks for.
        weighs_itself: the function uses ``batch.weight`` inside; only token-level corrections are then allowed.
        select: ``select(logprob [M], advantages [M], *, …) -> bool [M]``, for a loss that treats some tokens of an
            optimizer step apart. It sees all of the step's tokens, whatever their advantage, and its keyword-only
            parameters are options of the loss. The function receives the flags of its own tokens as its option
            ``selected``; see :func:`select_tokens`.

    Raises:
        ValueError: the name is taken.
        TypeError: a parameter that is neither the batch, nor shared, nor keyword-only with a default; or a
            ``select`` that asks for what is no option, or whose flags the function does not take.
    """

    def register(function: Callable[..., Terms]) -> Callable[..., Terms]:
        if name in _REGISTRY:
            raise ValueError(f"the loss {name!r} is already registered")
        shared, options = set(), {}
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                raise TypeError(f"loss {name!r}: parameter {parameter.name!r} must be keyword-only")
            if parameter.name in SHARED_PARAMETERS:
                shared.add(parameter.name)
            elif parameter.default is parameter.empty:
                raise TypeError(f"loss {name!r}: option {parameter.name!r} needs a default")
            else:
                options[parameter.name] = parameter.default
        if select is not None and not {"selected", *_keywords(select)} <= options.keys():
            raise TypeError(f"loss {name!r}: its options must hold 'selected' and those of {select.__name__}")
        _REGISTRY[name] = LossType(
            name, function, aggregation, importance, weighs_itself, select, frozenset(shared), options
        )
        return function

    return register


def get_loss(name: str) -> LossType:
    """The registered loss of that name.

    Raises:
        ValueError: there is none; the nearest name is given.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        nearest = difflib.get_close_matches(name, _REGISTRY, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown loss type {name!r}, did you mean {nearest!r}? Known: {loss_names()}") from None


def loss_names() -> tuple[str, ...]:
    """Names of all registered losses, sorted."""
    return tuple(sorted(_REGISTRY))


def loss_options(name: str) -> dict[str, Any]:
    """The options of a loss and their defaults; raises like :func:`get_loss`."""
    return dict(get_loss(name).options)


def select_tokens(loss_type: str, logprob: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    """The tokens that a loss registered with ``select`` treats apart, chosen once over a whole optimizer step.

    Each micro-batch then gets its part of the flags as the option ``selected`` of :func:`policy_loss`. Left to
    itself it would choose among its own tokens, and the gradient would depend on how the step is cut.

    Args:
        loss_type: name in the registry.
        logprob: log π of the step's trained tokens at the current weights, ``[M]``; no gradient is taken.
        advantages: ``[M]``.
        options: of the loss type; those that are missing have their defaults.

    Returns:
        bool ``[M]``.

    Raises:
        ValueError: there is no such loss (the nearest is named), or it selects nothing.
    """
    loss = get_loss(loss_type)
    if loss.select is None:
        raise ValueError(f"the loss type {loss_type!r} selects no tokens")
    settings = {**loss.options, **options}
    return loss.select(logprob, advantages, **{name: settings[name] for name in _keywords(loss.select)})


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Names of the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def token_ratio(log_ratio: Tensor) -> Tensor:
    """``r_t = exp(x_t)``, ``[M]``; exactly 1 where ``x_t = 0``, constant beyond :data:`MAX_LOG_RATIO`."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def sequence_ratio(log_ratio: Tensor, sequences: Sequences) -> Tensor:
    """``s_t = sg[(Π_{u ∈ o} r_u)^(1/|o|)] · r_t / sg[r_t]``, ``[M]``: the geometric mean of the sequence's ratios.

    With one advantage a sequence the value and the gradient are GSPO's; with an advantage a token it is
    GSPO-token (Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071).
    """
    return token_ratio(sequences.mean(log_ratio) + (log_ratio - log_ratio.detach()))


def _clip_flags(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def _choose(flag: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    """``yes`` or ``no`` in the dtype of ``like``; ``torch.where`` of two floats would round them to fp32."""
    return torch.where(flag, torch.full_like(like, yes), no)


@register_loss("grpo", aggregation="sequence_mean")
@register_loss("bnpo", aggregation="token_mean")
@register_loss("dr_grpo", aggregation="budget_mean")
@register_loss("dapo", aggregation="token_mean")
@register_loss("gspo", aggregation="sequence_mean", importance="sequence")
@register_loss("luspo", aggregation="sequence_sum", importance="sequence")
def clipped_surrogate(
    batch: LossBatch,
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Terms:
    """PPO's clipped surrogate, ``l_t = −min(r_t A_t, clip(r_t, 1 − ε, 1 + ε_high) A_t)``, under six aggregations.

    - ``grpo``: mean of each sequence, then mean over sequences. Shao et al., DeepSeekMath, arXiv:2402.03300.
    - ``dapo``: mean over all tokens of the optimizer step. Yu et al., arXiv:2503.14476.
    - ``bnpo``: TRL's name for a mean over the tokens of each micro-batch. That depends on how the batch is cut;
      with the step's one normaliser it is ``dapo``.
    - ``dr_grpo``: sum over tokens / (sequences · max_completion_length). Liu et al., arXiv:2503.20783.
    - ``gspo``: ``grpo`` with the sequence ratio. Zheng et al., arXiv:2507.18071.
    - ``luspo``: ``gspo`` with each sequence weighted by its length, ``Σ_o |o| l_o`` / sequences. arXiv:2602.05261.

    Args:
        delta: bounds the unclipped branch, ``min(r_t, δ) A_t``: two-sided clipping, which ends the unbounded loss
            of a large ratio at a negative advantage; above ``1 + ε_high``. INTELLECT-2, arXiv:2505.07291.
        dual_clip: ``c > 1``; where ``A_t < 0`` the term is at most ``−c A_t``. Ye et al., arXiv:1912.09729.
    """
    ratio, advantages = batch.ratio, batch.advantages
    if delta is not None and delta <= 1 + epsilon_high:
        raise ValueError(f"delta {delta} must lie above 1 + epsilon_high = {1 + epsilon_high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip {dual_clip} must lie above 1")
    unclipped = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    terms = -torch.minimum(unclipped * advantages, clipped * advantages)
    if dual_clip is not None:
        terms = torch.where(advantages < 0, torch.minimum(terms, -dual_clip * advantages), terms)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return terms, _clip_flags(low, high)


@register_loss("cispo")
def cispo(batch: LossBatch, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> Terms:
    """CISPO: ``l_t = −sg[clip(r_t, ratio_min, ratio_max)] A_t log π(t)``; a clipped token keeps its gradient.

    The bounds are on the ratio itself. MiniMax-M1, arXiv:2506.13585; the default bound is the one of
    ScaleRL, arXiv:2510.13786.
    """
    ratio = batch.ratio.detach()
    terms = -ratio.clamp(ratio_min, ratio_max) * batch.advantages * batch.logprob
    return terms, {"cispo_clip_ratio": (ratio > ratio_max) & (batch.advantages > 0)}


@register_loss("sapo", aggregation="sequence_mean")
def sapo(batch: LossBatch, *, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> Terms:
    """SAPO: a soft gate for the clip, ``l_t = −(4/τ) σ(τ (r_t − 1)) A_t``.

    ``τ`` is ``temperature_pos`` where ``A_t > 0``, else ``temperature_neg``; on policy the gradient is that of
    ``−r_t A_t``. Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    tau = _choose(batch.advantages > 0, temperature_pos, temperature_neg, like=batch.ratio)
    return -(4 / tau) * torch.sigmoid(tau * (batch.ratio - 1)) * batch.advantages, {}


@register_loss("vespo", importance="token", weighs_itself=True)
def vespo(
    batch: LossBatch,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Terms:
    """VESPO: ``l_t = −sg[φ(W)] A_t log π(t)`` with ``φ(W) = W^k exp(λ (1 − W))``, so ``φ(1) = 1``.

    ``W = Π_{u ∈ o} r_u w_u`` is the whole sequence's importance weight, rollout correction ``w_u`` included; it is
    held in ``[1e-8, exp(20)]``. ``k, λ`` are the ``_pos`` pair where ``A_t ≥ 0``, else the ``_neg`` pair.
    Variational Sequence-Level Soft Policy Optimization, arXiv:2602.10693.
    """
    smallest = math.log(1e-8)
    log_ratio = batch.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_weight = batch.sequences.sum(log_ratio + batch.weight.log().clamp(min=smallest))
    log_weight = log_weight.clamp(smallest, MAX_LOG_RATIO)
    positive = batch.advantages >= 0
    k = _choose(positive, k_pos, k_neg, like=log_weight)
    lam = _choose(positive, lambda_pos, lambda_neg, like=log_weight)
    phi = torch.exp(k * log_weight - lam * torch.expm1(log_weight))
    return -phi * batch.advantages * batch.logprob, {"vespo/phi_seq_mean": phi}


@register_loss("gmpo", aggregation="sequence_mean", importance="token")
def gmpo(batch: LossBatch, *, epsilon: float, epsilon_high: float) -> Terms:
    """GMPO: the geometric mean of ratios that are clipped token by token, ``l_t = −A_t (Π_{u ∈ o} r̂_u)^(1/|o|)``.

    The clip is in log space, one-sided as PPO's ``min``: ``log r̂_u`` is ``min(x_u, ε_high)`` where ``A_u > 0``
    and ``max(x_u, −ε)`` elsewhere; the paper takes ``ε = ε_high = 0.4``. Geometric-Mean Policy Optimization,
    arXiv:2507.20673.
    """
    positive = batch.advantages > 0
    bounded = torch.where(positive, batch.log_ratio.clamp(max=epsilon_high), batch.log_ratio.clamp(min=-epsilon))
    low = (batch.log_ratio < -epsilon) & (batch.advantages < 0)
    high = (batch.log_ratio > epsilon_high) & positive
    return -batch.advantages * sequence_ratio(bounded, batch.sequences), _clip_flags(low, high)


@register_loss("dppo", importance="token")
def dppo(
    batch: LossBatch, *, threshold_low: float = 0.15, threshold_high: float = 0.15, ratio_max: float = 20.0
) -> Terms:
    """DPPO, binary total variation: ``l_t = −m_t sg[min(r_t, ratio_max)] A_t log π(t)``.

    ``m_t`` drops a token that has already moved too far the way its advantage pushes it: ``π − π_old`` above
    ``threshold_high`` where ``A_t > 0``, below ``−threshold_low`` elsewhere. Rethinking the Trust Region in LLM
    Reinforcement Learning, arXiv:2602.04879.
    """
    moved = batch.logprob.detach().exp() - batch.old_logprob.exp()
    outside = torch.where(batch.advantages > 0, moved > threshold_high, moved < -threshold_low)
    return _divergence_masked(batch, outside, ratio_max)


@register_loss("dppo_kl", importance="token")
def dppo_kl(
    batch: LossBatch, *, threshold_low: float = 0.05, threshold_high: float = 0.05, ratio_max: float = 20.0
) -> Terms:
    """DPPO, binary KL: :func:`dppo` with ``m_t`` from the KL of two coins, "this token" or "another one".

    A token is dropped where ``π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π))`` exceeds the threshold
    and ``π`` lies on the side that the advantage pushes to. arXiv:2602.04879.
    """
    logprob, old = batch.logprob.detach(), batch.old_logprob
    log_rest, old_log_rest = _log_complement(logprob), _log_complement(old)
    divergence = old.exp() * (old - logprob) + old_log_rest.exp() * (old_log_rest - log_rest)
    outside = torch.where(
        batch.advantages > 0,
        (divergence > threshold_high) & (logprob > old),
        (divergence > threshold_low) & (logprob < old),
    )
    return _divergence_masked(batch, outside, ratio_max)


def _divergence_masked(batch: LossBatch, outside: Tensor, ratio_max: float) -> Terms:
    terms = -batch.ratio.detach().clamp(max=ratio_max) * batch.advantages * batch.logprob
    low, high = outside & (batch.advantages < 0), outside & (batch.advantages > 0)
    return torch.where(outside, 0.0, terms), _clip_flags(low, high)


def _log_complement(logprob: Tensor) -> Tensor:
    """``log(1 − p)``, finite also where p rounds to 1."""
    return (-torch.expm1(logprob)).clamp(min=torch.finfo(logprob.dtype).tiny).log()


def covariance(logprob: Tensor, advantages: Tensor) -> Tensor:
    """Each token's part in the batch covariance of log-prob and advantage, ``(log π − mean)(A − mean)``, ``[M]``.

    Its mean over tokens is, to first order, the entropy that a policy gradient step costs (arXiv:2505.22617).
    """
    logprob = logprob.detach()
    return (logprob - logprob.mean()) * (advantages - advantages.mean())


def draw_covariance(
    logprob: Tensor, advantages: Tensor, *, share: float, covariance_low: float, covariance_high: float
) -> Tensor:
    """Flags ``[M]`` of tokens, ``share`` of all, drawn at random where :func:`covariance` lies between the bounds.

    The draw is from torch's generator and follows the order of the tokens.
    """
    value = covariance(logprob, advantages)
    eligible = (value > covariance_low) & (value < covariance_high)
    return eligible & _top(torch.where(eligible, torch.rand_like(value), -1.0), share)


def top_covariance(logprob: Tensor, advantages: Tensor, *, share: float) -> Tensor:
    """Flags ``[M]`` of the ``share`` of tokens of largest :func:`covariance`."""
    return _top(covariance(logprob, advantages), share)


def _top(values: Tensor, share: float) -> Tensor:
    """Flags ``[M]`` of the largest ``share`` of the values, at least one."""
    count = min(max(int(share * values.numel()), 1), values.numel())
    return torch.zeros_like(values, dtype=torch.bool).scatter(0, values.topk(count).indices, True)


@register_loss("clip_cov", importance="token", select=draw_covariance)
def clip_cov(
    batch: LossBatch,
    *,
    epsilon: float,
    epsilon_high: float,
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    selected: Tensor | None = None,
) -> Terms:
    """Clip-Cov: the clipped surrogate, with no gradient from a few tokens that would cost the most entropy.

    Of the tokens whose :func:`covariance` lies between ``covariance_low`` and ``covariance_high``, as many as
    ``share`` of the batch are drawn at random, at least one. Cui et al., The Entropy Mechanism of Reinforcement
    Learning for Reasoning Language Models, arXiv:2505.22617.

    Args:
        selected: bool ``[M]``, the drawn tokens; ``None`` draws from the tokens of this call. For micro-batches to
            add up to the whole batch, :func:`select_tokens` draws once over all of it and each takes its part.
    """
    if selected is None:
        selected = draw_covariance(
            batch.logprob,
            batch.advantages,
            share=share,
            covariance_low=covariance_low,
            covariance_high=covariance_high,
        )
    terms, flags = clipped_surrogate(batch, epsilon=epsilon, epsilon_high=epsilon_high)
    return torch.where(selected, 0.0, terms), {**flags, "cov/selected_mean": selected}


@register_loss("kl_cov", importance="token", select=top_covariance)
def kl_cov(batch: LossBatch, *, share: float = 2e-4, kl_coef: float = 1.0, selected: Tensor | None = None) -> Terms:
    """KL-Cov: ``l_t = −r_t A_t``, plus ``kl_coef · |x_t|`` for the ``share`` of tokens of largest covariance.

    Unclipped; the penalty is on the move away from π_old, and acts on a selected token whatever its advantage.
    arXiv:2505.22617; at least one token is selected.

    Args:
        selected: bool ``[M]``, the tokens to penalise; ``None`` takes them from this call. For micro-batches to add
            up to the whole batch, :func:`select_tokens` selects once over all of it and each takes its part.
    """
    if selected is None:
        selected = top_covariance(batch.logprob, batch.advantages, share=share)
    terms = -batch.ratio * batch.advantages + torch.where(selected, kl_coef * batch.log_ratio.abs(), 0.0)
    return terms, {"cov/selected_mean": selected}

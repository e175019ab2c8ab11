"""The losses straight from the papers' formulas: Python floats (float64), loops over sequences, no autograd.

``sg[·]`` in a formula is a value at ``frozen``, a second copy of the log-probs: a derivative with respect to
``logprob`` at fixed ``frozen`` is then the derivative of the loss as the paper means it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

GROUPED = {"grpo": "mean", "sapo": "mean", "gspo": "mean", "gmpo": "mean"}  # others: a sum over tokens


@dataclass
class Case:
    """Tokens of a few interleaved sequences, with what every loss may need."""

    ids: list[int]
    logprob: list[float]
    old: list[float]
    ref: list[float]
    rollout: list[float]
    entropy: list[float]
    advantages: list[float]
    normalizer: float
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    options: dict[str, float] = field(default_factory=dict)

    def sequences(self) -> dict[int, list[int]]:
        """Token positions of each sequence."""
        members: dict[int, list[int]] = {}
        for position, name in enumerate(self.ids):
            members.setdefault(name, []).append(position)
        return members


def make_case(seed: int, lengths: list[int], *, one_advantage_a_sequence: bool = False, spread: float = 0.4) -> Case:
    """A reproducible case; ids are arbitrary integers and sequences are interleaved."""
    rng = random.Random(seed)
    ids = [17 * s - 5 for s, length in enumerate(lengths) for _ in range(length)]
    rng.shuffle(ids)
    logprob = [-rng.uniform(0.05, 3.0) for _ in ids]

    def near(logprobs: list[float], distance: float) -> list[float]:
        return [min(p - rng.gauss(0, distance), -0.01) for p in logprobs]  # a log-prob is never positive

    by_sequence = {name: rng.choice((-1, 1)) * rng.uniform(0.3, 2.0) for name in sorted(set(ids))}
    advantages = [by_sequence[n] if one_advantage_a_sequence else rng.gauss(0, 1) for n in ids]
    return Case(
        ids=ids,
        logprob=logprob,
        old=near(logprob, spread),
        ref=near(logprob, 0.5),
        rollout=near(logprob, spread),
        entropy=[rng.uniform(0, 2) for _ in ids],
        advantages=advantages,
        normalizer=rng.uniform(2, 20),
    )


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def geometric_mean_ratio(case: Case, logprob: list[float], members: list[int]) -> float:
    return math.prod(math.exp(logprob[i] - case.old[i]) for i in members) ** (1 / len(members))


def surrogate(case: Case, ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - case.epsilon, 1 + case.epsilon_high) * advantage)


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def token_term(kind: str, case: Case, i: int, members: list[int], logprob: list[float], frozen: list[float]) -> float:
    """``l_t`` of one token, its sequence being at ``members``."""
    advantage, old, opt = case.advantages[i], case.old[i], case.options
    ratio, frozen_ratio = math.exp(logprob[i] - old), math.exp(frozen[i] - old)
    if kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
        return surrogate(case, ratio, advantage)
    if kind in ("gspo", "luspo"):  # GSPO-token
        return surrogate(case, geometric_mean_ratio(case, frozen, members) * ratio / frozen_ratio, advantage)
    if kind == "cispo":
        return -clip(frozen_ratio, opt.get("ratio_min", 0.0), opt.get("ratio_max", 5.0)) * advantage * logprob[i]
    if kind == "sapo":
        tau = opt.get("temperature_pos", 1.0) if advantage > 0 else opt.get("temperature_neg", 1.05)
        return -4 / tau * sigmoid(tau * (ratio - 1)) * advantage
    if kind == "vespo":
        weight = math.prod(math.exp(frozen[j] - case.old[j]) for j in members)
        k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        return -(weight**k) * math.exp(lam * (1 - weight)) * advantage * logprob[i]
    if kind == "gmpo":
        log_mean = 0.0
        for j in members:
            x = frozen[j] - case.old[j]
            log_mean += min(x, case.epsilon_high) if case.advantages[j] > 0 else max(x, -case.epsilon)
        x, x_frozen = logprob[i] - old, frozen[i] - old
        if advantage > 0:
            moved = min(x, case.epsilon_high) - min(x_frozen, case.epsilon_high)
        else:
            moved = max(x, -case.epsilon) - max(x_frozen, -case.epsilon)
        return -advantage * math.exp(log_mean / len(members) + moved)
    if kind in ("dppo", "dppo_kl"):
        p, p_old = math.exp(frozen[i]), math.exp(old)
        if kind == "dppo":
            outside = p - p_old > 0.15 if advantage > 0 else p_old - p > 0.15
        else:
            outside = binary_kl(p_old, p) > 0.05 and (p > p_old if advantage > 0 else p < p_old)
        return 0.0 if outside else -min(frozen_ratio, 20.0) * advantage * logprob[i]
    if kind == "clip_cov":
        return 0.0 if i in opt["selected"] else surrogate(case, ratio, advantage)
    if kind == "kl_cov":
        return -ratio * advantage + (abs(logprob[i] - old) if i in opt["selected"] else 0.0)
    raise AssertionError(kind)


def loss(
    kind: str,
    case: Case,
    logprob: list[float],
    frozen: list[float],
    extra: Callable[[int, list[float]], float] | None = None,
    weights: list[float] | None = None,
) -> float:
    """``Σ_o c_o Σ_{t ∈ o} (w_t l_t + extra_t) / normalizer``."""
    total = 0.0
    for members in case.sequences().values():
        inner = 0.0
        for i in members:
            inner += (weights[i] if weights else 1.0) * token_term(kind, case, i, members, logprob, frozen)
            inner += extra(i, logprob) if extra else 0.0
        total += inner / len(members) if kind in GROUPED else inner
    return total / case.normalizer


def gradient(function: Callable[[list[float]], float], at: list[float], step: float = 1e-5) -> list[float]:
    """Central differences; exact to about 1e-10 for the smooth functions here."""
    result = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        result.append((function(up) - function(down)) / (2 * step))
    return result


def correction(
    mode: str, old: list[float], rollout: list[float], groups: list[list[int]], cap: float, floor: float
) -> list[float]:
    """Rollout correction weights, written out for each mode."""
    weights = [0.0] * len(old)
    for members in groups:
        product = math.prod(math.exp(old[j] - rollout[j]) for j in members)
        for i in members:
            token = math.exp(old[i] - rollout[i])
            geometric = product ** (1 / len(members))
            weights[i] = {
                "none": 1.0,
                "token_truncate": clip(token, floor, cap),
                "token_mask": token if floor <= token <= cap else 0.0,
                "icepop": token if floor <= token <= cap else 0.0,
                "sequence_truncate": clip(product, floor, cap),
                "sequence_mask": product if floor <= product <= cap else 0.0,
                "geometric_mask": 1.0 if floor <= geometric <= cap else 0.0,
            }[mode]
    return weights

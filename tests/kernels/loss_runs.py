"""The loss types under test, and how a case of the oracle is put to policy_loss."""

from __future__ import annotations

import torch

from metagrpo.kernels.losses import policy_loss

LOSSES = (
    "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo",
    "gspo", "gmpo", "clip_cov", "kl_cov", "dppo", "dppo_kl",
)  # fmt: skip
SELECTED = {1, 4, 9}  # positions that clip_cov and kl_cov act on in the tests


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def options_of(kind, size):
    if kind in ("clip_cov", "kl_cov"):
        return {"selected": torch.tensor([i in SELECTED for i in range(size)])}
    return {}


def run(kind, case, logprob, **arguments):
    """policy_loss of a case in float64, off policy, with the case's normaliser."""
    arguments = {
        "sequence_ids": torch.tensor(case.ids),
        "normalizer": tensor(case.normalizer),
        "old_logprob": tensor(case.old),
        "epsilon": case.epsilon,
        "epsilon_high": case.epsilon_high,
        **options_of(kind, len(case.ids)),
        **arguments,
    }
    return policy_loss(logprob, tensor(case.advantages), loss_type=kind, **arguments)

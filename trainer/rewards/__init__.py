"""Rewards: functions with TRL's signature, graded in processes that can be killed.

Nothing here imports torch or sympy, so that a grading process starts at once; the built-in functions that need
a library live in modules of their own: :mod:`~metagrpo.trainer.rewards.maths` and
:mod:`~metagrpo.trainer.rewards.gym`.
"""

from metagrpo.trainer.rewards.builtin import last_number, length_penalty
from metagrpo.trainer.rewards.load import batched
from metagrpo.trainer.rewards.pool import RewardPool
from metagrpo.trainer.rewards.result import RewardResult, Status

__all__ = ["RewardPool", "RewardResult", "Status", "batched", "last_number", "length_penalty"]

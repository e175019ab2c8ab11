"""AdamW on float32 weights, whatever the model computes in, and the learning-rate schedule.

A bfloat16 weight has 8 bits: an update of 1e-6 of its size is lost. So the optimizer keeps a float32 copy of every
weight that is not float32, adds each micro-batch's gradient to a float32 sum, and writes the rounded copy back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from metagrpo.trainer.config import TrainConfig
from metagrpo.trainer.errors import RunError


def learning_rate(config: TrainConfig, update: int, updates: int) -> float:
    """Learning rate of update ``update`` (from 0) out of ``updates``.

    A linear warm-up over ``ceil(warmup_ratio · updates)`` updates whose first is above 0, then constant, or linear
    or cosine (Loshchilov & Hutter, 2017) to 0 at ``updates``.
    """
    warmup = math.ceil(config.warmup_ratio * updates - 1e-9)  # 0.07 · 100 is a bit more than 7
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    progress = (update - warmup) / max(1, updates - warmup)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_scheduler_type]
    return config.learning_rate * shape


class Optimizer:
    """AdamW (Loshchilov & Hutter, 2019) with clipping.

    Args:
        parameters: the trained ones, by name; tied weights once.
        config: rates, decay, clipping.
        updates: optimizer steps of the whole run, which the schedule spans.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainConfig, updates: int) -> None:
        self._config = config
        self._updates = updates
        self._parameters = dict(parameters)
        self._masters: dict[str, nn.Parameter] = {}
        for name, parameter in self._parameters.items():
            if parameter.dtype == torch.float32:
                self._masters[name] = parameter
                continue
            master = nn.Parameter(parameter.detach().float())
            self._masters[name] = master
            parameter.register_post_accumulate_grad_hook(_accumulate_into(master))
        self._adamw = torch.optim.AdamW(
            self._masters.values(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        )

    def zero_grad(self) -> None:
        """Begin an update: every gradient is zero, also of a weight that no micro-batch reaches."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad.zero_()

    @torch.no_grad()
    def step(self, update: int) -> tuple[float, float]:
        """Clip and apply the gradients of update ``update``.

        Returns:
            The gradient's norm before clipping, and the learning rate.

        Raises:
            RunError: the norm is not finite; no weight was changed.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self._config.max_grad_norm or math.inf))
        if not math.isfinite(norm):
            raise RunError(f"the gradient's norm is {norm}: no weight was changed")
        rate = learning_rate(self._config, update, self._updates)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])
        return norm, rate

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by parameter name, and the float32 copies: all that a resume needs."""
        tensors = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                tensors[f"master.{name}"] = master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(tensors[f"master.{name}"])
            if f"step.{name}" in tensors:
                self._adamw.state[master] = {
                    # AdamW counts its steps in a tensor on the CPU.
                    key: tensors[f"{key}.{name}"].to("cpu" if key == "step" else master.device, copy=True)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }


def _accumulate_into(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        assert master.grad is not None and parameter.grad is not None
        master.grad += parameter.grad
        parameter.grad = None

    return hook

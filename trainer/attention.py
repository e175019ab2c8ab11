"""Attention over a token tree, as an attention function of transformers.

The model is loaded with ``attn_implementation="metagrpo"`` and called with ``layout=…``, which transformers hands
down to every layer. The layout holds the mask and does the attention; so the trainer, the sampler's prefill and
its decoding all run the same unpatched model, at any version of transformers that has attention functions.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.packing import TokenTree

ATTENTION = "metagrpo"


class Layout(Protocol):
    """How the rows of a batch see each other."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        """Attention of one layer: ``[B, heads, T, D]`` and ``[B, kv_heads, T, D]`` in, ``[B, T, heads, D]`` out."""
        ...


def _attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if layout is None:
        raise ConfigError(f"{type(module).__name__} is not served: its model does not hand layout=… down to it")
    if s_aux is not None:
        raise ConfigError("attention sinks are not served")
    out = layout.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    return out, None


AttentionInterface.register(ATTENTION, _attention_function)


class TreeLayout:
    """The mask of a :class:`TokenTree`, and its attention by SDPA, flex_attention or flash-attn varlen.

    Args:
        tree: one row of ``T`` tokens.
        backend: ``sdpa`` (any device), ``flex`` (GPU) or ``varlen`` (GPU; a tree that shares prefixes, which it
            cannot express, takes ``flex``).
    """

    def __init__(self, tree: TokenTree, backend: str) -> None:
        self.tree = tree
        self.backend = "flex" if backend == "varlen" and tree.is_shared else backend
        self._masks: dict[object, Any] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        """See :class:`Layout`; ``B`` is 1."""
        if self.backend == "flex":
            out = self._flex(query, key, value, scale, window, softcap)
        elif self.backend == "varlen":
            out = self._varlen(query, key, value, scale, window, softcap, dropout)
        else:
            out = self._sdpa(query, key, value, scale, window, softcap, dropout)
        return out

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        # One call a root: trees do not see each other, and a dense mask over all of them would cost the square
        # of the whole row.
        starts = self.tree.starts
        outputs = []
        for begin, stop in itertools.pairwise(starts):
            span = slice(begin, stop)
            mask = self._dense_mask(begin, stop, window, query.dtype)
            outputs.append(
                masked_attention(query[:, :, span], key[:, :, span], value[:, :, span], mask, scale, softcap, dropout)
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _dense_mask(self, begin: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask ``[n, n]`` of one tree, shared by all layers with the same window."""
        name = (begin, window, dtype)
        if name not in self._masks:
            index = torch.arange(begin, stop, device=self.tree.end.device)
            end, positions = self.tree.end[begin:stop], self.tree.positions[begin:stop]
            visible = (index[:, None] >= index) & (index[:, None] < end)
            if window is not None:
                visible &= positions[:, None] - positions < window
            self._masks[name] = torch.zeros(visible.shape, dtype=dtype, device=end.device).masked_fill_(
                ~visible, float("-inf")
            )
        return self._masks[name]

    def _flex(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        end, positions = self.tree.end, self.tree.positions
        if window not in self._masks:

            def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                seen = (k <= q) & (q < end[k])
                return seen if window is None else seen & (positions[q] - positions[k] < window)

            self._masks[window] = create_block_mask(visible, None, None, self.tree.size, self.tree.size, end.device)

        def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

        out = _compiled_flex()(
            query,
            key,
            value,
            score_mod=None if softcap is None else capped,
            block_mask=self._masks[window],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)

    def _varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        if "cu_seqlens" not in self._masks:
            starts = self.tree.starts
            self._masks["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32, device=query.device)
            self._masks["longest"] = max(b - a for a, b in itertools.pairwise(starts))
        lengths, longest = self._masks["cu_seqlens"], self._masks["longest"]
        out = flash_attn_varlen_func(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            lengths,
            lengths,
            longest,
            longest,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return out[None]


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Grouped-query attention with an additive mask.

    Args:
        query: ``[B, heads, n, D]``.
        key: ``[B, kv_heads, m, D]``, ``heads`` a multiple of ``kv_heads``.
        value: ``[B, kv_heads, m, D]``.
        mask: broadcastable to ``[B, heads, n, m]``, added to the scaled (and soft-capped) scores.
        scale: factor of the scores.
        softcap: ``softcap · tanh(score / softcap)``, as Gemma 2 has it; SDPA has none, so it is written out here.
        dropout: of the attention weights.

    Returns:
        ``[B, heads, n, D]``.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scale)
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), dropout).to(value.dtype)
    return weights @ value


def choose_backend(name: str, device: torch.device, shares: bool) -> str:
    """The backend that ``model.attention`` stands for on this device.

    Args:
        name: ``auto``, ``sdpa``, ``flex`` or ``varlen``.
        device: where the model is.
        shares: whether the rows share prefixes.

    Raises:
        ConfigError: the named backend does not run there.
    """
    has_flash = importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        if device.type != "cuda":
            return "sdpa"
        return "varlen" if has_flash and not shares else "flex"
    if name == "flex" and device.type != "cuda":
        raise ConfigError("model.attention: flex_attention has no backward pass on a CPU, use auto or sdpa")
    if name == "varlen" and (device.type != "cuda" or not has_flash):
        raise ConfigError("model.attention: varlen needs a GPU and `pip install flash-attn`")
    return name


_flex_function: Any = None


def _compiled_flex() -> Any:
    """flex_attention is only fused once compiled; one graph serves every length."""
    global _flex_function
    if _flex_function is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex_function = torch.compile(flex_attention, dynamic=True)
    return _flex_function

"""Attention over a token tree: each node attends as it would alone in its own sequence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metagrpo.trainer.attention import (
    TreeLayout,
    _attention_function,
    choose_backend,
    masked_attention,
)
from metagrpo.trainer.errors import ConfigError
from metagrpo.trainer.packing import build_tree

SEQUENCES = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 9], [5, 5, 5, 5], [1, 2, 3, 4]]
HEADS, KV_HEADS, DIM = 4, 2, 8


def oracle(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None):
    """Causal attention of one sequence by the formula, float64: ``[heads, n, D]`` → ``[n, heads, D]``."""
    q, k, v = (x.double().numpy() for x in (query, key, value))
    heads, length, _ = q.shape
    out = np.zeros((length, heads, v.shape[-1]))
    for head in range(heads):
        shared = head // (heads // k.shape[0])
        for position in range(length):
            first = 0 if window is None else max(0, position - window + 1)
            scores = k[shared, first : position + 1] @ q[head, position] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[position, head] = (weights / weights.sum()) @ v[shared, first : position + 1]
    return torch.from_numpy(out)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_each_sequence_attends_as_if_alone(share: bool, window: int | None, softcap: float | None) -> None:
    tree, paths = build_tree(SEQUENCES, share)
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, tree.size, DIM)
    key, value = torch.randn(2, 1, KV_HEADS, tree.size, DIM)
    layout = TreeLayout(tree, "sdpa")
    for layer in range(2):  # the second layer takes the first one's mask
        options = {"scale": 0.4, "window": window, "softcap": softcap, "dropout": 0.0}
        out = layout.attend(layer, query, key, value, **options)
        assert out.shape == (1, tree.size, HEADS, DIM)
        for path in paths:
            expected = oracle(query[0, :, path], key[0, :, path], value[0, :, path], 0.4, window, softcap)
            torch.testing.assert_close(out[0, path].double(), expected, rtol=1e-5, atol=1e-5)


def test_layers_with_other_windows_have_other_masks() -> None:
    tree, _ = build_tree([[1, 2, 3, 4]])
    layout = TreeLayout(tree, "sdpa")
    zero, value = torch.zeros(1, 1, 4, 1), torch.tensor([0.0, 1.0, 2.0, 3.0]).reshape(1, 1, 4, 1)
    # All scores are 0, so a node's output is the mean of the values that it sees.
    means = {None: [0, 0.5, 1, 1.5], 2: [0, 0.5, 1.5, 2.5], 1: [0.0, 1, 2, 3]}
    for window in (None, 2, 1, None):
        out = layout.attend(0, zero, zero, value, scale=1.0, window=window, softcap=None, dropout=0.0)
        torch.testing.assert_close(out.flatten(), torch.tensor(means[window]))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_dropout_keeps_the_mean_and_the_mask(softcap: float | None) -> None:
    torch.manual_seed(0)
    draws, keys = 4000, 3
    query = torch.zeros(draws, 1, 1, 2)
    value = torch.tensor([[3.0, 0.0], [0.0, 3.0], [100.0, 100.0]]).expand(draws, 1, keys, 2)
    mask = torch.tensor([0.0, 0.0, -math.inf])
    out = masked_attention(query, torch.zeros(draws, 1, keys, 2), value, mask, 1.0, softcap, dropout=0.25)[:, 0, 0]
    # Weights are ½, dropped to 0 or raised to ½ / 0.75; the third value is hidden.
    assert set(out.unique().tolist()) == {0.0, 2.0}
    share = (out == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / (2 * draws))


def attention_module(layer: int = 0) -> nn.Module:
    module = nn.Module()
    module.layer_idx = layer  # type: ignore[assignment]
    return module


class Recorder:
    """A layout that keeps what it is asked."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        self.asked = {"layer": layer, **options}
        return query


def test_the_layer_hands_its_own_settings_to_the_layout() -> None:
    x = torch.zeros(1, 2, 3, 16)
    recorder = Recorder()
    _attention_function(
        attention_module(5), x, x, x, None, layout=recorder, scaling=0.3, sliding_window=7, softcap=2.0
    )
    assert recorder.asked == {"layer": 5, "scale": 0.3, "window": 7, "softcap": 2.0, "dropout": 0.0}
    _attention_function(attention_module(), x, x, x, None, layout=recorder, dropout=0.1, is_causal=True)
    assert recorder.asked == {"layer": 0, "scale": 0.25, "window": None, "softcap": None, "dropout": 0.1}


def test_a_call_without_a_layout_or_with_sinks_is_refused() -> None:
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ConfigError, match="layout"):
        _attention_function(attention_module(), x, x, x, None)
    with pytest.raises(ConfigError, match="sinks"):
        _attention_function(attention_module(), x, x, x, None, layout=Recorder(), s_aux=torch.zeros(2))


def test_the_backend_of_a_cpu() -> None:
    cpu = torch.device("cpu")
    for name in ("auto", "sdpa"):
        assert choose_backend(name, cpu, shares=True) == "sdpa"
        assert choose_backend(name, cpu, shares=False) == "sdpa"
    for name in ("flex", "varlen"):
        with pytest.raises(ConfigError, match=f"model.attention.*{name}"):
            choose_backend(name, cpu, shares=True)


def test_the_backend_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto", gpu, shares=True) == "flex"
    assert choose_backend("auto", gpu, shares=False) == "flex"
    with pytest.raises(ConfigError, match="flash-attn"):
        choose_backend("varlen", gpu, shares=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose_backend("auto", gpu, shares=True) == "flex"
    assert choose_backend("auto", gpu, shares=False) == "varlen"
    assert choose_backend("varlen", gpu, shares=False) == "varlen"

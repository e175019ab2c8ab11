"""What only a GPU can show: the fused attention backends, and a device that agrees with the CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from metagrpo.trainer.attention import ATTENTION, TreeLayout
from metagrpo.trainer.model import Policy
from metagrpo.trainer.packing import build_tree
from metagrpo.trainer.rollout.native import NativeSampler
from metagrpo.trainer.rollout.protocol import Request

from .tiny import CONFIGS, relative_error, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

SHARED = [[*range(1, 150), 7, 8, 9], [*range(1, 150), 3, 3], [*range(1, 60), 5], [*range(40, 90)]]
CHAINS = [list(range(1, 130)), list(range(200, 260)), [300, 301]]


def attend(backend: str, sequences: list[list[int]], window: int | None, softcap: float | None) -> list[torch.Tensor]:
    """Output and the gradients of query, key and value, for random bfloat16 inputs at a fixed seed."""
    tree = build_tree(sequences, share=sequences is SHARED)[0].to(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tree.size, 64) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for shape in shapes]
    query, key, value = inputs
    out = TreeLayout(tree, backend).attend(
        0, query, key, value, scale=0.125, window=window, softcap=softcap, dropout=0.0
    )
    upstream = torch.randn(out.shape, generator=generator).to("cuda", torch.bfloat16)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_fused_attention_equals_sdpa(backend: str, window: int | None, softcap: float | None) -> None:
    if backend == "varlen" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn")
    sequences = SHARED if backend == "flex" else CHAINS
    for fused, reference in zip(
        attend(backend, sequences, window, softcap), attend("sdpa", sequences, window, softcap), strict=True
    ):
        assert relative_error(fused, reference) < 2e-2


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_hidden_states_equal_the_cpus(name: str) -> None:
    # flex_attention takes no head narrower than 16.
    sizes = {"head_dim": 16, "hidden_size": 64}
    tree, _ = build_tree([[index % 97 for index in ids] for ids in SHARED])
    on_cpu = Policy(tiny_model(name, ATTENTION, **sizes)).tree_states(tree)
    policy = Policy(tiny_model(name, ATTENTION, **sizes).cuda())
    assert policy.attention in ("flex", "varlen")
    policy.check()
    on_gpu = policy.tree_states(tree.to(policy.device))
    assert relative_error(on_gpu.cpu(), on_cpu) < 1e-2


def test_greedy_completions_equal_the_cpus() -> None:
    sizes = {"head_dim": 16, "hidden_size": 64}
    requests = [
        Request(str(index), [1, *range(3, 5 + index)], 12, seed=index, stop_ids=frozenset({2}), temperature=0.0)
        for index in range(6)
    ]
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = []
    for device in ("cpu", "cuda"):
        policy = Policy(tiny_model("llama", ATTENTION, **sizes).to(device))
        tokens.append([completion.token_ids for completion in NativeSampler(policy, 4).generate(requests)])
    assert tokens[0] == tokens[1]

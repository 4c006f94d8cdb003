"""Experts asked to be batch-invariant: a row's result has the same bits alone, in a small batch and in a large one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from epmoe import (
    Activation,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEConfig,
    MoEKernel,
    make_dispatcher,
    select_experts,
)
from epmoe.experts import select_experts_impl
from epmoe.ops import _configs
from epmoe.ops._configs import GemmConfig
from epmoe.ops._triton import INTERPRET
from epmoe.quant import quantize_weights

KINDS = [("grouped", "standard", None), ("batched", "batched", None), ("grouped_fp8", "standard", "fp8_block")]


def make(
    kind: str,
    layout: str,
    scheme: str | None,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    seed: int,
    activation: str = "swiglu",
) -> tuple[MoEKernel, ExpertWeights]:
    e, h, i = sizes
    act = Activation.named(activation)
    spec = ExpertsSpec(act, h, i, dtype, torch.device(device), scheme=scheme, batch_invariant=True)
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(e, 1), device)
    g = torch.Generator().manual_seed(seed)
    rows1 = 2 * i if act.gated else i
    w1 = (torch.randn(e, rows1, h, generator=g) * h**-0.5).to(device, dtype)
    w2 = (torch.randn(e, h, i, generator=g) * i**-0.5).to(device, dtype)
    b1, b2 = (torch.randn(e, n, generator=g).to(device, dtype) for n in (rows1, h))
    weights = ExpertWeights(w1, w2, b1, b2)
    if scheme is not None:
        q1, q2 = quantize_weights(w1, scheme), quantize_weights(w2, scheme)
        weights = ExpertWeights(q1.values, q2.values, b1, b2, gate_up_scale=q1.scales, down_scale=q2.scales)
    return MoEKernel(moves, select_experts(spec, kind, layout).experts, layout=layout), weights


def check(kernel: MoEKernel, weights: ExpertWeights, batches: list[int], k: int, seed: int) -> None:
    """Each batch begins with the rows of the one before it, and ends with others."""
    e, h = weights.down_proj.shape[:2]
    device, dtype = weights.down_proj.device, kernel.experts.spec.dtype
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batches[-1], h, generator=g).to(device, dtype)
    ids = torch.rand(batches[-1], e, generator=g).argsort(1)[:, :k].int().to(device)
    p = torch.rand(batches[-1], k, generator=g).to(device)
    with torch.no_grad():
        whole = kernel(x, ids, p, weights).routed
        for m in batches[:-1]:
            alone = kernel(x[:m], ids[:m], p[:m], weights).routed
            assert torch.equal(alone, whole[:m]), f"{m} rows alone"
        if x.is_cuda:  # numpy, the interpreter's arithmetic, treats the last rows of a block in a way of their own
            order = torch.randperm(batches[-1], generator=g).to(device)
            moved = kernel(x[order], ids[order], p[order], weights).routed
            assert torch.equal(moved, whole[order]), "the same rows in another order"


@pytest.mark.skipif(not INTERPRET, reason="Triton was imported without its interpreter")
@pytest.mark.parametrize(("kind", "layout", "scheme"), KINDS[:2])
def test_one_configuration_serves_every_batch(
    kind: str, layout: str, scheme: str | None, seed: int, monkeypatch: Any
) -> None:
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")

    def config(*arguments: Any) -> GemmConfig:  # of as many kinds as a GPU's, whose sums differ in their last bits
        rows_per_expert = arguments[2]
        return GemmConfig(16, 32, 16 if rows_per_expert < 2 else 32 if rows_per_expert < 5 else 64, 2, 4, 2)

    monkeypatch.setattr(_configs, "gemm_config", config)
    _configs.gemm_plan.cache_clear()
    try:
        kernel, weights = make(kind, layout, scheme, "cpu", torch.float32, (2, 64, 48), seed)
        check(kernel, weights, [1, 4, 20], 1, seed)
    finally:
        _configs.gemm_plan.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "layout", "scheme", "activation"),
    [
        *((*kind, "swiglu") for kind in KINDS),
        ("grouped", "standard", None, "swiglu_oai"),
        ("grouped", "standard", None, "relu2"),
        ("grouped_fp8", "standard", "fp8_row", "swiglu"),
    ],
)
def test_a_row_has_the_same_bits_from_decoding_to_prefill(
    kind: str, layout: str, scheme: str | None, activation: str, seed: int
) -> None:
    """8 experts, 2 for a token: 1 row per expert to 1250, for which other experts would take every kernel in turn."""
    kernel, weights = make(kind, layout, scheme, "cuda", torch.bfloat16, (8, 2048, 768), seed, activation)
    check(kernel, weights, [1, 5, 100, 300, 1500, 5000 if layout == "standard" else 2000], 2, seed)


def test_who_can_not_promise_it_is_passed_over_with_a_reason(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    config = MoEConfig(32, 16, 4, 2, batch_invariant=True)
    selection = select_experts_impl(config, device="cuda", dtype=torch.bfloat16)
    assert selection.experts.name == "grouped"
    refusals = {c.name: c.refusal for c in selection.candidates}
    for name in ("torch_grouped", "reference", "monolithic"):
        if name in refusals:
            assert refusals[name] == (
                "batch_invariant: their sums depend on the batch; use experts='batched' or 'grouped'"
            )
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "torch")
    with pytest.raises(ValueError, match="batch_invariant in torch.bfloat16 on cpu, where torch multiplies"):
        select_experts_impl(config, device="cpu", dtype=torch.bfloat16)
    spec = dataclasses.replace(selection.experts.spec, lora=True)
    with pytest.raises(ValueError, match="batch_invariant with LoRA adapters"):
        select_experts(spec, "grouped")

"""The routed MLP with LoRA by our kernels: what `grouped` runs for rows that carry adapter ids, forward and backward.

One sort by (local expert, adapter) gives two kinds of segments over the same rows: an expert's, on which the base GEMMs
run, and inside it one for each of its adapters, on which the low-rank products run. Rows without an adapter come first
in their expert, belong to no adapter's segment, and keep the bits that they would have without LoRA.

    rows of expert e:  [ no adapter | adapter 0 | adapter 1 | ... ]     A + 1 virtual experts, e·(A + 1) + adapter + 1

    GEMM1, activation ─► h, a      u1 = x·A1ᵀ     h += s·u1·B1ᵀ, a = act(h)
    GEMM2 ─► y                     u2 = a·A2ᵀ     y += s·u2·B2ᵀ

T rows, K experts per token, N (row, expert) pairs in sorted order, L local experts, A adapters, R rank, H width, I
intermediate size; s is the adapter's scaling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.dispatch.inputs import ExpertInput
from epmoe.experts.base import local_ids
from epmoe.experts.lora import ExpertLora
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops._segments import Segments
from epmoe.ops._triton import cdiv
from epmoe.ops.activation import activation_backward
from epmoe.ops.align import MAX_LOCAL, align_rows
from epmoe.ops.gather_dot import gather_dot
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.grouped_gemm import grouped_gemm, grouped_gemm_act
from epmoe.ops.grouped_wgrad import grouped_wgrad
from epmoe.ops.low_rank import add_low_rank, add_low_rank_act

Place = tuple[Tensor | None, int]
"""Where a row's operand lies: row index[n] // divisor, or row n without an index."""


class SortedPairs(NamedTuple):
    """Attributes: `row_index [N]` and `slot [T, K]` as `align_rows` gives them; `local [T, K]` int32, each pair's local
    expert or -1; `scale [T·K]` float32, each pair's s (any, where it has no adapter); the `[L]` segments of `experts`
    and the `[L·A]` ones of `adapters`."""

    row_index: Tensor
    slot: Tensor
    local: Tensor
    scale: Tensor
    experts: Segments
    adapters: Segments


def sort_pairs(rows: ExpertInput, lora: ExpertLora) -> SortedPairs:
    """The pairs by local expert and adapter; never waits for the device.

    Raises:
        ValueError: more experts and adapters than a sort takes.
    """
    assert rows.adapter_ids is not None
    num_local, per_expert = rows.num_local, lora.num_adapters + 1
    virtual = num_local * per_expert
    if virtual >= MAX_LOCAL:
        raise ValueError(
            f"{num_local} local experts with {lora.num_adapters} adapters make {virtual} pairs of both: must be fewer "
            f"than {MAX_LOCAL}; use fewer adapters, more ranks, or experts='reference'"
        )
    adapter = rows.adapter_ids
    adapter = torch.where((adapter >= 0) & (adapter < lora.num_adapters), adapter, -1)
    local = local_ids(rows)
    local = torch.where(local < num_local, local, -1).to(torch.int32)
    key = torch.where(local >= 0, local * per_expert + adapter[:, None] + 1, -1)
    itself = torch.arange(virtual, dtype=torch.int32, device=key.device)
    row_index, offsets, slot = align_rows(key, itself, virtual, rows.max_assignments)
    starts, ends = offsets[:-1].view(num_local, per_expert), offsets[1:].view(num_local, per_expert)
    return SortedPairs(
        row_index,
        slot,
        local,
        lora.scaling[adapter.clamp_min(0)][:, None].expand(key.shape).contiguous().view(-1),
        Segments(starts[:, 0].contiguous(), ends[:, -1].contiguous()),
        Segments(starts[:, 1:].reshape(-1), ends[:, 1:].reshape(-1)),
    )


class _LoraMLP(torch.autograd.Function):
    """out[t] = Σ_k p[t,k]·y[slot[t,k]] (or p on x, before w1), y as in `epmoe.experts.lora`.

    Backward, with g = dout·w2 + s·(dout·B2)·A2, dh = act'(h) ⊙ p·g, p = 1 in it where it stands on the input (there x
    is p·x):

        dp = ⟨g, a⟩      dB2 = Σ s·dout ⊗ p·a·A2ᵀ    dA2 = Σ s·dout·B2 ⊗ p·a     dw2 = Σ dout ⊗ p·a
        dx = dh·w1 + s·(dh·B1)·A1    dB1 = Σ s·dh ⊗ u1    dA1 = Σ s·dh·B1 ⊗ x    dw1 = Σ dh ⊗ x

    Only what needs a gradient is computed: frozen experts cost no weight gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        p: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None,
        b2: Tensor | None,
        lora_a1: Tensor,  # [L·A, R, H]
        lora_b1: Tensor,  # [L·A, 2I, R]
        lora_a2: Tensor,  # [L·A, R, I]
        lora_b2: Tensor,  # [L·A, H, R]
        row_index: Tensor,
        slot: Tensor,
        local: Tensor,
        scale: Tensor,
        expert_start: Tensor,
        expert_end: Tensor,
        adapter_start: Tensor,
        adapter_end: Tensor,
        expected_m: int | None,
        spec: ExpertsSpec,
    ) -> Tensor:
        experts, adapters = (expert_start, expert_end), (adapter_start, adapter_end)
        n, k = row_index.shape[0], slot.shape[1]
        activation = spec.activation
        act = (activation.name, activation.alpha, activation.limit)
        few = _rows_per_adapter(expected_m, expert_start, adapter_start)
        on_input = p.contiguous().view(-1) if spec.weight_on_input else None
        scale_in = scale if on_input is None else scale * on_input

        start, end = experts
        a, h = grouped_gemm_act(x, w1, b1, start, end, row_index, k, n, on_input, *act, True, expected_m=expected_m)
        u1 = grouped_gemm(x, lora_a1, None, *adapters, row_index, k, n, False, expected_m=few)
        start, end = adapters
        add_low_rank_act(h, a, u1, lora_b1, start, end, row_index, scale_in, *act, expected_m=few)
        y = grouped_gemm(a, w2, b2, *experts, None, 1, n, False, expected_m=expected_m)
        u2 = grouped_gemm(a, lora_a2, None, *adapters, None, 1, n, False, expected_m=few)
        add_low_rank(y, u2, lora_b2, *adapters, row_index, scale, False, expected_m=few)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(
                x, p, w1, w2, b2, lora_a1, lora_b1, lora_a2, lora_b2, h, u1,
                row_index, slot, local, scale, *experts, *adapters,
            )  # fmt: skip
            ctx.spec, ctx.expected_m = spec, expected_m
        return gather_sum(y, slot, None if spec.weight_on_input else p, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, p, w1, w2, b2, lora_a1, lora_b1, lora_a2, lora_b2, h, u1 = ctx.saved_tensors[:11]
        row_index, slot, local, scale, expert_start, expert_end, adapter_start, adapter_end = ctx.saved_tensors[11:]
        need_x, need_p, need_w1, need_w2, need_b1, need_b2 = ctx.needs_input_grad[:6]
        need_lora_a1, need_lora_b1, need_lora_a2, need_lora_b2 = ctx.needs_input_grad[6:10]
        spec: ExpertsSpec = ctx.spec
        activation, expected_m = spec.activation, ctx.expected_m
        experts, adapters = (expert_start, expert_end), (adapter_start, adapter_end)
        n, k = row_index.shape[0], slot.shape[1]
        few = _rows_per_adapter(expected_m, expert_start, adapter_start)
        flat, dout = p.contiguous().view(-1), dout.contiguous()
        weight_in, weight_out = (flat, None) if spec.weight_on_input else (None, flat)
        scale_in = scale if weight_in is None else scale * weight_in
        gathered, in_place = (row_index, k), (None, 1)  # with the token, or in sorted order

        def low_rank(dy: Tensor, dy_at: Place, u: Tensor, u_at: Place, scale: Tensor, like: Tensor) -> Tensor:
            """Σ scale · dy ⊗ u over the rows of each adapter."""
            return grouped_wgrad(
                dy, u, *adapters, *dy_at, *u_at, scale, row_index, False, like.dtype, expected_m=few
            )[0]  # fmt: skip

        g = grouped_gemm(dout, w2, None, *experts, *gathered, n, True, expected_m=expected_m)
        v2 = grouped_gemm(dout, lora_b2, None, *adapters, *gathered, n, True, expected_m=few)
        add_low_rank(g, v2, lora_a2, *adapters, row_index, scale, True, expected_m=few)
        dh, weighted_a, dp = activation_backward(
            h, g, *experts, None if weight_out is None else row_index, weight_out,
            activation.name, activation.alpha, activation.limit,
        )  # fmt: skip
        dx = dw1 = dw2 = db1 = db2 = d_lora_a1 = d_lora_b1 = d_lora_a2 = d_lora_b2 = None
        if need_lora_b2:
            u2 = grouped_gemm(weighted_a, lora_a2, None, *adapters, *in_place, n, False, expected_m=few)
            d_lora_b2 = low_rank(dout, gathered, u2, in_place, scale, lora_b2)
        if need_lora_a2:
            d_lora_a2 = low_rank(v2, in_place, weighted_a, in_place, scale, lora_a2)
        if need_w2:
            dw2, _ = grouped_wgrad(
                dout, weighted_a, *experts, *gathered, *in_place, None, None, False, w2.dtype, expected_m=expected_m
            )
        v1 = grouped_gemm(dh, lora_b1, None, *adapters, *in_place, n, True, expected_m=few)
        if need_lora_b1:
            d_lora_b1 = low_rank(dh, in_place, u1, in_place, scale_in, lora_b1)
        if need_lora_a1:
            d_lora_a1 = low_rank(v1, in_place, x, gathered, scale_in, lora_a1)
        if need_w1 or need_b1:
            on_input = (weight_in, None if weight_in is None else row_index)
            dw1, bias = grouped_wgrad(
                dh, x, *experts, *in_place, *gathered, *on_input, need_b1, w1.dtype, expected_m=expected_m
            )
            db1 = bias if need_b1 else None
        if need_x or spec.weight_on_input:
            rows = grouped_gemm(dh, w1, None, *experts, *in_place, n, True, expected_m=expected_m)
            add_low_rank(rows, v1, lora_a1, *adapters, row_index, scale, True, expected_m=few)
            dx = gather_sum(rows, slot, p if spec.weight_on_input else None, x.dtype)
            if spec.weight_on_input:
                dp = gather_dot(x, rows, slot)
        if not spec.weight_on_input:
            dp = torch.cat([dp, dp.new_zeros(1)])[slot]  # a slot of -1 takes the zero
            if b2 is not None:
                dp = dp + gather_dot(dout, b2, local)
        if need_b2:
            one = dout.new_ones(n, 1)
            on_output = (weight_out, None if weight_out is None else row_index)
            db2 = grouped_wgrad(
                dout, one, *experts, *gathered, *in_place, *on_output, False, b2.dtype, expected_m=expected_m
            )[0].squeeze(2)  # fmt: skip
        of_adapters = (d_lora_a1, d_lora_b1, d_lora_a2, d_lora_b2)
        return dx, dp.to(p.dtype), dw1, dw2, db1, db2, *of_adapters, *[None] * 10


def _rows_per_adapter(expected_m: int | None, expert_start: Tensor, adapter_start: Tensor) -> int | None:
    """What an adapter's segment should expect of an expert's `expected_m` rows."""
    return None if expected_m is None else cdiv(expected_m * expert_start.shape[0], adapter_start.shape[0])


def lora_routed_mlp(rows: ExpertInput, weights: ExpertWeights, spec: ExpertsSpec) -> Tensor:
    """The routed MLP `[T, H]` of rows with adapter ids and weights with adapters, weighted and summed.

    Raises:
        ValueError: as `sort_pairs`.
    """
    lora = weights.lora
    assert lora is not None
    pairs = sort_pairs(rows, lora)
    return _LoraMLP.apply(
        rows.x,
        rows.topk_weights,
        weights.gate_up_proj,
        weights.down_proj,
        weights.gate_up_bias,
        weights.down_bias,
        lora.gate_up_a.flatten(0, 1),
        lora.gate_up_b.flatten(0, 1),
        lora.down_a.flatten(0, 1),
        lora.down_b.flatten(0, 1),
        pairs.row_index,
        pairs.slot,
        pairs.local,
        pairs.scale,
        *pairs.experts,
        *pairs.adapters,
        rows.expected_m,
        spec,
    )

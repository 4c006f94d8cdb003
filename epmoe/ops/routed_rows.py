"""From routed tokens to one row per (token, choice) pair, for inference: sort by expert, GEMM1 with its activation,
GEMM2. On the path of a token: all that `grouped` experts do between dispatch and the weighted sum.

Where experts have few rows, the launches overlap: GEMM2 begins with the experts that GEMM1 has finished while the last
ones are still in work, so that memory does not rest where one ends and the other begins.

T rows of the expert input, K experts per token, N rows of the experts' buffers, H width, I intermediate size, L local
experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._gemm_few_rows import Chain, launch_plan, plan_few_rows
from epmoe.ops._segments import RowMap, standard_segments
from epmoe.ops._triton import check_buffer, op, use_triton
from epmoe.ops.activation import Epilogue, is_gated
from epmoe.ops.align import align_rows, align_rows_triton, check_routing, check_sizes
from epmoe.ops.grouped_gemm import check_gemm, check_gemm_act, grouped_gemm_act_into, grouped_gemm_into


@op("routed_rows")
def routed_rows(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor,
    max_rows: int,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    expected_m: int | None = None,
) -> tuple[Tensor, Tensor]:
    """y = act(s·x·w1ᵀ + b1)·w2ᵀ + b2 of each (token, choice) pair whose expert is local. Not differentiable.

    Args:
        x: `[T, H]`; rows may be strided.
        w1, b1, w2, b2: `[L, 2I, H]` (`[L, I, H]` not gated), `[L, 2I]` or None, `[L, H, I]`, `[L, H]` or None.
        topk_ids: `[T, K]` int32, contiguous; `expert_map [E]` int32: as in `align_rows`.
        max_rows: N; T·K always suffices, pairs past it have no row.
        row_scale: `[T·K]` float32 or None, the router weight on the input.
        activation, alpha, limit: fields of `Activation`.
        expected_m: the rows an expert should expect, which picks the configuration and never what is computed.

    Returns:
        `y [N, H]`, in expert order, unwritten where there is no pair; `slot [T, K]` int32, the row of each pair or -1.

    Raises:
        ValueError: as `align_rows` and `grouped_gemm_act`.
    """
    size = w1.shape[1] // (2 if is_gated(activation, alpha, limit) else 1)
    act = torch.empty(max_rows, size, dtype=x.dtype, device=x.device)
    y = torch.empty(max_rows, w2.shape[1], dtype=x.dtype, device=x.device)
    slot = routed_rows_into(
        y, act, x, w1, b1, w2, b2, topk_ids, expert_map, row_scale, activation, alpha, limit, expected_m
    )
    return y, slot


@routed_rows.register_fake
def _(
    x, w1, b1, w2, b2, topk_ids, expert_map, max_rows, row_scale, activation, alpha, limit, expected_m=None
):  # fmt: skip
    return x.new_empty(max_rows, w2.shape[1]), torch.empty_like(topk_ids)


def routed_rows_into(
    y: Tensor,
    act: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor,
    row_scale: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    expected_m: int | None = None,
) -> Tensor:
    """`routed_rows` into buffers of the caller's, planned workspaces: `y [N, H]` and, on the way, `act [N, I]`, both
    contiguous. Returns `slot`."""
    slot = None
    if use_triton(x):
        epilogue = Epilogue(activation, alpha, limit)
        slot = _launch_overlapped(y, act, x, w1, b1, w2, b2, topk_ids, expert_map, row_scale, epilogue, expected_m)
    if slot is None:
        row_index, offsets, slot = align_rows(topk_ids, expert_map, w1.shape[0], y.shape[0])
        rows = standard_segments(offsets)
        grouped_gemm_act_into(
            act, None, x, w1, b1, *rows, row_index, topk_ids.shape[1], row_scale, activation, alpha, limit, expected_m
        )
        grouped_gemm_into(y, act, w2, b2, *rows, None, 1, False, expected_m=expected_m)
    return slot


def _launch_overlapped(
    y: Tensor,
    act: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    topk_ids: Tensor,
    expert_map: Tensor,
    row_scale: Tensor | None,
    epilogue: Epilogue,
    expected_m: int | None,
) -> Tensor | None:
    """`routed_rows_into` by launches that overlap; None where they can't, and nothing has been done."""
    if x.dim() != 2 or w1.dim() != 3 or w2.dim() != 3:
        return None  # and an error that says so
    first = plan_few_rows(x, w1, y.shape[0], expected_m, False, epilogue)
    second = plan_few_rows(act, w2, y.shape[0], expected_m, False, Epilogue())
    if first is None or second is None or first.split > 1 or second.split > 1:
        return None
    L = w1.shape[0]
    check_routing(topk_ids, expert_map, L)
    check_sizes(topk_ids, y.shape[0])
    K = topk_ids.shape[1]
    done = torch.empty(L, dtype=torch.int32, device=x.device)
    row_index, offsets, slot = align_rows_triton(topk_ids, expert_map, L, y.shape[0], done)
    segments = standard_segments(offsets)
    found, in_place = RowMap(*segments, row_index, K, row_scale), RowMap(*segments)
    check_gemm_act(x, w1, b1, found, epilogue)
    check_buffer(act, "act", (y.shape[0], w2.shape[2]), x.dtype, x)
    check_gemm(act, w2, b2, in_place, False)
    check_buffer(y, "y", (y.shape[0], w2.shape[1]), x.dtype, x)
    launch_plan(first, x, w1, b1, found, act, None, epilogue, Chain(done))
    behind = Chain(done, first.column_tiles, first.constants["BLOCK_T"])
    launch_plan(second, act, w2, b2, in_place, y, None, Epilogue(), behind)
    return slot

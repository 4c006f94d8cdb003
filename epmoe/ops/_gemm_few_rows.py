"""Grouped GEMM for few rows per expert, where reading the weights once is all that costs: decoding. On the path of a
token it is `ops/grouped_gemm.py`, which comes here when an expert should expect at most `MAX_ROWS` rows.

Weights are the M side of the dot and tokens its N side (wgmma takes 64 rows of M but only 8 of N), each program reads
one tile of weights from its first to its last column, and so many tiles are in flight that memory never waits.

Letters: L local experts, N columns of an output (weight rows: 2I when gated), D the reduction width, K experts per
token, S parts of a split reduction. Expert e owns rows row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.ops._dependent_launch import let_next_start, wait_for_previous
from epmoe.ops._descriptors import unchecked_descriptor
from epmoe.ops._few_rows_configs import FewRowsPlan, few_rows_plan
from epmoe.ops._segments import RowMap
from epmoe.ops._triton import TensorDescriptor, cast_from_float32, cdiv, dot_accumulate, jit, on_device_of, tl
from epmoe.ops.activation import Epilogue, activate_and_slopes


class Chain(NamedTuple):
    """Two launches, directly one after the other, of which the second works on experts that the first has finished.

    `done [L]` int32, zeroed before the first: tiles of each expert that it has stored. The second waits for `tiles` of
    them for every `block_t` rows; in the first both are 0. What the second waits for always comes: none of its programs
    starts before all of the first have (`let_next_start`).
    """

    done: Tensor
    tiles: int = 0
    block_t: int = 0


@jit
def _locate(item, item_ends, begins, counts, experts):
    """(expert, its first row, its number of rows, item within the expert). `item_ends`: items up to and with each."""
    passed = tl.where(item_ends <= item, (item_ends.to(tl.int64) << 32) + experts + 1, 0)
    last = tl.max(passed)  # the last expert behind us, beside its items: one reduction for both
    e = (last & 0xFFFFFFFF).to(tl.int32)
    own = tl.sum(tl.where(experts == e, (begins.to(tl.int64) << 32) + counts, 0))
    return e, (own >> 32).to(tl.int32), (own & 0xFFFFFFFF).to(tl.int32), item - (last >> 32).to(tl.int32)


@jit(
    do_not_specialize=["num_rows", "awaited_tiles", "awaited_rows"],
    do_not_specialize_on_alignment=["row_start", "row_end"],
)
def _few_rows_kernel(
    a,
    w,  # a pointer, or a tensor descriptor when TMA
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,  # when SPLIT > 1 parts of the sums, fp32 [S, rows, N], and neither GATED nor anything else at the end
    preact,
    done,
    alpha,
    limit,
    num_rows,
    awaited_tiles,  # that the launch before this one stores for every awaited_rows rows
    awaited_rows,
    a_stride,
    w_stride_expert,
    w_stride_row,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DIVISOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRED: tl.constexpr,
    TMA: tl.constexpr,
    AWAIT: tl.constexpr,  # wait expert by expert, and not for the whole launch before this one
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk work items: BLOCK_W weight rows of one expert × up to BLOCK_T of its rows × one part of D.

    row_start = [0, 5, 5], row_end = [5, 5, 9], BLOCK_T = 4, two column tiles: expert 0 has items 0..3 (column tile 0
    with rows 0..3, then with row 4; the same for column tile 1), expert 1 none, expert 2 items 4 and 5: what reads the
    same weights does so at the same time. A gated tile holds BLOCK_W / 2 gates, then the up projections of the same
    columns.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = BLOCK_W // PARTS
    WIDTH: tl.constexpr = N // PARTS  # columns of the result
    TILES_N: tl.constexpr = (WIDTH + COLS - 1) // COLS
    STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    PART_D: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT * BLOCK_K
    EVEN: tl.constexpr = D % BLOCK_K == 0 and STEPS % SPLIT == 0

    experts = tl.arange(0, L_BLOCK)
    if not AWAIT:
        wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    # From L2: where nothing was waited for, this SM may remember others.
    begins = tl.load(row_start + experts, mask=experts < L, other=0, cache_modifier=".cg")
    counts = tl.load(row_end + experts, mask=experts < L, other=0, cache_modifier=".cg") - begins
    item_ends = tl.cumsum((counts + BLOCK_T - 1) // BLOCK_T) * (TILES_N * SPLIT)

    for item in tl.range(tl.program_id(0), tl.max(item_ends), tl.num_programs(0)):
        e, begin, count, within = _locate(item, item_ends, begins, counts, experts)
        part = within % SPLIT
        within = within // SPLIT
        row_tiles = (count + BLOCK_T - 1) // BLOCK_T
        row0 = within % row_tiles * BLOCK_T
        col0 = within // row_tiles * COLS
        if AWAIT:
            stored = tl.atomic_add(done + e, 0, sem="acquire", scope="gpu")
            while stored < (count + awaited_rows - 1) // awaited_rows * awaited_tiles:
                stored = tl.atomic_add(done + e, 0, sem="acquire", scope="gpu")

        spread_t = tl.arange(0, BLOCK_T)
        is_row = row0 + spread_t < count
        rows = begin + row0 + spread_t
        safe_rows = begin + tl.minimum(row0 + spread_t, count - 1)
        if row_index is not None:
            position = tl.load(row_index + safe_rows)
        else:
            position = safe_rows
        source = position // DIVISOR

        ks = tl.arange(0, BLOCK_K)
        spread = tl.arange(0, BLOCK_W)
        cols = col0 + spread % COLS
        w_rows = spread // COLS * WIDTH + tl.minimum(cols, WIDTH - 1)
        a_tile = a + source.to(tl.int64)[:, None] * a_stride + ks[None, :]
        if not TMA:
            if TRANSPOSE:
                w_tile = w + e.to(tl.int64) * w_stride_expert + ks.to(tl.int64)[:, None] * w_stride_row + cols[None, :]
            else:
                w_tile = (
                    w + e.to(tl.int64) * w_stride_expert + w_rows.to(tl.int64)[:, None] * w_stride_row + ks[None, :]
                )

        acc = tl.zeros((COLS if PAIRED else BLOCK_W, BLOCK_T), tl.float32)
        acc_up = acc
        for step in tl.range(0, PART_D, BLOCK_K):
            k = step + part * PART_D if SPLIT > 1 else step
            if TRANSPOSE:
                if TMA:
                    b = w.load([e, k, col0]).reshape(BLOCK_K, BLOCK_W)
                else:
                    inside = (k + ks < D)[:, None] & (cols < WIDTH)[None, :]
                    b = tl.load(w_tile + tl.cast(k, tl.int64) * w_stride_row, mask=inside, other=0.0)
                b = b.T
            elif PAIRED:
                b = w.load([e * PARTS, col0, k]).reshape(COLS, BLOCK_K)
                up = w.load([e * PARTS + 1, col0, k]).reshape(COLS, BLOCK_K)
            elif TMA:
                b = w.load([e * PARTS, col0, k]).reshape(BLOCK_W, BLOCK_K)
            elif EVEN:
                b = tl.load(w_tile + k)
            else:
                b = tl.load(w_tile + k, mask=(k + ks < D)[None, :], other=0.0)
            if EVEN:
                x = tl.load(a_tile + k, mask=is_row[:, None], other=0.0)
            else:
                x = tl.load(a_tile + k, mask=is_row[:, None] & (k + ks < D)[None, :], other=0.0)
            if PAIRED:
                acc_up = dot_accumulate(up, x.T, acc_up, INTERPRETED)
            acc = dot_accumulate(b, x.T, acc, INTERPRETED)

        out_cols = col0 + tl.arange(0, COLS)
        inside = is_row[None, :] & (out_cols < WIDTH)[:, None]
        row = rows.to(tl.int64)[None, :]
        if SPLIT > 1:
            tl.store(out + (part.to(tl.int64) * num_rows + row) * N + out_cols[:, None], acc, mask=inside)
        else:
            if PAIRED:
                g, u = acc, acc_up
            elif GATED:
                g, u = acc.reshape(2, COLS, BLOCK_T).permute(1, 2, 0).split()
            else:
                g, u = acc, acc
            if row_scale is not None:
                scale = tl.load(row_scale + position)[None, :]
                g *= scale
                u *= scale
            if bias is not None:
                at = bias + e.to(tl.int64) * N + tl.minimum(out_cols, WIDTH - 1)
                g += tl.load(at).to(tl.float32)[:, None]
                if GATED:
                    u += tl.load(at + WIDTH).to(tl.float32)[:, None]
            _finish(
                g, u, out, preact, row, out_cols[:, None], inside, alpha, limit,
                N, WIDTH, ACTIVATION, GATED, INTERPRETED,
            )  # fmt: skip
            if done is not None and not AWAIT:
                tl.debug_barrier()  # all threads' stores come before the one count
                tl.atomic_add(done + e, 1, sem="release", scope="gpu")
    if AWAIT:
        wait_for_previous(DEPENDENT)  # whoever waits for this kernel waits for all that stands before it


@jit
def _finish(
    g, u, out, preact, row, col, inside, alpha, limit,
    N: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Activation of gates `g` and up projections `u` (of `g` alone, and `u` is anything, when not GATED), and the
    stores."""
    if ACTIVATION != "none":
        if preact is not None:
            at = preact + row * N + col
            tl.store(at, cast_from_float32(g, preact.dtype.element_ty, INTERPRETED), mask=inside)
            if GATED:
                tl.store(at + WIDTH, cast_from_float32(u, preact.dtype.element_ty, INTERPRETED), mask=inside)
        if not GATED:
            u = 1.0
        g, _, _ = activate_and_slopes(g, u, alpha, limit, ACTIVATION)
    tl.store(out + row * WIDTH + col, cast_from_float32(g, out.dtype.element_ty, INTERPRETED), mask=inside)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["row_start", "row_end"])
def _join_parts_kernel(
    parts,
    bias,
    row_start,
    row_end,
    row_index,
    row_scale,
    out,
    preact,
    alpha,
    limit,
    num_rows,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program per row and BLOCK columns: the S parts of its sums in their order, then what a whole sum gets."""
    WIDTH: tl.constexpr = N // 2 if GATED else N
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    row = tl.program_id(0)
    experts = tl.arange(0, L_BLOCK)
    ends = tl.load(row_end + experts, mask=experts < L, other=2147483647)
    e = tl.sum((ends <= row).to(tl.int32))  # segments ascend: no earlier one reaches so far
    if e < L:
        if tl.load(row_start + e) <= row:
            n = row.to(tl.int64)
            col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = col < WIDTH
            g = tl.zeros((BLOCK,), tl.float32)
            u = tl.zeros((BLOCK,), tl.float32)
            for s in tl.static_range(SPLIT):
                at = parts + (s * num_rows.to(tl.int64) + n) * N + col
                g += tl.load(at, mask=inside, other=0.0)
                if GATED:
                    u += tl.load(at + WIDTH, mask=inside, other=0.0)
            if row_scale is not None:
                position = n
                if row_index is not None:
                    position = tl.load(row_index + n).to(tl.int64)
                scale = tl.load(row_scale + position)
                g *= scale
                u *= scale
            if bias is not None:
                at = bias + e.to(tl.int64) * N + col
                g += tl.load(at, mask=inside, other=0.0).to(tl.float32)
                if GATED:
                    u += tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
            _finish(g, u, out, preact, n, col, inside, alpha, limit, N, WIDTH, ACTIVATION, GATED, INTERPRETED)


def launch_few_rows(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    preact: Tensor | None,
    transpose: bool,
    expected_m: int | None,
    epilogue: Epilogue,
) -> bool:
    """Writes what `grouped_gemm` (`grouped_gemm_act`, with an activation) promises for checked arguments into `out`
    `[max_rows, N]` or `[max_rows, I]` and, unless it is None, `preact`; or returns False where this kernel should not:
    many rows per expert, a dtype or a device that it is not made for.
    """
    plan = plan_few_rows(a, w, out.shape[0], expected_m, transpose, epilogue)
    if plan is None:
        return False
    launch_plan(plan, a, w, bias, rows, out, preact, epilogue)
    return True


def plan_few_rows(
    a: Tensor,
    w: Tensor,
    max_rows: int,
    expected_m: int | None,
    transpose: bool,
    epilogue: Epilogue,
) -> FewRowsPlan | None:
    """The plan of such a launch, or None: not by this kernel."""
    aligned = w.data_ptr() % 16 == 0
    sizes = (w.shape, w.stride(), aligned, max_rows, expected_m)
    return few_rows_plan(a.device, a.dtype, *sizes, transpose, epilogue.gated)


def launch_plan(
    plan: FewRowsPlan,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rows: RowMap,
    out: Tensor,
    preact: Tensor | None,
    epilogue: Epilogue,
    chain: Chain | None = None,
) -> None:
    """`launch_few_rows` by a plan of `plan_few_rows`.

    Args:
        chain: with the launch that directly follows or precedes this one. Not with a split plan.
    """
    assert plan.split == 1 or chain is None
    num_rows, n = out.shape[0], w.shape[2 if plan.constants["TRANSPOSE"] else 1]
    operand: Any = w if plan.descriptor is None else unchecked_descriptor(TensorDescriptor, w, *plan.descriptor)
    result = out
    if plan.split > 1:
        result = torch.empty(plan.split, num_rows, n, dtype=torch.float32, device=a.device)
    awaits = chain is not None and chain.tiles > 0
    with on_device_of(a):
        _few_rows_kernel[(plan.programs,)](
            a,
            operand,
            bias,
            rows.row_start,
            rows.row_end,
            rows.row_index,
            rows.row_scale,
            result,
            preact,
            None if chain is None else chain.done,
            epilogue.alpha,
            epilogue.limit,
            num_rows,
            0 if chain is None else chain.tiles,
            0 if chain is None else chain.block_t,
            a.stride(0),
            w.stride(0),
            w.stride(1),
            DIVISOR=rows.divisor,
            ACTIVATION=epilogue.activation,
            AWAIT=awaits,
            **plan.constants,
        )
        if plan.split > 1:
            gated = out.shape[1] < n
            _join_parts_kernel[(num_rows, cdiv(out.shape[1], plan.join["BLOCK"]))](
                result,
                bias,
                rows.row_start,
                rows.row_end,
                rows.row_index,
                rows.row_scale,
                out,
                preact,
                epilogue.alpha,
                epilogue.limit,
                num_rows,
                N=n,
                ACTIVATION=epilogue.activation,
                GATED=gated,
                SPLIT=plan.split,
                **plan.join,
            )

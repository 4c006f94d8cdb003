"""The whole routed MLP of a few tokens in one launch, from router logits to the weighted sum over their experts. On the
path of a token it takes the place of routing, sort, both grouped GEMMs and reduction, where reading the weights of the
chosen experts once is all that costs.

Letters: M tokens, H hidden size, E experts (all local), K experts per token, I intermediate size, D distinct experts
chosen by any of the tokens, T tokens padded.

Every program routes all tokens for itself, which costs less than waiting for one that does. Then it computes columns of
the activation of some experts, waits for the other programs, and computes columns of the output, adding up the experts
in a fixed order. Weights stream through shared memory, each read once.

A matrix unit multiplies UNIT = 64 rows at a time, and 64 rows of one expert's weights would be too coarse to spread
evenly. So they are fewer, each there several times: GEMM1 cuts its reduction into SPLIT pieces, GEMM2 takes GROUP
experts together. Every piece or expert meets the columns of all, and only the products with its own are used:

    rows (piece, row) of w  ×  columns (piece', token) of x  ->  [UNIT, SPLIT·T], whose part piece = piece' adds up to
                                                                 [rows, T]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.ops._expert_table import codes_at, expert_of, tabulate_experts, tabulate_weights, wants, weights_at
from epmoe.ops._grid_barrier import cooperative_launch, grid_arrive, grid_parity, grid_wait
from epmoe.ops._routed_mlp_configs import MAX_TOKENS, UNIT, routed_mlp_config
from epmoe.ops._triton import (
    INTERPRET,
    KERNEL_DTYPES,
    cast_from_float32,
    dot_accumulate,
    jit,
    next_power_of_2,
    on_device_of,
    op,
    tl,
    unit_stride,
    use_triton,
)
from epmoe.ops.activation import activate_and_slopes, apply_activation, is_gated
from epmoe.ops.route import MAX_COLUMNS, choose_rows, padded_sizes, weigh_rows
from epmoe.ops.route_reference import route_reference

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _own(products, ROWS: tl.constexpr, PIECES: tl.constexpr, T: tl.constexpr):
    """[PIECES · ROWS, PIECES · T] -> [ROWS, T]: the sum of each piece with its own columns, whatever others hold."""
    piece = tl.arange(0, PIECES * ROWS)[:, None] // ROWS
    mine = tl.where(piece == tl.arange(0, PIECES * T)[None, :] // T, products, 0.0)
    mine = tl.sum(tl.reshape(mine, [PIECES * ROWS, PIECES, T]), axis=1)
    return tl.sum(tl.reshape(mine, [PIECES, ROWS, T]), axis=0)


@jit
def _routed_mlp_kernel(
    x_ptr, logits_ptr, selection_bias_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, table_ptr, act_ptr, out_ptr,
    scaling, alpha, limit, x_stride, w1_stride_expert, w1_stride_row, w2_stride_expert, w2_stride_row,
    M: tl.constexpr, H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    EXPERT_GROUP: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr, SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, ROUTE_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    UNIT: tl.constexpr, T: tl.constexpr, LENGTH: tl.constexpr, TABLE: tl.constexpr,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
    PHASE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """PHASE 1: up to the activation, `act [D, M, I]`; 2: from there on; 0: both, with a barrier between them.

    Programs take turns: with 3 of them, program 1 computes tiles 1, 4, 7, .. of GEMM1, COLS columns of an expert each,
    and then blocks 1, 4, .. of the output, ROWS columns each, of all D experts. A tile or block takes several steps of
    a loop that runs through all of them, so that loads of the next are under way while one ends.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    COLS: tl.constexpr = UNIT // (SPLIT * PARTS)
    TILES: tl.constexpr = (I + COLS - 1) // COLS
    STEPS_H: tl.constexpr = (PIECE + BLOCK_H - 1) // BLOCK_H
    ROWS: tl.constexpr = UNIT // GROUP
    BLOCKS: tl.constexpr = (H + ROWS - 1) // ROWS
    STEPS_I: tl.constexpr = (I + BLOCK_I - 1) // BLOCK_I
    if PHASE == 0:
        parity = grid_parity()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    unit = tl.arange(0, UNIT)
    t = tl.arange(0, T)
    table_ptr += program * TABLE

    token = tl.arange(0, ROUTE_ROWS)
    ids, top, inverse = choose_rows(
        logits_ptr, selection_bias_ptr, None, None, token, token < M,
        E, K, EXPERT_GROUP, TOPK_GROUPS, TOP2, SCORING, ROUTE_ROWS, PAD, COLUMNS, SLOTS,
    )  # fmt: skip
    place = tabulate_experts(table_ptr, ids, M, ROUTE_ROWS, SLOTS)
    count = tl.load(table_ptr)
    if WEIGHT_ON_INPUT:
        p = weigh_rows(logits_ptr, token, ids, top, inverse, scaling, E, SCORING, RENORMALIZE)
        tabulate_weights(table_ptr, ids, place, p, M, ROUTE_ROWS, LENGTH)

    if PHASE != 2:
        piece = unit // (UNIT // SPLIT)
        column = tl.arange(0, SPLIT * T)
        acc = tl.zeros([UNIT, SPLIT * T], tl.float32)
        for step in tl.range(0, (count * TILES - program + programs - 1) // programs * STEPS_H, num_stages=STAGES):
            tile = program + step // STEPS_H * programs
            n = tile // TILES
            code = codes_at(table_ptr, n, count, n < count)
            e = expert_of(code)
            col0 = tile % TILES * COLS
            row = tl.minimum(col0 + unit % COLS, I - 1) + unit // COLS % PARTS * I
            k = step % STEPS_H * BLOCK_H + tl.arange(0, BLOCK_H)
            w = w1_ptr + e * w1_stride_expert + (row.to(tl.int64) * w1_stride_row + piece * PIECE)[:, None] + k[None, :]
            if H == SPLIT * PIECE and PIECE % BLOCK_H == 0:
                w = tl.load(w)
            else:
                left = tl.minimum(H - piece * PIECE, PIECE)
                w = tl.load(w, mask=k[None, :] < left[:, None], other=0.0)
            left = tl.minimum(H - column // T * PIECE, PIECE) * wants(code, column % T)
            x = x_ptr + ((column % T).to(tl.int64) * x_stride + column // T * PIECE)[:, None] + k[None, :]
            x = tl.load(x, mask=k[None, :] < left[:, None], other=0.0)
            acc = dot_accumulate(w, x.T, acc, INTERPRETED)
            if step % STEPS_H == STEPS_H - 1:
                h = _own(acc, UNIT // SPLIT, SPLIT, T)
                acc = tl.zeros([UNIT, SPLIT * T], tl.float32)
                wanted = wants(code, t) != 0
                if WEIGHT_ON_INPUT:
                    h *= weights_at(table_ptr, n, t, wanted, M, LENGTH)[None, :]
                col = col0 + tl.arange(0, COLS)
                safe_col = tl.minimum(col, I - 1)
                if GATED:
                    g, u = tl.reshape(h, [2, COLS, T]).permute(1, 2, 0).split()
                    if b1_ptr is not None:
                        u += tl.load(b1_ptr + e * (PARTS * I) + I + safe_col).to(tl.float32)[:, None]
                else:
                    g, u = h, 1.0
                if b1_ptr is not None:
                    g += tl.load(b1_ptr + e * (PARTS * I) + safe_col).to(tl.float32)[:, None]
                a, _, _ = activate_and_slopes(g, u, alpha, limit, ACTIVATION)
                tl.store(
                    act_ptr + (n * M + t)[None, :] * I + col[:, None],
                    cast_from_float32(a, act_ptr.dtype.element_ty, INTERPRETED),
                    mask=wanted[None, :] & (col < I)[:, None],
                )

    if PHASE == 0:
        grid_arrive()
    if PHASE != 1:
        if not WEIGHT_ON_INPUT:
            p = weigh_rows(logits_ptr, token, ids, top, inverse, scaling, E, SCORING, RENORMALIZE)
            tabulate_weights(table_ptr, ids, place, p, M, ROUTE_ROWS, LENGTH)
        if PHASE == 0:
            grid_wait(parity)
        if count == 0:
            for block in range(program, BLOCKS, programs):
                h = block * ROWS + tl.arange(0, ROWS)
                tl.store(
                    out_ptr + t[None, :] * H + h[:, None],
                    tl.zeros([ROWS, T], out_ptr.dtype.element_ty),
                    mask=(t < M)[None, :] & (h < H)[:, None],
                )
        groups = (count + GROUP - 1) // GROUP
        divisor = tl.maximum(groups, 1).to(tl.int64)
        reciprocal = (4294967295 + divisor) // divisor  # 2³² / groups, rounded up: a division would delay every load
        column = tl.arange(0, GROUP * T)
        acc = tl.zeros([UNIT, GROUP * T], tl.float32)
        out = tl.zeros([ROWS, T], tl.float32)
        for step in tl.range(0, (BLOCKS - program + programs - 1) // programs * (groups * STEPS_I), num_stages=STAGES):
            turn = (tl.cast(step // STEPS_I, tl.int64) * reciprocal >> 32).to(tl.int32)
            group = step // STEPS_I - turn * groups
            h = (program + turn * programs) * ROWS + unit % ROWS
            j = step % STEPS_I * BLOCK_I + tl.arange(0, BLOCK_I)
            n = group * GROUP + unit // ROWS
            e = expert_of(codes_at(table_ptr, n, count, group < groups))
            w = (
                w2_ptr
                + (e * w2_stride_expert + tl.minimum(h, H - 1).to(tl.int64) * w2_stride_row)[:, None]
                + j[None, :]
            )
            w = tl.load(w, mask=j[None, :] < tl.where(n < count, I, 0)[:, None], other=0.0)
            n_of = group * GROUP + column // T
            wanted = wants(codes_at(table_ptr, n_of, count, group < groups), column % T)
            a = act_ptr + ((n_of * M + column % T) * I)[:, None] + j[None, :]
            a = tl.load(a, mask=j[None, :] < (wanted * I)[:, None], other=0.0)
            acc = dot_accumulate(w, a.T, acc, INTERPRETED)
            if step % STEPS_I == STEPS_I - 1:
                y = acc
                acc = tl.zeros([UNIT, GROUP * T], tl.float32)
                if b2_ptr is not None:
                    y += tl.load(b2_ptr + e * H + h, mask=h < H, other=0.0).to(tl.float32)[:, None]
                if not WEIGHT_ON_INPUT:
                    y *= weights_at(table_ptr, n_of, column % T, wanted != 0, M, LENGTH)[None, :]
                # selected and not multiplied by 0: a NaN of an expert is of those who want it
                out += _own(tl.where((wanted != 0)[None, :], y, 0.0), ROWS, GROUP, T)
                if group == groups - 1:
                    at = (program + turn * programs) * ROWS + tl.arange(0, ROWS)
                    tl.store(
                        out_ptr + t[None, :] * H + at[:, None],
                        cast_from_float32(out, out_ptr.dtype.element_ty, INTERPRETED),
                        mask=(t < M)[None, :] & (at < H)[:, None],
                    )
                    out = tl.zeros([ROWS, T], tl.float32)


class Rules(NamedTuple):
    """K and fields of `RouterConfig`, then those of `Activation`, then where the router weight is applied."""

    top_k: int
    scoring: str
    renormalize: bool
    scaling_factor: float
    num_groups: int
    topk_groups: int
    group_score: str
    activation: str
    alpha: float
    limit: float
    weight_on_input: bool


def _routed_mlp_triton(
    x: Tensor,
    logits: Tensor,
    selection_bias: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    rules: Rules,
) -> Tensor:
    (tokens, h), (num_experts, _, i), k = x.shape, w2.shape, rules.top_k
    out = torch.empty(tokens, h, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    gated = is_gated(rules.activation, rules.alpha, rules.limit)
    grouped = rules.topk_groups < rules.num_groups
    num_groups = rules.num_groups if grouped else 1
    pad, columns = padded_sizes(num_experts, num_groups)
    config = routed_mlp_config(x.device, x.dtype.itemsize, tokens, k, h, i, gated)
    length = next_power_of_2(tokens * k)
    table = torch.empty(config.programs, 1 + length * (1 + tokens), dtype=torch.int32, device=x.device)
    act = torch.empty(min(tokens * k, num_experts), tokens, i, dtype=x.dtype, device=x.device)
    together = cooperative_launch(x.device)
    with on_device_of(x):
        for phase in (0,) if together is not None else (1, 2):
            _routed_mlp_kernel[(config.programs,)](
                x, logits.contiguous(), None if selection_bias is None else selection_bias.contiguous(),
                w1, b1, w2, b2, table, act, out,
                rules.scaling_factor, rules.alpha, rules.limit,
                x.stride(0), w1.stride(0), w1.stride(1), w2.stride(0), w2.stride(1),
                M=tokens, H=h, I=i, E=num_experts, K=k, EXPERT_GROUP=num_experts // num_groups,
                TOPK_GROUPS=rules.topk_groups if grouped else 1, TOP2=rules.group_score == "top2_sum",
                SCORING=rules.scoring, RENORMALIZE=rules.renormalize, PAD=pad, COLUMNS=columns,
                SLOTS=next_power_of_2(k), ROUTE_ROWS=config.route_rows,
                ACTIVATION=rules.activation, GATED=gated, WEIGHT_ON_INPUT=rules.weight_on_input,
                UNIT=UNIT, T=config.columns, LENGTH=length, TABLE=table.shape[1],
                SPLIT=config.split, PIECE=config.piece, BLOCK_H=config.block_h,
                GROUP=config.group, BLOCK_I=config.block_i, STAGES=config.num_stages,
                PHASE=phase, INTERPRETED=INTERPRET, num_warps=config.num_warps, **(together or {}),
            )  # fmt: skip
    return out


def routed_mlp_reference(
    x: Tensor,
    logits: Tensor,
    selection_bias: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    rules: Rules,
) -> Tensor:
    """The torch twin of `routed_mlp`, one expert after another; waits for the device."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if selection_bias is None else selection_bias.to(wide)
    ids, p = route_reference(logits.to(wide), bias, None, None, *rules[:7])
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in ids[ids >= 0].unique().tolist():
        t, k = (ids == e).nonzero(as_tuple=True)
        scale = p[t, k, None]
        h = x[t].to(wide) @ w1[e].T.to(wide)
        h = h * scale if rules.weight_on_input else h
        h = h if b1 is None else h + b1[e].to(wide)
        a = apply_activation(h, rules.activation, rules.alpha, rules.limit).to(x.dtype)
        y = a.to(wide) @ w2[e].T.to(wide)
        y = y if b2 is None else y + b2[e].to(wide)
        out[t] += y if rules.weight_on_input else y * scale
    return out.to(x.dtype)


def routed_mlp_fits(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, num_groups: int) -> bool:
    """Whether the kernel takes these tokens, and is faster than routing, sort and grouped GEMMs."""
    return (
        use_triton(x)
        and x.shape[0] <= MAX_TOKENS
        and logits.dtype in LOGITS_DTYPES
        and w1.stride(2) == w2.stride(2) == 1
        and padded_sizes(logits.shape[1], num_groups)[1] <= MAX_COLUMNS
    )


@op("routed_mlp")
def routed_mlp(
    x: Tensor,
    logits: Tensor,
    selection_bias: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    activation: str,
    alpha: float,
    limit: float,
    weight_on_input: bool,
) -> Tensor:
    """out[t] = Σ_k p[t,k] · (act(x[t]·w1[e]ᵀ + b1[e])·w2[e]ᵀ + b2[e]), e = ids[t,k], of what `epmoe.route` chooses.

    With `weight_on_input` p multiplies x[t] instead. Where `routed_mlp_fits` is false the twin runs.

    Args:
        x: `[M, H]`, rows dense; may lie apart.
        logits: `[M, E]`, fp32, bf16 or fp16, routed in fp32 (in float64 beside float64 x).
        selection_bias: `[E]` or None.
        w1: `[E, 2I, H]`, gate rows then up rows (`[E, I, H]` not gated); w2: `[E, H, I]`; rows dense.
        b1: `[E, 2I]` (`[E, I]`) or None; b2: `[E, H]` or None; contiguous. Weights and biases have the dtype of x.
        top_k .. weight_on_input: see `Rules`.

    Returns:
        `[M, H]` in x's dtype. The activation is rounded to it; all sums are fp32, in an order that shapes alone decide.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit together.
    """
    rules = Rules(
        top_k,
        scoring,
        renormalize,
        scaling_factor,
        num_groups,
        topk_groups,
        group_score,
        activation,
        alpha,
        limit,
        weight_on_input,
    )
    _check(x, logits, selection_bias, w1, b1, w2, b2, is_gated(activation, alpha, limit))
    run = _routed_mlp_triton if routed_mlp_fits(x, logits, w1, w2, num_groups) else routed_mlp_reference
    return run(x, logits, selection_bias, w1, b1, w2, b2, rules)


@routed_mlp.register_fake
def _(x, logits, selection_bias, w1, b1, w2, b2, *rules):
    return x.new_empty(x.shape)


def _check(
    x: Tensor,
    logits: Tensor,
    selection_bias: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    gated: bool,
) -> None:
    unit_stride(x, "x")
    if x.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise ValueError(f"x has dtype {x.dtype}: must be float32, float16, bfloat16 or float64")
    if w2.dim() != 3:
        raise ValueError(f"w2 has shape {tuple(w2.shape)}: must be [E, H, I]")
    (tokens, h), (experts, _, i) = x.shape, w2.shape
    columns = 2 * i if gated else i
    shapes = {
        "logits": (logits, (tokens, experts)),
        "selection_bias": (selection_bias, (experts,)),
        "w1": (w1, (experts, columns, h)),
        "b1": (b1, (experts, columns)),
        "w2": (w2, (experts, h, i)),
        "b2": (b2, (experts, h)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {shape}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}: must be on {x.device}, as x is")
        if name in ("w1", "w2", "b1", "b2") and tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: must be {x.dtype}, as x is")
        if name in ("b1", "b2") and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: must be contiguous")

"""Logits -> each token's experts, their weights and the expert-major order of the pairs, in one launch for few tokens:
`ops/route.py` and `ops/align.py` in one, where all experts are local. First step of a token that comes with its logits;
the grouped GEMMs follow.

Letters: M tokens, E experts, K experts per token, N = M·K pairs.

Programs route a few tokens each, meet at a barrier, and place a few pairs each by comparing them with all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.config import RouterConfig
from epmoe.ops._configs import most_programs
from epmoe.ops._dependent_launch import dependent_launch, let_next_start
from epmoe.ops._grid_barrier import cooperative_launch, grid_arrive, grid_parity, grid_wait
from epmoe.ops._triton import INTERPRET, cdiv, jit, next_power_of_2, on_device_of, op, tl, use_triton
from epmoe.ops.align import ALL_PAIRS_MAX, align_rows, align_rows_reference
from epmoe.ops.route import MAX_COLUMNS, TILE, _route_kernel, padded_sizes, route_topk
from epmoe.ops.route_reference import route_reference

QUERIES = 128 if INTERPRET else 16  # pairs that a program of one warp places
KEYS = 128  # pairs that it compares them with at a time
PROGRAMS_PER_SM = 4  # one warp each: they all fit at once, whatever registers they take


@jit
def _align(
    ids_ptr, row_index_ptr, offsets_ptr, slot_ptr, num_pairs,
    E: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Places the pairs and offsets of this program; an id of -1 sorts last."""
    # Key of pair i: expert * SPAN + i, unique and ordered as the rows are. The number of smaller keys is, for the key
    # of pair i, its row, and for e * SPAN, offsets[e].
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_pair = query < num_pairs
    ids = tl.load(ids_ptr + query, mask=is_pair, other=-1)
    expert = tl.where(is_pair, tl.where(ids < 0, E, ids), query - num_pairs)
    query_key = expert * SPAN + tl.where(is_pair, query, 0)
    smaller = tl.zeros([QUERIES], tl.int32)
    total = 0
    for start in range(0, num_pairs, KEYS):
        pair = start + tl.arange(0, KEYS)
        other = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
        key = tl.where(other < 0, E, other) * SPAN + pair
        smaller += tl.sum((key[None, :] < query_key[:, None]).to(tl.int32), axis=1)
        total += tl.sum((other >= 0).to(tl.int32), axis=0)
    is_row = is_pair & (ids >= 0)
    tl.store(slot_ptr + query, tl.where(is_row, smaller, -1), mask=is_pair)
    tl.store(row_index_ptr + smaller, query, mask=is_row)
    tl.store(row_index_ptr + query, -1, mask=is_pair & (query >= total))
    tl.store(offsets_ptr + (query - num_pairs), smaller, mask=(query >= num_pairs) & (expert <= E))


@jit(do_not_specialize=["num_tokens"])
def _route_align_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, row_index_ptr, offsets_ptr, slot_ptr, num_tokens, scaling,
    E: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, PHASE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """PHASE 1 routes, 2 aligns, 0 does both. One warp, as `_route_kernel` has: a sum over experts then has its bits."""
    if PHASE == 0:
        parity = grid_parity()
        let_next_start(DEPENDENT)  # all programs of a cooperative launch have their places already
    if PHASE != 2:
        _route_kernel(
            logits_ptr, bias_ptr, None, None, ids_ptr, weights_ptr, num_tokens, scaling,
            E, K, GROUP, TOPK_GROUPS, TOP2, SCORING, RENORMALIZE, ROWS, PAD, COLUMNS, SLOTS,
        )  # fmt: skip
    if PHASE == 0:
        grid_arrive()
        grid_wait(parity)
    if PHASE != 1:
        _align(ids_ptr, row_index_ptr, offsets_ptr, slot_ptr, num_tokens * K, E, QUERIES, KEYS, SPAN)


Aligned = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty(logits: Tensor, top_k: int) -> Aligned:
    num_tokens, num_experts = logits.shape
    device, wide = logits.device, torch.promote_types(logits.dtype, torch.float32)
    return (
        torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
        torch.empty(num_tokens, top_k, dtype=wide, device=device),
        torch.empty(num_tokens * top_k, dtype=torch.int32, device=device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
        torch.empty(num_tokens, top_k, dtype=torch.int32, device=device),
    )


def _route_align_triton(
    logits: Tensor,
    selection_bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> Aligned:
    num_tokens, num_experts = logits.shape
    if topk_groups == num_groups:
        num_groups = topk_groups = 1
    pad, columns = padded_sizes(num_experts, num_groups)
    rows = max(1, TILE // columns)
    outputs = _empty(logits, top_k)
    together = cooperative_launch(logits.device)
    dependent = dependent_launch(logits.device)["DEPENDENT"]
    with on_device_of(logits):
        for phase in (0,) if together is not None else (1, 2):
            _route_align_kernel[(_programs(num_tokens, num_experts, top_k, rows),)](
                logits.contiguous(), None if selection_bias is None else selection_bias.contiguous(), *outputs,
                num_tokens, scaling_factor,
                E=num_experts, K=top_k, GROUP=num_experts // num_groups, TOPK_GROUPS=topk_groups,
                TOP2=group_score == "top2_sum", SCORING=scoring, RENORMALIZE=renormalize,
                ROWS=rows, PAD=pad, COLUMNS=columns, SLOTS=next_power_of_2(top_k),
                QUERIES=QUERIES, KEYS=KEYS, SPAN=ALL_PAIRS_MAX, PHASE=phase, DEPENDENT=dependent,
                num_warps=1, **(together or {}),
            )  # fmt: skip
    return outputs


def _programs(num_tokens: int, num_experts: int, top_k: int, rows: int) -> int:
    return max(cdiv(num_tokens, rows), cdiv(num_tokens * top_k + num_experts + 1, QUERIES))


def _fits(logits: Tensor, top_k: int, num_groups: int) -> bool:
    """Whether one launch takes these logits: not too wide, pairs few enough to compare all, programs that all fit."""
    num_tokens, num_experts = logits.shape
    _, columns = padded_sizes(num_experts, num_groups)
    if not use_triton(logits) or columns > MAX_COLUMNS or num_tokens * top_k > ALL_PAIRS_MAX:
        return False
    programs = _programs(num_tokens, num_experts, top_k, max(1, TILE // columns))
    return not logits.is_cuda or programs == most_programs(logits.device, PROGRAMS_PER_SM, programs)


def route_align_reference(
    logits: Tensor,
    selection_bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> Aligned:
    """The torch twin of `route_align`; half-precision logits are routed in float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rules = (top_k, scoring, renormalize, scaling_factor, num_groups, topk_groups, group_score)
    ids, weights = route_reference(logits, selection_bias, None, None, *rules)
    every = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return ids, weights, *align_rows_reference(ids, every, logits.shape[1], ids.numel())


@op("route_align")
def _route_align(
    logits: Tensor,
    selection_bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    launch = _route_align_triton if _fits(logits, top_k, num_groups) else route_align_reference
    rules = (top_k, scoring, renormalize, scaling_factor, num_groups, topk_groups, group_score)
    return launch(logits, selection_bias, *rules)


@_route_align.register_fake
def _(logits, selection_bias, top_k, *rules):
    return _empty(logits, top_k)


def route_align(
    logits: Tensor, config: RouterConfig, top_k: int, selection_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`route_topk`, then `align_rows` with every expert local and room for all pairs: to the bit what those give.

    Example, E = 3, K = 2: topk_ids [[2, 0], [0, -1]] give row_index [1, 2, 0, -1], offsets [0, 2, 2, 3] and slot
    [[2, 0], [1, -1]].

    Args:
        logits: `[M, E]`, fp32, fp16 or bf16; float64 takes the twin. The rules are those of `epmoe.router.route`.
        config, top_k: the rules and K; `config.dtype` is not read, the caller converts to it.
        selection_bias: `[E]`, any floating dtype, or None.

    Returns:
        `topk_ids [M, K]` int32, `topk_weights [M, K]` fp32 (fp64), `row_index [M·K]`, `offsets [E + 1]`,
        `slot [M, K]` int32; not differentiable. Never waits for the device.
    """
    if selection_bias is not None:
        selection_bias = selection_bias.detach().to(torch.promote_types(logits.dtype, torch.float32))
    c = config
    rules = (c.scoring, c.renormalize, float(c.scaling_factor), c.num_groups, c.topk_groups, c.group_score)
    if not use_triton(logits) or _fits(logits, top_k, config.num_groups):
        return _route_align(logits.detach(), selection_bias, top_k, *rules)
    logits = logits.detach().float()
    ids, weights = route_topk(logits, config, top_k, selection_bias)
    every = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return ids, weights, *align_rows(ids, every, logits.shape[1], ids.numel())

"""Sorts the (token, choice) pairs of an expert input by local expert: what the grouped GEMM reads its rows by.

Stands between dispatch and GEMM1. Only indices move here; rows stay where dispatch left them.

Letters: T rows of the expert input, K experts per token, E logical experts, L local experts, N = T·K pairs.

Up to `ALL_PAIRS_MAX` pairs one launch compares every pair with every other, and up to `BY_EXPERT_MAX` one launch has a
program for each expert that goes through all pairs: no second launch, no scratch. Above, (1) `_rank_kernel` ranks each
pair inside its block and counts experts per block, (2) `_scan_kernel` turns the counts of one expert into a running sum
over blocks, (3) `_place_kernel` adds the three parts of a row's position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._dependent_launch import dependent_launch, let_next_start, wait_for_previous
from epmoe.ops._triton import cdiv, jit, next_power_of_2, on_device_of, op, tl, use_triton

ALL_PAIRS_MAX = 1024
PAIRS_QUERIES = 16
BY_EXPERT_MAX = 8192
BY_EXPERT_WORK = 2**22  # pairs times experts
BY_EXPERT_BLOCK = 4096  # pairs that a program holds in 16 registers of each thread
RANK_BLOCK = 256  # pairs per program
RANK_KEYS = 64  # of them compared at a time
SCAN_BLOCK = 1024
MAX_PAIRS = 2**30  # positions, and strides between them, are int32
MAX_LOCAL = 4096  # a program holds one counter per local expert


@jit
def _local_of(ids_ptr, map_ptr, pair, in_range, num_experts, num_local):
    """Local expert of each pair; `num_local`, which sorts last, for everything that has none here."""
    ids = tl.load(ids_ptr + pair, mask=in_range, other=-1)
    known = (ids >= 0) & (ids < num_experts)
    local = tl.load(map_ptr + ids, mask=known, other=-1)
    return tl.where((local >= 0) & (local < num_local), local, num_local)


@jit(do_not_specialize=["num_pairs", "num_experts", "max_rows"])
def _all_pairs_kernel(
    ids_ptr, map_ptr, row_index_ptr, offsets_ptr, slot_ptr, zeros_ptr,
    num_pairs, num_experts, num_local, max_rows,
    QUERIES: tl.constexpr, SPAN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # Key of pair i: local * SPAN + i, unique and ordered as the rows are. The number of smaller keys is, for the key of
    # pair i, its row, and for l * SPAN, offsets[l].
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    first = tl.program_id(0) * QUERIES
    query = first + tl.arange(0, QUERIES)
    is_pair = query < num_pairs
    mine = _local_of(ids_ptr, map_ptr, query, is_pair, num_experts, num_local)
    expert = query - num_pairs
    is_offset = (expert >= 0) & (expert <= num_local)
    query_key = tl.where(is_pair, mine * SPAN + query, expert * SPAN)

    pair = tl.arange(0, SPAN)
    local = _local_of(ids_ptr, map_ptr, pair, pair < num_pairs, num_experts, num_local)
    key = local * SPAN + pair
    # keys first: a thread owns whole columns and adds without shuffles
    smaller = tl.sum((key[:, None] < query_key[None, :]).to(tl.int32), axis=0)
    total = tl.sum((local < num_local).to(tl.int32), axis=0)

    is_row = is_pair & (mine < num_local) & (smaller < max_rows)
    tl.store(slot_ptr + query, tl.where(is_row, smaller, -1), mask=is_pair)
    tl.store(row_index_ptr + smaller, query, mask=is_row)
    tl.store(offsets_ptr + expert, tl.minimum(smaller, max_rows), mask=is_offset)
    if zeros_ptr is not None:
        tl.store(zeros_ptr + expert, tl.zeros([QUERIES], tl.int32), mask=is_offset & (expert < num_local))
    for start in range(first, max_rows, tl.num_programs(0) * QUERIES):
        row = start + tl.arange(0, QUERIES)
        tl.store(row_index_ptr + row, tl.full([QUERIES], -1, tl.int32), mask=(row >= total) & (row < max_rows))


@jit(do_not_specialize=["num_pairs", "num_experts", "max_rows"])
def _by_expert_kernel(
    ids_ptr, map_ptr, row_index_ptr, offsets_ptr, slot_ptr, zeros_ptr,
    num_pairs, num_experts, num_local, max_rows,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program l places the pairs of local expert l behind those of smaller ones; the last program, l = L, has all that
    is no expert's, and fills up row_index."""
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    expert = tl.program_id(0)
    blocks = ()
    begin = 0
    for b in tl.static_range(BLOCKS):
        pair = b * BLOCK + tl.arange(0, BLOCK)
        local = _local_of(ids_ptr, map_ptr, pair, pair < num_pairs, num_experts, num_local)
        begin += tl.sum((local < expert).to(tl.int32), axis=0)
        blocks = blocks + (local,)  # type: ignore[assignment]
    tl.store(offsets_ptr + expert, tl.minimum(begin, max_rows))
    if zeros_ptr is not None:
        tl.store(zeros_ptr + expert, 0, mask=expert < num_local)
    row = begin
    limit = tl.where(expert < num_local, max_rows, 0)
    for b in tl.static_range(BLOCKS):
        pair = b * BLOCK + tl.arange(0, BLOCK)
        mine = (blocks[b] == expert) & (pair < num_pairs)
        rows = row + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        row += tl.sum(mine.to(tl.int32), axis=0)
        is_row = mine & (rows < limit)
        tl.store(slot_ptr + pair, tl.where(is_row, rows, -1), mask=mine)
        tl.store(row_index_ptr + rows, pair, mask=is_row)
    if expert == num_local:
        for start in range(begin, max_rows, BLOCK):
            tail = start + tl.arange(0, BLOCK)
            tl.store(row_index_ptr + tail, tl.full([BLOCK], -1, tl.int32), mask=tail < max_rows)


@jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks"])
def _rank_kernel(
    ids_ptr, map_ptr, local_ptr, rank_ptr, counts_ptr,
    num_pairs, num_experts, num_local, num_blocks,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    block = tl.program_id(0)
    first = block * BLOCK
    pair = first + tl.arange(0, BLOCK)
    in_range = pair < num_pairs
    mine = _local_of(ids_ptr, map_ptr, pair, in_range, num_experts, num_local)
    tl.store(local_ptr + pair, mine)
    tl.debug_barrier()  # the block's pairs are read back as keys, by every thread
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, BLOCK, KEYS):
        other = first + start + tl.arange(0, KEYS)
        local = tl.load(local_ptr + other)
        before = (local[:, None] == mine[None, :]) & (other[:, None] < pair[None, :])
        rank += tl.sum(before.to(tl.int32), axis=0)  # keys first, as above
    tl.store(rank_ptr + pair, rank)
    expert = tl.arange(0, BINS)
    counts = tl.histogram(mine, BINS)
    tl.store(counts_ptr + expert.to(tl.int64) * num_blocks + block, counts, mask=expert < num_local)


@jit(do_not_specialize=["num_blocks"])
def _scan_kernel(counts_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    expert = tl.program_id(0)
    column = counts_ptr + expert.to(tl.int64) * num_blocks
    carry = 0
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        counts = tl.load(column + block, mask=block < num_blocks, other=0)
        before = carry + tl.cumsum(counts, axis=0) - counts
        tl.debug_barrier()  # in place: no thread writes before all have read
        tl.store(column + block, before, mask=block < num_blocks)
        carry += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, carry)


@jit(do_not_specialize=["num_pairs", "num_blocks", "max_rows"])
def _place_kernel(
    local_ptr, rank_ptr, counts_ptr, totals_ptr, row_index_ptr, offsets_ptr, slot_ptr, zeros_ptr,
    num_pairs, num_local, num_blocks, max_rows,
    BLOCK: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    let_next_start(DEPENDENT)
    block = tl.program_id(0)
    expert = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + expert, mask=expert < num_local, other=0)
    begin = tl.cumsum(totals, axis=0) - totals
    total = tl.sum(totals, axis=0)
    if block == 0:
        tl.store(offsets_ptr + expert, tl.minimum(begin, max_rows), mask=expert <= num_local)
        if zeros_ptr is not None:
            tl.store(zeros_ptr + expert, tl.zeros([BINS], tl.int32), mask=expert < num_local)

    pair = block * BLOCK + tl.arange(0, BLOCK)
    in_range = pair < num_pairs
    local = tl.load(local_ptr + pair)
    rank = tl.load(rank_ptr + pair)
    is_local = local < num_local
    earlier = tl.load(counts_ptr + local.to(tl.int64) * num_blocks + block, mask=is_local, other=0)
    row = tl.gather(begin, local, axis=0) + earlier + rank
    is_row = is_local & (row < max_rows)
    tl.store(slot_ptr + pair, tl.where(is_row, row, -1), mask=in_range)
    tl.store(row_index_ptr + row, pair, mask=is_row)
    for start in range(block * BLOCK, max_rows, tl.num_programs(0) * BLOCK):
        tail = start + tl.arange(0, BLOCK)
        tl.store(row_index_ptr + tail, tl.full([BLOCK], -1, tl.int32), mask=(tail >= total) & (tail < max_rows))


def align_rows_triton(
    topk_ids: Tensor, expert_map: Tensor, num_local: int, max_rows: int, zeros: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`align_rows` of checked arguments, by kernels. `zeros`: `[L]` int32, set to 0 on the way."""
    ids, expert_map = topk_ids.contiguous(), expert_map.contiguous()
    num_pairs, num_experts = ids.numel(), expert_map.numel()
    row_index = ids.new_empty(max_rows)
    offsets = ids.new_empty(num_local + 1)
    slot = ids.new_empty(ids.shape)
    dependent = dependent_launch(ids.device)
    written = (row_index, offsets, slot, zeros)
    with on_device_of(ids):
        if num_pairs <= ALL_PAIRS_MAX:
            span = max(16, next_power_of_2(num_pairs))
            _all_pairs_kernel[(cdiv(num_pairs + num_local + 1, PAIRS_QUERIES),)](
                ids, expert_map, *written, num_pairs, num_experts, num_local, max_rows,
                QUERIES=PAIRS_QUERIES, SPAN=span, num_warps=8 if span >= 1024 else 4, **dependent,
            )  # fmt: skip
            return row_index, offsets, slot
        span = next_power_of_2(num_pairs)
        if num_pairs <= BY_EXPERT_MAX and num_local * span <= BY_EXPERT_WORK:
            block = min(span, BY_EXPERT_BLOCK)
            _by_expert_kernel[(num_local + 1,)](
                ids, expert_map, *written, num_pairs, num_experts, num_local, max_rows,
                BLOCK=block, BLOCKS=span // block, num_warps=8, **dependent,
            )  # fmt: skip
            return row_index, offsets, slot
        num_blocks = cdiv(num_pairs, RANK_BLOCK)
        bins = max(32, next_power_of_2(num_local + 1))
        local = ids.new_empty(num_blocks * RANK_BLOCK)
        rank = ids.new_empty(num_blocks * RANK_BLOCK)
        counts = ids.new_empty(num_local, num_blocks)
        totals = ids.new_empty(num_local)
        _rank_kernel[(num_blocks,)](
            ids, expert_map, local, rank, counts, num_pairs, num_experts, num_local, num_blocks,
            BLOCK=RANK_BLOCK, KEYS=RANK_KEYS, BINS=bins, num_warps=4, **dependent,
        )  # fmt: skip
        _scan_kernel[(num_local,)](counts, totals, num_blocks, BLOCK=SCAN_BLOCK, num_warps=4, **dependent)
        _place_kernel[(num_blocks,)](
            local, rank, counts, totals, *written, num_pairs, num_local, num_blocks, max_rows,
            BLOCK=RANK_BLOCK, BINS=bins, num_warps=4, **dependent,
        )  # fmt: skip
    return row_index, offsets, slot


def align_rows_reference(
    topk_ids: Tensor, expert_map: Tensor, num_local: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`align_rows` by a stable sort in torch, on any device and without waiting for it."""
    ids = topk_ids.reshape(-1).long()
    num_pairs, num_experts = ids.numel(), expert_map.numel()
    known = (ids >= 0) & (ids < num_experts)
    local = torch.where(known, expert_map[ids.clamp(0, num_experts - 1)].long(), -1)
    local = torch.where((local >= 0) & (local < num_local), local, num_local)
    sorted_local, order = torch.sort(local, stable=True)
    begin = torch.searchsorted(sorted_local, torch.arange(num_local + 1, device=ids.device))
    offsets = begin.clamp(max=max_rows).to(torch.int32)

    row = torch.arange(num_pairs, device=ids.device)
    row = torch.where((sorted_local < num_local) & (row < max_rows), row, -1)
    slot = torch.empty_like(row).scatter_(0, order, row).to(torch.int32).view(topk_ids.shape)
    row_index = torch.full((max_rows,), -1, dtype=torch.int32, device=ids.device)
    kept = min(num_pairs, max_rows)
    row_index[:kept] = torch.where(row >= 0, order, -1)[:kept].to(torch.int32)
    return row_index, offsets, slot


def check_routing(topk_ids: Tensor, expert_map: Tensor, num_local: int) -> None:
    """Raises `ValueError` unless these are arguments of `align_rows`."""
    if topk_ids.dtype != torch.int32 or topk_ids.dim() != 2:
        raise ValueError(f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}: must be int32 [T, K]")
    if expert_map.dtype != torch.int32 or expert_map.dim() != 1 or expert_map.numel() == 0:
        raise ValueError(f"expert_map is {expert_map.dtype} {tuple(expert_map.shape)}: must be int32 [E], E > 0")
    if expert_map.device != topk_ids.device:
        raise ValueError(f"expert_map is on {expert_map.device}: must be on the device of topk_ids, {topk_ids.device}")
    if not 0 < num_local < MAX_LOCAL:
        raise ValueError(f"num_local={num_local}: must be in 1 .. {MAX_LOCAL - 1}")


@op("align_rows", "(Tensor topk_ids, Tensor expert_map, int num_local, SymInt max_rows) -> (Tensor, Tensor, Tensor)")
def _align_rows(topk_ids, expert_map, num_local, max_rows):
    # here and not in `align_rows`: in a compiled graph these sizes have no value yet
    check_sizes(topk_ids, max_rows)
    launch = align_rows_triton if use_triton(topk_ids) else align_rows_reference
    return launch(topk_ids, expert_map, num_local, max_rows)


def check_sizes(topk_ids: Tensor, max_rows: int) -> None:
    """Raises `ValueError` where positions would not be int32."""
    if not 0 <= max_rows < MAX_PAIRS:
        raise ValueError(f"max_rows={max_rows}: must be in 0 .. {MAX_PAIRS - 1}")
    if topk_ids.numel() >= MAX_PAIRS:
        raise ValueError(f"topk_ids has {topk_ids.numel()} elements: must have fewer than {MAX_PAIRS}")


@_align_rows.register_fake
def _(topk_ids, expert_map, num_local, max_rows):
    shape = topk_ids.shape
    return topk_ids.new_empty(max_rows), topk_ids.new_empty(num_local + 1), topk_ids.new_empty(shape)


def align_rows(topk_ids: Tensor, expert_map: Tensor, num_local: int, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert-major order of the pairs (t, k) whose expert is local, stable inside an expert: the same bits every time.

    Example: E = 4 of which this rank owns experts 1 and 3 (as local 0 and 1), T = 3, K = 2::

        topk_ids   = [[3, 1], [0, 3], [1, -1]]       expert_map = [-1, 0, -1, 1]      num_local = 2, max_rows = 6
        pair t·K+k =   0  1    2  3    4   5
        row_index  = [1, 4, 0, 3, -1, -1]            rows 0, 1 are expert 1's pairs 1 and 4; rows 2, 3 are expert 3's
        offsets    = [0, 2, 4]                       rows of local expert l: offsets[l] .. offsets[l + 1]
        slot       = [[2, 0], [-1, 3], [1, -1]]      row_index[slot[t, k]] = t·K + k

    Args:
        topk_ids: `[T, K]` int32 logical ids. An id outside `[0, E)`, -1 or garbage alike, is no expert.
        expert_map: `[E]` int32, logical id -> local id, or -1. A value outside `[0, num_local)` counts as -1.
        num_local: L.
        max_rows: room in `row_index`; T·K always suffices. Pairs past it get slot -1 and `offsets` end at it.

    Returns:
        `row_index [max_rows]` (pair of each sorted row, -1 past the last), `offsets [L + 1]`, `slot [T, K]` (sorted row
        of each pair, or -1), all int32 on the device of `topk_ids`. Never waits for the device.

    Raises:
        ValueError: wrong dtype, dimensions or device, no experts, or a size out of range.
    """
    check_routing(topk_ids, expert_map, num_local)
    return _align_rows(topk_ids, expert_map, num_local, max_rows)

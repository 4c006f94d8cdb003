"""Which ranks each token goes to, and where its row lies among the rows for each rank.

Stands first in the `all_to_all` dispatch: what it counts is what ranks tell each other before rows move.

Letters: M tokens on this rank, K experts per token, E logical experts, R ranks, S rows to send (token × rank).

(1) `_count_kernel` places each token among those of its block that go to a rank, and counts rows and (row, expert)
pairs per rank and block; (2) `_place_kernel` adds what lies before: earlier blocks, and all rows for lower ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.ops._triton import jit, on_device_of, op, tl, triton, use_triton

BLOCK = 256  # tokens per program
LARGE = 32768  # tokens from which fewer, larger blocks leave less to add up than they cost in occupancy
LARGE_BLOCK = 1024
TILE = 8192  # ids that a program holds at most
SUM_BLOCK = 1024
MAX_ELEMENTS = 2**30  # positions are int32


@jit(do_not_specialize=["num_tokens", "num_experts", "num_blocks"])
def _count_kernel(
    ids_ptr, owner_ptr, slot_ptr, partial_ptr, num_tokens, num_experts, num_blocks,
    K: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rank = tl.program_id(1)
    num_ranks = tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    in_range = token < num_tokens
    choice = tl.arange(0, CHOICES)
    ids = tl.load(
        ids_ptr + token.to(tl.int64)[:, None] * K + choice[None, :],
        mask=in_range[:, None] & (choice[None, :] < K),
        other=-1,
    )
    owner = tl.load(owner_ptr + ids, mask=(ids >= 0) & (ids < num_experts), other=-1)
    pairs = tl.sum((owner == rank).to(tl.int32), axis=1)
    goes = (pairs > 0).to(tl.int32)
    earlier = tl.cumsum(goes, axis=0) - goes
    tl.store(slot_ptr + token.to(tl.int64) * num_ranks + rank, tl.where(goes > 0, earlier, -1), mask=in_range)
    partial = partial_ptr + rank.to(tl.int64) * num_blocks + block
    tl.store(partial, tl.sum(goes, axis=0))
    tl.store(partial + num_ranks.to(tl.int64) * num_blocks, tl.sum(pairs, axis=0))


@jit(do_not_specialize=["num_tokens", "num_blocks"])
def _place_kernel(
    partial_ptr, slot_ptr, send_index_ptr, counts_ptr, num_tokens, num_blocks,
    BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rank = tl.program_id(1)
    num_ranks = tl.num_programs(1)
    begin = rank * num_blocks
    end = begin + num_blocks
    before = 0
    rows = 0
    for start in range(0, end, SUM):
        i = start + tl.arange(0, SUM)
        part = tl.load(partial_ptr + i, mask=i < end, other=0)
        before += tl.sum(tl.where(i < begin + block, part, 0), axis=0)
        rows += tl.sum(tl.where(i >= begin, part, 0), axis=0)
    if block == 0:
        pairs_ptr = partial_ptr + num_ranks.to(tl.int64) * num_blocks
        pairs = 0
        for start in range(begin, end, SUM):
            i = start + tl.arange(0, SUM)
            pairs += tl.sum(tl.load(pairs_ptr + i, mask=i < end, other=0), axis=0)
        tl.store(counts_ptr + 2 * rank, rows)
        tl.store(counts_ptr + 2 * rank + 1, pairs)

    token = block * BLOCK + tl.arange(0, BLOCK)
    slot = slot_ptr + token.to(tl.int64) * num_ranks + rank
    earlier = tl.load(slot, mask=token < num_tokens, other=-1)
    goes = earlier >= 0
    position = before + earlier
    tl.store(slot, position, mask=goes)
    tl.store(send_index_ptr + position, token, mask=goes)


def _destinations_triton(
    topk_ids: Tensor, owner: Tensor, num_ranks: int, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    ids, owner = topk_ids.contiguous(), owner.contiguous()
    M, K = ids.shape
    choices = max(1, triton.next_power_of_2(K))
    block = max(1, min(BLOCK if M < LARGE else LARGE_BLOCK, TILE // choices))
    num_blocks = max(1, triton.cdiv(M, block))  # without tokens there still are counts to write
    send_index = ids.new_empty(M * num_ranks)
    slot = ids.new_empty(M, num_ranks)
    partial = ids.new_empty(2, num_ranks, num_blocks)
    if counts is None:
        counts = ids.new_empty(num_ranks, 2, dtype=torch.int64)
    grid = (num_blocks, num_ranks)
    warps = 4 if block <= BLOCK else 8
    with on_device_of(ids):
        _count_kernel[grid](
            ids, owner, slot, partial, M, owner.numel(), num_blocks,
            K=K, BLOCK=block, CHOICES=choices, num_warps=warps,
        )  # fmt: skip
        _place_kernel[grid](
            partial, slot, send_index, counts, M, num_blocks, BLOCK=block, SUM=SUM_BLOCK, num_warps=warps
        )
    return send_index, slot, counts


def destinations_reference(
    topk_ids: Tensor, owner: Tensor, num_ranks: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`destinations` in torch, on any device and without waiting for it."""
    tokens = topk_ids.shape[0]
    device = topk_ids.device
    known = (topk_ids >= 0) & (topk_ids < owner.shape[0])
    rank = torch.where(known, owner[torch.where(known, topk_ids, 0)], -1).long()  # [M, K]
    rank = torch.where((rank >= 0) & (rank < num_ranks), rank, num_ranks)
    pairs = torch.zeros(tokens, num_ranks + 1, dtype=torch.int64, device=device)
    pairs = pairs.scatter_add(1, rank, torch.ones_like(rank))[:, :num_ranks].t()  # [R, M]
    goes = pairs > 0
    position = goes.reshape(-1).cumsum(0).view_as(goes) - 1
    slot = torch.where(goes, position, -1)
    token = torch.arange(tokens, dtype=torch.int32, device=device).expand(num_ranks, tokens)
    # rows that go nowhere write to one spare element behind the list
    target = torch.where(goes, position, num_ranks * tokens)
    send_index = torch.empty(num_ranks * tokens + 1, dtype=torch.int32, device=device)
    send_index.scatter_(0, target.reshape(-1), token.reshape(-1))
    counted = torch.stack([goes.sum(1), pairs.sum(1)], dim=1)
    counts = counted if counts is None else counts.copy_(counted)
    return send_index[:-1], slot.t().to(torch.int32).contiguous(), counts


def _launch(
    topk_ids: Tensor, owner: Tensor, num_ranks: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    # here and not in `destinations`: in a compiled graph M has no value yet
    M, K = topk_ids.shape
    if M * max(num_ranks, K) >= MAX_ELEMENTS:
        raise ValueError(
            f"topk_ids has M={M} tokens of K={K} experts for R={num_ranks} ranks: M·max(K, R) must be less than "
            f"{MAX_ELEMENTS}"
        )
    launch = _destinations_triton if use_triton(topk_ids) else destinations_reference
    return launch(topk_ids, owner, num_ranks, counts)


@op("destinations", "(Tensor topk_ids, Tensor owner, int num_ranks) -> (Tensor, Tensor, Tensor)")
def _destinations(topk_ids, owner, num_ranks):
    return _launch(topk_ids, owner, num_ranks)


@_destinations.register_fake
def _(topk_ids, owner, num_ranks):
    M = topk_ids.shape[0]
    return (
        topk_ids.new_empty(M * num_ranks),
        topk_ids.new_empty(M, num_ranks),
        topk_ids.new_empty(num_ranks, 2, dtype=torch.int64),
    )


def destinations(
    topk_ids: Tensor, owner: Tensor, num_ranks: int, *, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to send, by rank and then by token: each token once to every rank that owns one of its experts.

    Example: R = 2, experts 0-1 on rank 0 and 2-3 on rank 1::

        topk_ids   = [[0, 1], [1, 3], [2, 3]]        owner = [0, 0, 1, 1]
        send_index = [0, 1 | 1, 2, -, -]             token 0 goes to rank 0, token 1 to both, token 2 to rank 1: S = 4
        slot       = [[0, -1], [1, 2], [-1, 3]]      send_index[slot[m, r]] = m
        counts     = [[2, 3], [2, 3]]                rows and pairs for each rank

    Args:
        topk_ids: `[M, K]` int32 logical ids. An id outside `[0, E)`, -1 or garbage alike, goes nowhere.
        owner: `[E]` int32, the rank of each expert. Outside `[0, R)`: the expert is nowhere.
        num_ranks: R.
        counts: int64 `[R, 2]`, contiguous: where to put the counts instead of in a new tensor; eagerly only.

    Returns:
        `send_index [M·R]` int32, of which the first S are written; `slot [M, R]` int32, the row of token m for rank r,
        or -1; `counts [R, 2]` int64: rows and (row, expert) pairs for each rank. On the device of `topk_ids`, without
        waiting for it; the same bits every time.

    Raises:
        ValueError: wrong dtype, dimensions or device, or a size out of range.
    """
    if topk_ids.dtype != torch.int32 or topk_ids.dim() != 2:
        raise ValueError(f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}: must be int32 [M, K]")
    if owner.dtype != torch.int32 or owner.dim() != 1 or owner.numel() == 0:
        raise ValueError(f"owner is {owner.dtype} {tuple(owner.shape)}: must be int32 [E], E > 0")
    if owner.device != topk_ids.device:
        raise ValueError(f"owner is on {owner.device}: must be on the device of topk_ids, {topk_ids.device}")
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks}: must be at least 1")
    if counts is None:
        return _destinations(topk_ids, owner, num_ranks)
    return _launch(topk_ids, owner, num_ranks, counts)

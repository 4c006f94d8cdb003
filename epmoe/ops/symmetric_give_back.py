"""Rows back to their tokens, in one launch: the sending half of combine, and the backward of dispatch.

What this rank holds for a token of rank s, one reduced row or its experts' rows to weight and sum on the way, is stored
straight into rank s's slot [this rank, token]. The same launch adds up what the peers store here, in fp32 and in the
order of the ranks, and empties the slots.

    rows [R·C, H], or [N, H] with slot [R·C, K]  ──►  the sources' slots [R, C]  ──►  out [M, H] = Σ over ranks

M tokens on this rank, C the most of any rank, R ranks, K experts per token, E experts, N expert rows, H row width.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.comm.symmetric import Channel
from epmoe.ops._dependent_launch import let_next_start, wait_for_previous
from epmoe.ops._triton import INTERPRET, jit, next_power_of_2, on_device_of, tl
from epmoe.ops.gather_sum import gather_sum_reference
from epmoe.ops.symmetric_configs import SymmetricConfig, give_back_config, launch_options, warm
from epmoe.ops.symmetric_slots import aligned_rows, given_back
from epmoe.ops.symmetric_words import (
    WORD_KINDS,
    advance,
    announce,
    await_peers,
    never_empty,
    pack_words,
    peek,
    rank_bits,
    ranks_of,
    take_words,
    turn_of,
    unpack_words,
)


@jit
def _weighted_sum(
    rows, slot, slot_weights, row, cols, num_rows, rows_stride,
    WORDS: tl.constexpr, TERMS: tl.constexpr, KIND: tl.constexpr, WEIGHTED: tl.constexpr, STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """fp32 halves of the row that stands for `row`: itself (TERMS 0), or the sum of its experts' rows, in order."""
    if TERMS == 0:
        w = tl.load(rows + row * (rows_stride * STRIDE_UNIT) + cols, mask=cols < WORDS, other=0)
        low, high = unpack_words(w, KIND)
    else:
        low = tl.zeros(cols.shape, tl.float32)
        high = tl.zeros(cols.shape, tl.float32)
        for k in tl.static_range(TERMS):
            n = tl.load(slot + row * TERMS + k)
            some = (n >= 0) & (n < num_rows)
            at = rows + n.to(tl.int64) * (rows_stride * STRIDE_UNIT) + cols
            w = tl.load(at, mask=cols < tl.where(some, WORDS, 0), other=0, eviction_policy="evict_first")
            a, b = unpack_words(w, KIND)
            if WEIGHTED:
                # the weight of an absent term may be NaN, and 0 · NaN is not 0
                p = tl.where(some, tl.load(slot_weights + row * TERMS + k), 0.0)
                a = a * p
                b = b * p
            low += a
            high += b
    return low, high


@jit
def _sum_in_turn(
    rows, slot, slot_weights, gradients, own, base, token, capacity, bits, cols, part, own_words,
    num_rows, rows_stride, limit_us, fault, dead, code,
    RANK: tl.constexpr, R: tl.constexpr, WORDS: tl.constexpr, WEIGHTS: tl.constexpr, SLOT: tl.constexpr,
    KIND: tl.constexpr, TERMS: tl.constexpr, WEIGHTED: tl.constexpr, STRIDE_UNIT: tl.constexpr, j,
):  # fmt: skip
    """Sums over many ranks, in their order: fp32 halves of what came for a token, and its gradients. The next rank's
    words are asked for while this one's are waited for. A loop, not R copies of it, which spill registers."""
    low = tl.zeros(cols.shape, tl.float32)
    high = tl.zeros(cols.shape, tl.float32)
    gradient = tl.zeros(j.shape, tl.float32)
    at = own + base + token.to(tl.int64) * SLOT + cols
    seen = peek(at, cols < tl.where(((bits & 1) == 1) & (RANK != 0), WORDS, 0))
    for r in range(R):
        row = (r * capacity + token).to(tl.int64)
        ahead = r + 1
        behind = own + base + (row + capacity) * SLOT + cols
        comes = (((bits >> ahead) & 1) == 1) & (ahead != RANK)
        next_seen = peek(behind, cols < tl.where(comes, WORDS, 0))
        if ((bits >> r) & 1) == 1:
            if r == RANK:
                if TERMS > 0:
                    a, b = unpack_words(own_words, KIND)
                else:
                    a, b = _weighted_sum(
                        rows, slot, slot_weights, row, cols, num_rows, rows_stride,
                        WORDS, TERMS, KIND, WEIGHTED, STRIDE_UNIT,
                    )  # fmt: skip
            else:
                ptrs = own + base + row * SLOT + cols
                w = take_words(seen, ptrs, cols < WORDS, limit_us, fault, dead, code, r)
                a, b = unpack_words(w, KIND)
            low += a
            high += b
            if WEIGHTS > 0:
                if part == 0:
                    if r == RANK:
                        g = tl.load(gradients + row * WEIGHTS + j, mask=j < WEIGHTS, other=0)
                    else:
                        beside = own + base + row * SLOT + WORDS + j
                        g = peek(beside, j < WEIGHTS)
                        g = take_words(g, beside, j < WEIGHTS, limit_us, fault, dead, code, r)
                    gradient += g.to(tl.float32, bitcast=True)
        seen = next_seen
    return low, high, gradient


@jit(do_not_specialize=["num_tokens", "capacity", "num_experts", "num_rows", "senders", "takers", "run", "taken_run",
                        "limit_us", "code", "rows_stride", "came_stride"])  # fmt: skip
def _give_back_kernel(
    rows, slot, slot_weights, gradients, came, ids, owner, out, out_gradients,
    peers, clock, fault, dead,
    num_tokens, capacity, num_experts, num_rows, senders, takers, run, taken_run, limit_us, code, rows_stride,
    came_stride, control_words, half_words,
    RANK: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WORDS: tl.constexpr, WEIGHTS: tl.constexpr,
    SLOT: tl.constexpr, KIND: tl.constexpr, TERMS: tl.constexpr, WEIGHTED: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    EXPERTS_PER_RANK: tl.constexpr, BLOCK: tl.constexpr, TAKE: tl.constexpr, WEIGHT_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr, NEXT_EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    let_next_start(NEXT_EARLY)
    pid = tl.program_id(0)
    epoch = tl.load(clock + pid)
    turn, stamp = turn_of(epoch, code)
    own = peers[RANK]
    base = control_words + turn.to(tl.int64) * half_words
    OTHERS: tl.constexpr = R - 1 if R > 1 else 1
    PARTS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    MANY: tl.constexpr = R > 2 and R < 32
    TAKEN_PARTS: tl.constexpr = (WORDS + TAKE - 1) // TAKE
    k = tl.arange(0, KP)
    j = tl.arange(0, WEIGHT_BLOCK)
    if pid == 0:
        announce(peers, stamp, turn, 0, RANK, R)
        await_peers(own, stamp, turn, limit_us, fault, dead, code, RANK, R)
    elif pid <= senders:
        runs = (PARTS + run - 1) // run
        for v in range(pid - 1, capacity * runs * (R - 1), senders):
            source = (RANK + 1 + v % OTHERS) % R
            token = v // OTHERS // runs
            first = v // OTHERS % runs * run
            row = (source * capacity + token).to(tl.int64)
            to = base + (RANK * capacity + token).to(tl.int64) * SLOT
            marks = tl.load(came + row * came_stride + k, mask=k < K, other=-1)
            # a token's parts follow each other in one program, which then finds slots and weights in its L1
            for part in range(first, tl.minimum(first + run, PARTS)):
                cols = part * BLOCK + tl.arange(0, BLOCK)
                if TERMS > 0:  # slots are -1 where nothing came: nothing waits for the marks
                    low, high = _weighted_sum(
                        rows, slot, slot_weights, row, cols, num_rows, rows_stride,
                        WORDS, TERMS, KIND, WEIGHTED, STRIDE_UNIT,
                    )  # fmt: skip
                    w = pack_words(low, high, KIND, INTERPRETED)
                here = tl.max(marks) >= 0
                if here:
                    if TERMS == 0:
                        w = tl.load(rows + row * (rows_stride * STRIDE_UNIT) + cols, mask=cols < WORDS, other=0)
                    for r in tl.static_range(R):
                        if r == source:
                            tl.store(peers[r] + to + cols, never_empty(w), mask=cols < WORDS)
                            if WEIGHTS > 0:
                                if part == 0:
                                    g = tl.load(gradients + row * WEIGHTS + j, mask=j < WEIGHTS, other=0)
                                    tl.store(peers[r] + to + WORDS + j, never_empty(g), mask=j < WEIGHTS)
    else:
        runs = (TAKEN_PARTS + taken_run - 1) // taken_run
        for v in range(pid - 1 - senders, num_tokens * runs, takers):
            token = v // runs
            first = v % runs * taken_run
            to = ranks_of(ids, owner, token, num_tokens, num_experts, K, KP, EXPERTS_PER_RANK)
            bits = rank_bits(to, MANY)
            mine = (RANK * capacity + token).to(tl.int64)
            for part in range(first, tl.minimum(first + taken_run, TAKEN_PARTS)):
                cols = part * TAKE + tl.arange(0, TAKE)
                if TERMS > 0:  # as above; asked for before anything is waited for
                    own_low, own_high = _weighted_sum(
                        rows, slot, slot_weights, mine, cols, num_rows, rows_stride,
                        WORDS, TERMS, KIND, WEIGHTED, STRIDE_UNIT,
                    )  # fmt: skip
                    # rounded as the sums of other ranks are that came as words: the same bits whoever sums, and where
                    own_words = pack_words(own_low, own_high, KIND, INTERPRETED)
                elif MANY:
                    own_words = tl.zeros((TAKE,), tl.int32)
                if MANY:
                    low, high, gradient = _sum_in_turn(
                        rows, slot, slot_weights, gradients, own, base, token, capacity, bits, cols, part,
                        own_words, num_rows, rows_stride, limit_us, fault, dead, code,
                        RANK, R, WORDS, WEIGHTS, SLOT, KIND, TERMS, WEIGHTED, STRIDE_UNIT, j,
                    )  # fmt: skip
                else:
                    low = tl.zeros((TAKE,), tl.float32)
                    high = tl.zeros((TAKE,), tl.float32)
                    gradient = tl.zeros((WEIGHT_BLOCK,), tl.float32)
                    for r in tl.static_range(R):
                        if tl.max((to == r).to(tl.int32)) > 0:
                            row = (r * capacity + token).to(tl.int64)
                            if r == RANK:
                                if TERMS > 0:
                                    a, b = unpack_words(own_words, KIND)
                                else:
                                    a, b = _weighted_sum(
                                        rows, slot, slot_weights, row, cols, num_rows, rows_stride,
                                        WORDS, TERMS, KIND, WEIGHTED, STRIDE_UNIT,
                                    )  # fmt: skip
                            else:
                                ptrs = own + base + row * SLOT + cols
                                w = peek(ptrs, cols < WORDS)
                                w = take_words(w, ptrs, cols < WORDS, limit_us, fault, dead, code, r)
                                a, b = unpack_words(w, KIND)
                            low += a
                            high += b
                            if WEIGHTS > 0:
                                if part == 0:
                                    if r == RANK:
                                        g = tl.load(gradients + row * WEIGHTS + j, mask=j < WEIGHTS, other=0)
                                    else:
                                        beside = own + base + row * SLOT + WORDS + j
                                        g = peek(beside, j < WEIGHTS)
                                        g = take_words(g, beside, j < WEIGHTS, limit_us, fault, dead, code, r)
                                    gradient += g.to(tl.float32, bitcast=True)
                at = out + token.to(tl.int64) * WORDS + cols
                tl.store(at, pack_words(low, high, KIND, INTERPRETED), mask=cols < WORDS)
                if WEIGHTS > 0:
                    if part == 0:
                        tl.store(out_gradients + token.to(tl.int64) * WEIGHTS + j, gradient, mask=j < WEIGHTS)
    advance(clock, epoch, pid, 1 + senders + takers)


def _give_back_triton(
    channel: Channel, rows: Tensor, came: Tensor, ids: Tensor, owner: Tensor, capacity: int, slot: Tensor | None,
    slot_weights: Tensor | None, gradients: Tensor | None, out: Tensor, code: int, config: SymmetricConfig,
    experts_per_rank: int, aside: bool,
) -> Tensor | None:  # fmt: skip
    (M, K), R = ids.shape, channel.ep.num_ranks
    H = rows.shape[1]
    rows = aligned_rows(rows)
    ids = ids.contiguous()
    slot, slot_weights, gradients = (None if t is None else t.contiguous() for t in (slot, slot_weights, gradients))
    out_gradients = None if gradients is None else gradients.new_empty(M, gradients.shape[1])
    weight_words = 0 if gradients is None else gradients.shape[1]
    plan = given_back(H, rows.dtype, weight_words)
    arguments = (
        rows.view(torch.int32), slot, slot_weights, None if gradients is None else gradients.view(torch.int32), came,
        ids, owner, out.view(torch.int32), out_gradients,
        channel.peers, channel.clock, channel.fault, channel.dead,
        M, capacity, owner.shape[0], rows.shape[0], config.senders, config.takers, config.run, config.taken_run,
        channel.limit_us, code,
        rows.stride(0) * rows.itemsize // 16, came.stride(0), channel.control_bytes // 4, channel.half_bytes // 4,
    )  # fmt: skip
    constants = {
        "RANK": channel.ep.rank,
        "R": R,
        "K": K,
        "KP": next_power_of_2(K),
        "WORDS": plan.values,
        "WEIGHTS": weight_words,
        "SLOT": plan.slot,
        "KIND": WORD_KINDS[rows.dtype],
        "TERMS": 0 if slot is None else slot.shape[1],
        "WEIGHTED": slot_weights is not None,
        "STRIDE_UNIT": 4,
        "EXPERTS_PER_RANK": experts_per_rank,
        "BLOCK": config.block,
        # not fewer than threads: then no two of them poll the same word and come to differ
        "TAKE": max(config.take, 32 * config.num_warps),
        "WEIGHT_BLOCK": max(next_power_of_2(weight_words), 32 * config.num_warps),
        "INTERPRETED": INTERPRET,
        **launch_options(rows.device, config, channel.ep.at_once),
    }
    fields = {"capacity": capacity, "H": H, "dtype": str(rows.dtype), "K": K, "gradients": weight_words}
    variant = {"terms": constants["TERMS"], "weighted": constants["WEIGHTED"], "experts_per_rank": experts_per_rank}
    with on_device_of(rows):
        compile_kernel = functools.partial(warm, _give_back_kernel, arguments, constants, config)
        channel.meet("give_back", fields | variant, compile_kernel, constants["NEXT_EARLY"])
        with channel.launching(aside, arguments):
            _give_back_kernel[(config.programs,)](*arguments, **constants)
    return out_gradients


def give_back_reference(
    channel: Channel, rows: Tensor, came: Tensor, ids: Tensor, owner: Tensor, capacity: int, slot: Tensor | None,
    slot_weights: Tensor | None, gradients: Tensor | None, out: Tensor, code: int,
) -> Tensor | None:  # fmt: skip
    """`give_back_rows` in torch, on CPU: what a peer announces has arrived."""
    (M, _), rank, R = ids.shape, channel.ep.rank, channel.ep.num_ranks
    if slot is not None:
        rows = gather_sum_reference(rows, slot, slot_weights)
    known = (ids >= 0) & (ids < owner.shape[0])
    to = torch.where(known, owner[torch.where(known, ids, 0).long()], -1)
    parts = [rows] if gradients is None else [rows, gradients]
    message = torch.cat([aligned_rows(t).contiguous().view(torch.uint8) for t in parts], dim=1)
    size = message.shape[1]
    slot_bytes = 4 * given_back(rows.shape[1], rows.dtype, (size - rows.shape[1] * rows.itemsize) // 4).slot
    here = (came >= 0).any(1)
    with channel.one_turn() as turn:
        for r in range(R):
            slots = channel.half(r, turn).narrow(0, rank * capacity * slot_bytes, capacity * slot_bytes)
            theirs = slice(r * capacity, (r + 1) * capacity)
            slots.view(capacity, slot_bytes)[:, :size][here[theirs]] = message[theirs][here[theirs]]
        channel.announce(0, code)
        sums = [
            torch.zeros(M, t.shape[1], dtype=torch.promote_types(t.dtype, torch.float32), device="cpu") for t in parts
        ]
        for r in range(R):
            if r != rank:
                channel.announced(r, code)
            slots = channel.half(rank, turn).narrow(0, r * capacity * slot_bytes, M * slot_bytes)
            came_back = slots.view(M, slot_bytes)[:, :size].clone()
            goes = (to == r).any(1)[:, None]
            begin = 0
            for t, total in zip(parts, sums, strict=True):
                end = begin + t.shape[1] * t.itemsize
                part = came_back[:, begin:end].contiguous().view(t.dtype)
                total += torch.where(goes, part.to(total.dtype), 0)
                begin = end
    out.copy_(sums[0])
    return None if gradients is None else sums[1].to(gradients.dtype)


def give_back_rows(
    channel: Channel,
    rows: Tensor,
    came: Tensor,
    ids: Tensor,
    owner: Tensor,
    capacity: int,
    *,
    operation: str,
    slot: Tensor | None = None,
    slot_weights: Tensor | None = None,
    gradients: Tensor | None = None,
    out: Tensor | None = None,
    experts_per_rank: int = 0,
    profile: str = "latency",
    sms: int | None = None,
    aside: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """out[m] = Σ over the ranks r that own an expert of token m of what r holds for it; every rank must call.

    Args:
        channel: of the group, with halves of at least `given_back(...).half_bytes(R, C)`; of words where kernels run.
        rows: `[R·C, H]` as `send_rows` gave them, those that came; or `[N, H]` with `slot`. Rows of a multiple of 16
            bytes; float32, bfloat16 or float16 for kernels.
        came: `[R·C, K]` int32, the ids that came with the rows (-1 all through: none came).
        ids: `[M, K]` int32, of this rank's tokens. owner: `[E]` int32. capacity: C.
        operation: names it in errors.
        slot: `[R·C, K]` int32, the rows to sum for each row that came, -1 for none; slot_weights: `[R·C, K]` float32.
        gradients: `[R·C, K]`, summed as the rows are.
        out: `[M, H]`, contiguous, to write into.
        experts_per_rank, profile, sms, aside: as for `send_rows`.

    Returns:
        `[M, H]` and the gradients' sum `[M, K]` or None.

    Raises:
        PeerError: on CPU, a peer did not deliver in time; on CUDA, an earlier operation failed.
        ValueError: the first of its kind while a CUDA graph is captured, or ranks that disagree.
    """
    M, H = ids.shape[0], rows.shape[1]
    assert M <= capacity and came.shape[0] == channel.ep.num_ranks * capacity and H * rows.itemsize % 16 == 0
    out = rows.new_empty(M, H) if out is None else out
    code = channel.begin(operation)
    if not channel.words:
        return out, give_back_reference(
            channel, rows, came, ids, owner, capacity, slot, slot_weights, gradients, out, code
        )
    terms = 0 if slot is None else slot.shape[1]
    words = H * rows.itemsize // 4
    config = give_back_config(
        rows.device, capacity, channel.ep.num_ranks, words, terms, sms, profile, channel.ep.at_once, ids.shape[1]
    )
    gradient = _give_back_triton(
        channel, rows, came, ids, owner, capacity, slot, slot_weights, gradients, out, code, config, experts_per_rank,
        aside,
    )  # fmt: skip
    if rows.device.type == "cpu":
        channel.check()
    return out, gradient

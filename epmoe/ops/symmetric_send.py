"""Rows to the ranks that own their experts, in one launch: the sending half of dispatch, and the backward of combine.

Each token's row is stored once into every rank that owns one of its experts, at slot [source rank, token], whatever the
other tokens do: no counts, no order. Beside it lie the words that travel along: whether the row is here at all, ids,
router weights. The same launch takes up what the peers store here and puts it into tensors of its own, so a slot is
free again when the launch ends and what was handed out stays as it is.

    x [M, H], words  ──►  every owner's slots [R, C]  ──►  out [R·C, H], words

M tokens on this rank, C the most of any rank, R ranks, K experts per token, E experts, H row width. Rows of `out` that
no token has are not written; their words are -1.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from epmoe.comm.symmetric import Channel
from epmoe.ops._dependent_launch import let_next_start, wait_for_previous
from epmoe.ops._triton import INTERPRET, jit, next_power_of_2, on_device_of, tl
from epmoe.ops.quantize import quantize_reference, row_format, scale_of
from epmoe.ops.symmetric_configs import SymmetricConfig, launch_options, send_config, warm
from epmoe.ops.symmetric_slots import aligned_rows, travelling
from epmoe.ops.symmetric_words import (
    FLIP,
    WORD_KINDS,
    advance,
    announce,
    await_peers,
    escaped,
    flipped,
    goes_to,
    largest_in_words,
    never_empty,
    peek,
    quantize_words,
    rank_bits,
    ranks_of,
    round_words,
    store_pairs,
    take_record,
    take_words,
    turn_of,
    unescaped,
    unpack_words,
)


@jit(
    do_not_specialize=[
        "num_tokens",
        "capacity",
        "num_experts",
        "senders",
        "takers",
        "run",
        "limit_us",
        "code",
        "x_stride",
        "came_stride",
    ]
)
def _send_kernel(
    x, ids, owner, words, weights, came, out, out16, out_words, out_weights, out_scales,
    peers, peers16, clock, fault, dead,
    num_tokens, capacity, num_experts, senders, takers, run, limit_us, code, x_stride, came_stride,
    control_words, half_words,
    RANK: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    ROW: tl.constexpr, VALUES: tl.constexpr, IDS: tl.constexpr, WEIGHTS: tl.constexpr, SCALES: tl.constexpr,
    SLOT: tl.constexpr, KIND: tl.constexpr, FLIP: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWWISE: tl.constexpr,
    EXPERTS_PER_RANK: tl.constexpr, GROUPS: tl.constexpr, TAKE: tl.constexpr, RECORD_BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, EAGER: tl.constexpr, DEPENDENT: tl.constexpr, NEXT_EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    let_next_start(NEXT_EARLY)
    pid = tl.program_id(0)
    epoch = tl.load(clock + pid)
    turn, stamp = turn_of(epoch, code)
    own = peers[RANK]
    base = control_words + turn.to(tl.int64) * half_words
    RECORD: tl.constexpr = 1 + IDS + WEIGHTS if IDS + WEIGHTS > 0 else 0
    OTHERS: tl.constexpr = R - 1 if R > 1 else 1
    PARTS: tl.constexpr = (ROW + GROUPS * 64 - 1) // (GROUPS * 64)
    MANY: tl.constexpr = R > 2 and R < 32
    FIRST: tl.constexpr = RANK + 1 if R > 2 else 0  # each rank begins with another peer: no link is all ranks' first
    j = tl.arange(0, RECORD_BLOCK)
    s = tl.arange(0, SCALE_BLOCK)
    lane = tl.arange(0, GROUPS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    if pid == 0:
        announce(peers, stamp, turn, num_tokens, RANK, R)
        await_peers(own, stamp, turn, limit_us, fault, dead, code, RANK, R)
    elif pid <= senders:
        runs = (PARTS + run - 1) // run
        for v in range(pid - 1, capacity * runs, senders):
            token = v // runs
            first = v % runs * run
            exists = token < num_tokens
            from_row = x + token.to(tl.int64) * (x_stride * STRIDE_UNIT)
            at = first * (GROUPS * 64) + lane
            w = tl.load(from_row + at, mask=at < tl.where(exists, ROW, 0), other=0)
            to = ranks_of(ids, owner, token, num_tokens, num_experts, K, KP, EXPERTS_PER_RANK)
            ranks = rank_bits(to, MANY)
            row = (RANK * capacity + token).to(tl.int64)
            if RECORD > 0:
                if first == 0:
                    sent = tl.where(exists, RECORD, 0)
                    is_id = (j > 0) & (j <= IDS) & (j < sent)
                    is_weight = (j > IDS) & (j < sent)
                    id_word = tl.load(words + token.to(tl.int64) * IDS + (j - 1), mask=is_id, other=-1)
                    weight = tl.load(weights + token.to(tl.int64) * WEIGHTS + (j - 1 - IDS), mask=is_weight, other=0)
                    here = goes_to(to, ranks, RANK, MANY) > 0
                    tl.store(out_words + row * IDS + (j - 1), tl.where(here, id_word, -1), mask=(j > 0) & (j <= IDS))
                    tl.store(
                        out_weights + row * WEIGHTS + (j - 1 - IDS), tl.where(here, weight, 0),
                        mask=(j > IDS) & (j < RECORD),
                    )  # fmt: skip
                    record = tl.where(j <= IDS, escaped(id_word), never_empty(weight))
                    for i in tl.static_range(R):
                        if (FIRST + i) % R != RANK:
                            goes = goes_to(to, ranks, (FIRST + i) % R, MANY)
                            slot = peers[(FIRST + i) % R] + base + row * SLOT + VALUES
                            tl.store(slot + j, tl.where(j == 0, goes, record), mask=j < sent)
            if ROWWISE:
                # The largest of the whole row, also where other programs send the rest of it: then this program reads
                # that from L2, and else a second time from L1.
                largest = largest_in_words(w, KIND)
                for ahead in tl.static_range(1, PARTS):
                    other = tl.where(first + ahead < PARTS, first + ahead, first + ahead - PARTS)
                    cols = other * (GROUPS * 64) + lane
                    rest = tl.load(from_row + cols, mask=cols < tl.where(exists, ROW, 0), other=0)
                    largest = tl.maximum(largest, largest_in_words(rest, KIND))
                row_scale, row_inverse = scale_of(tl.max(tl.max(largest, axis=1), axis=0), LARGEST)
            for part in range(first, tl.minimum(first + run, PARTS)):
                # the next part is on its way while this one is sent
                behind = at + GROUPS * 64
                more = part + 1 < tl.minimum(first + run, PARTS)
                next_w = tl.load(from_row + behind, mask=behind < tl.where(exists & more, ROW, 0), other=0)
                mask = at < tl.where(exists, ROW, 0)
                group = part * GROUPS + tl.arange(0, GROUPS)
                if ROWWISE:
                    low, high = unpack_words(w, KIND)
                    q = round_words(low, high, row_inverse, LARGEST, INTERPRETED)
                    scale = tl.zeros((GROUPS,), tl.float32) + row_scale
                elif SCALES > 0:
                    q, scale = quantize_words(w, KIND, LARGEST, POWER_OF_TWO, INTERPRETED)
                elif FLIP != 0:
                    q = flipped(w, FLIP)
                else:
                    q = never_empty(w)
                for i in tl.static_range(R):
                    if goes_to(to, ranks, (FIRST + i) % R, MANY) > 0:
                        if (FIRST + i) % R == RANK:
                            if SCALES > 0:
                                store_pairs(out + row * VALUES, out16 + row * ROW, at, q, mask, INTERPRETED)
                                tl.store(out_scales + row * SCALES + group, scale, mask=group < SCALES)
                            else:
                                tl.store(out + row * ROW + at, w, mask=mask)
                        else:
                            if SCALES > 0:
                                to_peer = q
                                if FLIP != 0:
                                    to_peer = q ^ 0x7F7F
                                to_words = peers[(FIRST + i) % R] + base + row * SLOT
                                to_pairs = peers16[(FIRST + i) % R] + 2 * (base + row * SLOT)
                                store_pairs(to_words, to_pairs, at, to_peer, mask, INTERPRETED)
                                scales = peers[(FIRST + i) % R] + base + row * SLOT + (VALUES + RECORD)
                                bits = never_empty(scale.to(tl.int32, bitcast=True))
                                tl.store(scales + group, bits, mask=group < SCALES)
                            else:
                                tl.store(peers[(FIRST + i) % R] + base + row * SLOT + at, q, mask=mask)
                w = next_w
                at = behind
    else:
        for v in range(pid - 1 - senders, capacity * (R - 1), takers):
            token = v // OTHERS
            source = (RANK + 1 + v % OTHERS) % R
            row = (source * capacity + token).to(tl.int64)
            slot = own + base + row * SLOT
            first_cols = tl.arange(0, TAKE)
            if EAGER:  # what is mostly there when the record is, and mostly for this rank
                seen = peek(slot + first_cols, first_cols < VALUES)
                if SCALES > 0:
                    seen_bits = peek(slot + (VALUES + RECORD) + s, s < SCALES)
            if RECORD > 0:
                control = own + turn * R + source
                record, exists = take_record(
                    control, slot + VALUES, j, RECORD, token, stamp, limit_us, fault, dead, code, source
                )
                here = exists & (tl.sum(tl.where(j == 0, record, 0)) > 0)
                id_word = tl.where(here, unescaped(record), -1)
                tl.store(out_words + row * IDS + (j - 1), id_word, mask=(j > 0) & (j <= IDS))
                weight = tl.where(here, record, 0)
                tl.store(out_weights + row * WEIGHTS + (j - 1 - IDS), weight, mask=(j > IDS) & (j < RECORD))
            else:
                k = tl.arange(0, KP)
                here = tl.max(tl.load(came + row * came_stride + k, mask=k < K, other=-1)) >= 0
            if here:
                if not EAGER:
                    seen = peek(slot + first_cols, first_cols < VALUES)
                    if SCALES > 0:
                        seen_bits = peek(slot + (VALUES + RECORD) + s, s < SCALES)
                for first in tl.static_range(0, VALUES, TAKE):
                    cols = first + tl.arange(0, TAKE)
                    if first + TAKE < VALUES:
                        next_seen = peek(slot + cols + TAKE, cols + TAKE < VALUES)
                    taken = take_words(seen, slot + cols, cols < VALUES, limit_us, fault, dead, code, source)
                    tl.store(out + row * VALUES + cols, taken ^ FLIP, mask=cols < VALUES)
                    if first + TAKE < VALUES:
                        seen = next_seen
                if SCALES > 0:
                    ptrs = slot + (VALUES + RECORD) + s
                    bits = take_words(seen_bits, ptrs, s < SCALES, limit_us, fault, dead, code, source)
                    tl.store(out_scales + row * SCALES + s, bits.to(tl.float32, bitcast=True), mask=s < SCALES)
    advance(clock, epoch, pid, 1 + senders + takers)


@dataclasses.dataclass(frozen=True)
class Sent:
    """What this rank received: `values [R·C, H]`, `words [R·C, W]` and `weights [R·C, K]` where they travelled, `scales
    [R·C, S]` where the sender quantized."""

    values: Tensor
    words: Tensor | None = None
    weights: Tensor | None = None
    scales: Tensor | None = None


def _send_rows_triton(
    channel: Channel, values: Tensor, ids: Tensor, owner: Tensor, capacity: int, words: Tensor | None,
    weights: Tensor | None, came: Tensor | None, scheme: str | None, code: int, config: SymmetricConfig,
    experts_per_rank: int, aside: bool,
) -> Sent:  # fmt: skip
    plan = travelling(values, words, weights, scheme)
    M, H = values.shape
    R, T = channel.ep.num_ranks, channel.ep.num_ranks * capacity
    values = aligned_rows(values)
    ids, words = ids.contiguous(), None if words is None else words.contiguous()
    weights = None if weights is None else weights.contiguous()
    form = None if scheme is None else row_format(scheme)
    out = values.new_empty(T, H, dtype=values.dtype if form is None else form.dtype)
    out_words = None if words is None else words.new_empty(T, words.shape[1])
    out_weights = None if weights is None else weights.new_empty(T, weights.shape[1])
    scales = None if scheme is None else values.new_empty(T, plan.scales, dtype=torch.float32)
    groups = max(1, config.block // 64)
    arguments = (
        _words(values), ids, owner, words, None if weights is None else _words(weights), came,
        out.view(torch.int32), None if scheme is None else out.view(torch.int16), out_words,
        None if out_weights is None else _words(out_weights), scales,
        channel.peers, channel.peers16, channel.clock, channel.fault, channel.dead,
        M, capacity, owner.shape[0], config.senders, config.takers, config.run, channel.limit_us, code,
        values.stride(0) * values.itemsize // 16, 0 if came is None else came.stride(0),
        channel.control_bytes // 4, channel.half_bytes // 4,
    )  # fmt: skip
    constants = {
        "RANK": channel.ep.rank,
        "R": R,
        "K": ids.shape[1],
        "KP": next_power_of_2(ids.shape[1]),
        "ROW": H * values.itemsize // 4,
        "VALUES": plan.values,
        "IDS": plan.ids,
        "WEIGHTS": plan.weights,
        "SCALES": plan.scales,
        "SLOT": plan.slot,
        "KIND": WORD_KINDS.get(values.dtype, 0),
        "FLIP": FLIP.get(out.dtype, 0),
        "STRIDE_UNIT": 4,
        "LARGEST": 0.0 if form is None else form.largest,
        "POWER_OF_TWO": form is not None and form.power_of_two,
        "ROWWISE": form is not None and not form.group,
        "EXPERTS_PER_RANK": experts_per_rank,
        "GROUPS": groups,
        # not fewer than threads: then no two of them poll the same word and come to differ
        "TAKE": max(config.take, 32 * config.num_warps),
        "RECORD_BLOCK": max(next_power_of_2(plan.record), 32 * config.num_warps),
        "SCALE_BLOCK": max(next_power_of_2(plan.scales), 32 * config.num_warps),
        "EAGER": config.eager,
        "INTERPRETED": INTERPRET,
        **launch_options(values.device, config, channel.ep.at_once),
    }
    fields = {"capacity": capacity, "values": str(values.dtype), "scheme": scheme, **dataclasses.asdict(plan), "H": H}
    fields |= {"K": ids.shape[1], "experts_per_rank": experts_per_rank}
    with on_device_of(values):
        compile_kernel = functools.partial(warm, _send_kernel, arguments, constants, config)
        channel.meet("send", fields, compile_kernel, constants["NEXT_EARLY"])
        with channel.launching(aside, arguments):
            _send_kernel[(config.programs,)](*arguments, **constants)
    return Sent(out, out_words, out_weights, scales)


def _words(t: Tensor) -> Tensor:
    return t.view(torch.int32)


def send_rows_reference(
    channel: Channel, values: Tensor, ids: Tensor, owner: Tensor, capacity: int, words: Tensor | None,
    weights: Tensor | None, came: Tensor | None, scheme: str | None, code: int,
) -> Sent:  # fmt: skip
    """`send_rows` in torch, on CPU: what a peer announces has arrived."""
    slot = 4 * travelling(values, words, weights, scheme).slot
    scales = None
    if scheme is not None:
        values, scales = quantize_reference(values, scheme)
    (M, H), rank, R = values.shape, channel.ep.rank, channel.ep.num_ranks
    known = (ids >= 0) & (ids < owner.shape[0])
    to = torch.where(known, owner[torch.where(known, ids, 0).long()], -1)  # [M, K]
    received = Sent(
        values.new_empty(R * capacity, H),
        None if words is None else words.new_full((R * capacity, words.shape[1]), -1),
        None if weights is None else weights.new_zeros(R * capacity, weights.shape[1]),
        None if scales is None else scales.new_empty(R * capacity, scales.shape[1]),
    )
    fields = dataclasses.fields(Sent)
    arrived = [t.view(torch.uint8) for t in (getattr(received, field.name) for field in fields) if t is not None]
    parts = [_bytes(t) for t in (values, words, weights, scales) if t is not None]
    with channel.one_turn() as turn:
        for r in range(R):
            goes = (to == r).any(1)
            sent = parts if came is not None else [*parts, goes[:, None].to(torch.uint8)]
            message = torch.cat(sent, dim=1)
            slots = channel.half(r, turn).narrow(0, rank * capacity * slot, M * slot).view(M, slot)
            slots[:, : message.shape[1]] = message
        channel.announce(M, code)
        for source in range(R):
            count = M if source == rank else channel.announced(source, code)
            row = source * capacity
            slots = channel.half(rank, turn).narrow(0, row * slot, count * slot).view(count, slot)
            ends = torch.tensor([t.shape[1] for t in parts], device="cpu").cumsum(0).tolist()
            here = slots[:, ends[-1]] > 0 if came is None else (came[row : row + count] >= 0).any(1)
            for t, begin, end in zip(arrived, [0, *ends], ends, strict=False):
                t[row : row + count][here] = slots[:, begin:end][here]
    return received


def _bytes(t: Tensor) -> Tensor:
    return aligned_rows(t).contiguous().view(torch.uint8)


def send_rows(
    channel: Channel,
    values: Tensor,
    ids: Tensor,
    owner: Tensor,
    capacity: int,
    *,
    operation: str,
    words: Tensor | None = None,
    weights: Tensor | None = None,
    came: Tensor | None = None,
    scheme: str | None = None,
    experts_per_rank: int = 0,
    profile: str = "latency",
    sms: int | None = None,
    aside: bool = False,
) -> Sent:
    """Sends each row once to every rank that owns one of its experts, and takes up what comes; every rank must call.

    No op of torch's dispatcher: it writes to buffers that no schema shows. The dispatcher wraps it in one that does.

    Args:
        channel: of the group, with halves of at least `travelling(...).half_bytes(R, C)`; of words where kernels run.
        values: `[M, H]`, M at most C, rows of a multiple of 16 bytes.
        ids: `[M, K]` int32; outside `[0, E)` goes nowhere.
        owner: `[E]` int32.
        capacity: C, the same on all ranks.
        operation: names it in errors.
        words, weights: `[M, W]` int32 and `[M, K]` that travel along, both or neither.
        came: without them, the `[R·C, K]` ids that travelled in an earlier call with the same `ids`.
        scheme: quantizes values (16-bit, where kernels run) on the way: the bits of `ops.quantize`.
        experts_per_rank: n where `owner[e] == e // n` for all e; 0: look owners up.
        profile: `latency` or `throughput`; see `symmetric_configs`.
        sms: the most SMs to use; None: all.
        aside: launch in the channel's own stream; `channel.arrival` then waits.

    Raises:
        PeerError: on CPU, a peer did not deliver in time; on CUDA, an earlier operation failed.
        ValueError: the first of its kind while a CUDA graph is captured, or ranks that disagree.
    """
    assert (words is None) == (weights is None) and (came is None) != (words is None)
    assert values.shape[0] <= capacity and values.shape[1] * values.itemsize % 16 == 0
    code = channel.begin(operation)
    if not channel.words:
        return send_rows_reference(channel, values, ids, owner, capacity, words, weights, came, scheme, code)
    plan = travelling(values, words, weights, scheme)
    config = send_config(
        values.device,
        capacity,
        channel.ep.num_ranks,
        values.shape[1] * values.itemsize // 4,
        plan.values,
        sms,
        profile,
        scheme is not None and not row_format(scheme).group,
        channel.ep.at_once,
    )
    sent = _send_rows_triton(
        channel, values, ids, owner, capacity, words, weights, came, scheme, code, config, experts_per_rank, aside
    )
    if values.device.type == "cpu":
        channel.check()
    return sent

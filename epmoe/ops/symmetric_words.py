"""What the kernels over symmetric memory share: words as they travel, waits with a deadline, the epoch.

Rows travel as 32-bit words: one fp32, two 16-bit or four 8-bit numbers. A slot's words hold `EMPTY` (all bits set)
until one arrives, and a reader sets them back as it takes them: each word is its own flag, so a row costs one flight
over the link and no fence. That needs no order between words: each is polled for itself. A 32-bit word is written and
read whole, also within a 16-byte access. No word sent is `EMPTY`: as a number it would be one NaN of many (or, in int8,
four times -128, which symmetric rounding never gives), so another takes its place.
"""

from __future__ import annotations

import time

import torch

from epmoe.comm.symmetric import CLOCKS, COUNT_BITS, EMPTY, OPERATION_BITS, TURNS
from epmoe.ops._triton import HAVE_TRITON, INTERPRET, cast_from_float32, jit, tl
from epmoe.ops.quantize import magnitude_bits, round_scaled, scale_of

if HAVE_TRITON and not INTERPRET:
    from triton.language.extra.cuda import globaltimer as nanoseconds
else:

    def nanoseconds():
        """The interpreter's clock; asked only while waiting, so let others run."""
        time.sleep(0.002)  # polling is interpreted too: most of the core is left to those that are waited for
        return time.monotonic_ns()


if HAVE_TRITON:
    _CLOCKS = tl.constexpr(CLOCKS)
    _COUNT_BITS = tl.constexpr(COUNT_BITS)
    _COUNT_MASK = tl.constexpr((1 << COUNT_BITS) - 1)
    _TURNS = tl.constexpr(TURNS)
    _OPERATION_BITS = tl.constexpr(OPERATION_BITS)
    _OPERATION_MASK = tl.constexpr((1 << OPERATION_BITS) - 1)
    _EMPTY = tl.constexpr(EMPTY)
    _ESCAPED = tl.constexpr(-(2**31) + 1)  # stands for a whole number that is -1
    _NAN = tl.constexpr(0x7FFFFFFF)  # NaN in fp32, bf16, fp16 and e4m3
    # Polls between looks at the clock, which take longer than a poll. The interpreter's look lets others run.
    _PATIENCE = tl.constexpr(1 if INTERPRET else 64)

WORD_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes that kernels add up, and how a word of them is taken apart."""

FLIP = {torch.int8: 0x7F7F7F7F}
"""What values are xor-ed with while they travel."""


@jit
def unpack_words(w, KIND: tl.constexpr):
    """The numbers of a word as fp32: (low half, high half); of fp32 twice the same."""
    if KIND == 0:
        f = w.to(tl.float32, bitcast=True)
        return f, f
    elif KIND == 1:
        return (w << 16).to(tl.float32, bitcast=True), (w & -65536).to(tl.float32, bitcast=True)
    else:
        low = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def pack_words(low, high, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """The inverse of `unpack_words`, rounded to nearest even."""
    if KIND == 0:
        return low.to(tl.int32, bitcast=True)
    elif INTERPRETED:
        dtype: tl.constexpr = tl.bfloat16 if KIND == 1 else tl.float16
        a = cast_from_float32(low, dtype, INTERPRETED).to(tl.int16, bitcast=True).to(tl.int32)
        b = cast_from_float32(high, dtype, INTERPRETED).to(tl.int16, bitcast=True).to(tl.int32)
        return (a & 0xFFFF) | (b << 16)
    else:
        asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if KIND == 1 else "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(asm, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@jit
def largest_in_words(w, KIND: tl.constexpr):
    """`magnitude_bits` of the larger of the two numbers in each word."""
    low, high = unpack_words(w, KIND)
    return tl.maximum(magnitude_bits(low), magnitude_bits(high))


@jit
def round_words(low, high, by, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr):
    """int16 pairs of low · by and high · by (fp32), as `ops.quantize` rounds them: of int8 where LARGEST is 127, else
    of e4m3."""
    if LARGEST == 127.0:
        # 1.5 · 2**23 leaves the whole number in the last bits of the sum; saturated first, it can't fuse
        low = tl.minimum(tl.maximum(tl.where(by == 0.0, 0.0, low) * by, -127.0), 127.0) + 12582912.0
        high = tl.minimum(tl.maximum(tl.where(by == 0.0, 0.0, high) * by, -127.0), 127.0) + 12582912.0
        return ((low.to(tl.int32, bitcast=True) & 0xFF) | (high.to(tl.int32, bitcast=True) << 8)).to(tl.int16)
    elif INTERPRETED:
        a = round_scaled(low, by, tl.float8e4nv, INTERPRETED).to(tl.int8, bitcast=True).to(tl.int16)
        b = round_scaled(high, by, tl.float8e4nv, INTERPRETED).to(tl.int8, bitcast=True).to(tl.int16)
        return (a & 0xFF) | (b << 8)
    else:
        low = tl.where(by == 0.0, 0.0, low * by)
        high = tl.where(by == 0.0, 0.0, high * by)
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; "
            "mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f",
            [low, high],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )


@jit
def quantize_words(w, KIND: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr):
    """`[groups, 64]` words of 16-bit numbers -> `[groups, 64]` int16 pairs and `[groups]` scales, as `ops.quantize`
    gives them for blocks of 128 numbers."""
    low, high = unpack_words(w, KIND)
    amax = tl.max(tl.maximum(magnitude_bits(low), magnitude_bits(high)), axis=1)
    scale, inverse = scale_of(amax, LARGEST, POWER_OF_TWO)
    return round_words(low, high, inverse[:, None], LARGEST, INTERPRETED), scale


@jit
def store_pairs(words, pairs16, at, q, mask, INTERPRETED: tl.constexpr):
    """Stores `[groups, 64]` int16 pairs at `at`, even runs of them under the mask, so that each 32-bit word is written
    whole: a GPU's threads have eight in a row. The interpreter stores one element after the other: words, then."""
    if INTERPRETED:
        a, b = tl.split(tl.reshape(q.to(tl.int32), q.shape[0], 32, 2))
        i, _ = tl.split(tl.reshape(at, q.shape[0], 32, 2))
        here, _ = tl.split(tl.reshape(mask.to(tl.int32), q.shape[0], 32, 2))
        tl.store(words + i // 2, (a & 0xFFFF) | (b << 16), mask=here > 0)
    else:
        tl.store(pairs16 + at, q, mask=mask)


@jit
def never_empty(w):
    """Words of numbers, fit to travel."""
    return tl.where(w == _EMPTY, _NAN, w)


@jit
def flipped(w, FLIP: tl.constexpr):
    """Words of int8 numbers (FLIP != 0), fit to travel and back: -128 four times becomes -127."""
    if FLIP != 0:
        w = tl.where(w == -2139062144, -2122219135, w) ^ FLIP
    return w


@jit
def escaped(w):
    """Words of whole numbers, fit to travel: -1 goes as `_ESCAPED`."""
    return tl.where(w == _EMPTY, _ESCAPED, w)


@jit
def unescaped(w):
    """The inverse of `escaped`."""
    return tl.where(w == _ESCAPED, -1, w)


@jit
def give_up(fault, dead, code, peer):
    """Tells the host, and later waits."""
    tl.store(dead, 1)
    tl.store(fault, (code << 8) | (peer + 1))


@jit
def is_late(start, limit_us, dead):
    """Whether a wait has lasted too long, or another has."""
    return (nanoseconds() - start > limit_us.to(tl.int64) * 1000) | (tl.load(dead, volatile=True) != 0)


@jit
def peek(ptrs, mask):
    """Words as they are: a relaxed load of each, from where the peer's store lands. Several of these before anything
    waits cost the time of one."""
    return tl.load(ptrs, mask=mask, other=0, volatile=True)


@jit
def take_words(w, ptrs, mask, limit_us, fault, dead, code, peer):
    """Waits until no word under the mask is empty, empties them again, and returns them; `w` is what a `peek` saw.
    Words that did not come in time stay empty: as numbers they are NaN."""
    waiting = tl.max((w == _EMPTY).to(tl.int32))
    polls = 0
    start = tl.zeros((), tl.int64)
    while waiting == 1:
        w = peek(ptrs, mask)
        waiting = tl.max((w == _EMPTY).to(tl.int32))
        polls += 1
        if polls % _PATIENCE == 0:
            start = tl.where(start == 0, nanoseconds(), start)
            late = is_late(start, limit_us, dead)
            # 2: some are missing, and it is too late. Clocks and flags are read by each thread for itself, so all that
            # decides passes through the reduction and is the same for all.
            waiting = tl.max((w == _EMPTY).to(tl.int32) * tl.where(late, 2, 1))
    if waiting == 2:
        give_up(fault, dead, code, peer)
    tl.store(ptrs, tl.full(w.shape, _EMPTY, tl.int32), mask=mask)
    return w


@jit
def take_record(control, ptr, j, words, token, stamp, limit_us, fault, dead, code, peer):
    """Waits until the peer has announced this operation and, if it has that many tokens, for the `words` words of one
    at `ptr + j`; empties and returns (words, whether it has that many tokens)."""
    announced = tl.load(control, volatile=True)
    w = tl.load(ptr + j, mask=j < words, other=0, volatile=True)
    waiting = tl.max(_missing(announced, w, token, stamp))
    polls = 0
    start = tl.zeros((), tl.int64)
    while waiting == 1:
        announced = tl.load(control, volatile=True)
        w = tl.load(ptr + j, mask=j < words, other=0, volatile=True)
        waiting = tl.max(_missing(announced, w, token, stamp))
        polls += 1
        if polls % _PATIENCE == 0:
            start = tl.where(start == 0, nanoseconds(), start)
            waiting = tl.max(_missing(announced, w, token, stamp) * tl.where(is_late(start, limit_us, dead), 2, 1))
    if waiting == 2:
        give_up(fault, dead, code, peer)
    exists = (waiting == 0) & (token < (announced & _COUNT_MASK))
    tl.store(ptr + j, tl.full(j.shape, _EMPTY, tl.int32), mask=j < tl.where(exists, words, 0))
    return w, exists


@jit
def _missing(announced, w, token, stamp):
    """1 for each word that is still to come: all, until the peer says how many tokens it has."""
    empty = tl.where(token < (announced & _COUNT_MASK), (w == _EMPTY).to(tl.int32), 0)
    return tl.where((announced >> _COUNT_BITS) == stamp, empty, 1)


@jit
def announce(peers, stamp, turn, count, RANK: tl.constexpr, R: tl.constexpr):
    """The herald tells every peer, at the start of an operation, that the ones before it are done.

    No release is needed for that: what they wrote was complete when this kernel began (the end of a kernel, or
    `wait_for_previous`, makes its writes visible to all), and this store comes after.
    """
    FIRST: tl.constexpr = RANK + 1 if R > 2 else 0  # not all of many to the same one
    for i in tl.static_range(R):
        if (FIRST + i) % R != RANK:
            control = peers[(FIRST + i) % R]
            tl.atomic_xchg(control + turn * R + RANK, (stamp << _COUNT_BITS) | count, sem="relaxed", scope="sys")


@jit
def await_peers(control, stamp, turn, limit_us, fault, dead, code, RANK: tl.constexpr, R: tl.constexpr):
    """The herald ends only when every peer has announced this operation, and with it the kernel: whatever follows in
    the stream may write into the half that the operation before this one used. The acquire pairs with nothing younger
    than the peer's last kernel; the stores that rely on it come in the next kernel here."""
    for r in tl.static_range(R):
        if r != RANK:
            ptr = control + turn * R + r
            # a scalar atomic whose result is used: one thread asks, all get its answer
            announced = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
            polls = 0
            start = tl.zeros((), tl.int64)
            late = 0
            while ((announced >> _COUNT_BITS) != stamp) & (late == 0):
                announced = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
                polls += 1
                if polls % _PATIENCE == 0:
                    start = tl.where(start == 0, nanoseconds(), start)
                    passed = (nanoseconds() - start > limit_us.to(tl.int64) * 1000).to(tl.int32)
                    late = tl.atomic_or(dead, passed, sem="relaxed", scope="gpu")  # the same for all threads
            if (announced >> _COUNT_BITS) != stamp:
                give_up(fault, dead, code, r)


@jit
def turn_of(epoch, code):
    """(the half that turn `epoch` uses, the stamp of operation `code` in it); see `comm.symmetric.stamp_of`."""
    return epoch & 1, ((epoch % _TURNS) << _OPERATION_BITS) | (code & _OPERATION_MASK)


@jit
def advance(clock, epoch, program, programs):
    """A program moves its copies of the epoch on, once all of its warps have read theirs."""
    tl.debug_barrier()
    for first in range(program, _CLOCKS, programs * 128):
        at = first + programs * tl.arange(0, 128)
        tl.store(clock + at, tl.full((128,), 1, tl.int32) + epoch, mask=at < _CLOCKS)


@jit
def _either(a, b):
    return a | b


@jit
def rank_bits(to, MANY: tl.constexpr):
    """Bit r is set where one of `to [KP]` is r, which costs one reduction for all ranks; 0 without MANY."""
    if MANY:
        return tl.reduce(tl.where(to >= 0, 1 << tl.where(to >= 0, to, 0), 0), 0, _either)
    else:
        return 0


@jit
def goes_to(to, bits, r, MANY: tl.constexpr):
    """1 where one of `to [KP]`, of which `bits` are the `rank_bits`, is r; else 0."""
    if MANY:
        return (bits >> r) & 1
    else:
        return tl.max((to == r).to(tl.int32))


@jit
def ranks_of(
    ids, owner, token, num_tokens, num_experts, K: tl.constexpr, KP: tl.constexpr, EXPERTS_PER_RANK: tl.constexpr
):
    """`[KP]`: the ranks that own the token's experts, -1 for none. Where experts lie in order and evenly over the ranks
    (`EXPERTS_PER_RANK` > 0) they are computed, which spares a read that waits for another."""
    k = tl.arange(0, KP)
    e = tl.load(ids + token.to(tl.int64) * K + k, mask=k < tl.where(token < num_tokens, K, 0), other=-1)
    known = (e >= 0) & (e < num_experts)
    if EXPERTS_PER_RANK > 0:
        return tl.where(known, tl.where(known, e, 0) // EXPERTS_PER_RANK, -1)
    else:
        return tl.load(owner + tl.where(known, e, 0), mask=known, other=-1)

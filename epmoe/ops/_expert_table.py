"""Which experts the tokens of one launch want, each once, in a table of every program's own: what `ops/routed_mlp.py`
walks after it has routed. On the path of a token it stands where `ops/align.py` does for many tokens.

    table   D   D codes of the distinct experts, expert | tokens << 16   LENGTH · M router weights, at n·M + t
    M = 2   ids [[7, 3], [3, -1]]   ->   2   7 | 0b01 << 16   3 | 0b11 << 16   p[0, 7] -   p[0, 3] p[1, 3]

Letters: M tokens, at most 15; E experts, at most 65536; K experts per token; D distinct ones. LENGTH >= M·K.
"""

from __future__ import annotations

from epmoe.ops._triton import jit, tl


@jit
def tabulate_experts(table_ptr, ids, M: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """Writes D and the codes for `ids [ROWS, SLOTS]`, M rows of them tokens and -1 where there is no expert.

    Returns:
        The place n of each of `ids` in the table; anything where there is no expert.
    """
    row = tl.arange(0, ROWS)
    if M == 1:
        place = tl.zeros([ROWS, SLOTS], tl.int32) + tl.arange(0, SLOTS)[None, :]  # usable slots come first
        tl.store(table_ptr + 0 * row, tl.sum((ids >= 0).to(tl.int32), axis=1), mask=row == 0)
        tl.store(table_ptr + 1 + place, ids | 1 << 16, mask=(row == 0)[:, None] & (ids >= 0))
    else:
        PAIRS: tl.constexpr = ROWS * SLOTS
        flat = tl.reshape(ids, [PAIRS])
        pair = tl.arange(0, PAIRS)
        same = flat[:, None] == flat[None, :]
        earlier = pair[None, :] < pair[:, None]
        is_first = (flat >= 0) & (tl.sum((same & earlier).to(tl.int32), axis=1) == 0)
        tokens = tl.sum(tl.where(same, 1 << (pair // SLOTS)[None, :], 0), axis=1)  # a token names an expert once
        nth = tl.where(is_first, tl.cumsum(is_first.to(tl.int32)), 0)
        tl.store(table_ptr, tl.sum(is_first.to(tl.int32)))
        tl.store(table_ptr + nth, flat | tokens << 16, mask=is_first)
        place = tl.reshape(tl.sum(tl.where(same, nth[:, None], 0), axis=0) - 1, [ROWS, SLOTS])
    tl.debug_barrier()  # every thread reads all of it
    return place


@jit
def tabulate_weights(table_ptr, ids, place, weights, M: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Adds the router weights `[ROWS, SLOTS]` of `ids`, whose places `tabulate_experts` gave."""
    row = tl.arange(0, ROWS)[:, None]
    bits = weights.to(tl.int32, bitcast=True)
    tl.store(table_ptr + 1 + LENGTH + place * M + row, bits, mask=(ids >= 0) & (row < M))
    tl.debug_barrier()


@jit
def codes_at(table_ptr, n, count, inside):
    """The codes at places `n`, 0 from `count` = D on.

    `inside` says that some are before D, and is always true: what is read under a condition Triton does not pipeline in
    a loop, where loads of weights would wait a turn for the code that they need.
    """
    codes = n * 0
    if inside:
        codes = tl.load(table_ptr + 1 + n, mask=n < count, other=0)
    return codes


@jit
def expert_of(code):
    """The expert of a code, int64 for what it is multiplied with."""
    return (code & 0xFFFF).to(tl.int64)


@jit
def wants(code, token):
    """1 where `token` wants the expert of `code`, else 0."""
    return (code >> (16 + token)) & 1


@jit
def weights_at(table_ptr, n, token, wanted, M: tl.constexpr, LENGTH: tl.constexpr):
    """Router weights of tokens for the experts at places `n`; 0 where not `wanted`."""
    bits = tl.load(table_ptr + 1 + LENGTH + n * M + token, mask=wanted, other=0)
    return bits.to(tl.float32, bitcast=True)

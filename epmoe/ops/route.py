"""Logits -> the K experts of each token and their weights in one launch, and the gradient of the weights in another.

First step on the path of a token, behind the router's matmul. `epmoe.router.route` states the rules; the twin in
`route_reference.py` is the reference and serves float64, devices without Triton and very wide rows.

Letters: M tokens, E experts, K experts per token. A program owns a few whole tokens within one warp, so that no
reduction leaves the warp. Inside a kernel a column is an expert; with groups each group is padded to PAD columns:
E = 6 in 2 groups gives experts 0 1 2 - 3 4 5 -, whose columns are ordered as the ids are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epmoe.config import RouterConfig
from epmoe.ops._triton import INTERPRET, cdiv, jit, next_power_of_2, on_device_of, op, runs_directly, tl, use_triton
from epmoe.ops.route_reference import route_backward_reference, route_reference

MAX_COLUMNS = 1024  # 32 experts per lane; wider rows take the twin
# Elements of a program: 16 per lane. The interpreter wants few programs.
TILE = 8192 if INTERPRET else 512


@jit
def _clean(raw):
    """Finite logits (0 where unusable) and which are usable; false for NaN."""
    usable = raw > float("-inf")
    return tl.minimum(tl.where(usable, raw, 0.0), 3.4028234663852886e38), usable


@jit
def _softmax_terms(z, usable):
    """Of each row the maximum and 1 / Σ exp(z - maximum), over its usable entries; finite where there are none."""
    top = tl.max(tl.where(usable, z, float("-inf")), axis=1)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(tl.where(usable, tl.exp(z - top[:, None]), 0.0), axis=1)
    return top, 1.0 / tl.where(total > 0.0, total, 1.0)


@jit
def _score(z, usable, top, inverse, SCORING: tl.constexpr):
    """Scores, 0 where unusable, and their slopes by z (of a softmax: with its two terms held fixed).

    Built on exp(-|z|), which neither overflows nor cancels: σ'(z) = e / (1 + e)².
    """
    if SCORING == "softmax" or SCORING == "topk_softmax":
        s = tl.exp(z - top[:, None]) * inverse[:, None]
        slope = s
    else:
        e = tl.exp(-tl.abs(z))
        r = 1.0 / (1.0 + e)
        s = tl.where(z < 0.0, e * r, r)
        slope = e * r * r
        if SCORING == "sqrt_softplus":
            # log(1 + e) = 2 artanh(w), w = e / (2 + e) <= 1/3: eight terms reach fp32, for the smallest e too
            w = e / (2.0 + e)
            q = w * w
            p = 0.1111111111 + q * (0.0909090909 + q * (0.0769230769 + q * 0.0666666667))
            p = 1.0 + q * (0.3333333333 + q * (0.2 + q * (0.1428571429 + q * p)))
            softplus = tl.maximum(z, 0.0) + 2.0 * w * p
            low = z < -40.0  # there √softplus is exp(z / 2), and softplus itself would underflow
            root = tl.where(low, tl.exp(0.5 * z), tl.sqrt(tl.where(low, 1.0, softplus)))
            slope = tl.where(low, 0.5 * root, 0.5 * s / tl.where(low, 1.0, root))
            s = root
        else:
            tl.static_assert(SCORING == "sigmoid")
    return tl.where(usable, s, 0.0), tl.where(usable, slope, 0.0)


@jit
def _slot_weights(z, chosen, top, inverse, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Weights of the slots before renormalisation, their slopes, and what renormalisation divides by."""
    if SCORING == "topk_softmax":
        top, inverse = _softmax_terms(z, chosen)
    w, slope = _score(z, chosen, top, inverse, SCORING)
    divisor = tl.sum(w, axis=1) + 1e-20 if RENORMALIZE else tl.full([z.shape[0]], 1.0, tl.float32)
    return w, slope, divisor


@jit
def _within_best_groups(
    value, ROWS: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr
):
    """`value [ROWS, GROUPS * PAD]`, -inf outside the TOPK_GROUPS best groups; of equal groups the lower wins."""
    grouped = tl.reshape(value, [ROWS, GROUPS, PAD])
    best, at = tl.max(grouped, axis=2, return_indices=True, return_indices_tie_break_left=True)
    score = best
    if TOP2:
        place = tl.arange(0, PAD)
        rest = tl.where(place[None, None, :] == at[:, :, None], float("-inf"), grouped)
        second = tl.max(rest, axis=2)
        total = best + tl.where(second > float("-inf"), second, 0.0)
        total = tl.maximum(total, -3.4028234663852886e38)  # two of -3e38 still beat an empty group
        score = tl.where(best > float("-inf"), total, float("-inf"))
    group = tl.arange(0, GROUPS)
    kept = tl.zeros([ROWS, GROUPS], tl.int32)
    for _ in range(TOPK_GROUPS):
        _, index = tl.max(score, axis=1, return_indices=True, return_indices_tie_break_left=True)
        hit = group[None, :] == index[:, None]
        kept = tl.where(hit, 1, kept)
        score = tl.where(hit, float("-inf"), score)
    return tl.reshape(tl.where(kept[:, :, None] != 0, grouped, float("-inf")), [ROWS, GROUPS * PAD])


@jit
def _sortable(value):
    """int32 keys in the order of fp32 `value`, equal where it is; none is the smallest int32."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def choose_rows(
    logits_ptr, bias_ptr, forced_ptr, mask_ptr, row, in_range,
    E: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    SCORING: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Ids `[ROWS, SLOTS]` of the tokens `row [ROWS]`, -1 for none, past slot K and out of range; and the two terms of
    each row's softmax, for `weigh_rows`."""
    GROUPS: tl.constexpr = E // GROUP
    live = in_range
    if mask_ptr is not None:
        live = tl.load(mask_ptr + row, mask=in_range, other=0) != 0
    column = tl.arange(0, COLUMNS)
    expert = column
    is_expert = column < E
    if GROUPS > 1 and GROUP != PAD:
        expert = column // PAD * GROUP + column % PAD
        is_expert = (column % PAD < GROUP) & (column < GROUPS * PAD)
    read = live[:, None] & is_expert[None, :]
    raw = tl.load(logits_ptr + row[:, None] * E + expert[None, :], mask=read, other=float("-inf"))
    z, usable = _clean(raw.to(tl.float32))
    top = tl.zeros([ROWS], tl.float32)
    inverse = top
    if SCORING == "softmax":
        top, inverse = _softmax_terms(z, usable)

    slot = tl.arange(0, SLOTS)
    is_slot = in_range[:, None] & (slot < K)[None, :]
    at = row[:, None] * K + slot[None, :]
    if forced_ptr is not None:
        ids = tl.load(forced_ptr + at, mask=is_slot & live[:, None], other=-1)
    else:
        value = z
        if SCORING != "topk_softmax":
            value, _ = _score(z, usable, top, inverse, SCORING)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
        value = tl.where(usable & (value == value), value, float("-inf"))
        if TOPK_GROUPS < GROUPS:
            value = _within_best_groups(value, ROWS, COLUMNS // PAD, PAD, TOPK_GROUPS, TOP2)
        ids = tl.full([ROWS, SLOTS], -1, tl.int32)
        # As integers, which a warp reduces in one instruction: the best, then the lowest of those that equal it.
        key = _sortable(value)
        for k in tl.static_range(K):
            best = tl.max(key, axis=1)
            index = tl.min(tl.where(key == best[:, None], column[None, :], COLUMNS), axis=1)
            key = tl.where(column[None, :] == index[:, None], -2147483648, key)
            if GROUPS > 1 and GROUP != PAD:
                index = index // PAD * GROUP + index % PAD
            index = tl.where(best > -2139095041, index, -1)  # the key of -inf
            ids = tl.where(slot[None, :] == k, index[:, None], ids)
    return ids, top, inverse


@jit
def weigh_rows(
    logits_ptr, row, ids, top, inverse, scaling, E: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr
):
    """Weights `[ROWS, SLOTS]` of what `choose_rows` gave; 0 where there is no expert, or an unusable one was forced."""
    # Logits are read again rather than reduced out of their tile once per slot.
    known = (ids >= 0) & (ids < E)
    raw = tl.load(logits_ptr + row[:, None] * E + ids, mask=known, other=float("-inf"))
    zk, chosen = _clean(raw.to(tl.float32))
    w, _, divisor = _slot_weights(zk, chosen, top, inverse, SCORING, RENORMALIZE)
    return w / divisor[:, None] * scaling


@jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr, bias_ptr, forced_ptr, mask_ptr, ids_ptr, weights_ptr, num_tokens, scaling,
    E: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_tokens
    ids, top, inverse = choose_rows(
        logits_ptr, bias_ptr, forced_ptr, mask_ptr, row, in_range,
        E, K, GROUP, TOPK_GROUPS, TOP2, SCORING, ROWS, PAD, COLUMNS, SLOTS,
    )  # fmt: skip
    weights = weigh_rows(logits_ptr, row, ids, top, inverse, scaling, E, SCORING, RENORMALIZE)
    slot = tl.arange(0, SLOTS)
    at = row[:, None] * K + slot[None, :]
    is_slot = in_range[:, None] & (slot < K)[None, :]
    tl.store(ids_ptr + at, ids, mask=is_slot)
    tl.store(weights_ptr + at, weights, mask=is_slot)


def padded_sizes(num_experts: int, num_groups: int) -> tuple[int, int]:
    """(PAD, COLUMNS): the padded width of a group and of a row."""
    pad = next_power_of_2(num_experts // num_groups)
    return pad, pad * next_power_of_2(num_groups)


def _route_triton(
    logits: Tensor,
    selection_bias: Tensor | None,
    topk_ids: Tensor | None,
    token_mask: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    if topk_groups == num_groups or topk_ids is not None:
        num_groups = topk_groups = 1
    pad, columns = padded_sizes(num_experts, num_groups)
    rows = max(1, TILE // columns)
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, top_k)
    if num_tokens == 0:
        return ids, weights
    with on_device_of(logits):
        _route_kernel[(cdiv(num_tokens, rows),)](
            logits.contiguous(),
            None if selection_bias is None else selection_bias.contiguous(),
            None if topk_ids is None else topk_ids.contiguous(),
            None if token_mask is None else token_mask.contiguous().view(torch.uint8),
            ids, weights, num_tokens, scaling_factor,
            E=num_experts, K=top_k, GROUP=num_experts // num_groups, TOPK_GROUPS=topk_groups,
            TOP2=group_score == "top2_sum", SCORING=scoring, RENORMALIZE=renormalize,
            ROWS=rows, PAD=pad, COLUMNS=columns, SLOTS=next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return ids, weights


@jit(do_not_specialize=["num_tokens"])
def _route_backward_kernel(
    dweights_ptr, logits_ptr, ids_ptr, dlogits_ptr, num_tokens, scaling,
    E: tl.constexpr, K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # The formulas are those of `route_backward_reference`.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_tokens
    expert = tl.arange(0, COLUMNS)
    is_expert = in_range[:, None] & (expert < E)[None, :]
    slot = tl.arange(0, SLOTS)
    is_slot = in_range[:, None] & (slot < K)[None, :]
    at = row[:, None] * K + slot[None, :]
    ids = tl.load(ids_ptr + at, mask=is_slot, other=-1)
    raw_k = tl.load(logits_ptr + row[:, None] * E + ids, mask=(ids >= 0) & (ids < E), other=float("-inf"))
    zk, chosen = _clean(raw_k)
    raw = tl.zeros([ROWS, COLUMNS], tl.float32)
    top = tl.zeros([ROWS], tl.float32)
    inverse = top
    if SCORING == "softmax":
        raw = tl.load(logits_ptr + row[:, None] * E + expert[None, :], mask=is_expert, other=float("-inf"))
        z, usable = _clean(raw)
        top, inverse = _softmax_terms(z, usable)

    w, slope, divisor = _slot_weights(zk, chosen, top, inverse, SCORING, RENORMALIZE)
    g = tl.where(chosen, tl.load(dweights_ptr + at, mask=is_slot, other=0.0) * scaling, 0.0)
    if RENORMALIZE:
        share = w / divisor[:, None]
        g = tl.where(chosen, (g - tl.sum(g * share, axis=1)[:, None]) / divisor[:, None], 0.0)
    dot = tl.sum(g * w, axis=1)
    if SCORING == "topk_softmax":
        g = w * (g - dot[:, None])
    elif SCORING != "softmax":
        g = g * slope
    if SCORING != "softmax":
        g = tl.where(raw_k < float("inf"), g, 0.0)

    grad = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(K):  # a forced id may stand in several slots: add
        here = slot[None, :] == k
        at_k = tl.sum(tl.where(here, ids, 0), axis=1)
        g_k = tl.sum(tl.where(here, g, 0.0), axis=1)
        grad += tl.where(expert[None, :] == at_k[:, None], g_k[:, None], 0.0)
    if SCORING == "softmax":
        s, _ = _score(z, usable, top, inverse, SCORING)
        grad = tl.where(raw < float("inf"), s * (grad - dot[:, None]), 0.0)
    tl.store(dlogits_ptr + row[:, None] * E + expert[None, :], grad, mask=is_expert)


def _route_backward_triton(
    dweights: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalize: bool, scaling_factor: float
) -> Tensor:
    num_tokens, num_experts = logits.shape
    top_k = topk_ids.shape[1]
    dlogits = logits.new_empty(num_tokens, num_experts)
    if num_tokens == 0:
        return dlogits
    _, columns = padded_sizes(num_experts, 1)
    rows = max(1, TILE // columns)
    with on_device_of(logits):
        _route_backward_kernel[(cdiv(num_tokens, rows),)](
            dweights.contiguous(), logits.contiguous(), topk_ids.contiguous(), dlogits, num_tokens, scaling_factor,
            E=num_experts, K=top_k, SCORING=scoring, RENORMALIZE=renormalize,
            ROWS=rows, COLUMNS=columns, SLOTS=next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return dlogits


def _fits(logits: Tensor, num_groups: int) -> bool:
    return use_triton(logits) and padded_sizes(logits.shape[1], num_groups)[1] <= MAX_COLUMNS


@op("route")
def _route(
    logits: Tensor,
    selection_bias: Tensor | None,
    topk_ids: Tensor | None,
    token_mask: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> tuple[Tensor, Tensor]:
    rules = (top_k, scoring, renormalize, scaling_factor, num_groups, topk_groups, group_score)
    if _fits(logits, num_groups):
        return _route_triton(logits, selection_bias, topk_ids, token_mask, *rules)
    ids, weights = route_reference(logits, selection_bias, topk_ids, token_mask, *rules)
    return ids.clone() if ids is topk_ids else ids, weights  # an op's output may not be its input


@_route.register_fake
def _(logits, selection_bias, topk_ids, token_mask, top_k, *rules):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


@op("route_backward")
def _route_backward(
    dweights: Tensor, logits: Tensor, topk_ids: Tensor, scoring: str, renormalize: bool, scaling_factor: float
) -> Tensor:
    launch = _route_backward_triton if _fits(logits, 1) else route_backward_reference
    return launch(dweights, logits, topk_ids, scoring, renormalize, scaling_factor)


@_route_backward.register_fake
def _(dweights, logits, topk_ids, scoring, renormalize, scaling_factor):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.rules = inputs[5:8]
    ctx.save_for_backward(inputs[0], output[0])


def _backward(ctx, _dids, dweights):
    logits, topk_ids = ctx.saved_tensors
    return _route_backward(dweights, logits, topk_ids, *ctx.rules), *[None] * 10


_route.register_autograd(_backward, setup_context=_setup_context)


class _Route(torch.autograd.Function):
    """The op's kernels without the dispatcher, whose way costs the host more than they cost the device."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _route_triton(*inputs)
        _setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[0])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, _dids, dweights):
        logits, topk_ids = ctx.saved_tensors
        return _route_backward_triton(dweights, logits, topk_ids, *ctx.rules), *[None] * 10


def route_topk(
    logits: Tensor,
    config: RouterConfig,
    top_k: int,
    selection_bias: Tensor | None = None,
    topk_ids: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The choice and the weights of `epmoe.router.route`, which states the rules and checks what comes here.

    Args:
        logits: `[M, E]` float32 (float64: the twin).
        selection_bias: `[E]`, any floating dtype. topk_ids: `[M, K]` int32, forced. token_mask: `[M]` bool.

    Returns:
        `topk_ids [M, K]` int32 and `topk_weights [M, K]` in the dtype of `logits`, differentiable in `logits`; once
        only where the kernel ran.
    """
    if selection_bias is not None:
        selection_bias = selection_bias.detach().to(logits.dtype)
    rules = (
        top_k,
        config.scoring,
        config.renormalize,
        float(config.scaling_factor),
        config.num_groups,
        config.topk_groups,
        config.group_score,
    )
    inputs = (logits, selection_bias, topk_ids, token_mask, *rules)
    if torch.compiler.is_compiling():
        return _route(*inputs)
    if not _fits(logits, config.num_groups):
        return route_reference(*inputs)
    if logits.requires_grad and torch.is_grad_enabled() and runs_directly((logits.detach(), *inputs[1:])):
        return _Route.apply(*inputs)
    return _route(*inputs)

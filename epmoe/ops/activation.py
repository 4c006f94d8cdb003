"""The activation between the two expert GEMMs: its forward for torch and for kernel epilogues, and its backward as one
pass over the rows. In the forward it stands inside GEMM1 (`ops/grouped_gemm.py`); in the backward between GEMM2's dgrad
and GEMM1's dgrad and wgrad. Formulas: `Activation` in `epmoe/config.py`; g is the gate, u the up projection.

Letters: I expert intermediate size, K experts per token, T rows of the expert input, L local experts, N rows of the
experts' buffers, of which expert e owns row_start[e]:row_end[e] (`ops/_segments.py`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.config import Activation
from epmoe.ops._configs import num_programs, row_config
from epmoe.ops._segments import check_segments, segment_slices
from epmoe.ops._triton import (
    INTERPRET,
    cast_from_float32,
    check_flat,
    jit,
    next_power_of_2,
    on_device_of,
    op,
    scale_dtypes,
    tl,
    unit_stride,
    use_triton,
)

_SQRT_2 = math.sqrt(2.0)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@functools.lru_cache(maxsize=256)
def is_gated(name: str, alpha: float, limit: float) -> bool:
    """Whether the activation is gated; looked up once, since every launch asks.

    Raises:
        ValueError: as `Activation`.
    """
    return Activation(name, alpha, limit).gated


LINEAR = "none"  # the activation of a plain product


class Epilogue(NamedTuple):
    """What a product's sums pass through before they are stored: the fields of an `Activation`, or nothing."""

    activation: str = LINEAR
    alpha: float = 1.0
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        """Whether two sums make one output."""
        return self.activation != LINEAR and is_gated(*self)


def apply_activation(preact: Tensor, name: str, alpha: float = 1.0, limit: float = math.inf) -> Tensor:
    """The activation in plain torch, differentiable, float64-capable; half precision is computed in float32.

    Args:
        preact: `[..., 2I]`, gates then up projections (`[..., I]` when `name` is not gated).
        name, alpha, limit: fields of `Activation`, with its errors.

    Returns:
        `[..., I]` in `preact.dtype`. Gradients pass a clamp where g <= limit and |u| <= limit.
    """
    gated = Activation(name, alpha, limit).gated
    if gated and preact.shape[-1] % 2:
        raise ValueError(f"preact has shape {tuple(preact.shape)}: {name!r} is gated and needs an even last dimension")
    wide = preact if preact.dtype == torch.float64 else preact.float()
    if name == "silu":
        return F.silu(wide).to(preact.dtype)
    if name == "gelu":
        return F.gelu(wide).to(preact.dtype)
    if name == "relu2":
        return F.relu(wide).square().to(preact.dtype)
    g, u = wide.chunk(2, dim=-1)
    if name == "swiglu":
        act = F.silu(g) * u
    elif name == "geglu":
        act = F.gelu(g) * u
    elif name == "geglu_tanh":
        act = F.gelu(g, approximate="tanh") * u
    elif name == "reglu2":
        act = F.relu(g).square() * u
    else:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        act = g * torch.sigmoid(alpha * g) * (u + 1 if name == "swiglu_oai" else u)
    return act.to(preact.dtype)


@jit
def activate_and_slopes(g, u, alpha, limit, NAME: tl.constexpr):
    """The activation of fp32 blocks `g` and `u`, and its derivatives by both: (act, by g, by u).

    Not gated: pass `u` = 1 and drop the third. What a caller drops the compiler drops too.
    """
    if NAME == "swiglu_oai" or NAME == "swiglu_clamped":
        g_open = g <= limit
        u_open = tl.abs(u) <= limit
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        if NAME == "swiglu_oai":
            u = u + 1.0
        s = tl.sigmoid(alpha * g)
        f = g * s
        df = tl.where(g_open, s + alpha * f * (1.0 - s), 0.0)
        return f * u, df * u, tl.where(u_open, f, 0.0)
    else:
        if NAME == "swiglu" or NAME == "silu":
            s = tl.sigmoid(g)
            f = g * s
            df = s + f * (1.0 - s)
        elif NAME == "geglu" or NAME == "gelu":
            cdf = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)  # 1 / sqrt(2)
            f = g * cdf
            df = cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)  # 1 / sqrt(2 pi)
        elif NAME == "geglu_tanh":  # 0.5 (1 + tanh z) = sigmoid(2z), z = sqrt(2 / pi) (g + 0.044715 g^3)
            s = tl.sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * g * g))
            f = g * s
            df = s + f * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        else:
            tl.static_assert(NAME == "reglu2" or NAME == "relu2")
            r = tl.where(g < 0.0, 0.0, g)  # and not tl.maximum, which hides a NaN
            f = r * r
            df = 2.0 * r
        return f * u, df * u, f


@jit(do_not_specialize_on_alignment=["row_start", "row_end"])
def _activation_backward_kernel(
    preact,
    grad,
    row_start,
    row_end,
    row_index,
    weights,
    dpre,
    act_scaled,
    dweight,
    alpha,
    limit,
    preact_stride,
    grad_stride,
    L: tl.constexpr,
    L_BLOCK: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs walk tiles of ROWS rows, counted from the segments on the device as in the grouped GEMM, in steps of
    BLOCK columns: I = 5, BLOCK = 4 reads columns 0..3, then 4.

    A whole row belongs to one program, and on CUDA to one of its warps, which adds up dweight without a barrier: a sum
    in a fixed order.
    """
    width: tl.constexpr = 2 * I if GATED else I
    experts = tl.arange(0, L_BLOCK)
    begins = tl.load(row_start + experts, mask=experts < L, other=0)
    ends = tl.load(row_end + experts, mask=experts < L, other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        passed = tile_ends <= tile
        e = tl.sum(passed.to(tl.int32))
        rows = tl.load(row_start + e) + (tile - tl.max(tl.where(passed, tile_ends, 0))) * ROWS + tl.arange(0, ROWS)
        real = rows < tl.load(row_end + e)
        n = rows.to(tl.int64)
        w = tl.full((ROWS,), 1.0, tl.float32)
        if weights is not None:
            at = rows
            if row_index is not None:
                at = tl.load(row_index + n, mask=real, other=0)
            w = tl.load(weights + at, mask=real, other=0.0)
        w = w[:, None]
        dot = tl.zeros((ROWS,), tl.float32)
        for start in range(0, I, BLOCK):
            col = start + tl.arange(0, BLOCK)
            if I % BLOCK == 0:
                inside = real[:, None]
            else:
                inside = real[:, None] & (col < I)[None, :]
            pre_at = preact + n[:, None] * preact_stride + col[None, :]
            dpre_at = dpre + n[:, None] * width + col[None, :]
            g = tl.load(pre_at, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(grad + n[:, None] * grad_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
            if GATED:
                u = tl.load(pre_at + I, mask=inside, other=0.0).to(tl.float32)
                act, by_g, by_u = activate_and_slopes(g, u, alpha, limit, NAME)
                by_u = cast_from_float32(w * dy * by_u, dpre.dtype.element_ty, INTERPRETED)
                tl.store(dpre_at + I, by_u, mask=inside)
            else:
                act, by_g, _ = activate_and_slopes(g, 1.0, alpha, limit, NAME)
            by_g = cast_from_float32(w * dy * by_g, dpre.dtype.element_ty, INTERPRETED)
            tl.store(dpre_at, by_g, mask=inside)
            scaled = cast_from_float32(w * act, act_scaled.dtype.element_ty, INTERPRETED)
            tl.store(act_scaled + n[:, None] * I + col[None, :], scaled, mask=inside)
            dot += tl.sum(dy * act, axis=1)
        tl.store(dweight + n, dot, mask=real)


@op("activation_backward")
def activation_backward(
    preact: Tensor,
    grad: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    topk_weights_flat: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """All that the backward of an expert needs between its two GEMMs, recomputed from GEMM1's output.

    Args:
        preact: `[N, 2I]` (`[N, I]` not gated), what the activation saw; rows may be strided.
        grad: `[N, I]`, dout @ W2, not yet multiplied by the router weight; rows may be strided.
        row_start, row_end: `[L]` int32 on the device, the rows of each expert; rows of none are neither read nor
            written.
        row_index: `[N]` int32, which entry of `topk_weights_flat` each row has; None: entry n.
        topk_weights_flat: flat float32 router weights w on the output; None is w = 1.

    Returns:
        `dpre` like preact, act'(preact) · w · grad; `act_scaled` `[N, I]`, w · act (wgrad's operand for W2);
        `dweight` `[N]` float32, <grad, act>.

    Raises:
        ValueError: shapes, dtypes or strides are not as above, or an unknown activation.
    """
    gated = is_gated(activation, alpha, limit)
    size = preact.shape[1] // 2 if gated else preact.shape[1]
    if grad.shape != (preact.shape[0], size) or grad.dtype != preact.dtype:
        raise ValueError(
            f"grad is {tuple(grad.shape)} {grad.dtype}: must be {(preact.shape[0], size)} {preact.dtype}, "
            f"as preact {tuple(preact.shape)} with {activation!r} asks"
        )
    check_segments(row_start, row_end)
    check_flat(row_index, "row_index", torch.int32)
    check_flat(topk_weights_flat, "topk_weights_flat", *scale_dtypes(preact))
    if not use_triton(preact):
        return activation_backward_reference(
            preact, grad, row_start, row_end, row_index, topk_weights_flat, activation, alpha, limit
        )
    preact_stride, grad_stride = unit_stride(preact, "preact"), unit_stride(grad, "grad")
    dpre, act_scaled, dweight = _empty_backward(preact, grad)
    L, rows = row_start.shape[0], grad.shape[0]
    if grad.numel() == 0 or L == 0:
        return dpre, act_scaled, dweight
    config = row_config(size)
    tiles = rows // config.rows + min(L, rows)
    with on_device_of(preact):
        _activation_backward_kernel[(num_programs(preact.device, config.programs_per_sm, tiles),)](
            preact,
            grad,
            row_start,
            row_end,
            row_index,
            topk_weights_flat,
            dpre,
            act_scaled,
            dweight,
            alpha,
            limit,
            preact_stride,
            grad_stride,
            L=L,
            L_BLOCK=next_power_of_2(L),
            I=size,
            NAME=activation,
            GATED=gated,
            ROWS=config.rows,
            BLOCK=config.block,
            INTERPRETED=INTERPRET,
            num_warps=config.num_warps,
        )
    return dpre, act_scaled, dweight


def _empty_backward(preact: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if preact.dtype == torch.float64 else torch.float32
    return (
        torch.empty(preact.shape, dtype=preact.dtype, device=preact.device),
        torch.empty(grad.shape, dtype=preact.dtype, device=preact.device),
        torch.empty(grad.shape[0], dtype=wide, device=preact.device),
    )


@activation_backward.register_fake
def _(preact, grad, row_start, row_end, row_index, topk_weights_flat, activation, alpha, limit):
    return _empty_backward(preact, grad)


def activation_backward_reference(
    preact: Tensor,
    grad: Tensor,
    row_start: Tensor,
    row_end: Tensor,
    row_index: Tensor | None,
    topk_weights_flat: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch twin of `activation_backward`; in float64 everything, dweight too, is float64."""
    dpre, act_scaled, dweight = _empty_backward(preact, grad)
    wide = dweight.dtype
    for _, own in segment_slices(row_start, row_end):
        dy = grad[own].to(wide)
        act, slopes = _torch_slopes(preact[own].to(wide), activation, alpha, limit)
        dweight[own] = (dy * act).sum(-1)
        if topk_weights_flat is not None:
            w = topk_weights_flat[own if row_index is None else row_index[own].long()].to(wide)[:, None]
            dy, act = dy * w, act * w
        act_scaled[own] = act.to(preact.dtype)
        dpre[own] = torch.cat([dy * slope for slope in slopes], dim=-1).to(preact.dtype)
    return dpre, act_scaled, dweight


def _torch_slopes(preact: Tensor, name: str, alpha: float, limit: float) -> tuple[Tensor, list[Tensor]]:
    """`activate_and_slopes` in torch: the activation and its derivatives by g and (gated) by u."""
    if not is_gated(name, alpha, limit):
        g, u = preact, torch.ones_like(preact)
    else:
        g, u = preact.chunk(2, dim=-1)
    open_g, open_u = g <= limit, u.abs() <= limit
    if name in ("swiglu_oai", "swiglu_clamped"):
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        u = u + 1 if name == "swiglu_oai" else u
    if name in ("geglu", "gelu"):
        cdf = 0.5 * (1 + torch.erf(g / _SQRT_2))
        f, df = g * cdf, cdf + g * _INV_SQRT_2PI * torch.exp(-0.5 * g * g)
    elif name == "geglu_tanh":
        s = torch.sigmoid(2 * _SQRT_2_OVER_PI * (g + 0.044715 * g**3))
        f = g * s
        df = s + f * (1 - s) * 2 * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * g * g)
    elif name in ("reglu2", "relu2"):
        f, df = F.relu(g).square(), 2 * F.relu(g)
    else:
        s = torch.sigmoid(alpha * g)
        f, df = g * s, s + alpha * g * s * (1 - s)
    if name in ("swiglu_oai", "swiglu_clamped"):
        return f * u, [df * u * open_g, f * open_u]
    return f * u, [df * u] if name in ("silu", "gelu", "relu2") else [df * u, f]

"""Scaled products as tests make them: operands in every layout, and what their results are held to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from epmoe.config import Activation
from epmoe.ops._segments import RowMap, batched_segments, standard_segments
from epmoe.ops.activation import Epilogue, apply_activation
from epmoe.ops.quantize import quantize_reference
from epmoe.ops.quantize_blocks import BLOCK, quantize_blocks_reference
from epmoe.ops.scaled_gemm import scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.ops.scaled_gemm_reference import scaled_grouped_gemm_act_reference, scaled_grouped_gemm_reference
from epmoe.quant import QuantizedWeights
from epmoe.testing import poisoned_empty

# Relative L2 of any one row: one rounding of an fp32 sum (2^-8, 2^-11 at worst), or to e4m3 (2^-4 at worst). Tensor
# cores add fp8 products in about 14 bits: that is below bf16's, not below fp16's.
ROW_ERROR = {
    "cpu": {torch.bfloat16: 4.5e-3, torch.float16: 6e-4},
    "cuda": {torch.bfloat16: 4.5e-3, torch.float16: 1.5e-3},
}
# Of the largest of 128 numbers, relative; and of each sum before it, in units of its terms' magnitudes, which may
# cancel: fp32, or the 14 bits of tensor cores.
SCALE_ERROR = {"cpu": 1e-5, "cuda": 2e-3}
TERMS_ERROR = {"cpu": 2**-20, "cuda": 2**-13}
REQUANTIZED = 0.04
UNQUANTIZED = 0.07  # against the numbers before they were rounded to eight bits
LAYOUTS = ["in-place", "gathered", "batched"]


def case(
    counts: list[int], n: int, d: int, scheme: str, device: str, seed: int, layout: str = "gathered", k: int = 3,
    block: tuple[int, int] = BLOCK,
) -> SimpleNamespace:  # fmt: skip
    """Rows over six decades and experts over three, inside wider buffers of NaN; rows of no expert are NaN, their
    scales too, and their indices -1."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count, L = sum(counts), len(counts)
    if layout == "batched":
        capacity = max(counts) + 2
        segments, max_rows = batched_segments(torch.tensor(counts, dtype=torch.int32), capacity), L * capacity
    else:
        segments = standard_segments(torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int())
        max_rows = count + 5
    bounds = list(zip(*(t.tolist() for t in segments), strict=True))
    owned = torch.tensor([n for start, end in bounds for n in range(start, end)], dtype=torch.int64)
    expert = torch.tensor([e for e, (start, end) in enumerate(bounds) for _ in range(start, end)], dtype=torch.int64)
    index, divisor, source = None, 1, owned
    tokens = max_rows
    if layout == "gathered":
        tokens, divisor = -(-(count + 4) // k), k
        index = torch.full((max_rows,), -1, dtype=torch.int32)
        index[owned] = torch.randperm(tokens * k, generator=generator)[:count].int()
        source = index[owned].long() // k
    x = randn(tokens, d) * 10.0 ** torch.randint(-3, 4, (tokens, 1), generator=generator)
    values, scales = quantize_reference(x, scheme)
    unused = torch.ones(tokens, dtype=torch.bool)
    unused[source] = False
    scales[unused] = math.nan
    values.view(torch.uint8)[unused] = 0x7F  # NaN
    wide_a = torch.full((tokens, -(-d // 16) * 16 + 16), 0x7F, dtype=torch.uint8).view(values.dtype)
    wide_a.view(torch.uint8)[:, :d] = values.view(torch.uint8)
    wide_s = torch.full((tokens, scales.shape[1] + 3), math.nan)
    wide_s[:, : scales.shape[1]] = scales
    magnitude = torch.tensor([1.0, 1e3, 1e-3, 3.0])[torch.arange(L) % 4]
    w = randn(L, n, d) * magnitude[:, None, None] / d**0.5
    w *= 10.0 ** torch.randint(-1, 2, (L, n, 1), generator=generator)  # channels differ too
    if block != BLOCK:  # and columns: those of a block differ from its neighbours'
        w *= 10.0 ** torch.randint(-1, 2, (L, 1, d), generator=generator)
    # By the twins: on a GPU's machine no kernel runs on CPU tensors.
    if scheme == "fp8_block":
        q = QuantizedWeights(*quantize_blocks_reference(w, scheme, block), scheme, block)
    else:
        w_values, w_scales = quantize_reference(w.view(-1, d), scheme)
        q = QuantizedWeights(w_values.view(w.shape), w_scales.view(L, n), scheme)
    bias = randn(L, n) * magnitude[:, None]
    row_scale = torch.rand(max(tokens * k, max_rows), generator=generator) + 0.5
    padding = torch.ones(max_rows, dtype=torch.bool)
    padding[owned] = False
    c = SimpleNamespace(scheme=scheme, divisor=divisor, max_rows=max_rows, bounds=bounds, block=block)
    c.blocks = dict(zip(("block_rows", "block_columns"), block, strict=True))
    tensors = {
        "a": wide_a, "a_scale": wide_s, "w": q.values, "w_scale": q.scales, "bias": bias, "row_scale": row_scale,
        "x": x, "raw_w": w, "owned": owned, "padding": padding, "source": source, "expert": expert,
    }  # fmt: skip
    for name, tensor in tensors.items():
        setattr(c, name, tensor.to(device))
    c.a, c.a_scale = c.a[:, :d], c.a_scale[:, : scales.shape[1]]
    c.index = None if index is None else index.to(device)
    c.segments = tuple(t.to(device) for t in segments)
    c.operands = (c.a, c.a_scale, c.w, c.w_scale)
    c.rows = (*c.segments, c.index, divisor, max_rows)
    c.sources = (RowMap(*c.segments, c.index, divisor), max_rows)  # the same for the twins
    return c


BLOCKS = [(64, 64), (128, 64), (32, 128), (1, 128), (256, 256), (64, 384), (2, 32)]


def row_error(got: Tensor, want: Tensor) -> float:
    """The worst relative error of a row; rows that cancelled to almost nothing count against their neighbours."""
    if got.shape[0] == 0:
        return 0.0
    norms = want.norm(dim=-1)
    error = (got.double() - want).norm(dim=-1)
    return (error / norms.clamp_min(1e-30)).nan_to_num(math.inf).max().item()  # a row not written is wrong


def act_twin(
    c: SimpleNamespace, act: Activation, bias: Tensor | None, scale: Tensor | None, out: torch.dtype, requantize: bool
) -> tuple[Tensor, Tensor]:
    rows, epilogue = c.sources[0]._replace(row_scale=scale), Epilogue(act.name, act.alpha, act.limit)
    return scaled_grouped_gemm_act_reference(
        *c.operands, bias, rows, c.max_rows, epilogue, c.scheme, out, requantize, torch.float64, c.block
    )


def check_gemm(c: SimpleNamespace, bias: bool = False, out: torch.dtype = torch.bfloat16, **options: object) -> Tensor:
    b = c.bias if bias else None
    with poisoned_empty():
        got = scaled_grouped_gemm(*c.operands, b, *c.rows, c.scheme, out, **c.blocks, **options)
    double = torch.float64
    want = scaled_grouped_gemm_reference(*c.operands, b, *c.sources, c.scheme, double, double, c.block)
    assert got.shape == want.shape and got.dtype == out
    assert row_error(got[c.owned], want[c.owned]) < ROW_ERROR[c.a.device.type][out]
    assert got[c.padding].isnan().all(), "a row of no expert was written"
    return got


def spread_of_terms(
    c: SimpleNamespace, act: Activation, bias: Tensor | None, scale: Tensor | None, part: float
) -> Tensor:
    """`[N, I]`: by how much activations differ where each sum is off by `part` of its terms' magnitudes, either way."""
    double, rows = torch.float64, c.sources
    z = scaled_grouped_gemm_reference(*c.operands, None, *rows, c.scheme, double, double, c.block)
    off = scaled_grouped_gemm_reference(
        c.a.float().abs(), c.a_scale, c.w.float().abs(), c.w_scale, None, *rows, c.scheme, double, double, c.block
    )
    off *= part
    if scale is not None:
        factor = scale[c.owned if c.index is None else c.index[c.owned].long()].double()[:, None]
        z[c.owned] *= factor
        off[c.owned] *= factor
    if bias is not None:
        z[c.owned] += bias[c.expert].double()

    def activated(*signs: int) -> Tensor:
        ways = torch.tensor(signs, dtype=double, device=z.device)
        return apply_activation(
            z + off * ways.repeat_interleave(z.shape[1] // len(signs)), act.name, act.alpha, act.limit
        )

    ways = [(1, 1), (1, -1), (-1, 1), (-1, -1)] if act.gated else [(1,), (-1,)]
    middle = activated(*(0,) * len(ways[0]))
    return torch.stack([(activated(*signs) - middle).abs() for signs in ways]).amax(0)


def check_act(c: SimpleNamespace, act: Activation, requantize: bool, bias: bool = True, scale: bool = True) -> None:
    b, s = c.bias if bias else None, c.row_scale if scale else None
    tail = (s, act.name, act.alpha, act.limit, c.scheme)
    with poisoned_empty():
        tail = (*tail, torch.bfloat16, requantize)
        got, got_scale = scaled_grouped_gemm_act(*c.operands, b, *c.rows, *tail, **c.blocks)
    double = torch.float64
    want, _ = act_twin(c, act, b, s, double, False)
    want = want[c.owned]
    if not requantize:
        assert got_scale.shape == (0,) and got.dtype == torch.bfloat16
        assert row_error(got[c.owned], want) < ROW_ERROR[c.a.device.type][torch.bfloat16]
        assert got[c.padding].isnan().all(), "a row of no expert was written"
        return
    width = want.shape[1]
    assert got.shape == (c.max_rows, width) and got_scale.shape == (c.max_rows, -(-width // 128))
    assert got_scale[c.padding].isnan().all(), "a scale of no expert's row was written"
    exact = torch.nn.functional.pad(want, (0, -width % 128)).view(len(want), -1, 128)
    amax = exact.abs().amax(-1)
    allowed = spread_of_terms(c, act, b, s, TERMS_ERROR[c.a.device.type])[c.owned]
    allowed = torch.nn.functional.pad(allowed, (0, -width % 128)).view(exact.shape).amax(-1) / 448
    want_scale = torch.where(amax == 0, 1.0, amax / 448)
    allowed = allowed + SCALE_ERROR[c.a.device.type] * want_scale
    excess = (got_scale[c.owned].double() - want_scale).abs() - allowed
    assert not (excess > 0).any() and got_scale[c.owned].isfinite().all(), excess.max()
    values = got.view(torch.uint8)[c.owned].view(got.dtype).double()
    back = values * got_scale[c.owned].double().repeat_interleave(128, 1)[:, :width]
    # block by block, so that no block hides behind a larger one
    back = torch.nn.functional.pad(back, (0, -width % 128)).view(exact.shape)
    assert row_error(back.flatten(0, 1), exact.flatten(0, 1)) < REQUANTIZED

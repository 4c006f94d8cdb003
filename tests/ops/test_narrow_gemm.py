"""Grouped GEMM on narrow weights: the twin against float64 one number at a time, kernels against float64 of the same
narrow numbers, row by row, under every configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops import _narrow_configs
from epmoe.ops._narrow_configs import NarrowConfig
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.activation import apply_activation
from epmoe.ops.narrow_formats import narrow_format, numbers_of
from epmoe.ops.narrow_gemm import (
    narrow_grouped_gemm,
    narrow_grouped_gemm_act,
    narrow_grouped_gemm_act_into,
    narrow_grouped_gemm_act_reference,
    narrow_grouped_gemm_into,
    narrow_grouped_gemm_reference,
)
from epmoe.quant import NARROW_SCHEMES, dequantize_narrow, quantize_narrow
from epmoe.testing import poisoned_empty
from tests import naive
from tests.ops.gemm_cases import LAYOUTS
from tests.quant.test_narrow import INTEGERS, own_error

# Relative L2 of any one row: one rounding of an fp32 sum (2^-8, 2^-11 at worst); tensor cores add up a little coarser.
ROW_ERROR = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3}
FORMS = [(scheme, zeros) for scheme in NARROW_SCHEMES for zeros in ((False, True) if scheme in INTEGERS else (False,))]
narrow_config = _narrow_configs.narrow_config


@pytest.fixture
def configure(monkeypatch):
    """Replaces the choice of configurations; the plans made from them last as long."""

    def replace(choose):
        _narrow_configs.narrow_plan.cache_clear()
        monkeypatch.setattr(_narrow_configs, "narrow_config", choose)

    yield replace
    _narrow_configs.narrow_plan.cache_clear()


def case(
    counts: list[int], n: int, d: int, scheme: str, device: str, seed: int, *, zeros: bool = False,
    layout: str = "gathered", dtype: torch.dtype = torch.bfloat16, k: int = 3, scales: torch.dtype | None = None,
) -> SimpleNamespace:  # fmt: skip
    """Rows over decades (fp16: within its range) and experts over three, inside wider buffers of NaN; rows of no expert
    are NaN and their indices -1."""
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
    index, divisor, source, tokens = None, 1, owned, max_rows
    if layout == "gathered":
        tokens, divisor = -(-(count + 4) // k), k
        index = torch.full((max_rows,), -1, dtype=torch.int32)
        index[owned] = torch.randperm(tokens * k, generator=generator)[:count].int()
        source = index[owned].long() // k
    half = dtype == torch.float16
    x = randn(tokens, d) * (1.0 if half else 10.0 ** torch.randint(-3, 4, (tokens, 1), generator=generator))
    unused = torch.ones(tokens, dtype=torch.bool)
    unused[source] = False
    wide_a = torch.full((tokens, -(-d // 16) * 16 + 16), math.nan, dtype=dtype)
    wide_a[:, :d] = x.to(dtype)
    wide_a[unused] = math.nan
    magnitude = torch.tensor([1.0, 1e3, 1e-3, 3.0])[torch.arange(L) % 4] ** (0.3 if half else 1.0)
    w = randn(L, n, d) * magnitude[:, None, None] / d**0.5
    q = quantize_narrow(w, scheme, zeros=zeros, scale_dtype=scales)
    bias = randn(L, n) * magnitude[:, None]
    row_scale = torch.rand(max(tokens * k, max_rows), generator=generator) + 0.5
    padding = torch.ones(max_rows, dtype=torch.bool)
    padding[owned] = False
    c = SimpleNamespace(scheme=scheme, divisor=divisor, max_rows=max_rows, dtype=dtype)
    tensors = {
        "a": wide_a, "bias": bias, "row_scale": row_scale, "raw_w": w, "owned": owned, "padding": padding,
        "source": source, "expert": expert,
    }  # fmt: skip
    for name, tensor in tensors.items():
        setattr(c, name, tensor.to(device))
    c.a = c.a[:, :d]
    c.q = q
    c.narrow = tuple(None if t is None else t.to(device) for t in (q.values, q.scales, q.zeros, q.outer))
    c.index = None if index is None else index.to(device)
    c.segments = tuple(t.to(device) for t in segments)
    c.rows = (*c.segments, c.index, divisor, max_rows)
    return c


def row_error(got: Tensor, want: Tensor) -> float:
    """The worst relative error of a row."""
    if got.shape[0] == 0:
        return 0.0
    return ((got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)).nan_to_num(9.0).max().item()


def exactly(c: SimpleNamespace, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """`[rows of experts, N]` in float64 of the weights w `[L, N, D]`."""
    y = torch.stack([w[e] @ c.a[s].double() for s, e in zip(c.source, c.expert, strict=True)])
    if scale is not None:
        y = y * scale[c.owned if c.index is None else c.index[c.owned].long()].double()[:, None]
    return y if bias is None else y + bias[c.expert].double()


def check(c: SimpleNamespace, got: Tensor, wanted: Callable[[Tensor], Tensor]) -> None:
    """Rows are within a rounding of what the numbers give, or of what integers give whose products with their scales
    are numbers in bf16: configurations choose."""
    assert got[c.padding].isnan().all(), "a row of no expert was written"
    if not len(c.owned):
        return
    weights = [dequantize_narrow(c.q, torch.float64)]
    if c.scheme in INTEGERS and c.dtype == torch.bfloat16:
        q, group = c.q, narrow_format(c.scheme).group or c.a.shape[1]
        numbers = numbers_of(q.values, narrow_format(c.scheme).kind, q.width, torch.float32)
        own, zeros = (
            None if t is None else t.float().mT.repeat_interleave(group, -1)[..., : q.width]
            for t in (q.scales, q.zeros)
        )
        assert own is not None
        numbers = numbers if zeros is None else numbers - zeros
        weights.append((numbers * own.bfloat16().float()).bfloat16().double())
    errors = [row_error(got[c.owned], wanted(w.to(c.a.device))) for w in weights]
    assert min(errors) < ROW_ERROR[c.dtype], errors


def check_gemm(c: SimpleNamespace, bias: bool = True, **options: object) -> Tensor:
    b = c.bias if bias else None
    with poisoned_empty():
        got = narrow_grouped_gemm(c.a, *c.narrow, b, *c.rows, c.scheme, **options)
    assert got.shape == (c.max_rows, c.bias.shape[1]) and got.dtype == c.dtype
    check(c, got, lambda w: exactly(c, w, None, b))
    return got


def check_act(c: SimpleNamespace, act: Activation, bias: bool = True, scale: bool = True) -> None:
    b, s = c.bias if bias else None, c.row_scale if scale else None
    tail = (act.name, act.alpha, act.limit)
    with poisoned_empty():
        got = narrow_grouped_gemm_act(c.a, *c.narrow, b, *c.rows, s, *tail, c.scheme)
    assert got.shape == (c.max_rows, c.bias.shape[1] // (2 if act.gated else 1)) and got.dtype == c.dtype
    check(c, got, lambda w: apply_activation(exactly(c, w, s, b), *tail))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twin_is_a_dot_product_of_the_numbers_per_row_and_column(layout, seed):
    for scheme in ("int4_g32", "nvfp4"):
        c = case([2, 0, 3], 6, 150, scheme, "cpu", seed, zeros=scheme in INTEGERS, layout=layout)
        with poisoned_empty():
            got = narrow_grouped_gemm_reference(c.a, *c.narrow, c.bias, *c.rows, scheme, precise=torch.float64)
        w = dequantize_narrow(c.q, torch.float64)
        for n, source, e in zip(c.owned.tolist(), c.source.tolist(), c.expert.tolist(), strict=True):
            for column in range(6):
                exact = math.fsum((c.a[source].double() * w[e, column]).tolist()) + c.bias[e, column].item()
                assert got[n, column].item() == pytest.approx(exact, rel=1e-9)
        assert got[c.padding].isnan().all()


def test_twin_scales_before_the_bias_and_the_activation(seed):
    c = case([2, 3], 12, 20, "int8_g64", "cpu", seed)
    tail = (c.row_scale, "swiglu", 1.0, math.inf, c.scheme)
    act = narrow_grouped_gemm_act_reference(c.a, *c.narrow, c.bias, *c.rows, *tail, precise=torch.float64)
    plain = narrow_grouped_gemm_reference(c.a, *c.narrow, None, *c.rows, c.scheme, precise=torch.float64)
    for n, e in zip(c.owned.tolist(), c.expert.tolist(), strict=True):
        z = plain[n] * c.row_scale[int(c.index[n])].double() + c.bias[e].double()
        torch.testing.assert_close(act[n], naive.activation(z, "swiglu", 1.0, math.inf))


@pytest.mark.parametrize("scheme, zeros", FORMS, ids=str)
def test_kernel_agrees_with_float64_of_the_same_numbers(scheme, zeros, device, seed):
    counts, n, d = ([3, 0, 2], 48, 200) if device == "cpu" else ([37, 0, 340, 1, 5], 1408, 1496)
    c = case(counts, n, d, scheme, device, seed, zeros=zeros)
    check_act(c, Activation("swiglu"))
    got = check_gemm(c, bias=False)
    unquantized = torch.stack([c.raw_w[e].double() @ c.a[s].double() for s, e in zip(c.source, c.expert, strict=True)])
    total = (got[c.owned].double() - unquantized).norm(dim=-1) / unquantized.norm(dim=-1)
    assert total.square().mean().sqrt().item() < 1.3 * own_error(scheme)


@pytest.mark.parametrize(
    "scheme", ["int4_g32", "int4_channel", "int8_g128", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2"]
)
def test_fp16_rows_keep_their_own_precision(scheme, device, seed):
    c = case([3, 2], 48, 144, scheme, device, seed, zeros=scheme in INTEGERS, dtype=torch.float16)
    check_gemm(c)


@pytest.mark.parametrize("scales", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["int4_g32", "int4_g128", "int8_channel"])
def test_integers_may_have_scales_of_another_dtype_than_rows(scheme, scales, device, seed):
    """As GPTQ and AWQ checkpoints have them."""
    c = case([3, 0, 40], 48, 144, scheme, device, seed, zeros=True, scales=scales)
    assert c.q.scales.dtype == scales
    check_gemm(c)
    check_act(c, Activation("swiglu"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [[5, 0, 34, 1], [0, 0], [7]], ids=str)
def test_any_split_of_rows_in_any_layout(counts, layout, device, seed):
    check_gemm(case(counts, 40, 64, "int4_g64", device, seed, zeros=True, layout=layout), bias=layout == "gathered")


@pytest.mark.parametrize("n, d", [(24, 40), (192, 80), (80, 192), (2, 1)])
def test_no_size_has_to_be_a_multiple_of_a_block(n, d, device, seed):
    for scheme in ("int4_g128", "mxfp4", "int8_g32", "mxfp6_e3m2"):
        check_act(case([2, 0, 3], n, d, scheme, device, seed), Activation("swiglu"))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_the_epilogue(name, device, seed):
    act = Activation.named(name, limit=0.75 if name in ("swiglu_oai", "swiglu_clamped") else None)
    check_act(case([4, 2], 64 if act.gated else 32, 32, "int4_g32", device, seed), act)


@pytest.mark.parametrize("bias, scale", [(False, False), (True, False), (False, True)], ids=str)
def test_bias_and_router_weight_are_independent(bias, scale, device, seed):
    check_act(case([4, 0, 7], 48, 32, "int8_channel", device, seed), Activation("swiglu"), bias=bias, scale=scale)


@pytest.mark.parametrize(
    "scheme, rows",
    [
        ("int4_g128", 4), ("nvfp4", 20), ("int8_g32", 40), ("int4_g64", 80), ("mxfp4", 400), ("mxfp6_e2m3", 4),
        ("mxfp6_e3m2", 400),
    ],
)  # fmt: skip
def test_what_a_gpu_would_choose_is_right_for_few_rows_and_for_many(scheme, rows, device, seed, configure):
    configure(lambda device, scheme, _, n, d, gated: narrow_config(device, scheme, rows, n, d, gated, False))
    n, d = (96, 200) if device == "cpu" else (1440, 1500)
    c = case([2, 0, 3], n, d, scheme, device, seed, zeros=scheme in INTEGERS)
    check_act(c, Activation("swiglu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme, zeros, rows, dtype",
    [
        ("int4_g128", False, 3, torch.bfloat16),
        ("int4_g128", True, 300, torch.bfloat16),
        ("int4_g128", True, 300, torch.float16),
        ("int4_g32", True, 40, torch.bfloat16),
        ("int8_g128", False, 20, torch.bfloat16),
        ("int8_channel", False, 300, torch.bfloat16),
        ("mxfp4", False, 3, torch.bfloat16),
        ("mxfp4", False, 300, torch.bfloat16),
        ("mxfp4", False, 300, torch.float16),
        ("nvfp4", False, 90, torch.bfloat16),
        ("mxfp6_e2m3", False, 3, torch.bfloat16),
        ("mxfp6_e3m2", False, 40, torch.bfloat16),
        ("mxfp6_e2m3", False, 300, torch.bfloat16),
        ("mxfp6_e3m2", False, 300, torch.float16),
    ],
    ids=str,
)
def test_large_experts_by_the_kernels_choice(scheme, zeros, rows, dtype, device, seed):
    c = case([rows, 0, rows // 2, 1], 1536, 2048, scheme, device, seed, zeros=zeros, dtype=dtype)
    check_act(c, Activation("swiglu"), bias=False)
    check_gemm(c, bias=False)


@pytest.mark.parametrize("on_tile", [False, True], ids=["sums", "tile"])
@pytest.mark.parametrize("scheme", ["int4_g64", "int8_g128", "nvfp4", "mxfp6_e2m3"])
def test_scales_may_multiply_weights_or_sums(scheme, on_tile, device, seed, configure):
    """Also e2m1, whose product with its scale is exact in bf16."""
    c = case([3, 0, 2], 40, 256, scheme, device, seed, zeros=scheme in INTEGERS)
    for rows in (16, 128) if device == "cpu" else (16, 64, 128, 256):  # one dot for a step, or two
        configure(lambda *args, rows=rows: NarrowConfig(rows, 64, 4, 2, on_tile=on_tile))
        check_gemm(c)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_pointers_and_descriptors_read_the_same(tma, device, seed, monkeypatch, configure):
    configure(narrow_config)
    monkeypatch.setattr(_narrow_configs, "_has_tma", lambda device: tma)
    for scheme in ("int4_g128", "int8_channel", "mxfp6_e2m3"):
        check_act(case([5, 0, 4], 144, 160, scheme, device, seed), Activation("swiglu"))


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(device, seed):
    c = case([9, 0, 5], 48, 192, "int4_g128", device, seed, zeros=True, layout="in-place")
    want = narrow_grouped_gemm(c.a, *c.narrow, None, *c.rows, c.scheme, expected_m=4)
    start, end = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([4, 9, 10], [7, 9, 11]))
    got = narrow_grouped_gemm(c.a, *c.narrow, None, start, end, None, 1, c.max_rows, c.scheme, expected_m=4)
    for n in (4, 5, 6, 10):
        assert torch.equal(got[n], want[n])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_spoils_its_channel_and_no_other(bad, device, seed):
    c = case([3, 2], 48, 192, "int4_g64", device, seed)
    clean = narrow_grouped_gemm(c.a, *c.narrow, None, *c.rows, c.scheme)
    c.narrow[1][1, 2, 7] = bad  # expert 1, columns 128.., channel 7
    got = narrow_grouped_gemm(c.a, *c.narrow, None, *c.rows, c.scheme)
    hit = torch.zeros_like(got, dtype=torch.bool)
    hit[c.owned[c.expert == 1], 7] = True
    assert not got[hit].isfinite().any()
    assert torch.equal(got[c.owned][~hit[c.owned]], clean[c.owned][~hit[c.owned]])


@pytest.mark.parametrize("byte", [0, 1, 127, 254, 255])
def test_every_byte_is_its_power_of_two(byte, device):
    if device == "cuda" and byte == 0:
        byte = 2  # tensor cores need not keep numbers below the smallest normal one
    w = torch.zeros(1, 16, 64, dtype=torch.uint8)
    w[0, :, 0] = 2  # column 0 is 1
    scales = torch.full((1, 4, 16), byte, dtype=torch.uint8)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 0] = 2.0**60 if byte < 3 else 1.0
    start, end = (torch.tensor([t], dtype=torch.int32, device=device) for t in (0, 1))
    x, w, scales = (t.to(device) for t in (x, w, scales))
    y = narrow_grouped_gemm(x, w, scales, None, None, None, start, end, None, 1, 1, "mxfp4")
    want = math.nan if byte == 255 else x[0, 0].item() * 2.0 ** (byte - 127)
    torch.testing.assert_close(y.float(), torch.full_like(y, want).float(), equal_nan=True, rtol=0, atol=0)


def test_shapes_are_known_without_running(seed):
    c = case([2, 3], 48, 160, "nvfp4", "cpu", seed)
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in (c.a, *c.narrow, c.bias, *c.rows)]
    out = torch.ops.epmoe.narrow_grouped_gemm(*meta, "nvfp4")
    assert out.shape == (c.max_rows, 48) and out.dtype == torch.bfloat16
    act = torch.ops.epmoe.narrow_grouped_gemm_act(*meta, None, "swiglu", 1.0, math.inf, "nvfp4")
    assert act.shape == (c.max_rows, 24)


def test_what_does_not_fit_is_named(seed):
    c = case([2, 3], 48, 160, "int4_g32", "cpu", seed, zeros=True)
    w, scale, zero, _ = c.narrow
    good = {
        "a": c.a, "w": w, "w_scale": scale, "w_zero": zero, "w_outer": None, "bias": c.bias,
        "row_start": c.segments[0], "row_end": c.segments[1], "row_index": c.index, "index_divisor": 3,
        "max_rows": c.max_rows, "scheme": "int4_g32",
    }  # fmt: skip
    for change, message in [
        ({"scheme": "fp8_row"}, "scheme='fp8_row'"),
        ({"a": c.a.float()}, "a is torch.float32"),
        ({"a": c.a[:, :100]}, "w is torch.uint8"),
        ({"w": w[:, :, :64]}, "w is torch.uint8"),
        ({"w_scale": scale.mT}, "w_scale is"),
        ({"w_scale": scale.double()}, "w_scale is torch.float64"),
        ({"w_zero": zero[:1]}, "w_zero is"),
        ({"w_outer": torch.ones(2, 48)}, "w_outer is torch.float32.*must be None"),
        ({"bias": c.bias[:, :3]}, "bias is"),
        ({"row_end": c.segments[1][:1]}, "row_start has 2 entries"),
        ({"row_index": c.index.long()}, "row_index is torch.int64"),
        ({"index_divisor": 0}, "index_divisor=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            narrow_grouped_gemm(**(good | change))
    narrow, rows = (*c.narrow, c.bias), c.rows[:4]
    with pytest.raises(ValueError, match=rf"out is torch.bfloat16 \({c.max_rows}, 47\).*\({c.max_rows}, 48\)"):
        narrow_grouped_gemm_into(c.a.new_empty(c.max_rows, 47), c.a, *narrow, *rows, "int4_g32")
    with pytest.raises(ValueError, match=rf"act is torch.float32.*torch.bfloat16 \({c.max_rows}, 24\)"):
        act = torch.empty(c.max_rows, 24)
        narrow_grouped_gemm_act_into(act, c.a, *narrow, *rows, None, "swiglu", 1.0, math.inf, "int4_g32")
    n = case([2, 3], 48, 160, "nvfp4", "cpu", seed)
    with pytest.raises(ValueError, match="w_outer is None"):
        narrow_grouped_gemm(n.a, *n.narrow[:3], None, None, *n.rows, "nvfp4")


def test_a_gpu_takes_wide_tiles_for_few_rows_and_where_four_bits_are_integers_as_many_registers_as_four_programs_have():
    def chosen(scheme: str, rows: int, d: int = 2048) -> tuple[int, int, int, int]:
        config = narrow_config(torch.device("cpu"), scheme, rows, 4096, d, False, False)
        return config.block_t, config.block_w, config.num_stages, config.registers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_narrow_configs, "_has_roomy_sms", lambda device: True)
        narrow_config.cache_clear()
        for scheme in ("int4_g32", "int4_g128", "int4_channel"):
            assert chosen(scheme, 1) == chosen(scheme, 12) == (16, 128, 3, 128)
            assert chosen(scheme, 4, 7168) == (16, 128, 4, 128) and chosen(scheme, 24) == (32, 128, 3, 168)
            assert chosen(scheme, 48) == (32, 128, 4, 0)
        for scheme in ("mxfp4", "nvfp4"):  # where few experts have rows, small tiles are the more
            assert chosen(scheme, 1) == (16, 64, 4, 0) and chosen(scheme, 2) == (16, 128, 3, 0)
        for scheme in ("int8_channel", "mxfp6_e2m3"):
            assert chosen(scheme, 1) == (16, 128, 3, 0)
    narrow_config.cache_clear()


@pytest.mark.parametrize("registers", [0, 128])
def test_the_registers_of_a_choice_reach_the_compiler(registers, configure):
    configure(lambda *args: NarrowConfig(16, 128, 4, 3, registers=registers))
    plan = _narrow_configs.narrow_plan(
        torch.device("cpu"), torch.bfloat16, "int4_g128", 2, 256, 512, True, 32, 16, None, False
    )
    assert plan.constants.get("maxnreg", 0) == registers


def test_words_of_four_bit_numbers_begin_at_words(seed):
    n = case([2, 3], 48, 160, "int4_g32", "cpu", seed)
    w, *others = n.narrow
    moved = torch.cat((w.new_zeros(1), w.flatten()))[1:].view(w.shape)
    with pytest.raises(ValueError, match="multiple of 4"):
        narrow_grouped_gemm(n.a, moved, *others, None, *n.rows, "int4_g32")

"""Grouped GEMM on eight bits: the twin against float64 one row at a time, kernels against float64 of the same quantized
numbers, row by row, under every configuration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops import _scaled_configs, _triton
from epmoe.ops._scaled_configs import ScaledConfig
from epmoe.ops.quantize import quantize_reference
from epmoe.ops.scaled_gemm import SCALED_SCHEMES, scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.ops.scaled_gemm_reference import scaled_grouped_gemm_reference
from epmoe.testing import poisoned_empty
from tests import naive
from tests.ops.scaled_cases import (
    BLOCKS,
    LAYOUTS,
    UNQUANTIZED,
    act_twin,
    case,
    check_act,
    check_gemm,
    row_error,
)

scaled_config = _scaled_configs.scaled_config


@pytest.fixture
def configure(monkeypatch):
    """Replaces the choice of configurations; the plans made from them last as long."""

    def replace(choose):
        _scaled_configs.scaled_plan.cache_clear()
        monkeypatch.setattr(_scaled_configs, "scaled_config", choose)

    yield replace
    _scaled_configs.scaled_plan.cache_clear()


@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_inputs_for_a_gpu_are_made_without_a_kernel_on_cpu(scheme, seed, monkeypatch):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")  # as the fixture does
    monkeypatch.setattr(_triton, "INTERPRET", False)
    case([2, 3], 12, 20, scheme, "cpu", seed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_twin_is_a_dot_product_of_scaled_numbers_per_row_and_column(scheme, layout, seed):
    c = case([2, 0, 3], 150, 140, scheme, "cpu", seed, layout)
    double = torch.float64
    with poisoned_empty():
        got = scaled_grouped_gemm_reference(*c.operands, c.bias, *c.sources, scheme, double, precise=double)
    block = scheme == "fp8_block"
    for n, source, e in zip(c.owned.tolist(), c.source.tolist(), c.expert.tolist(), strict=True):
        for column in (0, 127, 128, 149):
            total = c.bias[e, column].item()
            for i in range(140):
                scale = c.a_scale[source, i // 128 if block else 0].item()
                scale *= (c.w_scale[e, column // 128, i // 128] if block else c.w_scale[e, column]).item()
                total += c.a[source, i].item() * c.w[e, column, i].item() * scale
            assert got[n, column].item() == pytest.approx(total, rel=1e-9)
    assert got[c.padding].isnan().all()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_twin_finds_the_scale_of_each_number_in_blocks_of_any_size(block, seed):
    c = case([2, 0, 3], 300, 420, "fp8_block", "cpu", seed, block=block)
    double, (rows, columns) = torch.float64, block
    got = scaled_grouped_gemm_reference(*c.operands, c.bias, *c.sources, c.scheme, double, double, block)
    column, i = torch.arange(300)[:, None], torch.arange(420)[None, :]
    for n, source, e in zip(c.owned.tolist(), c.source.tolist(), c.expert.tolist(), strict=True):
        w = c.w[e].double() * c.w_scale[e].double()[column // rows, i // columns]
        want = w @ (c.a[source].double() * c.a_scale[source].double()[i[0] // 128]) + c.bias[e].double()
        torch.testing.assert_close(got[n], want, rtol=1e-9, atol=1e-9 * want.abs().max().item())


@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_twin_is_near_the_product_before_rounding_to_fp8(scheme, seed):
    c = case([5, 0, 9], 192, 320, scheme, "cpu", seed)
    got = scaled_grouped_gemm_reference(*c.operands, None, *c.sources, scheme, torch.float64, precise=torch.float64)
    want = torch.stack([c.raw_w[e].double() @ c.x[s].double() for s, e in zip(c.source, c.expert, strict=True)])
    assert row_error(got[c.owned], want) < UNQUANTIZED


@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_twin_scales_before_the_bias_and_the_activation_and_quantizes_after(scheme, seed):
    c = case([2, 3], 12, 20, scheme, "cpu", seed)
    double = torch.float64
    act, _ = act_twin(c, Activation("swiglu"), c.bias, c.row_scale, double, False)
    plain = scaled_grouped_gemm_reference(*c.operands, None, *c.sources, scheme, double, precise=double)
    for n, e in zip(c.owned.tolist(), c.expert.tolist(), strict=True):
        z = plain[n] * c.row_scale[int(c.index[n])].double() + c.bias[e].double()
        torch.testing.assert_close(act[n], naive.activation(z, "swiglu", 1.0, math.inf))
    if scheme == "fp8_block":
        values, scales = act_twin(c, Activation("swiglu"), c.bias, c.row_scale, torch.bfloat16, True)
        want, want_scales = quantize_reference(act[c.owned], scheme)
        assert torch.equal(values.view(torch.uint8)[c.owned], want.view(torch.uint8))
        assert torch.equal(scales[c.owned], want_scales)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
@pytest.mark.parametrize("counts", [[5, 0, 34, 1], [0, 0], [0, 1, 0]], ids=str)
def test_kernel_agrees_with_float64_for_any_split_of_rows(counts, scheme, layout, device, seed):
    n, d = 144, 160
    if device == "cuda":
        counts, n, d = [37 * count for count in counts], 1408, 1472
    check_gemm(case(counts, n, d, scheme, device, seed, layout), bias=layout == "gathered")


@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
@pytest.mark.parametrize("n, d", [(24, 40), (192, 80), (80, 192), (1, 1), (320, 300)])
def test_no_size_has_to_be_a_multiple_of_a_block(n, d, scheme, device, seed):
    counts = [5, 0, 34, 1] if device == "cpu" else [5, 0, 340, 1, 64, 129]
    c = case(counts, n, d, scheme, device, seed)
    check_gemm(c, bias=True)


@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_fp16_comes_out_with_its_own_precision(scheme, device, seed):
    c = case([3, 6], 48, 64, scheme, device, seed)
    c.a_scale[c.source] = torch.rand_like(c.a_scale[c.source]) + 0.5  # else past fp16's range
    c.w_scale.copy_((torch.rand_like(c.w_scale) + 0.5) / 2048)
    check_gemm(c, out=torch.float16)


@pytest.mark.parametrize("width", [128, 192, 80, 40])
@pytest.mark.parametrize("name", ["swiglu", "relu2"])
@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_fused_activation_and_its_quantization_at_any_width(scheme, name, width, device, seed):
    """Where I is no multiple of 128, a block of weight scales holds the last gates and the first up projections."""
    act = Activation(name)
    counts = [3, 0, 17] if device == "cpu" else [5, 0, 340, 1, 64, 129]
    if device == "cuda":
        width *= 8
    c = case(counts, width * (2 if act.gated else 1), 144, scheme, device, seed)
    check_act(c, act, requantize=scheme == "fp8_block")
    if scheme == "fp8_block":
        check_act(c, act, requantize=False)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_the_epilogue(name, device, seed):
    act = Activation.named(name, limit=0.75 if name in ("swiglu_oai", "swiglu_clamped") else None)
    c = case([4, 2], 64 if act.gated else 32, 32, "fp8_block", device, seed)
    check_act(c, act, requantize=True)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("scale", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias_router_weight_and_layout_are_independent(layout, scale, bias, device, seed):
    c = case([4, 0, 7], 48, 32, "fp8_block", device, seed, layout)
    check_act(c, Activation("swiglu"), True, bias=bias, scale=scale)


@pytest.mark.parametrize("gathered", [False, True], ids=["in-place", "gathered"])
@pytest.mark.parametrize("rows", [4, 20, 60, 100, 400])
@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_what_a_gpu_would_choose_is_right_for_few_rows_and_for_many(scheme, rows, gathered, device, seed, configure):
    def choose(device, per_block, _, *args):
        return scaled_config(device, per_block, rows, *args[:4], interpret=False)

    configure(choose)
    c = case([2, 0, 5], 272, 160, scheme, device, seed, "gathered" if gathered else "in-place")
    check_gemm(c, bias=True)
    check_act(c, Activation("swiglu"), requantize=scheme == "fp8_block")


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_pointers_and_descriptors_read_and_write_the_same(scheme, tma, device, seed, configure, monkeypatch):
    config = ScaledConfig(16 if device == "cpu" else 128, 128, 2, 4, 2, tma_out=tma)
    configure(lambda *args: config)
    monkeypatch.setattr(_scaled_configs, "_has_tma", lambda device: tma)
    check_gemm(case([5, 0, 34], 144, 160, scheme, device, seed, "in-place"), bias=True)


@pytest.mark.parametrize("d", [128, 300, 512])
@pytest.mark.parametrize("scheme", SCALED_SCHEMES)
def test_steps_of_several_blocks_need_no_multiple_of_them(scheme, d, device, seed, configure):
    configure(lambda *args: ScaledConfig(16, 128, 2, 4, 2, swap_ab=True, unroll=2))
    check_gemm(case([5, 0, 20], 144, d, scheme, device, seed))


@pytest.mark.parametrize("swap", [False, True], ids=["plain", "swapped"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_any_size_at_widths_that_nothing_divides(block, swap, device, seed, configure):
    """What is gated has an I that no block divides but that of one row; both have a last block cut in either way."""

    def choose(device, per_block, rows, n, d, gated, *args):
        split = gated or not swap  # of what is not gated: one dot of 128 weight rows, or two
        unroll = 2 if swap else 1
        return ScaledConfig(32, 256 if split else 128, 2, 4, 2, split=split, swap_ab=swap, unroll=unroll)

    configure(choose)
    counts = [5, 0, 17] if device == "cpu" else [5, 0, 340, 1, 64, 129]
    check_gemm(case(counts, 300, 420, "fp8_block", device, seed, "in-place", block=block), bias=True)
    check_act(case(counts, 2 * 203, 420, "fp8_block", device, seed, block=block), Activation("swiglu"), True)
    check_act(case(counts, 203, 420, "fp8_block", device, seed, block=block), Activation("relu2"), False)


@pytest.mark.parametrize("width", [128, 384])
@pytest.mark.parametrize("block", [(128, 64), (256, 256), (384, 128)], ids=str)
def test_up_projections_may_begin_inside_a_block_or_where_one_does(block, width, device, seed):
    c = case([3, 0, 17], 2 * width, 272, "fp8_block", device, seed, block=block)
    check_act(c, Activation("swiglu"), requantize=True)


@pytest.mark.parametrize("rows", [4, 20, 400])
@pytest.mark.parametrize("block", [(64, 64), (1, 128), (256, 256)], ids=str)
def test_what_a_gpu_would_choose_for_a_block_is_right_and_not_its_gluon_kernel(block, rows, device, seed, configure):
    chosen = []

    def choose(device, per_block, _, *args):
        chosen.append(scaled_config(device, per_block, rows, *args[:5], interpret=False))
        return chosen[-1]

    configure(choose)
    c = case([2, 0, 5], 144, 272, "fp8_block", device, seed, block=block)
    check_gemm(c, bias=True)
    check_act(c, Activation("swiglu"), requantize=True)
    assert len(chosen) == 2 and not any(config.gluon for config in chosen)


def test_the_gluon_kernel_takes_blocks_of_128_by_128_and_no_others(monkeypatch):
    gluon = pytest.importorskip("epmoe.ops._scaled_gluon")
    a, w, out = (torch.empty(*shape, dtype=torch.uint8) for shape in ((8, 256), (2, 256, 256), (8, 256)))
    config = ScaledConfig(64, 256, 8, 4, 4, gluon=True)
    assert gluon.can_take(a, w, out, False, False, config)
    assert not any(gluon.can_take(a, w, out, False, False, config, block) for block in BLOCKS)


def test_the_gluon_kernel_starts_early_for_few_rows_alone():
    gluon = pytest.importorskip("epmoe.ops._scaled_gluon")
    few, many = ScaledConfig(64, 256, 8, 4, 4, gluon=True), ScaledConfig(128, 256, 8, 8, 4, gluon=True)
    assert [rows for rows in (1, 64, 65, 129) if gluon.starts_early(few, rows)] == [1, 64]
    assert not any(gluon.starts_early(many, rows) for rows in (1, 64, 65, 129))


def test_entries_that_were_tuned_for_128_by_128_are_not_those_of_other_blocks(monkeypatch):
    tuned = ScaledConfig(64, 256, 8, 4, 4, split=True, gluon=True)
    monkeypatch.setattr(_scaled_configs, "tuned", lambda *args: tuned)
    operands = (
        torch.device("cpu"),
        "fp8_block",
        (2, 256, 256),
        (65536, 256, 1),
        True,
        True,
        8,
        False,
        1,
        "none",
        False,
    )
    plan = _scaled_configs.scaled_plan.__wrapped__
    assert plan(*operands, torch.bfloat16).config == tuned
    assert plan(*operands, torch.bfloat16, (64, 64)).config != tuned


def test_expected_rows_choose_a_configuration_and_never_a_result(device, seed, configure):
    configure(lambda *args: scaled_config(*args[:7], interpret=False))
    c = case([3, 0, 90], 128, 128, "fp8_block", device, seed, "batched")
    chosen = set()
    for expected_m in (1, 40, 10**6):
        check_gemm(c, expected_m=expected_m)
        share = min(-(-c.max_rows // 3), expected_m)
        chosen.add(scaled_config(c.a.device, True, share, 128, 128, False, False, interpret=False))
    assert len(chosen) > 1, "the hint changed nothing"


def test_integers_are_summed_exactly(device, seed):
    """Sums past 2**24, which fp32 does not count one by one."""
    g = torch.Generator().manual_seed(seed)
    d = 2048
    a, w = torch.full((1, d), 127, dtype=torch.int8), torch.full((1, 16, d), 127, dtype=torch.int8)
    w[0, :, ::2] = -127
    a[0, 5], w[0, :, 5] = 1, torch.randint(-127, 128, (16,), generator=g).to(torch.int8)
    ones = (torch.ones(1, 1, device=device), torch.ones(1, 16, device=device))
    ends = (torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device))
    a, w = a.to(device), w.to(device)
    y = scaled_grouped_gemm(a, ones[0], w, ones[1], None, *ends, None, 1, 1, "int8_row", torch.float16)
    want = (a.long().cpu() @ w[0].long().cpu().T).half()
    assert want.isfinite().all() and torch.equal(y.cpu(), want)


def test_one_scale_for_all_is_a_stride_of_nothing(device, seed):
    """Per tensor: rows whose scale was known before, and weights with one scale for each expert."""
    c = case([2, 3], 48, 160, "int8_row", device, seed)
    one = torch.full((), 0.01, device=device)
    c.a_scale = one.expand(c.a.shape[0], 1)
    c.w_scale = c.w_scale[:, :1].repeat(1, 48)
    c.operands = (c.a, c.a_scale, c.w, c.w_scale)
    c.bias = c.bias * 0
    check_gemm(c)


def test_shapes_are_known_without_running(seed):
    c = case([2, 3], 48, 160, "fp8_block", "cpu", seed)
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in (*c.operands, c.bias, *c.rows)]
    out = torch.ops.epmoe.scaled_grouped_gemm(*meta, "fp8_block", torch.float16)
    assert out.shape == (c.max_rows, 48) and out.dtype == torch.float16
    act, scale = torch.ops.epmoe.scaled_grouped_gemm_act(
        *meta, None, "swiglu", 1.0, math.inf, "fp8_block", torch.float16, True
    )
    assert act.shape == (c.max_rows, 24) and act.dtype == torch.float8_e4m3fn and scale.shape == (c.max_rows, 1)


def test_what_does_not_fit_is_named(seed):
    c = case([2, 3], 48, 160, "fp8_block", "cpu", seed)
    good = {
        "a": c.a, "a_scale": c.a_scale, "w": c.w, "w_scale": c.w_scale, "bias": c.bias, "row_start": c.segments[0],
        "row_end": c.segments[1], "row_index": c.index, "index_divisor": 3, "max_rows": c.max_rows,
        "scheme": "fp8_block", "out_dtype": torch.bfloat16,
    }  # fmt: skip
    for change, message in [
        ({"scheme": "int4_g128"}, "scheme='int4_g128'"),
        ({"a": c.a.float()}, "a is torch.float32"),
        ({"w": c.w[:, :, :80]}, "w has shape"),
        ({"a_scale": c.a_scale[:, :1]}, "a_scale is torch.float32"),
        ({"a_scale": c.a_scale.double()}, "a_scale is torch.float64"),
        ({"w_scale": c.w_scale[:, :, :1]}, "w_scale is torch.float32"),
        ({"w_scale": c.w_scale.transpose(0, 2).contiguous().transpose(0, 2)}, "w_scale is .* with strides"),
        ({"bias": c.bias[:, :3]}, "bias is"),
        ({"row_end": c.segments[1][:1]}, "row_start has 2 entries"),
        ({"row_index": c.index.long()}, "row_index is torch.int64"),
        ({"index_divisor": 0}, "index_divisor=0"),
        ({"out_dtype": torch.float32}, "out_dtype=torch.float32"),
        (
            {"block_rows": 96},
            r"block_rows, block_columns=\(96, 128\) with scheme='fp8_block': must be \(rows, columns\)",
        ),
        ({"block_columns": 16}, r"block_columns=\(128, 16\)"),
        ({"block_columns": 64}, r"w_scale is torch.float32 \(2, 1, 2\).*must be contiguous float32 \(2, 1, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            scaled_grouped_gemm(**(good | change))
    rows = case([2, 3], 48, 160, "fp8_row", "cpu", seed)
    tail = (None, "swiglu", 1.0, math.inf, "fp8_row", torch.bfloat16, True)
    with pytest.raises(ValueError, match="requantize=True with scheme='fp8_row'"):
        scaled_grouped_gemm_act(*rows.operands, None, *rows.rows, *tail)
    with pytest.raises(ValueError, match=r"\(64, 128\) with scheme='fp8_row': must be \(128, 128\)"):
        scaled_grouped_gemm_act(*rows.operands, None, *rows.rows, *tail, block_rows=64)

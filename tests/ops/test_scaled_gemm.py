"""Grouped GEMM on eight bits: the twin against float64 one row at a time, kernels against float64 of the same quantized
numbers, row by row, under every configuration."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops import _scaled_configs, _triton
from epmoe.ops._scaled_configs import ScaledConfig
from epmoe.ops._segments import RowMap, batched_segments, standard_segments
from epmoe.ops.activation import Epilogue, apply_activation
from epmoe.ops.quantize import quantize_reference
from epmoe.ops.quantize_blocks import BLOCK, quantize_blocks_reference
from epmoe.ops.scaled_gemm import SCALED_SCHEMES, scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.ops.scaled_gemm_reference import scaled_grouped_gemm_act_reference, scaled_grouped_gemm_reference
from epmoe.quant import QuantizedWeights
from epmoe.testing import poisoned_empty
from tests import naive

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
scaled_config = _scaled_configs.scaled_config


@pytest.fixture
def configure(monkeypatch):
    """Replaces the choice of configurations; the plans made from them last as long."""

    def replace(choose):
        _scaled_configs.scaled_plan.cache_clear()
        monkeypatch.setattr(_scaled_configs, "scaled_config", choose)

    yield replace
    _scaled_configs.scaled_plan.cache_clear()


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

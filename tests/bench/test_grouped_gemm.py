"""Bench `grouped_gemm`: what its cases are, that figures count what they say, and that nothing wrong is timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench import grouped_gemm as bench
from epmoe.bench.cli import bench_app
from epmoe.bench.grouped_gemm import GroupedGemmCase, make_operands, measure_grouped_gemm, standard_cases
from epmoe.bench.records import load
from epmoe.bench.session import Session, Settings
from epmoe.testing import RankFailed, run_ranks

CPU = torch.device("cpu")


def run(tmp_path, *arguments, device="cpu"):
    options = ["--quick", "--device", device, "--out", str(tmp_path), "--timeout", "100"]
    result = CliRunner().invoke(bench_app, ["grouped_gemm", *arguments, *options])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return [record for path in tmp_path.iterdir() for record in load(path)]


def test_every_layout_and_scheme_is_measured_beside_torch_where_torch_has_it(tmp_path):
    schemes = ",".join(bench.SCHEMES)
    records = run(tmp_path, "--shape", "4x8x64x160", "--layout", ",".join(bench.LAYOUTS), "--scheme", schemes)
    assert len(records) == len(bench.LAYOUTS) * len(bench.SCHEMES)
    for record in records:
        case, bf16 = record["case"], record["case"]["scheme"] == "bf16"
        assert set(case) == {"layout", "scheme", "experts", "rows", "n", "k"}
        assert record["peers"].keys() == ({"torch_grouped_mm"} if bf16 else set())  # fp8 in torch needs CUDA
        assert record["tflops"] == pytest.approx(2 * 32 * 64 * 160 / record["median_us"] * 1e-6, abs=0.06)
        if case["layout"] != "uneven":
            weights = 4 * 64 * 160 * (2 if bf16 else 1)
            assert record["gb_s"] == pytest.approx(weights / record["median_us"] * 1e-3, abs=0.06)
        assert 0 < record["floor_us"] and "sustained_us" not in record


def measured(rank, world_size, settings, wrong=None):
    shape = (4, 8, 64, 32)
    bench.SHAPES = {"A": shape, "D": (2, 8, 64, 32)}
    if wrong == "ours":
        right = bench.grouped_gemm
        bench.grouped_gemm = lambda *a: right(*a) * 1.02
    if wrong == "theirs":
        bench.F.grouped_mm = lambda a, b, offs: torch.zeros(a.shape[0], b.shape[2], dtype=a.dtype)
    session = Session(settings)
    return [measure_grouped_gemm(GroupedGemmCase(layout, "bf16", *shape), session) for layout in ("even", "uneven")]


def test_load_is_measured_of_the_even_shapes_a_and_d_and_of_the_peer_alike():
    ((even, uneven),) = run_ranks(measured, 1, args=(Settings(1, 2, sustained=0.01),))
    assert even["sustained_us"] > 0 and even["sustained_peers"].keys() == even["peers"].keys()
    assert "sustained_us" not in uneven


@pytest.mark.parametrize(("wrong", "who"), [("ours", "epmoe"), ("theirs", "torch_grouped_mm")])
def test_a_wrong_product_stops_the_bench(wrong, who):
    with pytest.raises(RankFailed, match=f"{who} and float64 disagree, so nothing was timed"):
        run_ranks(measured, 1, args=(Settings(0, 1), wrong))


@pytest.mark.parametrize("layout", bench.LAYOUTS)
@pytest.mark.parametrize("scheme", bench.SCHEMES)
def test_the_float64_it_checks_with_is_that_of_the_plain_formula(layout, scheme):
    case = GroupedGemmCase(layout, scheme, 3, 8, 64, 160)
    operands = make_operands(case, CPU)
    plain = make_operands(dataclasses.replace(case, scheme="bf16"), CPU)  # the same numbers before they are quantized
    rows = bench._sample(operands)
    got = bench._reference(case, operands, rows)
    limit = 1e-12 if scheme == "bf16" else 0.1
    for row, y in zip(rows.tolist(), got, strict=True):
        e = int((plain.offsets[1:] <= row).sum())
        source = row if plain.row_index is None else int(plain.row_index[row]) // 8
        expected = plain.weights[e].double() @ plain.rows[source].double()
        if layout == "swiglu":
            expected = torch.nn.functional.silu(expected[:32]) * expected[32:]
        assert (y - expected).norm() <= limit * expected.norm()


def test_the_sample_has_the_last_row_and_rows_of_the_first_and_the_last_expert_that_have_some():
    operands = make_operands(GroupedGemmCase("even", "bf16", 3, 8, 32, 32), CPU)
    operands = dataclasses.replace(operands, offsets=torch.tensor([0, 0, 5, 5, 24, 24], dtype=torch.int32))
    assert bench._sample(operands).tolist() == [0, 2, 4, 5, 14, 23]


def test_uneven_counts_differ_and_add_up():
    counts = make_operands(GroupedGemmCase("uneven", "bf16", 8, 64, 32, 32), CPU).offsets.diff()
    assert counts.sum() == 8 * 64 and counts.unique().numel() > 1


def test_the_standard_cases_hold_every_shape_and_scheme_and_the_others_of_a_and_d():
    cases = standard_cases()
    assert len(cases) == len(set(cases)) == 18 + 18 + 12
    assert sum(bench.is_sustained(case) for case in cases) == 6
    assert GroupedGemmCase("even", "fp8_block", 32, 1, 4096, 7168) in cases


@pytest.mark.gpu
def test_it_runs_on_a_gpu_with_torchs_fp8_beside(tmp_path):
    schemes, layouts = ",".join(bench.SCHEMES), ",".join(bench.LAYOUTS)
    shapes = ["--shape", "8x256x512x1024,32x1x512x1024"]
    records = run(tmp_path, *shapes, "--layout", layouts, "--scheme", schemes, device="cuda")
    for record in records:
        peer = {"bf16": {"torch_grouped_mm"}, "fp8_row": {"torch_scaled_grouped_mm"}, "fp8_block": set()}
        assert record["peers"].keys() == peer[record["case"]["scheme"]]

"""Bench `grouped_gemm`: what its cases are, that figures count what they say, and that nothing wrong is timed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench import grouped_gemm as bench
from epmoe.bench.cli import bench_app
from epmoe.bench.grouped_gemm import GroupedGemmCase, make_operands, measure_grouped_gemm, standard_cases
from epmoe.bench.records import load
from epmoe.bench.session import Session, Settings
from epmoe.ops._segments import standard_segments
from epmoe.testing import RankFailed, poisoned_empty, run_ranks

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
        batched = case["layout"] == "batched"
        fields = {"layout", "scheme", "experts", "rows", "n", "k"}
        assert set(case) == (fields | {"capacity"} if batched else fields)
        if batched:
            assert case["capacity"] == 128 and record["peers"].keys() == {"torch_bmm" if bf16 else "torch_bmm_bf16"}
        else:
            assert record["peers"].keys() == ({"torch_grouped_mm"} if bf16 else set())  # fp8 in torch needs CUDA
        assert record["tflops"] == pytest.approx(2 * 32 * 64 * 160 / record["median_us"] * 1e-6, abs=0.06)
        if case["layout"] not in ("uneven", "batched"):
            weights = 4 * 64 * 160 * (2 if bf16 else 1)
            assert record["gb_s"] == pytest.approx(weights / record["median_us"] * 1e-3, abs=0.06)
        assert 0 < record["floor_us"] and "sustained_us" not in record


def measured(rank, world_size, settings, wrong=None, layouts=("even", "uneven")):
    shape = (4, 8, 64, 32)
    bench.SHAPES = {"A": shape, "D": (2, 8, 64, 32)}
    if wrong == "ours":
        right = bench.grouped_gemm
        bench.grouped_gemm = lambda *a: right(*a) * 1.02
    if wrong == "theirs":
        bench.F.grouped_mm = lambda a, b, offs: torch.zeros(a.shape[0], b.shape[2], dtype=a.dtype)
        bench.torch.bmm = lambda a, b: torch.zeros(*a.shape[:2], b.shape[2], dtype=a.dtype)
    session = Session(settings)
    return [measure_grouped_gemm(GroupedGemmCase(layout, "bf16", *shape), session) for layout in layouts]


def test_load_is_measured_of_the_even_shapes_a_and_d_and_of_the_peer_alike():
    ((even, uneven),) = run_ranks(measured, 1, args=(Settings(1, 2, sustained=0.01),))
    assert even["sustained_us"] > 0 and even["sustained_peers"].keys() == even["peers"].keys()
    assert "sustained_us" not in uneven


@pytest.mark.parametrize(
    ("layout", "wrong", "who"),
    [
        ("even", "ours", "epmoe"),
        ("even", "theirs", "torch_grouped_mm"),
        ("batched", "ours", "epmoe"),
        ("batched", "theirs", "torch_bmm"),
    ],
)
def test_a_wrong_product_stops_the_bench(layout, wrong, who):
    with pytest.raises(RankFailed, match=f"{who} and float64 disagree, so nothing was timed"):
        run_ranks(measured, 1, args=(Settings(0, 1), wrong, (layout,)))


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
        e = int((plain.segments.row_end <= row).sum())
        source = row if plain.row_index is None else int(plain.row_index[row]) // 8
        expected = plain.weights[e].double() @ plain.rows[source].double()
        if layout == "swiglu":
            expected = torch.nn.functional.silu(expected[:32]) * expected[32:]
        assert (y - expected).norm() <= limit * expected.norm()


def test_the_sample_has_the_last_row_and_rows_of_the_first_and_the_last_expert_that_have_some():
    operands = make_operands(GroupedGemmCase("even", "bf16", 3, 8, 32, 32), CPU)
    case = GroupedGemmCase("even", "bf16", 5, 8, 32, 32)
    offsets = torch.tensor([0, 0, 5, 5, 24, 24], dtype=torch.int32)
    operands = dataclasses.replace(operands, weights=torch.ones(5, 32, 32), segments=standard_segments(offsets))
    rows = bench._sample(operands)
    assert rows.tolist() == [0, 2, 4, 5, 14, 23]
    # and each is multiplied by the weights of the expert that has it, whoever beside it has none
    operands.weights[:] = torch.arange(5.0)[:, None, None]
    expected = bench._reference(case, operands, rows)[:, 0]
    assert torch.allclose(expected, operands.rows[rows].double().sum(1) * torch.tensor([1, 1, 1, 3, 3, 3]))


def test_uneven_counts_differ_and_add_up():
    counts = make_operands(GroupedGemmCase("uneven", "bf16", 8, 64, 32, 32), CPU).counts
    assert counts.sum() == 8 * 64 and counts.unique().numel() > 1


def test_batched_experts_have_as_many_rows_in_places_of_their_own_and_only_those_are_computed():
    case = GroupedGemmCase("batched", "bf16", 8, 64, 32, 32, capacity=100)
    operands = make_operands(case, CPU)
    counts = operands.counts
    assert counts.sum() == 8 * 64 and counts.unique().numel() > 1
    assert operands.segments.row_start.tolist() == list(range(0, 800, 100)) and operands.rows.shape == (800, 32)
    with poisoned_empty():
        out, _ = bench.our_call(case, operands)()
    used = (torch.arange(100) < counts[:, None]).flatten()
    assert out[used].isfinite().all() and out[~used].isnan().all()


def test_what_floors_and_rates_of_the_batched_layout_count_is_rows_and_not_places(monkeypatch):
    case, seen = GroupedGemmCase("batched", "fp8_block", 4, 8, 64, 160, capacity=1000), {}
    ceilings = SimpleNamespace(
        compute_us=lambda flops, scheme: seen.update(flops=flops, scheme=scheme) or 1.0,
        memory_us=lambda moved: seen.update(moved=moved) or 2.0,
    )
    session = SimpleNamespace(
        device=CPU, ceilings=ceilings, settings=Settings(), burst=lambda calls: dict.fromkeys(calls, 10.0)
    )
    record = measure_grouped_gemm(case, session)
    active = int((make_operands(case, CPU).counts > 0).sum())
    assert seen["flops"] == 2 * 32 * 64 * 160 and seen["scheme"] == "fp8_block" and record["floor_us"] == 2.0
    assert seen["moved"] == active * 64 * 160 + 32 * 160 + 32 * 64 * 2
    assert record["case"]["capacity"] == 1000 and "sustained_us" not in record


@pytest.mark.parametrize(
    ("layout", "capacity", "message"),
    [("even", 64, "only batched has one"), ("batched", 7, "at least 8, the rows")],
)
def test_a_capacity_that_cannot_be_is_refused(layout, capacity, message):
    with pytest.raises(ValueError, match=rf"capacity={capacity}.*{message}"):
        GroupedGemmCase(layout, "bf16", 4, 8, 64, 32, capacity)


def test_a_capacity_that_the_draw_overflows_names_how_much_it_must_be():
    with pytest.raises(ValueError, match=r"capacity=64: must be at least \d+"):
        make_operands(GroupedGemmCase("batched", "bf16", 8, 64, 32, 32, capacity=64), CPU)


def test_the_standard_cases_hold_every_shape_and_scheme_and_the_others_of_a_and_d():
    cases = standard_cases()
    assert len(cases) == len(set(cases)) == 18 + 18 + 12 + 12
    assert sum(bench.is_sustained(case) for case in cases) == 6
    assert GroupedGemmCase("even", "fp8_block", 32, 1, 4096, 7168) in cases


@pytest.mark.gpu
def test_it_runs_on_a_gpu_with_torchs_fp8_beside(tmp_path):
    schemes, layouts = ",".join(bench.SCHEMES), ",".join(bench.LAYOUTS)
    shapes = ["--shape", "8x256x512x1024,32x1x512x1024"]
    records = run(tmp_path, *shapes, "--layout", layouts, "--scheme", schemes, device="cuda")
    for record in records:
        peer = {"bf16": {"torch_grouped_mm"}, "fp8_row": {"torch_scaled_grouped_mm"}, "fp8_block": set()}
        if record["case"]["layout"] == "batched":
            peer = {"bf16": {"torch_bmm"}, "fp8_row": {"torch_bmm_bf16"}, "fp8_block": {"torch_bmm_bf16"}}
        assert record["peers"].keys() == peer[record["case"]["scheme"]]

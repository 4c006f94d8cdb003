"""Bench `quantized` on CPU: every scheme is checked against float64 and its peers, and its bytes are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from epmoe.bench import quantized
from epmoe.bench.cli import bench_app
from epmoe.bench.quantized import SCHEMES, SHAPES, TOKENS, QuantizedCase, bytes_read, standard_cases
from epmoe.bench.shapes import SHAPES as KNOWN
from epmoe.experts import ExpertWeights
from epmoe.quant.formats import FIELDS, FORMATS


def bench(folder: Path, *arguments: str, device: str = "cpu") -> list[dict[str, Any]]:
    options = ["--device", device, "--quick", "--out", str(folder)]
    result = CliRunner().invoke(bench_app, ["quantized", *arguments, *options])
    assert result.exit_code == 0, result.output
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_every_scheme_is_measured_beside_torch(tmp_path: Path) -> None:
    records = bench(tmp_path, "--shape", "tiny", "--tokens", "128", "--scheme", ",".join(SCHEMES))
    assert sorted(r["case"]["scheme"] for r in records) == sorted(SCHEMES)
    for record in records:
        assert record["bench"] == "quantized" and record["case"]["experts"] == "reference"
        assert record["median_us"] > 0 and record["floor_us"] > 0 and {"tflops", "gb_s"} <= record.keys()
        assert quantized.GROUPED_PEER in record["peers"]
        assert (quantized.INT8_PEER in record["peers"]) == (record["case"]["scheme"] == "int8_row")


@pytest.mark.parametrize(("scheme", "bits"), [
    ("fp8_block", 8 + 32 / 128**2), ("int8_row", 8 + 32 / 256), ("int4_g128", 4 + 16 / 128), ("mxfp4", 4 + 8 / 32),
    ("mxfp6_e2m3", 6 + 8 / 32), ("nvfp4", 4 + 8 / 16 + 32 / 256),
])  # fmt: skip
def test_the_bytes_of_a_weight_are_those_of_its_number_and_its_share_of_a_scale(scheme: str, bits: float) -> None:
    fields = {}
    for name, shape in (("gate_up", (3, 512, 256)), ("down", (3, 256, 256))):
        for suffix, part in FORMATS[scheme].quantize(torch.zeros(shape), False).items():
            fields[f"{name}_{FIELDS[suffix] if suffix else 'proj'}"] = part
    assert bytes_read(ExpertWeights(**fields), 2) == 2 * 3 * 256 * 256 * bits / 8


def test_a_scheme_that_does_not_exist_is_named_before_anything_starts() -> None:
    result = CliRunner().invoke(bench_app, ["quantized", "--shape", "tiny", "--scheme", "int3", "--device", "cpu"])
    assert result.exit_code != 0 and "scheme='int3'" in result.output


def test_the_standard_cases_are_every_scheme_at_every_shape_for_decoding_and_prefill() -> None:
    cases = standard_cases()
    assert len(cases) == len(set(cases)) == len(SCHEMES) * len(SHAPES) * len(TOKENS)
    assert {case.scheme for case in cases} == set(SCHEMES) <= set(FORMATS)
    assert {case.tokens for case in cases} == {1, 4, 16, 64, 4096}
    assert set(SHAPES) <= set(KNOWN)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"scheme": "int3"}, "scheme='int3'"),
    ({"experts": "grouped"}, "experts='grouped'"),
    ({"shape": "huge"}, "shape='huge'"),
    ({"tokens": 0}, "tokens=0"),
], ids=lambda v: next(iter(v)) if isinstance(v, dict) else "")  # fmt: skip
def test_a_case_that_can_t_be_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedCase(**({"scheme": "mxfp4", "shape": "tiny", "tokens": 1} | wrong))


@pytest.mark.gpu
def test_it_runs_on_a_gpu_by_our_kernels(tmp_path: Path) -> None:
    records = bench(
        tmp_path, "--shape", "qwen3-30b", "--tokens", "4", "--scheme", "int4_g128,fp8_row,mxfp6_e2m3", device="cuda"
    )
    by_scheme = {r["case"]["scheme"]: r for r in records}
    experts = {scheme: record["case"]["experts"] for scheme, record in by_scheme.items()}
    assert experts == {"int4_g128": "weight_only", "fp8_row": "grouped_fp8", "mxfp6_e2m3": "weight_only"}
    assert quantized.FP8_PEER in by_scheme["fp8_row"]["peers"]

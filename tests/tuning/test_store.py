"""Tuning files: which entry answers, what a bad file says, and that the kernels' plans ask."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from epmoe.ops import _configs, _few_rows_configs, _gemm_gluon, _narrow_configs, _scaled_configs
from epmoe.ops._configs import GemmConfig
from epmoe.ops._few_rows_configs import FewRowsConfig
from epmoe.ops._narrow_configs import NarrowConfig
from epmoe.ops._scaled_configs import ScaledConfig
from epmoe.tuning import store
from epmoe.tuning.problems import CACHES
from epmoe.tuning.store import SHIPPED, folder_for, load, lookup, read, slug, tuned, write

GPU = torch.device("cuda", 0)
TILE = GemmConfig(128, 128, 64, 8, num_warps=8, num_stages=4)
RULED = FewRowsConfig(16, 64, 128, num_warps=4, num_stages=4)
PROBLEM = ("grouped_gemm", GPU, 8, 256, 512, torch.bfloat16, "none")


def forget():
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a GPU that is not there."""
    monkeypatch.setenv("EPMOE_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(store, "_triton_version", lambda: "3.6")
    forget()
    yield tmp_path / "nvidia-h200" / "triton-3.6"
    forget()


def entry(rows=16, config=TILE, **changed):
    key = {"L": 8, "N": 256, "K": 512, "dtype": "bfloat16", "scheme": "none", "rows": rows}
    return key | {"kind": type(config).__name__, "config": dataclasses.asdict(config), "us": 1.0} | changed


def found(rows, problem=PROBLEM):
    nearest = lookup(*problem, rows)
    return nearest and nearest.rows


def test_the_nearest_rows_answer_and_more_of_them_where_two_are_as_near(folder):
    write(folder / "grouped_gemm.json", [entry(rows) for rows in (4, 16, 64)])
    assert [found(rows) for rows in (3, 4, 7, 8, 16, 31, 32, 33, 64)] == [4, 4, 4, 16, 16, 16, 64, 64, 64]


def test_none_answers_for_more_than_twice_or_less_than_half_its_rows(folder):
    write(folder / "grouped_gemm.json", [entry(16)])
    assert [found(rows) for rows in (7, 8, 32, 33)] == [None, 16, 16, None]


@pytest.mark.parametrize(("place", "other"), [(2, 4), (3, 512), (4, 256), (5, torch.float16), (6, "fp8_row")])
def test_another_shape_dtype_or_scheme_is_another_problem(folder, place, other):
    write(folder / "grouped_gemm.json", [entry(16)])
    problem = list(PROBLEM)
    problem[place] = other
    assert found(16, problem) is None and found(16) == 16
    assert lookup("grouped_gemm_act", *PROBLEM[1:], 16) is None


def test_a_configuration_is_that_of_its_kernel_and_no_other(folder):
    write(folder / "grouped_gemm.json", [entry(16, RULED)])
    nearest = lookup(*PROBLEM, 16)
    assert nearest.of(FewRowsConfig) == RULED
    assert nearest.of(GemmConfig) is None and tuned(GemmConfig, *PROBLEM, 16) is None


def test_a_cpu_a_device_without_files_and_no_triton_have_nothing(folder, monkeypatch):
    write(folder / "grouped_gemm.json", [entry(16)])
    assert lookup(PROBLEM[0], torch.device("cpu"), *PROBLEM[2:], 16) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Other")
    lookup.cache_clear()
    assert found(16) is None
    monkeypatch.setattr(store, "_triton_version", lambda: None)
    assert folder_for(GPU) is None


def test_files_are_those_of_the_device_and_the_triton_that_is_installed(monkeypatch):
    monkeypatch.delenv("EPMOE_TUNING_DIR", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    version = store._triton_version()
    assert folder_for(GPU) == SHIPPED / "nvidia-h100-80gb-hbm3" / f"triton-{version}"
    assert version is None or version.count(".") == 1
    assert slug("(weird)  Name/9") == "weird-name-9"


def test_a_file_is_read_once_and_cannot_be_changed_through_what_was_read(folder):
    path = folder / "grouped_gemm.json"
    write(path, [entry(16)])
    first = load(path)
    write(path, [entry(32)])
    assert load(path) is first
    (kept,) = first.values()
    with pytest.raises(TypeError):
        first[next(iter(first))] = ()
    with pytest.raises(TypeError):
        kept[0].config["block_m"] = 16


@pytest.mark.parametrize(
    ("broken", "line", "message"),
    [
        ({"L": 0}, 3, "L=0: must be an int > 0"),
        ({"rows": True}, 3, "rows=True"),
        ({"N": 2.5}, 3, "N=2.5"),
        ({"dtype": None}, 3, "dtype=None: must be a string"),
        ({"config": [1]}, 3, r"config=\[1\]: must be an object"),
        ({"kind": "FastConfig"}, 3, "kind='FastConfig'"),
        ({"rows": 4}, 3, r"rows=4 stand twice, also in .*grouped_gemm.json, line 2"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named_with_its_file_and_line(folder, broken, line, message):
    folder.mkdir(parents=True)
    path = folder / "grouped_gemm.json"
    path.write_text("[\n" + json.dumps(entry(4)) + ",\n" + json.dumps(entry(16) | broken) + "\n]\n")
    with pytest.raises(ValueError, match=rf"{path}, line {line}: .*{message}"):
        lookup(*PROBLEM, 16)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{}", 1),
        ("", 1),
        ("[\n{},\n7\n]", 3),
        ("[\n{}\n{}\n]", 2),
        ('[\n{"L": 1,\n "N": }\n]', 3),
        ("[{}]\n\nmore", 3),
        ("[{}", 1),
    ],
)
def test_a_file_that_is_no_list_of_entries_is_named_with_its_line(tmp_path, text, line):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}, line {line}: "):
        read(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_q": 1}, "config.block_q=1: is no field of GemmConfig"),
        ({"block_m": True}, "config.block_m=True: must be int"),
        ({"tma": 1}, "config.tma=1: must be bool"),
        ({}, "config does not make a GemmConfig"),
    ],
)
def test_a_configuration_that_its_kernel_does_not_know_is_named_with_its_line(folder, config, message):
    fields = dataclasses.asdict(TILE) | config if config else {"block_m": 128}
    write(folder / "grouped_gemm.json", [entry(16, config=TILE) | {"config": fields}])
    with pytest.raises(ValueError, match=rf"grouped_gemm.json, line 2: {message}"):
        tuned(GemmConfig, *PROBLEM, 16)


def test_a_newer_entry_takes_the_place_of_the_older_and_of_no_other(tmp_path):
    path = tmp_path / "deep" / "grouped_gemm.json"
    write(path, [entry(64, us=1.0), entry(16, us=2.0)])
    write(path, [entry(16, us=3.0), entry(16, L=4, us=4.0)])
    assert [(line, raw["L"], raw["rows"], raw["us"]) for line, raw in read(path)] == [
        *((2, 4, 16, 4.0), (3, 8, 16, 3.0), (4, 8, 64, 1.0))
    ]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def plan_few(rows, gated=False, max_rows=None):
    shape, strides = (8, 256, 512), (256 * 512, 512, 1)
    most = 8 * rows if max_rows is None else max_rows
    return _few_rows_configs.few_rows_plan(GPU, torch.bfloat16, shape, strides, True, most, rows, False, gated)


def plan_many(rows, gated=False):
    shape, strides = (8, 256, 512), (256 * 512, 512, 1)
    return _configs.gemm_plan(GPU, torch.bfloat16, shape, strides, 512, True, rows, False, gated, False)


def plan_scaled(rows, gated=False, scheme="fp8_block"):
    shape, strides = (8, 256, 512), (256 * 512, 512, 1)
    operands = (GPU, scheme, shape, strides, True, True, rows, False, 1, "swiglu" if gated else "none", gated)
    return _scaled_configs.scaled_plan(*operands, torch.bfloat16)


def plan_narrow(rows, gated=False, scheme="int4_g128", dtype=torch.bfloat16):
    return _narrow_configs.narrow_plan(GPU, dtype, scheme, 8, 256, 512, True, 8 * rows, rows, rows, gated).constants


@pytest.fixture
def no_gpu_is_asked(monkeypatch):
    """What plans ask a GPU for."""
    monkeypatch.setattr("epmoe.ops._configs._num_sms", lambda device: 132)
    for module in (_configs, _few_rows_configs, _scaled_configs, _narrow_configs):
        monkeypatch.setattr(module, "_has_tma", lambda device: False)
        monkeypatch.setattr(module, "_has_roomy_sms", lambda device: True)
    for name in ("_few_rows_configs", "_scaled_configs", "_narrow_configs"):
        monkeypatch.setattr(f"epmoe.ops.{name}.dependent_launch", lambda device: {"DEPENDENT": False})


@pytest.mark.parametrize("gated", [False, True])
def test_plans_of_unquantized_products_take_the_entry_and_its_kernel(folder, no_gpu_is_asked, gated):
    name = "grouped_gemm_act.json" if gated else "grouped_gemm.json"
    odd = FewRowsConfig(32, 128, 64, num_warps=8, num_stages=2)
    tile = dataclasses.replace(TILE, group_m=3)
    write(folder / name, [entry(16, tile), entry(256, odd)])
    assert plan_few(16, gated) is None  # by the other kernel
    assert plan_many(16, gated).config == tile
    few = plan_few(256, gated).constants
    assert (few["BLOCK_T"], few["BLOCK_W"], few["num_stages"]) == (32, 128, 2)
    ruled = plan_many(2048, gated).config
    assert ruled == _configs.gemm_config(GPU, torch.bfloat16, 2048, 256, 512, gated)


@pytest.mark.parametrize("gated", [False, True])
def test_the_plan_of_the_gluon_kernel_takes_the_entry_too(folder, no_gpu_is_asked, gated):
    pytest.importorskip("triton.experimental.gluon")
    name = "grouped_gemm_act.json" if gated else "grouped_gemm.json"
    write(folder / name, [entry(16, dataclasses.replace(TILE, gluon=True, panel=3)), entry(256)])
    shape, strides = (8, 256, 512), (256 * 512, 512, 1)
    plans = [_gemm_gluon.gluon_plan(GPU, torch.bfloat16, shape, strides, m, False, gated, False) for m in (16, 256)]
    assert plans[0].panel == 3 and plans[1] is None


def test_fewer_rows_than_experts_are_left_to_the_rule(folder, no_gpu_is_asked, monkeypatch):
    write(folder / "grouped_gemm.json", [entry(1, FewRowsConfig(32, 128, 64, num_warps=8, num_stages=2))])
    monkeypatch.setattr(_few_rows_configs, "few_rows_config", lambda *args: RULED)
    assert plan_few(1, max_rows=8).constants["num_warps"] == 8
    assert plan_few(1, max_rows=7).constants["num_warps"] == RULED.num_warps


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_row", "int8_row"])
def test_plans_of_eight_bit_products_take_the_entry_of_their_scheme(folder, no_gpu_is_asked, gated, scheme):
    name = "scaled_grouped_gemm_act.json" if gated else "scaled_grouped_gemm.json"
    odd = ScaledConfig(64, 256, 3, num_warps=4, num_stages=2, split=True)
    write(folder / name, [entry(16, odd, dtype="int8" if scheme == "int8_row" else "float8_e4m3fn", scheme=scheme)])
    for other in ("fp8_block", "fp8_row", "int8_row"):
        assert (plan_scaled(16, gated, other).config == odd) == (other == scheme)


@pytest.mark.parametrize("scheme", ["fp8_row", "int8_row"])
def test_the_kernel_that_reads_scales_per_block_runs_on_no_others_whatever_an_entry_says(
    folder, no_gpu_is_asked, scheme
):
    odd = ScaledConfig(64, 256, 3, num_warps=4, num_stages=2, split=True, gluon=True)
    dtype = "int8" if scheme == "int8_row" else "float8_e4m3fn"
    write(folder / "scaled_grouped_gemm.json", [entry(16, odd, dtype=dtype, scheme=scheme)])
    assert plan_scaled(16, scheme=scheme).config == dataclasses.replace(odd, gluon=False)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scheme", ["int4_g128", "int8_channel", "mxfp4", "mxfp6_e3m2"])
def test_plans_of_narrow_products_take_the_entry_of_their_scheme_and_rows(folder, no_gpu_is_asked, gated, scheme):
    name = "narrow_grouped_gemm_act.json" if gated else "narrow_grouped_gemm.json"
    odd = NarrowConfig(32, 128, num_warps=8, num_stages=7)
    write(folder / name, [entry(16, odd, scheme=scheme)])

    def taken(**other):
        made = plan_narrow(**{"rows": 16, "gated": gated, "scheme": scheme, **other})
        return (made["BLOCK_T"], made["BLOCK_W"], made["num_warps"], made["num_stages"]) == (32, 128, 8, 7)

    assert taken() and taken(rows=31)
    others = {"rows": 33}, {"gated": not gated}, {"scheme": "nvfp4"}, {"dtype": torch.float16}
    assert not any(taken(**other) for other in others)


def test_the_shipped_files_can_be_read_and_make_configurations():
    kinds = {"GemmConfig": GemmConfig, "FewRowsConfig": FewRowsConfig, "ScaledConfig": ScaledConfig}
    kinds |= {"WgradConfig": _configs.WgradConfig, "NarrowConfig": NarrowConfig}
    for path in SHIPPED.glob("*/triton-*/*.json"):
        assert path.stem in store.OPS
        for entries in load(path).values():
            for one in entries:
                assert one.of(kinds[one.kind]) is not None
        for _, raw in read(path):
            assert {"us", "rule_us", "tried", "commit", "date", "torch", "triton"} <= raw.keys()
            assert raw["triton"].startswith(path.parent.name.removeprefix("triton-"))

"""What `epmoe tune` measures and tries: a model's products, their operands, and the candidates near a rule's choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epmoe.bench.shapes import Shape, named_shape
from epmoe.config import Activation
from epmoe.ops._configs import GemmConfig, WgradConfig
from epmoe.ops._few_rows_configs import FewRowsConfig
from epmoe.ops._narrow_configs import NarrowConfig, narrow_config
from epmoe.ops._scaled_configs import ScaledConfig
from epmoe.ops.scaled_gemm import SCALED_SCHEMES
from epmoe.quant import NARROW_SCHEMES
from epmoe.tuning import problems, store
from epmoe.tuning.candidates import near
from epmoe.tuning.problems import Problem, make_call, make_weights, problems_of, rule

CPU = torch.device("cpu")
SMALL = Problem("grouped_gemm", 4, 64, 96, "none", 8)


def test_a_models_problems_are_both_products_of_a_ranks_share_and_in_training_all_gradients():
    shape = named_shape("qwen3-30b")
    plain = problems_of(shape, 4, ["none"], [4, 256], False)
    assert [(p.op, p.L, p.N, p.K, p.rows) for p in plain] == [
        ("grouped_gemm_act", 32, 1536, 2048, 4),
        ("grouped_gemm", 32, 2048, 768, 4),
        ("grouped_gemm_act", 32, 1536, 2048, 256),
        ("grouped_gemm", 32, 2048, 768, 256),
    ]
    more = [p for p in problems_of(shape, 4, ["none"], [4, 256], True) if p not in plain]
    assert [(p.op, p.N, p.K, p.rows, p.transpose) for p in more] == [
        ("grouped_gemm", 768, 2048, 256, True),
        ("grouped_gemm", 2048, 1536, 256, True),
        ("grouped_wgrad", 1536, 2048, 256, False),
        ("grouped_wgrad", 2048, 768, 256, False),
    ]
    eight_bits = ("fp8_block", "fp8_row", "int8_row")
    scaled = problems_of(shape, 4, eight_bits, [4], True)
    assert {(p.op, p.scheme) for p in scaled} == {
        (f"scaled_grouped_gemm{end}", scheme) for end in ("", "_act") for scheme in eight_bits
    }
    narrow = problems_of(shape, 4, ["int4_g128", "mxfp4"], [4], True)
    assert [(p.op, p.N, p.K, p.scheme) for p in narrow] == [
        (f"narrow_grouped_gemm{end}", n, k, scheme)
        for scheme in ("int4_g128", "mxfp4")
        for end, n, k in (("_act", 1536, 2048), ("", 2048, 768))
    ]


@pytest.mark.parametrize(
    ("scheme", "dtype", "weight_bytes"),
    [
        ("none", torch.bfloat16, 2.0),
        ("fp8_row", torch.float8_e4m3fn, 1.0),
        ("int8_row", torch.int8, 1.0),
        ("int4_g128", torch.bfloat16, 0.5 + 2 / 128),
        ("mxfp4", torch.bfloat16, 0.5 + 1 / 32),
        ("mxfp6_e2m3", torch.bfloat16, 0.75 + 1 / 32),
    ],
)
def test_a_problem_has_the_dtype_of_its_rows_and_the_bytes_of_its_weights(scheme, dtype, weight_bytes):
    problem = Problem("grouped_gemm", 4, 256, 512, scheme, 0)
    assert problem.dtype == dtype and problem.num_bytes == 4 * 256 * 512 * weight_bytes
    assert problem.as_key()["dtype"] == str(dtype).removeprefix("torch.")


def test_no_two_problems_are_one_entry_of_a_file():
    made = problems_of(Shape("square", 256, 256, 8, 2), 1, ["none", "fp8_row"], [1, 64, 256], True)
    entries = [(p.op, p.L, p.N, p.K, p.scheme, p.rows) for p in made]
    assert len(set(entries)) == len(entries)
    assert [p.transpose for p in made if (p.op, p.rows, p.K) == ("grouped_gemm", 64, 256)] == [False]


def test_problems_stop_at_the_rows_that_a_rank_may_get():
    rows = [p.rows for p in problems_of(named_shape("deepseek-v3"), 1, ["none"], problems.ROWS, False)]
    assert (
        max(rows) == 1024
        and max(p.rows for p in problems_of(named_shape("mixtral"), 1, ["none"], problems.ROWS, False)) == 4096
    )


@pytest.mark.parametrize(("ranks", "scheme", "message"), [(3, "none", "ranks=3"), (1, "int3", "scheme='int3'")])
def test_ranks_that_do_not_divide_and_unknown_schemes_are_refused(ranks, scheme, message):
    with pytest.raises(ValueError, match=message):
        problems_of(named_shape("mixtral"), ranks, [scheme], [1], False)


CHOSEN = [
    FewRowsConfig(16, 64, 128, num_warps=4, num_stages=4),
    FewRowsConfig(64, 128, 64, num_warps=4, num_stages=4),
    GemmConfig(128, 256, 64, 8, num_warps=8, num_stages=4, flatten=True),
    ScaledConfig(16, 128, 8, num_warps=4, num_stages=5, swap_ab=True, programs_per_sm=0, gluon=True),
    ScaledConfig(128, 256, 8, num_warps=8, num_stages=4, split=True, gluon=True),
    NarrowConfig(16, 128, num_warps=4, num_stages=3, registers=128),
    NarrowConfig(32, 64, num_warps=4, num_stages=4),
    NarrowConfig(256, 128, num_warps=8, num_stages=3, on_tile=True),
    WgradConfig(128, 256, 64, 8, num_warps=8, num_stages=4),
]


@pytest.mark.parametrize(
    "chosen", CHOSEN, ids=lambda c: f"{type(c).__name__}-{c.block_m if hasattr(c, 'block_m') else c.block_t}"
)
@pytest.mark.parametrize("rows", [1, 16, 64, 1024])
def test_the_rules_own_choice_is_tried_first_and_nothing_twice(chosen, rows):
    scheme = {ScaledConfig: "fp8_block", NarrowConfig: "int4_g128"}.get(type(chosen), "none")
    tried = near(dataclasses.replace(SMALL, K=512, scheme=scheme, rows=rows), chosen, CPU)
    assert tried[0] == chosen and 2 < len(tried) == len(set(tried)) <= 9
    for config in tried:
        # blocks are powers of two, and the entry that holds the configuration gives it back
        assert all(v & (v - 1) == 0 for name, v in vars(config).items() if name.startswith("block"))
        assert store.Entry(1, type(config).__name__, dataclasses.asdict(config), "").of(type(config)) == config


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_channel", "int8_g32", "mxfp4", "nvfp4", "mxfp6_e2m3"])
@pytest.mark.parametrize("rows", problems.ROWS)
def test_candidates_of_narrow_weights_round_as_the_rule_does_and_keep_the_blocks_that_it_has_to_have(
    scheme, rows, monkeypatch
):
    monkeypatch.setattr("epmoe.ops._narrow_configs._has_roomy_sms", lambda device: True)
    for k in (512, 320):
        ruled = narrow_config(CPU, scheme, rows, 256, k, False, interpret=False)
        tried = near(dataclasses.replace(SMALL, op="narrow_grouped_gemm", scheme=scheme, rows=rows, K=k), ruled, CPU)
        assert len(tried) > 3 and {config.on_tile for config in tried} == {ruled.on_tile}
        for config in tried:
            assert (
                config.block_w >= 64 and config.block_t >= 16 and config.num_stages >= 2 and config.num_warps in (4, 8)
            )
            assert config.registers in (0, 128, 168)


def test_gluon_kernels_are_tried_where_they_run_and_nowhere_else(monkeypatch):
    many, scaled = CHOSEN[2], dataclasses.replace(CHOSEN[3], gluon=False)
    for able in (False, True):
        monkeypatch.setattr("epmoe.tuning.candidates._has_gluon", lambda device, able=able: able)
        monkeypatch.setattr("epmoe.tuning.candidates.runs_gluon", lambda device, able=able: able)
        for chosen, rows, scheme in ((many, 1024, "none"), (CHOSEN[0], 64, "none"), (scaled, 16, "fp8_block")):
            tried = near(dataclasses.replace(SMALL, scheme=scheme, rows=rows), chosen, CPU)
            assert any(getattr(config, "gluon", False) for config in tried) == able
        for scheme in ("fp8_row", "int8_row"):  # it reads scales per block
            tried = near(dataclasses.replace(SMALL, scheme=scheme, rows=16), scaled, CPU)
            assert not any(config.gluon for config in tried)


def schemes_of(op):
    if op.startswith("narrow"):
        return NARROW_SCHEMES
    return SCALED_SCHEMES if op.startswith("scaled") else ("none",)


@pytest.mark.parametrize("rows", problems.ROWS)
@pytest.mark.parametrize("op", store.OPS)
def test_there_is_a_rule_for_every_problem(op, rows):
    for scheme in schemes_of(op):
        assert type(rule(Problem(op, 4, 64, 96, scheme, rows), CPU)).__name__ in store.KINDS


@pytest.mark.parametrize("op", store.OPS)
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_every_problem_can_be_run_at_every_load_and_rows_past_nobody_are_not_counted(op, activation):
    for scheme in schemes_of(op):
        for rows in (1, 3):
            problem = Problem(op, 16, 64, 128, scheme, rows, Activation.named(activation), top_k=4)
            weights = make_weights(problem, CPU)
            assert problem.loads == ((4, 16) if rows == 1 and scheme != "none" else (16 * rows,))
            for total in problem.loads:
                result = make_call(problem, weights, total, CPU)()
                sample = problems.sampled(result)
                assert sample.dtype == torch.float64 and sample.isfinite().all() and sample.abs().sum() > 0
                if op.endswith("gemm"):  # numbers as a model's: those far from 1 draw another power
                    assert 0.2 < sample.std() < 5


def test_the_gradient_of_rows_multiplies_by_the_weights_as_they_lie():
    problem = dataclasses.replace(SMALL, transpose=True)
    weights = make_weights(problem, CPU)
    assert weights.shape == (4, 96, 64)
    assert make_call(problem, weights, 32, CPU)()[0].shape == (32, 64)

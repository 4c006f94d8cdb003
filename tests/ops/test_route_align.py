"""`route_align` against routing and sorting one after the other, to the bit; on the device under test, interpreted on
CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.config import RouterConfig
from epmoe.ops import route_align as module
from epmoe.ops.align import ALL_PAIRS_MAX, align_rows
from epmoe.ops.route import route_topk
from epmoe.ops.route_align import route_align, route_align_reference
from epmoe.testing import poisoned_empty

NAMES = ("topk_ids", "topk_weights", "row_index", "offsets", "slot")
GROUPED = {"num_groups": 4, "topk_groups": 2}
CONFIGS = [
    RouterConfig(),
    RouterConfig(scoring="topk_softmax", renormalize=False),
    RouterConfig(scoring="sigmoid", scaling_factor=2.5, group_score="top2_sum", **GROUPED),
    RouterConfig(scoring="sqrt_softplus", **GROUPED),
]


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Counts the calls that took the fused launch."""
    made: list[int] = []
    real = module._route_align_triton
    monkeypatch.setattr(module, "_route_align_triton", lambda *args: made.append(1) or real(*args))
    return made


def make(M: int, E: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits, some NaN and -inf, many equal, one row all NaN; and a selection bias."""
    g = torch.Generator().manual_seed(seed)
    z = ((torch.randn(M, E, generator=g) * 2 * 4).round() / 4).to(dtype)
    z[torch.rand(M, E, generator=g) < 0.05] = math.nan
    z[torch.rand(M, E, generator=g) < 0.05] = -math.inf
    z[M // 2] = math.nan
    return z, torch.randn(E, generator=g)


def one_after_the_other(z: Tensor, config: RouterConfig, k: int, bias: Tensor | None) -> tuple[Tensor, ...]:
    ids, weights = route_topk(z.float(), config, k, bias)
    every = torch.arange(z.shape[1], dtype=torch.int32, device=z.device)
    return ids, weights, *align_rows(ids, every, z.shape[1], ids.numel())


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w), name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.scoring)
@pytest.mark.parametrize("M", [1, 5, 37])
def test_gives_the_bits_of_routing_and_then_sorting(config, M, device, launches, seed):
    z, bias = (t.to(device) for t in make(M, 24, seed))
    for b in (None, bias):
        with poisoned_empty():
            got = route_align(z, config, 3, b)
        check(got, one_after_the_other(z, config, 3, b))
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_routed_in_float32(dtype, device, launches, seed):
    z, bias = (t.to(device) for t in make(9, 24, seed, dtype))
    with poisoned_empty():
        got = route_align(z, CONFIGS[2], 4, bias)
    assert launches and got[1].dtype == torch.float32
    check(got, one_after_the_other(z, CONFIGS[2], 4, bias))


def test_every_expert_may_be_chosen_and_none(device, seed):
    z, _ = make(6, 4, seed)
    z.nan_to_num_(0.0, neginf=0.0)
    for rows in (z, torch.full_like(z, math.nan)):
        with poisoned_empty():
            got = route_align(rows.to(device), RouterConfig(), 4)
        check(got, one_after_the_other(rows.to(device), RouterConfig(), 4, None))
    assert (got[0] == -1).all() and (got[2] == -1).all() and (got[3] == 0).all() and (got[4] == -1).all()


def test_more_pairs_than_are_compared_at_once_take_two_steps(device, launches, seed):
    M = ALL_PAIRS_MAX // 4 + 1
    z, bias = (t.to(device) for t in make(M, 8, seed))
    with poisoned_empty():
        got = route_align(z, RouterConfig(), 4, bias)
    assert not launches
    check(got, one_after_the_other(z, RouterConfig(), 4, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_twin_sorts_what_it_routes(dtype, seed):
    z, bias = make(11, 24, seed, torch.float32)
    z = z.to(dtype)
    got = route_align(z, CONFIGS[3], 3, bias)  # on CPU, without the interpreter
    ids, weights = route_topk(z, CONFIGS[3], 3, bias)
    every = torch.arange(24, dtype=torch.int32)
    check(got, (ids, weights, *align_rows(ids, every, 24, ids.numel())))
    assert got[1].dtype == dtype


def test_no_tokens(device):
    with poisoned_empty():
        ids, weights, row_index, offsets, slot = route_align(torch.empty(0, 8, device=device), RouterConfig(), 2)
    assert ids.shape == weights.shape == slot.shape == (0, 2) and row_index.shape == (0,)
    assert offsets.tolist() == [0] * 9


def test_the_fake_is_faithful(seed):
    z, bias = make(5, 8, seed)
    rules = (2, "softmax", True, 1.0, 1, 1, "max")
    torch.library.opcheck(
        torch.ops.epmoe.route_align.default, (z, bias, *rules), test_utils=("test_schema", "test_faketensor")
    )
    assert route_align_reference(z.bfloat16(), bias, *rules)[1].dtype == torch.float32


@pytest.mark.gpu
def test_replays_of_a_graph_follow_their_input(seed):
    z, bias = (t.cuda() for t in make(40, 128, seed))
    route_align(z, CONFIGS[2], 8, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = route_align(z, CONFIGS[2], 8, bias)
    for step in range(4):
        z.copy_(make(40, 128, seed + step + 1)[0])
        graph.replay()
        check(got, one_after_the_other(z, CONFIGS[2], 8, bias))


@pytest.mark.gpu
def test_launches_on_two_streams_do_not_meet_at_one_barrier(seed):
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [make(64, 128, seed + s)[0].cuda() for s in range(2)]
    want = [one_after_the_other(z, RouterConfig(), 8, None) for z in inputs]
    torch.cuda.synchronize()
    got: list[list] = [[], []]
    for _ in range(20):
        for s, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[s].append(route_align(inputs[s], RouterConfig(), 8))
    torch.cuda.synchronize()
    for s in range(2):
        for one in got[s]:
            check(one, want[s])

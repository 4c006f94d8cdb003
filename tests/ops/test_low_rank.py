"""Low-rank updates in place: against float64, kernel and twin, and rows of no segment that keep their bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from epmoe.config import ACTIVATIONS, Activation
from epmoe.ops._triton import INTERPRET
from epmoe.ops.low_rank import add_low_rank, add_low_rank_act
from tests import naive

# Relative L2: an fp32 sum, or one rounding of it (2^-11, 2^-8 at worst).
ERROR = {torch.float64: 1e-14, torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
# Segments (start, end) among 60 rows: gaps, empty ones, one longer than a tile, two that touch.
SEGMENTS = {
    "gaps": [(2, 5), (9, 9), (11, 48), (50, 51)],
    "touching": [(0, 7), (7, 60)],
    "empty": [(0, 0), (3, 3)],
}


@pytest.fixture(params=["twin", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "twin":
        return "cpu"
    if INTERPRET == (request.param == "cuda"):
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    return request.param


class Case:
    """`out [60, n]` and `u [60, r]`, rows of no segment NaN as `torch.empty` may leave them, u's in wider rows."""

    def __init__(self, segments, n: int, rank: int, dtype: torch.dtype, device: str, seed: int, transpose: bool):
        g = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.bounds = segments
        self.owned = torch.zeros(60, dtype=torch.bool)
        for start, end in segments:
            self.owned[start:end] = True
        self.out = randn(60, n).to(dtype)
        self.out[~self.owned] = math.nan
        wide = torch.full((60, rank + 3), math.nan, dtype=dtype)
        wide[self.owned, :rank] = randn(int(self.owned.sum()), rank).to(dtype)
        shape = (rank, n) if transpose else (n, rank)
        magnitude = 4.0 ** torch.arange(len(segments))[:, None, None]  # another segment's weights are far off
        self.w = (randn(len(segments), *shape) * magnitude * rank**-0.5).to(dtype)
        self.index = torch.full((60,), -1, dtype=torch.int32)
        self.index[self.owned] = torch.randperm(100, generator=g)[: int(self.owned.sum())].int()
        self.scale = torch.rand(100, generator=g) + 0.5
        self.transpose = transpose
        starts, ends = (torch.tensor(t, dtype=torch.int32, device=device) for t in zip(*segments, strict=True))
        self.segments = (starts, ends)
        for name in ("out", "w", "index", "scale"):
            setattr(self, name, getattr(self, name).to(device))
        self.u = wide.to(device)[:, :rank]

    def expected(self, indexed: bool, scaled: bool) -> Tensor:
        total = self.out.double().cpu()
        for s, (start, end) in enumerate(self.bounds):
            for n in range(start, end):
                w = self.w[s].double().cpu()
                delta = (w.T if self.transpose else w) @ self.u[n].double().cpu()
                entry = int(self.index[n]) if indexed else n
                total[n] += delta * (float(self.scale[entry]) if scaled else 1.0)
        return total


def error(got: Tensor, want: Tensor) -> float:
    """The worst relative error of a row."""
    if want.shape[0] == 0:
        return 0.0
    return float(((got.double().cpu() - want).norm(dim=1) / want.norm(dim=1)).max())


@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
def test_the_sum_matches_float64_and_other_rows_keep_their_bits(device, dtype, transpose, seed):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("float64 is the twin's")
    for number, (segments, n, rank) in enumerate(
        [
            (SEGMENTS["gaps"], 40, 5),
            (SEGMENTS["touching"], 130, 16),
            (SEGMENTS["empty"], 40, 4),
            (SEGMENTS["gaps"], 72, 70),
        ]
    ):
        indexed, scaled = number % 2 == 0, number != 1
        case = Case(segments, n, rank, dtype, device, seed, transpose)
        want, owned = case.expected(indexed, scaled), case.owned
        before = case.out.clone()
        add_low_rank(
            case.out, case.u, case.w, *case.segments, case.index if indexed else None, case.scale if scaled else None,
            transpose,
        )  # fmt: skip
        assert error(case.out[owned], want[owned]) < ERROR[dtype], (n, rank)
        assert torch.equal(case.out[~owned].nan_to_num(), before[~owned].nan_to_num())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_sees_the_sum(device, name, seed):
    activation = Activation.named(name)
    act_of = (activation.name, activation.alpha, activation.limit)
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(SEGMENTS["gaps"], 80, 6, dtype, device, seed, False)
        want, owned = case.expected(True, True), case.owned
        width = 40 if activation.gated else 80
        act = torch.full((60, width), 7.0, dtype=dtype, device=device)
        add_low_rank_act(case.out, act, case.u, case.w, *case.segments, case.index, case.scale, *act_of)
        assert error(case.out[owned], want[owned]) < ERROR[dtype]
        wanted = torch.stack([naive.activation(row, *act_of) for row in want[owned]])
        # a row's worst element may stand where the activation is steep: the whole decides
        assert (act[owned].double().cpu() - wanted).norm() / wanted.norm() < ERROR[dtype]
        assert (act[~owned] == 7.0).all()


def test_torch_sees_which_arguments_change():
    out, u, w = torch.zeros(4, 8), torch.ones(4, 2), torch.ones(1, 8, 2)
    segments = (torch.tensor([1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.epmoe.add_low_rank.default, (out, u, w, *segments, None, None, False), test_utils=utils
    )
    args = (out, torch.zeros(4, 4), u, w, *segments, None, None, "swiglu", 1.0, math.inf)
    torch.library.opcheck(torch.ops.epmoe.add_low_rank_act.default, args, test_utils=utils)


def test_mistakes_are_named():
    out, u, w = torch.zeros(4, 8), torch.ones(4, 2), torch.ones(1, 8, 2)
    segments = (torch.tensor([1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    for match, args in (
        ("all must be the same floating dtype", (out, u.half(), w)),
        ("must be 2-D and contiguous", (out.t(), u, w)),
        ("u has 3 rows: must have one per row of out, 4", (out, u[:3], w)),
        (r"w has shape \(1, 8, 3\).*must be \[S, 8, 2\]", (out, u, torch.ones(1, 8, 3))),
        ("must have one per expert, 2", (out, u, torch.ones(2, 8, 2))),
    ):
        with pytest.raises(ValueError, match=match):
            add_low_rank(*args, *segments, None, None, False)
    with pytest.raises(ValueError, match=r"act is torch.float32 \(4, 8\): must be .*\(4, 4\)"):
        add_low_rank_act(out, torch.zeros(4, 8), u, w, *segments, None, None, "swiglu", 1.0, math.inf)

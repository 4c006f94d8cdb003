"""Every kind of experts with quantized weights, every scheme, every dispatcher in either layout, on real processes:
each row against float64 of the same quantized numbers, where the arithmetic shows, and against float64 of nothing
quantized, where the scheme's own error does. Bytes that cross to each rank are counted beside."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe import (
    DISPATCHERS,
    Activation,
    EPGroup,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEKernel,
    make_dispatcher,
    select_experts,
)
from epmoe.capabilities import LAYOUTS, combinations
from epmoe.dispatch.wire import row_bytes
from epmoe.experts import QUANTIZED_EXPERTS
from epmoe.experts.base import Experts
from epmoe.quant import (
    NARROW_SCHEMES,
    NarrowWeights,
    QuantizedWeights,
    dequantize_narrow,
    dequantize_rows,
    dequantize_weights,
    quantize_rows,
)
from epmoe.quant.formats import FIELDS, FORMATS
from epmoe.testing import poisoned_empty, run_ranks

E, K, H, I, CAP = 7, 2, 192, 80, 7  # noqa: E741  (neither width is a multiple of a block of 128)
BESIDE_REFERENCE = [
    (kind.name, s) for kind in QUANTIZED_EXPERTS.values() for s in kind.schemes if kind.name != "reference"
]
SCALED = [
    (kind, scheme) for kind, scheme in BESIDE_REFERENCE if scheme is not None and FORMATS[scheme].rows is not None
]
JOINED = [
    (c.dispatcher, c.experts, c.layout) for c in combinations() if c.refusal is None and c.experts in QUANTIZED_EXPERTS
]
SITUATIONS = ("a rank without tokens", "one token each", "all to one rank")
# Relative L2. The same numbers, of any one row: bf16 between the GEMMs and on the way back, a number beside a tie that
# falls on its other side. Nothing quantized, root mean square over rows: what rounding weights, rows and activations
# costs each scheme.
SAME = 0.02
OWN = {"fp8": 0.12, "int8_row": 0.05, "int8": 0.04, "int4": 0.45, "mxfp4": 0.45, "nvfp4": 0.4, "mxfp6": 0.2}


def kinds_of(scheme: str) -> list[str]:
    """Those that compute with such weights in fewer bits or by kernels."""
    return [kind for kind, its in BESIDE_REFERENCE if its == scheme]


def own_error(scheme: str) -> float:
    return next(limit for name, limit in OWN.items() if scheme.startswith(name))


def wide_weights(seed: int) -> tuple[Tensor, Tensor]:
    """Experts whose scales differ by 1e3, one of them with a block of zeros."""
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.logspace(-2, 1, E)[:, None, None]
    w1 = torch.randn(E, 2 * I, H, generator=g) * H**-0.5 * magnitude.sqrt()
    w2 = torch.randn(E, H, I, generator=g) * I**-0.5 / magnitude
    w2[2, 128:] = 0
    return w1.bfloat16(), w2.bfloat16()


def batch_of(rank: int, seed: int, situation: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose magnitudes differ by 1e6, one of zeros, one without experts, ids of -1; or a situation, whose rows do
    not saturate gates: near their kinks gradients depend on the last bit."""
    tokens = {"a rank without tokens": [0, 6, 3], "one token each": [1, 1, 1]}.get(situation, [7, 4, 0])[rank]
    g = torch.Generator().manual_seed(seed * 4 + rank)
    x = torch.randn(tokens, H, generator=g) * 10.0 ** (torch.arange(tokens) % (4 if situation else 7) - 3)[:, None]
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].int()
    if situation == "all to one rank":
        ids = torch.tensor([[E - 1, -1]], dtype=torch.int32).expand(tokens, K).contiguous()
    elif tokens and not situation:
        x[1], ids[2], ids[3, 0] = 0, -1, -1
    return x.bfloat16(), ids, torch.rand(tokens, K, generator=g) + 0.5


def zeros_of(scheme: str) -> bool:
    return FORMATS[scheme].zeros


def quantized_weights(scheme: str, seed: int, local: list[int]) -> ExpertWeights:
    fields: dict[str, Tensor] = {}
    for name, wide in zip(("gate_up", "down"), wide_weights(seed), strict=True):
        parts = FORMATS[scheme].quantize(wide[local], zeros_of(scheme))
        fields[f"{name}_proj"] = parts.pop("")
        fields |= {f"{name}_{FIELDS[suffix]}": part for suffix, part in parts.items()}
    return ExpertWeights(**fields)


def held(scheme: str, seed: int) -> tuple[Tensor, Tensor]:
    """What all quantized experts hold, in float64."""
    w = quantized_weights(scheme, seed, list(range(E)))
    made = []
    for name, width in (("gate_up", H), ("down", I)):
        values, scale, zero, outer = (getattr(w, f"{name}_{part}") for part in ("proj", "scale", "zero", "outer"))
        if scheme in NARROW_SCHEMES:
            made.append(dequantize_narrow(NarrowWeights(values, scale, scheme, width, zero, outer), torch.float64))
        else:
            made.append(dequantize_weights(QuantizedWeights(values, scale, scheme), torch.float64))
    return made[0], made[1]


def through(x: Tensor, scheme: str | None) -> Tensor:
    return x.double() if scheme is None else dequantize_rows(quantize_rows(x, scheme), torch.float64)


def expected(
    ranks: int, seed: int, scheme: str, quantized: bool, situation: str = "", narrow: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """`[all tokens, H]` in float64, one pair after the other, and what it is a function of: rows as they arrived and
    router weights. `narrow`: activations are rounded as well as rows."""
    parts = [batch_of(rank, seed, situation) for rank in range(ranks)]
    x, ids, p = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    w1, w2 = held(scheme, seed) if quantized else (w.double() for w in wide_weights(seed))
    rows = FORMATS[scheme].rows if quantized else None
    leaves = [through(x, rows).requires_grad_(), p.double().requires_grad_()]
    out = 0 * (leaves[0] + leaves[1].sum())  # a function of both, also without a pair
    for t, k in itertools.product(range(x.shape[0]), range(K)):
        e = int(ids[t, k])
        if e < 0:
            continue
        gate, up = (w1[e] @ leaves[0][t]).chunk(2)
        h = F.silu(gate) * up
        if rows is not None and narrow:  # fp8_block is quantized by GEMM1's epilogue, others from bf16
            h = through(h.float() if scheme == "fp8_block" else h.bfloat16(), rows)
        out[t] += leaves[1][t, k] * (w2[e] @ h)
    return out, leaves


def cases_of(ranks: int, kind: str) -> list[tuple[str, str]]:
    """Dispatchers and layouts that it goes with; `local` where there is one rank, the others where there are more."""
    return [(name, layout) for name, its, layout in JOINED if its == kind and (name == "local") == (ranks == 1)]


def kernel_of(
    rank: int, ranks: int, kind: str, scheme: str, name: str, layout: str, ep: EPGroup, seed: int
) -> tuple[MoEKernel, ExpertWeights]:
    placement = ExpertPlacement.contiguous(E, ranks)
    group = None if name == "local" else ep
    moves = make_dispatcher(name, group, placement, "cpu", layer="blocks.1", max_tokens_per_rank=CAP)
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
    experts = select_experts(spec, kind, layout).experts
    kernel = MoEKernel(moves, experts, layout=layout, dispatch_scheme=FORMATS[scheme].rows)
    return kernel, quantized_weights(scheme, seed, list(placement.local_experts(rank)))


def outputs(rank: int, ranks: int, seed: int, schemes: list[str]) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """By kind, scheme, dispatcher and layout: this rank's rows, and what it says it sent."""
    ep, found = EPGroup(timeout=60), {}
    for kind, scheme in BESIDE_REFERENCE:
        for name, layout in cases_of(ranks, kind) if scheme in schemes else ():
            kernel, weights = kernel_of(rank, ranks, kind, scheme, name, layout, ep, seed)
            with torch.no_grad(), poisoned_empty():
                result = kernel(*batch_of(rank, seed), weights)
            assert result.layout is not None
            found[f"{kind} + {scheme} + {name} ({layout})"] = (result.routed, kernel.wire_bytes(result.layout, K))
    return found


def row_errors(case: str, got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 of each row that is not zeros; those that are to be zeros are."""
    nothing = (want == 0).all(1)
    assert not got[nothing].any() and got[~nothing].isfinite().all(), case
    return ((got - want).norm(dim=1) / want.norm(dim=1))[~nothing]


def compare(case: str, got: Tensor, want: Tensor) -> None:
    """Row by row with what the same numbers give."""
    errors = row_errors(case, got, want)
    assert (errors < SAME).all(), (case, errors)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("schemes", [
    ["fp8_block", "fp8_block_ue8m0", "fp8_row", "int8_row"],
    ["int4_g32", "int4_g64", "int4_g128", "int4_channel", "int8_g32", "int8_g64", "int8_g128", "int8_channel"],
    ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4"],
], ids=["scaled", "integers", "floats"])  # fmt: skip
def test_every_row_is_what_the_quantized_numbers_give_however_it_moved(
    schemes: list[str], ranks: int, seed: int
) -> None:
    by_rank = run_ranks(outputs, ranks, args=(seed, schemes), timeout=150)
    movers = [name for name in DISPATCHERS if (name == "local") == (ranks == 1)]
    assert len(by_rank[0]) == sum(len(kinds_of(scheme)) for scheme in schemes) * len(movers) * len(LAYOUTS)
    for scheme in schemes:
        same, plain = (expected(ranks, seed, scheme, quantized)[0].detach() for quantized in (True, False))
        for name, kind, layout in JOINED:
            if kind not in kinds_of(scheme) or name not in movers:
                continue
            case = f"{kind} + {scheme} + {name} ({layout})"
            got = torch.cat([found[case][0] for found in by_rank]).double()
            compare(case, got, same)
            own = row_errors(case, got, plain).square().mean().sqrt()
            assert own < own_error(scheme), (case, own)
            there, back, *_ = row_bytes(H, torch.bfloat16, K, scheme=FORMATS[scheme].rows)
            for rank, found in enumerate(by_rank):
                said, (out, came) = found[case][1], crossing(name, rank, ranks, seed)
                assert said["dispatch"] == (out * there, came * there), (case, rank)
                assert said["combine"] == (came * back, out * back), (case, rank)


def rows_to(ranks: int, seed: int) -> list[list[int]]:
    """Of rank r's tokens how many have an expert on rank d, at [r][d]: rows that cross once each."""
    placement = ExpertPlacement.contiguous(E, ranks)
    owner = [next(r for r in range(ranks) if e in placement.local_experts(r)) for e in range(E)]
    ids = [batch_of(rank, seed)[1].tolist() for rank in range(ranks)]
    return [[sum(any(e >= 0 and owner[e] == d for e in row) for row in own) for d in range(ranks)] for own in ids]


def crossing(name: str, rank: int, ranks: int, seed: int) -> tuple[int, int]:
    """Rows of messages that leave a rank for others in dispatch, and that arrive: padded where sizes are fixed."""
    if name in ("all_gather", "all_to_all_fixed"):
        most = max(len(batch_of(r, seed)[1]) for r in range(ranks)) if name == "all_gather" else CAP
        return (ranks - 1) * most, (ranks - 1) * most
    rows, others = rows_to(ranks, seed), [r for r in range(ranks) if r != rank]
    return sum(rows[rank][d] for d in others), sum(rows[r][rank] for r in others)


def in_situations(rank: int, ranks: int, seed: int, drawn: list[tuple[str, str]]) -> dict[str, list[Tensor]]:
    """By kind, scheme, dispatcher, layout and situation: this rank's rows, and the gradients of x and the router
    weights where the kind has any."""
    ep, found = EPGroup(timeout=60), {}
    for kind, scheme in drawn:
        for name, layout in cases_of(ranks, kind):
            kernel, weights = kernel_of(rank, ranks, kind, scheme, name, layout, ep, seed)
            for situation in SITUATIONS:
                x, ids, p = batch_of(rank, seed, situation)
                trains = QUANTIZED_EXPERTS[kind].autograd
                leaves = [leaf.requires_grad_(trains) for leaf in (x, p)]
                with torch.set_grad_enabled(trains), poisoned_empty():
                    out = kernel(x, ids, p, weights).routed
                    gradients = torch.autograd.grad(out, leaves, out.detach()) if trains else ()
                found[f"{kind} + {scheme} + {name} ({layout}), {situation}"] = [out.detach(), *gradients]
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_kind_is_right_in_every_situation(ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    drawn = [(kind, rng.choice([s for s in cls.schemes if s is not None])) for kind, cls in QUANTIZED_EXPERTS.items()]
    by_rank = run_ranks(in_situations, ranks, args=(seed, drawn), timeout=120)
    for (kind, scheme), situation in itertools.product(drawn, SITUATIONS):
        # the reference multiplies wide activations, by what quantized weights hold
        narrow = kind != "reference"
        same, leaves = expected(ranks, seed, scheme, True, situation, narrow)
        for name, layout in cases_of(ranks, kind):
            case = f"{kind} + {scheme} + {name} ({layout}), {situation}"
            got, *gradients = (torch.cat(parts).double() for parts in zip(*(f[case] for f in by_rank), strict=True))
            compare(case, got, same.detach())
            if gradients:
                wanted = torch.autograd.grad(same, leaves, got, retain_graph=True)
                for n, (a, b) in enumerate(zip(gradients, wanted, strict=True)):
                    compare(f"{case}, gradient {n}", a, b)


def test_all_schemes_are_walked_through() -> None:
    walked = test_every_row_is_what_the_quantized_numbers_give_however_it_moved.pytestmark  # type: ignore[attr-defined]
    (groups,) = (mark.args[1] for mark in walked if mark.args[0] == "schemes")
    assert {scheme for group in groups for scheme in group} == set(FORMATS)
    assert all(kinds_of(scheme) for scheme in FORMATS)
    assert (
        {kind for _, kind, _ in JOINED}
        == set(QUANTIZED_EXPERTS)
        == {kind for kind, _ in BESIDE_REFERENCE} | {"reference"}
    )


# ---- bytes


def sent_to_each(rank: int, ranks: int, seed: int, scheme: str) -> dict[str, list[list[int]]]:
    """By collective dispatcher: bytes handed to the network for each destination in dispatch and in combine."""
    ep, found = EPGroup(timeout=60), {}
    sent: list[list[int]] = []
    honest_exchange, honest_gather = EPGroup.all_to_all_async, EPGroup.all_gather_async

    def exchange(self: EPGroup, buffer: Tensor, to: Any = None, come: Any = None, **options: Any) -> Any:
        if buffer.dtype == torch.uint8:  # counts are int64
            share = [buffer.shape[0] // ranks] * ranks if to is None else list(to)
            sent.append([n * buffer.shape[1] for n in share])
        return honest_exchange(self, buffer, to, come, **options)

    def gather(self: EPGroup, buffer: Tensor) -> Any:
        if buffer.dtype == torch.uint8:
            sent.append([buffer.numel()] * ranks)
        return honest_gather(self, buffer)

    placement = ExpertPlacement.contiguous(E, ranks)
    EPGroup.all_to_all_async, EPGroup.all_gather_async = exchange, gather  # type: ignore[method-assign]
    try:
        for name in ("all_gather", "all_to_all", "all_to_all_fixed", "hierarchical"):
            moves = make_dispatcher(name, ep, placement, "cpu", layer="blocks.1", max_tokens_per_rank=CAP)
            spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
            experts = select_experts(spec, kinds_of(scheme)[0]).experts
            kernel = MoEKernel(moves, experts, dispatch_scheme=scheme, combine_scheme=scheme)
            sent.clear()
            with torch.no_grad():
                kernel(*batch_of(rank, seed), quantized_weights(scheme, seed, list(placement.local_experts(rank))))
            found[name] = [list(share) for share in sent]
    finally:
        EPGroup.all_to_all_async, EPGroup.all_gather_async = honest_exchange, honest_gather  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_row", "int8_row"])
def test_each_destination_gets_the_bytes_of_its_tokens_rows_once(scheme: str, seed: int) -> None:
    ranks = 3
    found = run_ranks(sent_to_each, ranks, args=(seed, scheme), timeout=120)
    scales = 4 * (-(-H // 128) if scheme == "fp8_block" else 1)
    there = H + -(-(8 * K + scales) // 16) * 16  # values, ids and weights, scales
    back = H + -(-scales // 16) * 16
    assert (there, back) == row_bytes(H, torch.bfloat16, K, scheme=scheme, combine_scheme=scheme)[:2]
    wanted = rows_to(ranks, seed)
    tokens = [len(batch_of(rank, seed)[1]) for rank in range(ranks)]
    for rank in range(ranks):
        for name in ("all_to_all", "hierarchical"):  # one node: no row is relayed
            went, came = found[rank][name]
            assert went == [n * there for n in wanted[rank]], name
            assert came == [wanted[d][rank] * back for d in range(ranks)], name
        went, came = found[rank]["all_gather"]
        assert went == [max(tokens) * there] * ranks and came == [max(tokens) * back] * ranks
        went, came = found[rank]["all_to_all_fixed"]
        assert went == [CAP * there] * ranks and came == [CAP * back] * ranks


# ---- the batched layout


@pytest.mark.parametrize(("kind", "scheme"), SCALED)
def test_batched_experts_multiply_the_bytes_that_arrived(
    kind: str, scheme: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    placement = ExpertPlacement.contiguous(E, 1)
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
    results = []
    for layout in LAYOUTS:
        experts = select_experts(spec, kind, layout).experts
        honest = type(experts).output

        def output(self: Experts, rows: Any, *args: Any, _honest: Any = honest, **options: Any) -> Any:
            seen.append(rows)
            return _honest(self, rows, *args, **options)

        monkeypatch.setattr(type(experts), "output", output)
        moves = make_dispatcher("local", None, placement, "cpu")
        kernel = MoEKernel(moves, experts, layout=layout, dispatch_scheme=scheme)
        x, ids, p = batch_of(0, seed)
        with torch.no_grad(), poisoned_empty():
            results.append(kernel(x, ids, p, quantized_weights(scheme, seed, list(range(E)))).routed)
        monkeypatch.undo()
    rows = seen[1]
    assert rows.scheme == scheme and rows.x.dtype == quantize_rows(x, scheme).values.dtype
    sent = quantize_rows(x, scheme)
    for t, k in itertools.product(range(x.shape[0]), range(K)):
        place = int(rows.slot[t, k])
        if place >= 0:
            assert torch.equal(rows.x.view(-1, H)[place].view(torch.uint8), sent.values[t].view(torch.uint8))
            assert torch.equal(rows.x_scale.view(-1, sent.scales.shape[1])[place], sent.scales[t])
    assert ((results[0] - results[1]).double().norm(dim=1) <= 4e-3 * results[0].double().norm(dim=1)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "scheme"), SCALED)
def test_no_rows_are_fine_in_either_layout(kind: str, scheme: str, layout: str, seed: int) -> None:
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme=scheme)
    experts = select_experts(spec, kind, layout).experts
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
    kernel = MoEKernel(moves, experts, layout=layout, dispatch_scheme=scheme)
    x, ids, p = (t[:0] for t in batch_of(0, seed))
    with torch.no_grad():
        assert kernel(x, ids, p, quantized_weights(scheme, seed, list(range(E)))).routed.shape == (0, H)


def test_a_gradient_through_batched_quantized_rows_is_refused_and_not_cut(seed: int) -> None:
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), scheme="fp8_block")
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(E, 1), "cpu")
    kernel = MoEKernel(
        moves, select_experts(spec, "grouped_fp8", "batched").experts, layout="batched", dispatch_scheme="fp8_block"
    )
    x, ids, p = batch_of(0, seed)
    with pytest.raises(ValueError, match="needs a gradient"):
        kernel(x.requires_grad_(), ids, p, quantized_weights("fp8_block", seed, list(range(E))))

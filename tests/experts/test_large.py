"""Expert MLPs on more than 2**31 elements: what lies past the reach of 32-bit addresses is right, there and back.

Batched experts run small on CPU as well, through the interpreter: there it says that these tests are right.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from epmoe import Activation, ExpertPlacement, ExpertsSpec, ExpertWeights, MoEKernel, make_dispatcher, select_experts
from epmoe.dispatch.inputs import BatchedInput, Layout
from epmoe.experts import QUANTIZED_EXPERTS, BatchedExperts
from epmoe.ops._triton import INTERPRET
from epmoe.ops.quantize import quantize_reference
from epmoe.ops.quantize_blocks import quantize_blocks_reference
from epmoe.quant import NARROW_SCHEMES, QuantizedWeights, dequantize_narrow, dequantize_weights, quantize_narrow
from tests import naive

SWIGLU = ("swiglu", 1.0, math.inf)
L, FIRST, LAST = 4, 3, 40  # experts; rows of the first one and of the last


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 500_000])
def test_rows_past_two_to_the_31_elements_are_right_forward_and_backward(chunk: int | None, seed: int) -> None:
    e, h, i, tokens, checked = 4, 4096, 64, 2**31 // 4096 + 1000, 50  # x, y and their gradients: 4.3 GB each
    torch.manual_seed(seed)
    spec = ExpertsSpec(Activation(), h, i, torch.bfloat16, torch.device("cuda"))
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(e, 1), "cuda")
    kernel = MoEKernel(moves, select_experts(spec, "grouped").experts, chunk_tokens=chunk)
    w = {"gate_up_proj": torch.randn(e, 2 * i, h, device="cuda") * h**-0.5}
    w["down_proj"] = torch.randn(e, h, i, device="cuda") * i**-0.5
    w = {name: t.bfloat16().requires_grad_() for name, t in w.items()}
    x = torch.zeros(tokens, h, device="cuda", dtype=torch.bfloat16)
    x[-checked:].normal_()
    x.requires_grad_()
    ids = torch.randint(e, (tokens, 1), device="cuda", dtype=torch.int32)
    p = torch.rand(tokens, 1, device="cuda")
    y = kernel(x, ids, p, ExpertWeights(**w)).routed
    dout = torch.zeros_like(y)
    dout[-checked:].normal_()
    y.backward(dout)
    assert x.grad is not None and not y[:-checked].any() and not x.grad[:-checked].any()

    last = slice(tokens - checked, None)
    wide = {name: t.detach().cpu().double().requires_grad_() for name, t in w.items()}
    rows = x.detach()[last].cpu().double().requires_grad_()
    want = naive.routed(rows, ids[last].cpu(), p[last].cpu().double(), wide, SWIGLU, False)
    want.backward(dout[last].cpu().double())
    pairs = [(y[last], want), (x.grad[last], rows.grad), *((w[name].grad, wide[name].grad) for name in w)]
    for got, right in pairs:
        assert got is not None and right is not None
        assert error(got, right) < 1e-2


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got.detach().cpu().double() - want).norm() / want.norm())


def row_errors(got: Tensor, want: Tensor) -> float:
    """The larger error of the first expert's rows and the last one's."""
    return max(error(got[:FIRST], want[:FIRST]), error(got[FIRST:], want[FIRST:]))


@dataclasses.dataclass(frozen=True)
class Reach:
    """`elements`: what no index of rows below those of the last expert reaches."""

    device: str
    elements: int
    h: int
    i: int

    @property
    def capacity(self) -> int:
        return self.elements // (self.h * (L - 1)) + 1 + LAST

    def empty(self) -> Tensor:
        """`[L, C, H]` bf16 as `torch.empty` leaves it but for the rows of the first and the last expert."""
        rows = torch.empty(L, self.capacity, self.h, dtype=torch.bfloat16, device=self.device)
        rows[0, :FIRST].normal_()
        rows[-1, :LAST].normal_()
        assert rows[:-1].numel() > self.elements
        return rows

    def batch(self, x: Tensor, p: Tensor | None = None, expected_m: int | None = None) -> BatchedInput:
        counts = torch.tensor([FIRST, *[0] * (L - 2), LAST], dtype=torch.int32, device=self.device)
        places = L * self.capacity
        return BatchedInput(x, counts, Layout(0, places, places), p, expected_m)

    def spec(self, scheme: str | None = None, on_input: bool = False) -> ExpertsSpec:
        return ExpertsSpec(
            Activation(), self.h, self.i, torch.bfloat16, torch.device(self.device), on_input, scheme=scheme
        )

    def weights(self) -> dict[str, Tensor]:
        """w1 `[L, 2I, H]` and w2 `[L, H, I]` in float32."""
        w1 = torch.randn(L, 2 * self.i, self.h, device=self.device) * self.h**-0.5
        return {"gate_up_proj": w1, "down_proj": torch.randn(L, self.h, self.i, device=self.device) * self.i**-0.5}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def reach(request, monkeypatch, seed) -> Iterator[Reach]:
    """Where the kernels run: compiled on a GPU, through the interpreter on CPU. One process can do only one of them."""
    cuda = request.param == "cuda"
    if INTERPRET == cuda:
        pytest.skip("Triton was imported " + ("with TRITON_INTERPRET=1" if INTERPRET else "without its interpreter"))
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    torch.manual_seed(seed)
    yield Reach("cuda", 2**31, 4096, 128) if cuda else Reach("cpu", 2**10, 128, 32)
    if cuda:
        torch.cuda.empty_cache()


def eight_bits(w: Tensor, scheme: str) -> QuantizedWeights:
    """By the twins: a row after the other the interpreter would take seconds."""
    if scheme == "fp8_block":
        return QuantizedWeights(*quantize_blocks_reference(w, scheme), scheme)
    values, scales = quantize_reference(w.flatten(0, 1), scheme)
    return QuantizedWeights(values.view(w.shape), scales.view(w.shape[:2]), scheme)


def used(t: Tensor) -> Tensor:
    """The rows of `[L, C, ...]` that the first and the last expert have."""
    return torch.cat([t[0, :FIRST], t[-1, :LAST]]).detach()


IDS = torch.tensor([0] * FIRST + [L - 1] * LAST)[:, None]  # of those rows


@pytest.mark.parametrize(("on_input", "expected_m"), [(False, None), (True, 16)])
def test_batched_experts_past_two_to_the_31_elements_are_right_forward_and_backward(on_input, expected_m, reach):
    w = {name: t.bfloat16().requires_grad_() for name, t in reach.weights().items()}
    x, dy = reach.empty().requires_grad_(), reach.empty()
    p = torch.rand(L, reach.capacity, device=reach.device).requires_grad_() if on_input else None
    y = BatchedExperts(reach.spec(on_input=on_input))(reach.batch(x, p, expected_m), ExpertWeights(**w))
    leaves = [x, *w.values(), *([] if p is None else [p])]
    dx, *dw = torch.autograd.grad(y, leaves, dy)
    # rows that nobody has are zeros of a gradient, up to the last of them
    assert not dx[0, FIRST:].any() and not dx[1:-1].any() and not dx[-1, LAST:].any()

    wide = {name: t.detach().cpu().double().requires_grad_() for name, t in w.items()}
    rows = used(x).cpu().double().requires_grad_()
    weight = torch.ones(len(IDS), 1).double() if p is None else used(p).cpu().double()[:, None]
    weight.requires_grad_()
    want = naive.routed(rows, IDS, weight, wide, SWIGLU, on_input)
    want.backward(used(dy).cpu().double())
    assert row_errors(used(y), want.detach()) < 1e-2 and row_errors(used(dx), rows.grad) < 1e-2
    if p is not None:
        assert row_errors(used(dw.pop()), weight.grad.flatten()) < 1e-2
    for got, t in zip(dw, wide.values(), strict=True):
        assert error(got[0], t.grad[0]) < 1e-2 and error(got[-1], t.grad[-1]) < 1e-2 and not got[1:-1].any()


LIMITS = {"fp8_block": 0.07, "fp8_row": 0.07, "int8_row": 0.03, "int4_g128": 1e-2}  # of rows rounded to eight bits too


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("grouped_fp8", "fp8_block"),
        ("grouped_fp8", "fp8_row"),
        ("grouped_int8", "int8_row"),
        ("weight_only", "int4_g128"),
    ],
)
def test_batched_experts_on_quantized_weights_are_right_past_two_to_the_31_elements(name, scheme, reach):
    given, meant = {}, {}
    for part, w in reach.weights().items():
        scale = part.replace("proj", "scale")
        if scheme in NARROW_SCHEMES:
            narrow = quantize_narrow(w, scheme)
            given[part], given[scale], meant[part] = (
                narrow.values,
                narrow.scales,
                dequantize_narrow(narrow, torch.float64),
            )
        else:
            q = eight_bits(w, scheme)
            given[part], given[scale], meant[part] = q.values, q.scales, dequantize_weights(q, torch.float64)
    x = reach.empty()
    with torch.no_grad():
        y = QUANTIZED_EXPERTS[name](reach.spec(scheme))(reach.batch(x, expected_m=16), ExpertWeights(**given))
    meant = {part: w.cpu() for part, w in meant.items()}
    want = naive.routed(used(x).cpu().double(), IDS, torch.ones(len(IDS), 1), meant, SWIGLU, True)
    assert row_errors(used(y), want) < LIMITS[scheme]

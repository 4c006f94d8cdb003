"""Rows and experts for the tests of quantized experts: magnitudes span decades, so that a swapped scale is far off.

T rows, K experts per token, H width, I intermediate size; four local experts of E.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from epmoe.comm.workspace import Workspace
from epmoe.config import Activation
from epmoe.dispatch import make_dispatcher
from epmoe.dispatch.inputs import BatchedInput, ExpertInput, Layout
from epmoe.experts import ExpertsSpec, ExpertWeights, select_experts
from epmoe.kernel import MoEKernel
from epmoe.placement import ExpertPlacement

E, K, H, I = 6, 2, 192, 80  # noqa: E741  (neither is a multiple of a scale block)
OWNED = [0, 2, 3, 5]  # experts of this rank; nobody chooses 3


@dataclasses.dataclass
class Case:
    spec: ExpertsSpec
    rows: ExpertInput
    weights: ExpertWeights
    raw: tuple[Tensor, Tensor]  # w1, w2 before they were quantized

    def batched(self) -> BatchedInput:
        """The same rows by expert, and NaN where there is none."""
        rows = self.rows
        local = rows.expert_map[rows.topk_ids.clamp_min(0)].masked_fill(rows.topk_ids < 0, -1)
        capacity, width = rows.x.shape
        x = torch.full((rows.num_local, capacity, width), math.nan, dtype=rows.x.dtype, device=rows.x.device)
        p = torch.full((rows.num_local, capacity), math.nan, device=rows.x.device)
        counts = [0] * rows.num_local
        slot = torch.full_like(rows.topk_ids, -1)
        for t in range(capacity):
            for k in range(K):
                e = int(local[t, k])
                if e >= 0:
                    x[e, counts[e]], p[e, counts[e]] = rows.x[t], rows.topk_weights[t, k]
                    slot[t, k] = e * capacity + counts[e]
                    counts[e] += 1
        tokens = torch.tensor(counts, dtype=torch.int32, device=x.device)
        on_input = self.spec.weight_on_input
        return BatchedInput(
            x, tokens, rows.handle, p if on_input else None, None, slot, None if on_input else rows.topk_weights
        )


@dataclasses.dataclass(frozen=True)
class Drawn:
    spec: ExpertsSpec
    rows: ExpertInput  # on the device
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None


def draw(
    scheme: str, device: str, seed: int, *, act: str, bias: bool, on_input: bool, rows: int, h: int, i: int,
    local: int = 4,
) -> Drawn:  # fmt: skip
    """Rows over six decades, experts over six; a row of zeros, one without a local expert, ids of -1."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    activation = Activation(act)
    wide = 2 * i if activation.gated else i
    magnitude = torch.tensor([1.0, 1e3, 1e-3, 30.0])[:local, None, None]
    w1, w2 = randn(local, wide, h) * magnitude / h**0.5, randn(local, h, i) / magnitude / i**0.5
    x = randn(rows, h) * 10.0 ** (torch.arange(rows) % 7 - 3)[:, None]
    choices = torch.tensor([0, 1, 2, 4, 5], dtype=torch.int32)
    ids = choices[torch.rand(rows, 5, generator=g).argsort(1)[:, :K]]
    if rows > 3:
        x[1], ids[2], ids[3, 0] = 0, torch.tensor([1, 4]), -1
    p = torch.rand(rows, K, generator=g) + 0.5
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[OWNED[:local]] = torch.arange(local, dtype=torch.int32)
    b1, b2 = (randn(local, wide).bfloat16(), randn(local, h).bfloat16()) if bias else (None, None)
    spec = ExpertsSpec(activation, h, i, torch.bfloat16, torch.device(device), on_input, scheme=scheme)
    x, ids, p, expert_map = (t.to(device) for t in (x.bfloat16(), ids, p, expert_map))
    data = ExpertInput(x, ids, p, expert_map, local, rows * K, Layout(rows, rows, rows * K))
    return Drawn(spec, data, w1, w2, b1, b2)


def row_error(got: Tensor, want: Tensor) -> float:
    """The worst relative error of a row; rows that are zero must be."""
    errors = _row_errors(got, want)
    return errors.max().item() if errors.numel() else 0.0


def median_row_error(got: Tensor, want: Tensor) -> float:
    """The same of the middle row, the lower one of two."""
    return _row_errors(got, want).median().item()


def same_numbers(got: Tensor, want: Tensor, limit: float, flip: float = 0.0) -> bool:
    """Whether all rows are within `limit`, but for one that may be within `flip`: a number among its activations lay so
    near the middle of two that the sums' last bits decided which it became."""
    errors = _row_errors(got, want).sort(descending=True).values
    return bool((errors[:1] < max(limit, flip)).all() and (errors[1:] < limit).all())


def _row_errors(got: Tensor, want: Tensor) -> Tensor:
    got = got.to(want.device)
    zero = (want == 0).all(-1)
    assert not got[zero].any()
    return ((got.double() - want).norm(dim=-1) / want.norm(dim=-1))[~zero]


def peaks_on_a_gpu(experts: str, scheme: str, quantized: Callable[[Tensor, Tensor], ExpertWeights]) -> tuple[int, int]:
    """Of a forward in a planned workspace: the peak that `memory_plan` predicts, and the allocator's."""
    h, i, e, k, m = 2048, 768, 32, 4, 4096
    spec = ExpertsSpec(Activation(), h, i, torch.bfloat16, torch.device("cuda"), scheme=scheme)
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(e, 1), "cuda")
    kernel = MoEKernel(moves, select_experts(spec, experts).experts, workspace=Workspace(spec.device))
    weights = quantized(*(torch.randn(e, n, d, device="cuda") for n, d in ((2 * i, h), (h, i))))
    x = torch.randn(m, h, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(m, e, device="cuda").argsort(1)[:, :k].int()
    rows = (x, ids, torch.rand(m, k, device="cuda"), weights)
    with torch.no_grad():
        kernel(*rows)  # compiles
        kernel.workspace = Workspace(spec.device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = kernel(*rows)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    del out
    return kernel.memory_plan(m, k).peak, peak

"""What every way of computing experts promises, in either layout of its rows.

    ExpertInput  x [T,H] ─── GEMM1 (w1) ── activation ── GEMM2 (w2) ── × router weight, sum over local experts ──► [T,H]
    BatchedInput x [L,C,H] ─ GEMM1 (w1) ── activation ── GEMM2 (w2) ──► [L,C,H], which combine weights and sums

T rows, H width, I expert intermediate size, L local experts, C places for each in the batched layout, K experts per
token.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from epmoe.comm.workspace import Workspace
from epmoe.config import RouterConfig
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, WeightAndReduce
from epmoe.experts.checks import check_batched, check_weights
from epmoe.experts.gradient_sums import summed_by_autograd
from epmoe.experts.lora import ExpertLora
from epmoe.experts.spec import ExpertsSpec, ExpertWeights, WorkspaceShapes
from epmoe.ops._triton import use_triton

# Rows per expert that `batch_invariant` experts expect, whatever comes. In microseconds on an H200, Qwen3-30B in bf16,
# for 16, 128, 512 and 4096 tokens: 187, 283, 305, 585 by the kernels for each; always those for 64 rows: 193, 290, 307,
# 872; always those for 1024: 263, 363, 358, 662.
INVARIANT_ROWS = 64


class Experts(ABC):
    """Base of `reference`, `torch_grouped`, `grouped` and `batched`. Holds the spec and no tensors.

    Attributes:
        layouts: of rows that it takes.
        weight_and_reduce: by layout, how combine is to make one row per row received of its output.
        row_schemes: of rows that it computes with, None for rows that are not quantized; others are dequantized before
            it sees them.
        monolithic: it goes from router logits to the output by itself; see `from_logits`.
        lora: whether it takes weights with adapters, in every layout that it takes.
        schemes: of weights that it computes with, None for weights that are not quantized.
        autograd, cuda_graph: whether it has a backward, and whether a CUDA graph may hold it.
        sums_gradients: its backward adds to `ExpertWeights.sums` by itself, where others leave that to autograd.
        batch_invariant: whether it can give a row the same bits in every batch.
    """

    name: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]] = ("standard",)
    weight_and_reduce: ClassVar[Mapping[str, WeightAndReduce]] = {"standard": "no_op", "batched": "batched"}
    row_schemes: ClassVar[tuple[str | None, ...]] = (None,)
    monolithic: ClassVar[bool] = False
    lora: ClassVar[bool] = False
    schemes: ClassVar[tuple[str | None, ...]] = (None,)
    autograd: ClassVar[bool] = True
    cuda_graph: ClassVar[bool] = False
    sums_gradients: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False

    def __init__(self, spec: ExpertsSpec) -> None:
        if (reason := self.reason_against(spec)) is not None:
            raise ValueError(f"experts={self.name!r}: {reason}")
        self.spec = spec

    @classmethod
    def reason_against(cls, spec: ExpertsSpec) -> str | None:
        """`refusal`, after what its declared capabilities alone rule out."""
        if spec.lora and not cls.lora:
            kinds = (repr(k.name) for k in Experts.__subclasses__() if k.lora and spec.scheme in k.schemes)
            return f"no LoRA adapters here; use experts={' or '.join(kinds)}"
        if spec.scheme not in cls.schemes:
            kinds = (repr(kind.name) for kind in Experts.__subclasses__() if spec.scheme in kind.schemes)
            takes = " or ".join(map(repr, cls.schemes))
            are = "are not quantized" if spec.scheme is None else f"are of scheme={spec.scheme!r}"
            way = f", or quantize them, QuantConfig({cls.schemes[0]!r})" if spec.scheme is None else ""
            return f"the weights {are}, these take {takes}; use experts={' or '.join(kinds) or 'none'}{way}"
        if spec.batch_invariant:
            if not cls.batch_invariant:
                able = (k for k in Experts.__subclasses__() if k.batch_invariant and spec.scheme in k.schemes)
                use = " or ".join(repr(kind.name) for kind in able)
                return f"batch_invariant: their sums depend on the batch; use experts={use or 'none'}"
            if spec.lora:
                return "batch_invariant with LoRA adapters, whose kernels choose by the batch: merge them"
            kernels = spec.device.type == "cuda" or use_triton(torch.empty(0, device="cpu"))
            if not kernels or spec.dtype == torch.float64:
                return (
                    f"batch_invariant in {spec.dtype} on {spec.device.type}, where torch multiplies, in an order that "
                    "depends on the batch: use CUDA and at most float32"
                )
        return cls.refusal(spec)

    @classmethod
    @abstractmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        """Why these experts can't take `spec`, and what would be needed; None if they can."""

    @abstractmethod
    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        """The routed MLP of this rank's experts.

        Standard layout: `[T, H]`, weighted and summed over the experts in fp32 in the order of K. Batched layout:
        `[L, C, H]`, each row as its expert gives it, neither summed nor weighted (unless the weight is on the input);
        rows past an expert's count may hold anything, while the gradients of such rows of x are 0.
        """

    def output(
        self,
        rows: ExpertInput | BatchedInput,
        weights: ExpertWeights,
        *,
        delegate: bool = False,
        workspace: Workspace | None = None,
    ) -> ExpertOutput:
        """`__call__`, and how combine is to weight and sum it.

        Args:
            delegate: the dispatcher weights and sums while it sends: leave that to it where that costs nothing.
            workspace: scratch for a forward without gradients; the output may lie in it. Those that plan no workspace
                do not use it.
        """
        y = self(rows, weights)
        if not isinstance(rows, BatchedInput):
            return ExpertOutput(y)
        strategy: WeightAndReduce = "delegate" if delegate else self.weight_and_reduce["batched"]
        return ExpertOutput(y, strategy, rows.slot, rows.slot_weights)

    def expected_rows(self, rows: ExpertInput | BatchedInput) -> int | None:
        """`expected_m` of the rows, by which ops choose kernels; one number where results must not depend on the
        batch."""
        return INVARIANT_ROWS if self.spec.batch_invariant else rows.expected_m

    def takes_rows(self, scheme: str | None, layout: str, training: bool = False) -> bool:
        """Whether it computes with rows of `scheme` as they arrived, without dequantizing: its weights' own scheme, in
        the standard layout; `training`: rows that have a source, which wants a gradient."""
        if scheme is None:
            return True
        return scheme in self.row_schemes and scheme == self.spec.scheme and layout == "standard"

    def from_logits(
        self,
        x: Tensor,
        logits: Tensor,
        router: RouterConfig,
        weights: ExpertWeights,
        *,
        selection_bias: Tensor | None = None,
        top_k: int,
    ) -> Tensor:
        """Monolithic experts: `[M, H]` from `x [M, H]` and router logits `[M, E]`, all experts being local.

        Raises:
            ValueError: these experts are not monolithic.
        """
        raise ValueError(f"experts={self.name!r} take topk_ids, not logits: MoEKernel.from_logits routes for them")

    def workspace_shapes(self, num_rows: int, num_pairs: int) -> WorkspaceShapes | None:
        """Scratch that `output` takes from a workspace; None: it plans none and allocates as it goes.

        Args:
            num_rows: rows of x: T rows received, in the batched layout L·C places.
            num_pairs: N (row, expert) pairs; in the batched layout L·C places.
        """
        return None

    def __call__(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        """`apply` after checking that rows and weights fit each other and the spec."""
        self.check(rows, weights)
        return self.apply(rows, weights if self.sums_gradients else summed_by_autograd(weights))

    def check_lora(self, lora: ExpertLora | None, with_ids: bool) -> None:
        """Raises `ValueError` for adapters that these experts can't apply, or `adapter_ids` without adapters."""
        if lora is not None and not self.lora:
            reason = self.reason_against(dataclasses.replace(self.spec, lora=True))
            raise ValueError(f"experts={self.name!r}: weights.lora is given, {reason}")
        if lora is None and with_ids:
            raise ValueError(
                f"experts={self.name!r}: rows have adapter_ids and weights.lora is None: give the adapters"
            )

    def check(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> None:
        """Raises `ValueError` for a layout, shapes, dtypes or devices that do not fit."""
        spec, where = self.spec, f"experts={self.name!r}: "
        layout = "batched" if isinstance(rows, BatchedInput) else "standard"
        if layout not in self.layouts:
            raise ValueError(f"{where}rows are in the {layout} layout, must be {' or '.join(self.layouts)}")
        if isinstance(rows, BatchedInput):
            check_batched(where, spec, rows)
        self.check_lora(weights.lora, rows.adapter_ids is not None)
        if weights.lora is not None:
            weights.lora.check(where, spec, rows.num_local, rows.x.device)
        ids = rows.adapter_ids
        if ids is not None and (
            ids.shape != rows.x.shape[:-1] or ids.dtype != torch.int32 or ids.device != rows.x.device
        ):
            raise ValueError(
                f"{where}adapter_ids is {ids.dtype} {tuple(ids.shape)} on {ids.device}, must be int32 "
                f"{tuple(rows.x.shape[:-1])} on {rows.x.device}"
            )
        if rows.x.shape[-1] != spec.hidden_size:
            raise ValueError(f"{where}rows are {rows.x.shape[-1]} wide, hidden_size is {spec.hidden_size}")
        row_scheme = rows.scheme
        if not self.takes_rows(row_scheme, layout, isinstance(rows, ExpertInput) and rows.source is not None):
            raise ValueError(
                f"{where}rows are quantized ({row_scheme}), which these do not compute with: pass "
                f"rows.dequantized({spec.dtype})"
            )
        if row_scheme is None and rows.x.dtype != spec.dtype:
            raise ValueError(
                f"{where}rows are {rows.x.dtype}, made for {spec.dtype}: convert them, or run under torch.autocast"
            )
        check_weights(where, spec, weights, rows.num_local, rows.x.device)


def local_ids(rows: ExpertInput) -> Tensor:
    """`[T, K]` int64: the local expert of each pair; L where it has none here (other ranks', -1, out of range)."""
    ids = rows.topk_ids
    valid = (ids >= 0) & (ids < rows.expert_map.shape[0])
    local = rows.expert_map[torch.where(valid, ids, 0)]
    return torch.where(valid & (local >= 0), local, rows.num_local).long()

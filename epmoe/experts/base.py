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
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from epmoe.comm.workspace import Part, Workspace
from epmoe.config import Activation, MoEConfig, RouterConfig
from epmoe.dispatch.base import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, WeightAndReduce
from epmoe.experts.gradient_sums import GradientSums, summed_by_autograd
from epmoe.experts.lora import ExpertLora
from epmoe.ops._triton import use_triton
from epmoe.quant import row_dtype, weight_scale_shape
from epmoe.quant.narrow import NARROW_SCHEMES, narrow_mismatch

# Rows per expert that `batch_invariant` experts expect, whatever comes. In microseconds on an H200, Qwen3-30B in bf16,
# for 16, 128, 512 and 4096 tokens: 187, 283, 305, 585 by the kernels for each; always those for 64 rows: 193, 290, 307,
# 872; always those for 1024: 263, 363, 358, 662.
INVARIANT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """This rank's experts, in local order.

    Attributes:
        gate_up_proj: w1 `[L, 2I, H]`, gate rows then up rows (`[L, I, H]` when the activation is not gated).
        down_proj: w2 `[L, H, I]`.
        gate_up_bias: `[L, 2I]` (or `[L, I]`), or None.
        down_bias: `[L, H]`, or None.
        lora: adapters beside them, which rows with `adapter_ids` meet too, or None.
        gate_up_scale, down_scale: scales of quantized gate_up_proj and down_proj, of the shapes and dtypes that
            the scheme says (`quant/weights.py`, `quant/narrow.py`); None where they are not quantized. Narrow
            weights are packed along their last dimension.
        sums: where gradients of parts are added up, set by `sum_gradients`; None: autograd does.
        gate_up_zero, down_zero, gate_up_outer, down_outer: zero points and second scales of narrow weights, or None.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    lora: ExpertLora | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    sums: GradientSums | None = None
    gate_up_zero: Tensor | None = None
    down_zero: Tensor | None = None
    gate_up_outer: Tensor | None = None
    down_outer: Tensor | None = None

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same weights in `dtype`, differentiably; quantized ones keep their values and scales."""
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias.to(dtype)
        down_bias = None if self.down_bias is None else self.down_bias.to(dtype)
        lora = None if self.lora is None else self.lora.to(dtype)
        w1, w2 = self.gate_up_proj, self.down_proj
        if self.gate_up_scale is None:
            w1, w2 = w1.to(dtype), w2.to(dtype)
        return dataclasses.replace(
            self, gate_up_proj=w1, down_proj=w2, gate_up_bias=gate_up_bias, down_bias=down_bias, lora=lora
        )


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The problem that a kind of experts is asked to take on.

    Attributes:
        activation: between the GEMMs.
        hidden_size: H; intermediate_size: I; both as the experts see them.
        dtype: of rows, and of weights that are not quantized.
        device: where they are.
        weight_on_input: the router weight multiplies the row before GEMM1.
        lora: the weights may have adapters.
        scheme: of quantized weights, one of `quant.WEIGHT_SCHEMES` or `quant.NARROW_SCHEMES`; None where they are not.
        batch_invariant: a row's result must have the same bits whichever rows are with it, and however many.
    """

    activation: Activation
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    device: torch.device
    weight_on_input: bool = False
    lora: bool = False
    scheme: str | None = None
    batch_invariant: bool = False

    @classmethod
    def of(cls, config: MoEConfig, *, device: torch.device, dtype: torch.dtype, lora: bool = False) -> ExpertsSpec:
        """What a layer of this configuration asks of its experts."""
        return cls(
            config.activation_function,
            config.expert_hidden_size,
            config.intermediate_size,
            dtype,
            device,
            config.router_weight_on_input,
            lora,
            None if config.quant is None else config.quant.weights,
            config.batch_invariant,
        )


class WorkspaceShapes(NamedTuple):
    """Scratch of one forward without gradients.

    Attributes:
        workspace13: what the GEMMs give, one at a time: GEMM1's output where the activation is a pass of its own, then
            GEMM2's `[N, H]`.
        workspace2: the activation's output `[N, I]`, GEMM2's input.
        output: `[T, H]`, one reduced row per row received.
    """

    workspace13: Part
    workspace2: Part
    output: Part


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
            return f"the weights {are}, these take {takes}; use experts={' or '.join(kinds) or 'none'}"
        if spec.batch_invariant:
            if not cls.batch_invariant:
                able = (k for k in Experts.__subclasses__() if k.batch_invariant and spec.scheme in k.schemes)
                use = " or ".join(repr(kind.name) for kind in able)
                return f"batch_invariant: their sums depend on the batch; use experts={use or 'none'}"
            if spec.lora:
                return "batch_invariant with LoRA adapters, whose kernels choose by the batch: merge them"
            kernels = spec.device.type == "cuda" or use_triton(torch.empty(0))
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
        spec = self.spec
        layout = "batched" if isinstance(rows, BatchedInput) else "standard"
        if layout not in self.layouts:
            raise ValueError(
                f"experts={self.name!r}: rows are in the {layout} layout, must be {' or '.join(self.layouts)}"
            )
        if isinstance(rows, BatchedInput):
            self._check_batched(rows)
        self.check_lora(weights.lora, rows.adapter_ids is not None)
        if weights.lora is not None:
            weights.lora.check(f"experts={self.name!r}: ", spec, rows.num_local, rows.x.device)
        ids = rows.adapter_ids
        if ids is not None and (
            ids.shape != rows.x.shape[:-1] or ids.dtype != torch.int32 or ids.device != rows.x.device
        ):
            raise ValueError(
                f"experts={self.name!r}: adapter_ids is {ids.dtype} {tuple(ids.shape)} on {ids.device}, must be int32 "
                f"{tuple(rows.x.shape[:-1])} on {rows.x.device}"
            )
        h, i = spec.hidden_size, spec.intermediate_size
        gate_up = (rows.num_local, 2 * i if spec.activation.gated else i)
        expected = {
            "gate_up_proj": (weights.gate_up_proj, (*gate_up, h)),
            "down_proj": (weights.down_proj, (rows.num_local, h, i)),
            "gate_up_bias": (weights.gate_up_bias, gate_up),
            "down_bias": (weights.down_bias, (rows.num_local, h)),
        }
        if rows.x.shape[-1] != h:
            raise ValueError(f"experts={self.name!r}: rows are {rows.x.shape[-1]} wide, hidden_size is {h}")
        row_scheme = rows.scheme if isinstance(rows, ExpertInput) else None
        if not self.takes_rows(row_scheme, layout, isinstance(rows, ExpertInput) and rows.source is not None):
            raise ValueError(
                f"experts={self.name!r}: rows are quantized ({row_scheme}), which these do not compute with: pass "
                f"rows.dequantized({spec.dtype})"
            )
        if row_scheme is None and rows.x.dtype != spec.dtype:
            raise ValueError(
                f"experts={self.name!r}: rows are {rows.x.dtype}, made for {spec.dtype}: convert them, or run under "
                "torch.autocast"
            )
        dtype = spec.dtype
        self._check_scales(weights)
        for name, (tensor, shape) in expected.items():
            if tensor is None:
                continue
            if spec.scheme in NARROW_SCHEMES and name.endswith("proj"):
                shape = (*shape[:2], *tensor.shape[2:])  # packed: `_check_scales` has looked at the rest
            if tuple(tensor.shape) != shape:
                raise ValueError(f"experts={self.name!r}: {name} has shape {tuple(tensor.shape)}, must be {shape}")
            if tensor.dtype != dtype and (spec.scheme is None or name.endswith("bias")):
                raise ValueError(
                    f"experts={self.name!r}: {name} is {tensor.dtype} and the rows are {dtype}: convert one, or "
                    "run under torch.autocast"
                )
            if tensor.device != rows.x.device:
                raise ValueError(f"experts={self.name!r}: {name} is on {tensor.device}, the rows on {rows.x.device}")

    def _check_scales(self, weights: ExpertWeights) -> None:
        """Raises `ValueError` for weights that are not quantized as the spec says."""
        scheme = self.spec.scheme
        for name, width in (("gate_up", self.spec.hidden_size), ("down", self.spec.intermediate_size)):
            values: Tensor = getattr(weights, f"{name}_proj")
            scale: Tensor | None = getattr(weights, f"{name}_scale")
            where = f"experts={self.name!r}: {name}"
            zero, outer = getattr(weights, f"{name}_zero"), getattr(weights, f"{name}_outer")
            if scheme not in NARROW_SCHEMES and (zero is not None or outer is not None):
                raise ValueError(
                    f"{where}_{'outer' if zero is None else 'zero'} is given with scheme={scheme!r} in the spec: it "
                    "belongs to narrow weights"
                )
            if (scheme is None) != (scale is None):
                raise ValueError(
                    f"{where}_scale is {'given' if scheme is None else 'None'} with scheme={scheme!r} in the spec: "
                    "scales belong to quantized weights"
                )
            if scheme is None or scale is None:
                continue
            if scheme in NARROW_SCHEMES:
                if (reason := narrow_mismatch(values, scale, zero, outer, scheme, width)) is not None:
                    raise ValueError(f"{where}: {reason}")
                continue
            right = weight_scale_shape(tuple(values.shape), scheme)
            if values.dtype != row_dtype(scheme):
                raise ValueError(f"{where}_proj is {values.dtype}: must be {row_dtype(scheme)} for scheme={scheme!r}")
            if tuple(scale.shape) != right or scale.dtype != torch.float32 or scale.device != values.device:
                raise ValueError(
                    f"{where}_scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}: must be torch.float32 "
                    f"{right} on {values.device} for scheme={scheme!r}"
                )

    def _check_batched(self, rows: BatchedInput) -> None:
        where, x, counts, p = f"experts={self.name!r}: ", rows.x, rows.expert_num_tokens, rows.topk_weights
        if x.dim() != 3 or (x.stride(2) != 1 and x.shape[2] > 1 and x.numel() > 0):
            raise ValueError(
                f"{where}x has shape {tuple(x.shape)} and strides {x.stride()}: must be [L, C, H] with dense rows"
            )
        if counts.shape != x.shape[:1] or counts.dtype != torch.int32 or counts.device != x.device:
            raise ValueError(
                f"{where}expert_num_tokens is {counts.dtype} {tuple(counts.shape)} on {counts.device}: must be int32 "
                f"({x.shape[0]},) on {x.device}"
            )
        if not self.spec.weight_on_input:
            return
        right = f"must be float32 {tuple(x.shape[:2])}, since the router weight is on the input"
        if p is None:
            raise ValueError(f"{where}topk_weights=None: {right}")
        precise = torch.promote_types(x.dtype, torch.float32)
        if p.shape != x.shape[:2] or p.dtype not in (torch.float32, precise) or p.device != x.device:
            raise ValueError(f"{where}topk_weights is {p.dtype} {tuple(p.shape)} on {p.device}: {right}")


class ProblemSize(NamedTuple):
    """The sizes of an expert MLP as its arguments show them; see `moe_problem_size`."""

    num_local: int  # L
    rows: int  # T, or C in the batched layout
    width: int  # H
    intermediate: int  # I
    top_k: int  # K


def moe_problem_size(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    *,
    gated: bool = True,
    packed_int4: bool = False,
    transposed: bool = False,
) -> ProblemSize:
    """The sizes that rows, weights and routing agree on: what workspaces and configurations are chosen by.

    Example: bf16 rows `[7, 128]` (or `[4, 16, 128]`), topk_ids `[7, 2]`, L = 4, I = 96::

        w1                    w2                flags
        [4, 192, 128]         [4, 128, 96]
        [4, 96, 128]          [4, 128, 96]      gated=False
        [4, 192, 64] uint8    [4, 128, 48]      packed_int4=True
        [4, 128, 192]         [4, 96, 128]      transposed=True

    Args:
        x: `[T, H]`, or `[L, C, H]` in the batched layout; unpacked.
        w1: `[L, 2I, H]` (`[L, I, H]` not gated); `transposed`: `[L, H, 2I]`.
        w2: `[L, H, I]`; `transposed`: `[L, I, H]`.
        topk_ids: `[T, K]`; in the batched layout those of the tokens, of any length.
        gated: w1 has gate and up rows.
        packed_int4: two weights share a byte (int8 or uint8) along the dimension that is summed over, H in w1 and I in
            w2, which are half as long then.
        transposed: the weights' last two dimensions change places.

    Raises:
        ValueError: the arguments do not agree, naming the first that does not.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [T, H], or [L, C, H] in the batched layout")
    for name, w in (("w1", w1), ("w2", w2)):
        if w.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(w.shape)}: must have three dimensions, experts first")
        if packed_int4 and w.dtype not in (torch.uint8, torch.int8):
            raise ValueError(f"{name} is {w.dtype}: packed_int4=True says that it holds two weights per uint8 or int8")
    rows, width = x.shape[-2:]
    per_byte = 2 if packed_int4 else 1
    num_local, packed = w2.shape[0], w2.shape[1 if transposed else 2]
    intermediate = packed * per_byte
    flags = f"gated={gated}, packed_int4={packed_int4}, transposed={transposed}"

    def require(name: str, w: Tensor, out: int, inner: int) -> None:
        right = (num_local, inner, out) if transposed else (num_local, out, inner)
        if tuple(w.shape) != right:
            raise ValueError(f"{name} has shape {tuple(w.shape)}: must be {right} for rows of {width} with {flags}")

    if width % per_byte:
        raise ValueError(f"x has rows of {width}: must be even, since packed_int4 holds two weights in each byte")
    require("w2", w2, width, packed)
    require("w1", w1, intermediate * (2 if gated else 1), width // per_byte)
    if x.dim() == 3 and x.shape[0] != num_local:
        raise ValueError(f"x has shape {tuple(x.shape)}: must have one batch per expert, {num_local}")
    if topk_ids.dim() != 2 or (x.dim() == 2 and topk_ids.shape[0] != rows):
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}: must be [T, K], T = {rows} as x has")
    return ProblemSize(num_local, rows, width, intermediate, topk_ids.shape[1])


def local_ids(rows: ExpertInput) -> Tensor:
    """`[T, K]` int64: the local expert of each pair; L where it has none here (other ranks', -1, out of range)."""
    ids = rows.topk_ids
    valid = (ids >= 0) & (ids < rows.expert_map.shape[0])
    local = rows.expert_map[torch.where(valid, ids, 0)]
    return torch.where(valid & (local >= 0), local, rows.num_local).long()

"""What experts with quantized weights share: the routed MLP in either layout, without a backward.

    x ── align (standard rows) ── GEMM1, activation, GEMM2 ── × router weight, sum

T rows, K experts per token, N (row, expert) pairs in expert order or places of the batched layout, H width, I
intermediate size, L local experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from epmoe.comm.workspace import Part, Workspace, carved
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.dispatch.reduce import ExpertOutput, WeightAndReduce
from epmoe.experts._mlp import Rows, may_use_workspace
from epmoe.experts.spec import ExpertsSpec, ExpertWeights, WorkspaceShapes
from epmoe.ops._segments import batched_segments, standard_segments
from epmoe.ops.align import align_rows
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.quantize import quantize, quantize_into, row_format
from epmoe.ops.quantize_by import quantize_by, quantize_by_into
from epmoe.ops.scaled_gemm import scaled_grouped_gemm, scaled_grouped_gemm_act
from epmoe.ops.scaled_gemm_into import scaled_grouped_gemm_act_into, scaled_grouped_gemm_into

Quantized: TypeAlias = tuple[Tensor, Tensor]  # values and scales


class InferencePath(ABC):
    """A base beside `Experts` of kinds that give `_mlp` and nothing else."""

    name: ClassVar[str]
    numbers: ClassVar[str]  # what messages call the weights' numbers
    weight_and_reduce: ClassVar[Mapping[str, WeightAndReduce]] = {"standard": "contiguous", "batched": "batched"}
    spec: ExpertsSpec

    if TYPE_CHECKING:  # `Experts` has them, behind this class in the order of resolution

        def check(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> None: ...

        def expected_rows(self, rows: ExpertInput | BatchedInput) -> int | None: ...

    @abstractmethod
    def _mlp(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weights: ExpertWeights,
        rows: Rows,
        span: int,
        weight_in: Tensor | None,
        space: Workspace | None = None,
    ) -> Tensor:
        """y = act(s·x·w1ᵀ + b1)·w2ᵀ + b2 `[N, H]` for each row of a segment; segments lie in spans of `span` rows.
        Written into `space` by kinds that plan one, if it is given."""

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        self._refuse_gradients(rows, weights)
        if isinstance(rows, BatchedInput):
            return self._batched(rows, weights)
        y, slot = self._pairs(rows, weights)
        return gather_sum(y, slot, None if self.spec.weight_on_input else rows.topk_weights, self.spec.dtype)

    def output(
        self,
        rows: ExpertInput | BatchedInput,
        weights: ExpertWeights,
        *,
        delegate: bool = False,
        workspace: Workspace | None = None,
    ) -> ExpertOutput:
        """Combine weights and sums."""
        self.check(rows, weights)
        self._refuse_gradients(rows, weights)
        layout = "batched" if isinstance(rows, BatchedInput) else "standard"
        strategy: WeightAndReduce = "delegate" if delegate else self.weight_and_reduce[layout]
        space = workspace if may_use_workspace(workspace, rows.x) else None
        if isinstance(rows, BatchedInput):
            return ExpertOutput(self._batched(rows, weights, space), strategy, rows.slot, rows.slot_weights)
        y, slot = self._pairs(rows, weights, space)
        return ExpertOutput(y, strategy, slot, None if self.spec.weight_on_input else rows.topk_weights)

    def _pairs(
        self, rows: ExpertInput, weights: ExpertWeights, space: Workspace | None = None
    ) -> tuple[Tensor, Tensor]:
        """`y [N, H]`, one row per pair, and the `slot [T, K]` of each."""
        n = rows.max_assignments
        row_index, offsets, slot = align_rows(rows.topk_ids, rows.expert_map, rows.num_local, n)
        segments = Rows(*standard_segments(offsets), row_index, slot.shape[1], n, self.expected_rows(rows))
        on_input = rows.topk_weights.contiguous().view(-1) if self.spec.weight_on_input else None
        return self._mlp(rows.x, rows.x_scale, weights, segments, n, on_input, space), slot

    def _batched(self, rows: BatchedInput, weights: ExpertWeights, space: Workspace | None = None) -> Tensor:
        num_local, capacity, width = rows.x.shape
        n = num_local * capacity
        segments = Rows(*batched_segments(rows.expert_num_tokens, capacity), None, 1, n, self.expected_rows(rows))
        p = rows.topk_weights
        on_input = p.contiguous().view(n) if self.spec.weight_on_input and p is not None else None
        x = rows.x.reshape(n, width)
        scale = None if rows.x_scale is None else rows.x_scale.reshape(n, rows.x_scale.shape[2])
        return self._mlp(x, scale, weights, segments, capacity, on_input, space).view(num_local, capacity, width)

    def _refuse_gradients(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> None:
        if not torch.is_grad_enabled():
            return
        named = {
            "x": rows.source if isinstance(rows, ExpertInput) and rows.source is not None else rows.x,
            "topk_weights": rows.topk_weights,
            "gate_up_bias": weights.gate_up_bias,
            "down_bias": weights.down_bias,
        }
        asked = [name for name, tensor in named.items() if tensor is not None and tensor.requires_grad]
        if asked:
            raise ValueError(
                f"experts={self.name!r}: {asked[0]} needs a gradient and {self.numbers} experts have no backward: run "
                "under torch.no_grad(), or train with weights that are not quantized"
            )


class ScaledPath(InferencePath):
    """The MLP on rows and weights that are both quantized.

    With scales per block GEMM1's epilogue quantizes the activation. A scale per row needs the whole row, as does the
    search for an inf or a NaN in it where experts' scales are fixed, and scales that are powers of two another
    rounding: there the activation leaves GEMM1 in the rows' dtype and a pass of its own quantizes it. Where experts
    have fixed scales of rows too, each pair has a row of its own, quantized by its expert's.
    """

    def takes_rows(self, scheme: str | None, layout: str, training: bool = False) -> bool:
        """Its weights' own scheme, in both layouts; in the batched one a gradient would be lost with the source. Wide
        rows alone where each expert has a scale of its own for them."""
        if scheme is None:
            return True
        if self.spec.scales_by_expert:
            return False
        return scheme == self.spec.scheme and (layout == "standard" or not training)

    def workspace_shapes(self, num_rows: int, num_pairs: int) -> WorkspaceShapes:
        """Workspace13 holds what GEMM1 reads, and its output where a pass of its own quantizes that; then GEMM2's."""
        first, second, y = self._parts(num_rows, num_pairs)
        early = sum(part.nbytes for part in first)
        return WorkspaceShapes(
            Part((max(early, y.nbytes),), torch.uint8),
            Part((sum(part.nbytes for part in second),), torch.uint8),
            Part((num_rows, self.spec.hidden_size), self.spec.dtype),
        )

    def _parts(self, num_rows: int, num_pairs: int) -> tuple[list[Part], list[Part], Part]:
        """Quantized rows with their scales (and the activation), the quantized activation with its scales, and y."""
        spec = self.spec
        assert spec.scheme is not None
        form, h, i = row_format(spec.scheme), spec.hidden_size, spec.intermediate_size
        met = num_pairs if spec.scales_by_expert else num_rows
        first = [Part((met, h), form.dtype), Part((met, form.scales(h)), torch.float32)]
        if spec.scheme != "fp8_block":
            first.append(Part((num_pairs, i), spec.dtype))
        second = [Part((num_pairs, i), form.dtype), Part((num_pairs, form.scales(i)), torch.float32)]
        return first, second, Part((num_pairs, h), spec.dtype)

    def _mlp(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weights: ExpertWeights,
        rows: Rows,
        span: int,
        weight_in: Tensor | None,
        space: Workspace | None = None,
    ) -> Tensor:
        spec, scheme = self.spec, self.spec.scheme
        assert scheme is not None
        w1, w2, s1, s2 = weights.gate_up_proj, weights.down_proj, weights.gate_up_scale, weights.down_scale
        assert s1 is not None and s2 is not None
        start, end, index, divisor, n, expected_m = rows
        last = end[-1:] if span == n else end
        into_x, into_act, into_a, y = self._carved(space, x.shape[0], n)
        if (fixed := weights.gate_up_input_scale) is not None:
            of_pairs, weight_in = _apart(weight_in, index)
            by = (fixed, start, end, scheme, index, divisor, of_pairs)
            x, x_scale = _made(quantize_by, quantize_by_into, into_x, x, *by)
            index, divisor = None, 1
        elif x_scale is None:  # of rows in their places only those of a segment: the others may hold anything
            covered = () if index is not None else (last, span)
            x, x_scale = _made(quantize, quantize_into, into_x, x, scheme, *covered)
        fused, product = scheme == "fp8_block", "fp8_block" if row_format(scheme).group else scheme
        act = (spec.activation.name, spec.activation.alpha, spec.activation.limit, product, spec.dtype)
        gemm1 = (x, x_scale, w1, s1, weights.gate_up_bias, start, end, index, divisor)
        if into_act is None:
            a, a_scale = scaled_grouped_gemm_act(*gemm1, n, weight_in, *act, fused, expected_m, *spec.block)
        else:
            a, a_scale = into_act
            scaled_grouped_gemm_act_into(a, a_scale if fused else None, *gemm1, weight_in, *act, expected_m, spec.block)
        del x, x_scale, gemm1
        if (fixed := weights.down_input_scale) is not None:
            a, a_scale = _made(quantize_by, quantize_by_into, into_a, a, fixed, start, end, scheme)
        elif not fused:
            a, a_scale = _made(quantize, quantize_into, into_a, a, scheme, last, span)
        gemm2 = (a, a_scale, w2, s2, weights.down_bias, start, end, None, 1)
        if y is None:
            return scaled_grouped_gemm(*gemm2, n, product, spec.dtype, expected_m, *spec.block)
        scaled_grouped_gemm_into(y, *gemm2, product, expected_m, spec.block)
        return y

    def _carved(
        self, space: Workspace | None, num_rows: int, num_pairs: int
    ) -> tuple[Quantized | None, Quantized | None, Quantized | None, Tensor | None]:
        """Where in `space` the steps of `_mlp` write: quantized rows, what GEMM1 gives, what GEMM2 reads, y; None each
        without a workspace."""
        if space is None:
            return None, None, None, None
        first, second, result = self._parts(num_rows, num_pairs)
        early, late = space.take(self.workspace_shapes(num_rows, num_pairs)[:2])
        values, scales, *wide = carved(early, first)
        a, a_scale = carved(late, second)
        (y,) = carved(early, [result])  # over what GEMM2 no longer reads
        return (values, scales), (wide[0] if wide else a, a_scale), (a, a_scale), y


def _made(
    op: Callable[..., Quantized], op_into: Callable[..., None], into: Quantized | None, *operands: Any
) -> Quantized:
    """What `op` gives; by `op_into` in the caller's buffers, where there are some."""
    if into is None:
        return op(*operands)
    op_into(*into, *operands)
    return into


def _apart(weight_in: Tensor | None, index: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The weights on the input that become part of pairs' scales, and those that are left to GEMM1: of rows in their
    places."""
    return (None, weight_in) if index is None else (weight_in, None)

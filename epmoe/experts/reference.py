"""`reference`: the routed MLP as one reads it in a paper, a loop over experts in plain torch, in any dtype up to
float64.

Every other implementation is compared with this one. It is also what runs on CPU by default.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.config import DTYPES
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.experts.base import Experts, local_ids
from epmoe.experts.lora import low_rank_update
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops.activation import apply_activation
from epmoe.ops.narrow_formats import widen
from epmoe.quant import WEIGHT_SCHEMES, QuantizedWeights, dequantize_rows, dequantize_weights, quantize_rows_by
from epmoe.quant.narrow import NARROW_SCHEMES


class ReferenceExperts(Experts):
    """One expert after another; autograd by torch. On a GPU it waits for the device once per expert."""

    name = "reference"
    layouts = ("standard", "batched")
    lora = True
    schemes = (None, *WEIGHT_SCHEMES, *NARROW_SCHEMES)

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        return None if spec.dtype in DTYPES else f"dtype={spec.dtype}: must be one of {', '.join(map(str, DTYPES))}"

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        if isinstance(rows, BatchedInput):
            return self._batched(rows, weights)
        x, scale_input = rows.x, self.spec.weight_on_input
        local = local_ids(rows)
        precise = torch.promote_types(x.dtype, torch.float32)  # every step in between is in this precision
        rows_of, slots_of, results = [], [], []
        for expert in range(rows.num_local):
            t, k = (local == expert).nonzero(as_tuple=True)  # also when there is none: its gradients are zeros then
            scale = rows.topk_weights[t, k, None].to(precise)
            row = self._as_met(x[t].to(precise), weights, expert)
            adapters = None if rows.adapter_ids is None else rows.adapter_ids[t]
            y = self._expert(row * scale if scale_input else row, weights, expert, adapters)
            rows_of.append(t)
            slots_of.append(k)
            results.append(y if scale_input else y * scale)
        # one row per (row, k) pair, summed in the order of k
        parts = x.new_zeros((*local.shape, x.shape[1]), dtype=precise)
        parts = parts.index_put((torch.cat(rows_of), torch.cat(slots_of)), torch.cat(results))
        return parts.sum(1).to(x.dtype)

    def _batched(self, rows: BatchedInput, weights: ExpertWeights) -> Tensor:
        x = rows.x
        precise = torch.promote_types(x.dtype, torch.float32)
        results = []
        for expert, count in enumerate(rows.expert_num_tokens.tolist()):
            row = self._as_met(x[expert, :count].to(precise), weights, expert)
            if self.spec.weight_on_input:
                assert rows.topk_weights is not None
                row = row * rows.topk_weights[expert, :count, None].to(precise)
            adapters = None if rows.adapter_ids is None else rows.adapter_ids[expert, :count]
            y = self._expert(row, weights, expert, adapters).to(x.dtype)
            results.append(F.pad(y, (0, 0, 0, x.shape[1] - count)))
        return torch.stack(results) if results else torch.zeros_like(x)

    def _expert(self, row: Tensor, weights: ExpertWeights, expert: int, adapters: Tensor | None) -> Tensor:
        """`row [n, H]` of `adapters [n]` through one expert, in the precision of `row`."""
        activation, lora = self.spec.activation, weights.lora if adapters is not None else None

        def updated(y: Tensor, x: Tensor, name: str) -> Tensor:
            if lora is None or adapters is None:
                return y
            a, b = (getattr(lora, f"{name}_{part}")[expert].to(x.dtype) for part in "ab")
            return y + low_rank_update(x, a, b, lora.scaling, adapters)

        bias1, bias2 = (
            None if bias is None else bias[expert].to(row.dtype) for bias in (weights.gate_up_bias, weights.down_bias)
        )
        w1, w2 = self._weights(weights, expert, row.dtype)
        h = updated(F.linear(row, w1, bias1), row, "gate_up")
        h = apply_activation(h, activation.name, activation.alpha, activation.limit)
        if weights.down_input_scale is not None:
            h = self._by_fixed_scale(h, weights.down_input_scale[expert, None])
        return updated(F.linear(h, w2, bias2), h, "down")

    def _as_met(self, row: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
        """`row [n, H]` as the expert's GEMM1 sees it, before any weight on it."""
        fixed = weights.gate_up_input_scale
        return row if fixed is None else self._by_fixed_scale(row, fixed[expert, None])

    def _by_fixed_scale(self, h: Tensor, scale: Tensor) -> Tensor:
        """`h [n, *]` as a fixed scale lets a GEMM see it: saturated, which no rounding undoes. Backward takes it for
        the identity."""
        assert self.spec.scheme is not None
        rounded = dequantize_rows(quantize_rows_by(h, scale, self.spec.scheme), h.dtype)
        return h + (rounded - h).detach() if h.requires_grad else rounded

    def _weights(self, weights: ExpertWeights, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """w1 and w2 of one expert in `dtype`, dequantized where they are quantized."""
        w1, w2 = weights.gate_up_proj[expert], weights.down_proj[expert]
        scheme, s1, s2 = self.spec.scheme, weights.gate_up_scale, weights.down_scale
        if scheme is None or s1 is None or s2 is None:
            return w1.to(dtype), w2.to(dtype)
        if scheme in NARROW_SCHEMES:
            z1, z2, o1, o2 = (
                None if t is None else t[expert]
                for t in (weights.gate_up_zero, weights.down_zero, weights.gate_up_outer, weights.down_outer)
            )
            w1 = widen(w1, s1[expert], z1, o1, scheme, self.spec.hidden_size, dtype)
            return w1, widen(w2, s2[expert], z2, o2, scheme, self.spec.intermediate_size, dtype)
        one, how = slice(expert, expert + 1), (scheme, self.spec.block)
        w1 = dequantize_weights(QuantizedWeights(weights.gate_up_proj[one], s1[one], *how), dtype)[0]
        return w1, dequantize_weights(QuantizedWeights(weights.down_proj[one], s2[one], *how), dtype)[0]

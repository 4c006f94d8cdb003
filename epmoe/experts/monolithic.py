"""`monolithic`: from router logits to the routed output in one piece, for inference where every expert is local. It
stands where the router's choice, dispatch, experts and combine stand otherwise, and shows none of them.

Few tokens take one launch (`ops/routed_mlp.py`); more of them the same grouped GEMMs as `grouped`, behind a launch that
routes and sorts (`ops/route_align.py`).

M tokens, H width, I intermediate size, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.config import RouterConfig
from epmoe.dispatch.inputs import BatchedInput, ExpertInput
from epmoe.experts._mlp import Rows, kernel_refusal, mlp_forward
from epmoe.experts.base import Experts
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.ops._segments import standard_segments
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.route_align import route_align
from epmoe.ops.routed_mlp import routed_mlp, routed_mlp_fits


class MonolithicExperts(Experts):
    """Triton kernels on CUDA; on CPU their torch twins. Takes logits only: `from_logits`. No gradients, no adapters."""

    name = "monolithic"
    monolithic = True
    autograd = False
    cuda_graph = True

    @classmethod
    def refusal(cls, spec: ExpertsSpec) -> str | None:
        return kernel_refusal(spec)

    def apply(self, rows: ExpertInput | BatchedInput, weights: ExpertWeights) -> Tensor:
        raise ValueError(
            f"experts={self.name!r} route by themselves and take no routed rows: call from_logits(x, logits, ...), or "
            "use experts='grouped'"
        )

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
        """The routed MLP of each token by the experts that `epmoe.route` chooses from its logits.

        Args:
            x: `[M, H]`, rows dense; may lie apart.
            logits: `[M, E]`, any floating dtype; E experts, all of them in `weights`. Routed in `router.dtype`.
            selection_bias: `[E]` or None, as in `epmoe.route`.

        Returns:
            `[M, H]` in x's dtype.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit each other or the spec; adapters; gradient recording
                asked for.
        """
        self._check(x, logits, router, weights, selection_bias, top_k)
        spec = self.spec
        act = spec.activation
        w1, w2, b1, b2 = weights.gate_up_proj, weights.down_proj, weights.gate_up_bias, weights.down_bias
        if torch.float64 in (router.dtype, logits.dtype):
            logits = logits.to(router.dtype)  # lower precisions the kernels raise by themselves
        if routed_mlp_fits(x, logits, w1, w2, router.num_groups):
            return routed_mlp(
                x,
                logits,
                selection_bias,
                w1,
                b1,
                w2,
                b2,
                top_k,
                router.scoring,
                router.renormalize,
                float(router.scaling_factor),
                router.num_groups,
                router.topk_groups,
                router.group_score,
                act.name,
                act.alpha,
                act.limit,
                spec.weight_on_input,
            )
        _, p, row_index, offsets, slot = route_align(logits, router, top_k, selection_bias)
        p = p.to(torch.promote_types(x.dtype, torch.float32))
        rows = Rows(*standard_segments(offsets), row_index, top_k, row_index.shape[0])
        weight_in = p.view(-1) if spec.weight_on_input else None
        y, _ = mlp_forward(x, w1, w2, b1, b2, rows, weight_in, act, False)
        return gather_sum(y, slot, None if spec.weight_on_input else p, x.dtype)

    def _check(
        self,
        x: Tensor,
        logits: Tensor,
        router: RouterConfig,
        weights: ExpertWeights,
        selection_bias: Tensor | None,
        top_k: int,
    ) -> None:
        where, spec = f"experts={self.name!r}: ", self.spec
        self.check_lora(weights.lora, False)
        if x.dim() != 2 or x.shape[1] != spec.hidden_size or (x.stride(1) != 1 and x.numel() > x.shape[0]):
            raise ValueError(
                f"{where}x has shape {tuple(x.shape)} and strides {x.stride()}: must be [M, H={spec.hidden_size}] with "
                "dense rows"
            )
        experts = weights.down_proj.shape[0]
        per_group = experts // router.num_groups
        if experts != per_group * router.num_groups or not 1 <= top_k <= per_group * router.topk_groups:
            raise ValueError(
                f"{where}top_k={top_k} of {experts} experts in {router.num_groups} groups, of which "
                f"{router.topk_groups} may be chosen from: groups must be equal and hold top_k experts, at least 1"
            )
        h, i = spec.hidden_size, spec.intermediate_size
        gate_up = (experts, 2 * i if spec.activation.gated else i)
        expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
            "x": (x, (x.shape[0], h)),
            "gate_up_proj": (weights.gate_up_proj, (*gate_up, h)),
            "down_proj": (weights.down_proj, (experts, h, i)),
            "gate_up_bias": (weights.gate_up_bias, gate_up),
            "down_bias": (weights.down_bias, (experts, h)),
            "logits": (logits, (x.shape[0], experts)),
            "selection_bias": (selection_bias, (experts,)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{where}{name} has shape {tuple(tensor.shape)}, must be {shape}, {experts} experts being local"
                )
            routing = name in ("logits", "selection_bias")
            if not tensor.is_floating_point() or (not routing and tensor.dtype != x.dtype):
                right = "a floating dtype" if routing else f"{x.dtype}, as x: convert one, or run under torch.autocast"
                raise ValueError(f"{where}{name} is {tensor.dtype}, must be {right}")
            if tensor.device != x.device:
                raise ValueError(f"{where}{name} is on {tensor.device}, x on {x.device}")
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise ValueError(
                    f"{where}{name} wants a gradient and there is no backward here: use torch.no_grad(), or a router "
                    "and experts='grouped'"
                )

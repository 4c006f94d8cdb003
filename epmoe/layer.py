"""`MoELayer`: the `nn.Module` that goes where a model's MoE block was.

    x [..., H] ── router ──► Routing ── MoEKernel ──► routed [M, H]  (+ shared experts) ──► [..., H]

With `latent_size` the routed experts work between `latent_down` and `latent_up`; router and shared experts see all of
x. H hidden size, I expert intermediate size, E experts, L experts on this rank, M tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epmoe.adapters import LORA_PARAMETERS, WithLora
from epmoe.checks import as_device, check_ids, check_kind, said
from epmoe.comm import EPGroup
from epmoe.config import DTYPES, MoEConfig
from epmoe.dense import Projection, SharedExperts
from epmoe.dispatch import make_dispatcher
from epmoe.dispatch.wire import RowSpec
from epmoe.experts import ExpertWeights, select_experts_impl, sum_gradients
from epmoe.kernel import MoEKernel
from epmoe.placement import ExpertPlacement
from epmoe.quantized import (
    DOWN_INPUT_SCALE,
    INPUT_SCALE,
    PROJECTIONS,
    SCALE_PARAMETERS,
    WithQuantizedExperts,
    check_loaded,
    copy_bits,
)
from epmoe.recompute import current_tape
from epmoe.router import Router
from epmoe.routing import Routing, as_routing

EXPERT_PARAMETERS = (
    "gate_up_proj", "down_proj", "gate_up_bias", "down_bias", *SCALE_PARAMETERS, *LORA_PARAMETERS
)  # fmt: skip


class MoELayer(WithLora, WithQuantizedExperts):
    """A Mixture-of-Experts layer whose routed experts are spread over the ranks of `ep`.

    Parameters: `router.weight [E, H]`; this rank's experts `gate_up_proj [L, 2I, H]` (gate rows, then up rows; `[L, I,
    H]` when the activation is not gated) and `down_proj [L, H, I]`, with `expert_bias` also `gate_up_bias`,
    `down_bias`; `shared_experts.*`; `latent_down.weight [latent, H]`, `latent_up.weight [H, latent]`. `local_experts`
    are the logical ids of the L. Quantized experts (`config.quant`, or `quantize_` later) hold values in the
    projections and scales beside them, such as `gate_up_proj_scale_inv`, none of which needs a gradient.

    Every rank of the group must call the layer the same number of times, in forward and in backward, also with zero
    tokens. Expert gradients are sums over the tokens of all ranks: see `epmoe.integrations.gradients` for data
    parallelism.

    Args:
        config: sizes and functions.
        ep: the ranks that share the experts; None: all of them live here.
        device, dtype: of the parameters; `device="meta"` builds without memory (`to_empty`, then `reset_parameters` or
            `load_experts`).
        router: a module or callable `f(x [M, H]) -> Routing | (topk_ids, topk_weights)` instead of `config.router`.
        name: names the layer in errors and finds its place in a recomputation.

    Raises:
        ValueError: the configuration can't be built here, or differs between the ranks (each differing field is named).

    Example::

        layer = MoELayer(MoEConfig(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8), EPGroup(),
                         device="cuda", dtype=torch.bfloat16)
        y = layer(x)  # [..., 2048] -> [..., 2048]
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    shared_experts: SharedExperts | None
    latent_down: Projection | None
    latent_up: Projection | None

    def __init__(
        self,
        config: MoEConfig,
        ep: EPGroup | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        router: Callable[[Tensor], Routing | tuple[Tensor, Tensor]] | None = None,
        name: str = "moe",
    ) -> None:
        super().__init__()
        swapped = "the first argument is the MoEConfig, the second the EPGroup" if isinstance(config, EPGroup) else ""
        check_kind("config", config, MoEConfig, "a MoEConfig", swapped)
        check_kind("ep", ep, (EPGroup, type(None)), "an EPGroup, or None for all experts in this process")
        check_kind("name", name, str, "a str")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in DTYPES:
            raise ValueError(f"{said('dtype', dtype)}: must be one of {', '.join(map(str, DTYPES))}")
        if router is not None and not callable(router):
            raise ValueError(
                f"layer {name!r}: {said('router', router)}: must be a module or function of x that returns a Routing "
                "or (topk_ids, topk_weights); rules for the layer's own go into MoEConfig(router=RouterConfig(...))"
            )
        self.config, self.ep, self.name = config, ep, name
        ranks, rank = (ep.num_ranks, ep.rank) if ep is not None else (1, 0)
        if device is None and ep is not None:
            device = ep.device
        device = None if device is None else as_device(device)
        if config.experts == "monolithic" and router is not None:
            raise ValueError(
                f"layer {name!r}: experts='monolithic' route by themselves, which a router of your own can't: leave "
                "router unset, or use other experts"
            )
        if ep is not None:  # before anything that could fail on one rank only
            ep.check_same(f"MoELayer {name!r}", {**config.fields(), "dtype": dtype, "own router": router is not None})
        self.placement = ExpertPlacement.from_spec(config.placement, config.num_experts, ranks)
        self.local_experts = self.placement.local_experts(rank)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        h, h_expert, i, local = (
            config.hidden_size, config.expert_hidden_size, config.intermediate_size, len(self.local_experts)
        )  # fmt: skip
        activation = config.activation_function
        width = 2 * i if activation.gated else i
        self.router = (
            Router(config.router, h, config.num_experts, config.top_k, **factory) if router is None else router
        )
        self._make_projections(device, dtype)
        self.gate_up_bias = nn.Parameter(torch.empty(local, width, **factory)) if config.expert_bias else None
        self.down_bias = nn.Parameter(torch.empty(local, h_expert, **factory)) if config.expert_bias else None
        self.latent_down = Projection(h, h_expert, **factory) if config.latent_size else None
        self.latent_up = Projection(h_expert, h, **factory) if config.latent_size else None
        self.shared_experts = (
            SharedExperts(
                config.num_shared_experts, h, config.shared_size, activation, config.shared_expert_gate, **factory
            )
            if config.num_shared_experts
            else None
        )
        self._kernels: dict[tuple[torch.device, torch.dtype], MoEKernel] = {}
        if self.gate_up_proj.device.type != "meta":
            self.kernel(self.gate_up_proj.device, dtype)  # a combination that can't work is refused here
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, and which experts are here."""
        c = self.config
        return (
            f"H={c.hidden_size}, I={c.intermediate_size}, E={c.num_experts}, K={c.top_k}, {c.activation}, "
            f"{len(self.local_experts)} experts here, ep={self.ep}"
        )

    def kernel(self, device: torch.device, dtype: torch.dtype) -> MoEKernel:
        """The `MoEKernel` for rows of `dtype` on `device`: chosen once, then kept."""
        if (device, dtype) not in self._kernels:
            config = self.config
            rows = RowSpec.of(config, dtype)
            self._kernels[device, dtype] = MoEKernel(
                make_dispatcher(
                    config.dispatcher,
                    self.ep,
                    self.placement,
                    device,
                    layer=self.name,
                    max_tokens_per_rank=config.max_tokens_per_rank,
                    rows=rows,
                    compared=True,  # with the configuration, when the layer was made
                ),
                select_experts_impl(config, device=device, dtype=dtype, lora=bool(self.lora_adapters)).experts,
                layout=config.experts_layout,
                dispatch_scheme=rows.scheme,
                combine_scheme=rows.combine_scheme,
                grad_scheme=rows.grad_scheme,
                quantized_before=rows.quantized_before,
                expert_capacity=config.expert_capacity,
                overflow=config.overflow,
                chunk_tokens=config.chunk_tokens,
                shared_experts_order=config.shared_experts_order,
                comm_sms=config.comm_sms,
                validate=config.validate or None,
            )
        return self._kernels[device, dtype]

    def _check_experts(self, config: MoEConfig, dtype: torch.dtype) -> None:
        device = self.gate_up_proj.device
        if device.type != "meta":
            select_experts_impl(config, device=device, dtype=dtype, lora=bool(self.lora_adapters))

    def expert_weights(self) -> ExpertWeights:
        """This rank's experts as `MoEKernel` takes them."""
        return ExpertWeights(
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_bias,
            self.down_bias,
            lora=self.expert_lora(),
            **self._expert_scales(),
        )

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that differ between ranks, by name: the routed experts'. All others are replicated."""
        names = (*EXPERT_PARAMETERS, *((INPUT_SCALE,) if self._scales_by_expert else ()))
        named = {name: getattr(self, name) for name in names}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with std 1/√fan-in, biases zero.

        Each expert draws from a generator of its own, seeded from torch's default one and its logical id, so that ranks
        seeded alike build the same model at any EP size.
        """
        if isinstance(self.router, Router):
            self.router.reset_parameters()
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters()
        for projection in (self.latent_down, self.latent_up):
            if projection is not None:
                projection.reset_parameters()
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator(self.gate_up_proj.device)
        for local, expert in enumerate(self.local_experts):
            generator.manual_seed(seed + expert)
            for name in PROJECTIONS:
                self._draw_expert(name, local, generator)
        self.reset_lora_parameters()

    @torch.no_grad()
    def load_experts(self, tensors: Mapping[str, Tensor], expert_ids: Sequence[int] | None = None) -> list[int]:
        """Copies this rank's experts out of full or sharded tensors.

        Quantized experts take values and scales as they are, or wide weights, which are quantized one expert at a time.

        Args:
            tensors: `gate_up_proj`, `down_proj`, `gate_up_bias`, `down_bias`, scales such as `gate_up_proj_scale_inv`,
                or some of them, each one row per expert along the first dimension.
            expert_ids: the logical id of each row; None: the tensors are full, row e is expert e.

        Returns:
            The logical ids that were copied: those in `tensors` that this rank owns.

        Raises:
            ValueError: an unknown name, a wrong shape, a dtype that is none of such numbers, ids that do not fit, or no
                tensor at all.
        """
        num_experts = self.config.num_experts
        ids = list(range(num_experts)) if expert_ids is None else check_ids("expert_ids", expert_ids, num_experts)
        parameters = self.expert_parameters()
        if not isinstance(tensors, Mapping) or not tensors:
            raise ValueError(f"{said('tensors', tensors)}: must map names to tensors, some of {', '.join(parameters)}")
        for name, tensor in tensors.items():
            if name not in parameters:
                raise ValueError(f"{name!r} is no expert tensor of this layer; it has {', '.join(parameters)}")
            check_kind(name, tensor, Tensor, "a tensor")
            wide = self._is_wide(name, tensor, tensors)
            check_loaded(name, tensor, self.dtype if wide else parameters[name].dtype)
            shape = (len(ids), *(self.weight_shape(name) if wide else parameters[name].shape)[1:])
            if tuple(tensor.shape) != shape:
                hint = "" if expert_ids is not None else " (pass expert_ids if these are not all experts)"
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}{hint}")
        here = [(self.local_experts.index(e), row, e) for row, e in enumerate(ids) if e in self.local_experts]
        for name, tensor in tensors.items():
            wide = self._is_wide(name, tensor, tensors)
            for local, row, _ in here:
                if wide:
                    self._write_expert(name, local, tensor[row].to(parameters[name].device))
                else:
                    copy_bits(parameters[name][local], tensor[row])
        if DOWN_INPUT_SCALE in tensors or INPUT_SCALE in tensors:
            self._look_at_scales()
        return [expert for _, _, expert in here]

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        adapter_ids: Tensor | int | None = None,
        routing: Routing | tuple[Tensor, Tensor] | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, Routing]:
        """The layer's output, in the shape and dtype of x.

        Args:
            x: `[..., H]`; any number of tokens, also none.
            token_mask: `[...]` bool, False for padding: those tokens go to no routed expert and cost nothing there.
            adapter_ids: `[...]` int32, each token's adapter of `add_lora`, or one number for all tokens; -1 is none, as
                None is for all. Other ranks may have other tokens or none with adapters.
            routing: decided elsewhere, as a `router` of one's own gives it: the layer's router is not asked.
            return_routing: also give the `Routing`, for losses and load metrics.

        Raises:
            ValueError: x does not fit the layer.
            PeerError: another rank did not take part within the group's deadline.
        """
        dtype = self._check(x, token_mask)
        tokens = x.reshape(-1, x.shape[-1])
        if tokens.stride(-1) != 1:
            tokens = tokens.contiguous()
        mask = None if token_mask is None else token_mask.reshape(-1)
        adapters = self._adapter_ids(adapter_ids, x)

        kernel = self.kernel(tokens.device, dtype)
        monolithic = kernel.experts.monolithic
        tape = None if monolithic else current_tape()
        forced, layout = tape.next(self.name) if tape is not None and tape.replaying else (None, None)
        if monolithic:
            logits = self._logits(tokens, mask, return_routing, routing is not None)
        else:
            chosen = self._route(tokens, mask, forced, routing)
        with torch.autocast(tokens.device.type, enabled=False):
            tokens = tokens.to(dtype)
            routed_input = tokens if self.latent_down is None else self.latent_down(tokens)
            weights, shared_experts = self.expert_weights().to(dtype), self.shared_experts
            if self.config.main_grad:
                weights = sum_gradients(weights, self.expert_parameters())
            shared = None if shared_experts is None else lambda: shared_experts(tokens)
            if monolithic:
                out = kernel.from_logits(routed_input, logits, weights, shared_experts=shared, **self._routing_rules())
            else:
                precise = chosen.topk_weights.to(torch.promote_types(dtype, torch.float32))
                out = kernel(
                    self._as_sent(routed_input),
                    chosen.topk_ids,
                    precise,
                    weights,
                    shared_experts=shared,
                    layout=layout,
                    adapter_ids=adapters,
                )
            if tape is not None and not tape.replaying:
                assert out.layout is not None
                tape.record(self.name, chosen.topk_ids, out.layout)
            y = out.routed if self.latent_up is None else self.latent_up(out.routed)
            if out.shared is not None:
                y = y + out.shared
        y = y.to(x.dtype)
        if y.shape != x.shape:  # no view: hooks on an output, as FSDP2 sets them, are lost where a view is written to
            y = torch.ops.aten._unsafe_view(y, x.shape)
        return (y, chosen) if return_routing else y

    def _logits(self, tokens: Tensor, mask: Tensor | None, return_routing: bool, given: bool) -> Tensor:
        """What monolithic experts route by; a masked token has no usable expert."""
        if return_routing or given:
            verb, asked = ("show", "return_routing=True") if return_routing else ("take", "routing=")
            raise ValueError(
                f"layer {self.name!r}: experts={self.config.experts!r} {verb} no routing: {asked} needs others"
            )
        assert isinstance(self.router, Router), "checked when the layer was made"
        logits = self.router.logits(tokens, mask)
        return logits if mask is None else torch.where(mask[:, None], logits, -torch.inf)

    def _routing_rules(self) -> dict[str, Any]:
        assert isinstance(self.router, Router)
        return {
            "router": self.router.config,
            "top_k": self.router.top_k,
            "selection_bias": self.router.selection_bias,
        }

    def _route(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        forced: Tensor | None,
        given: Routing | tuple[Tensor, Tensor] | None,
    ) -> Routing:
        if given is None and isinstance(self.router, Router):
            return self.router(tokens, topk_ids=forced, token_mask=mask)
        result = self.router(tokens) if given is None else given
        origin = "the router returned" if given is None else "routing= is"
        routing = as_routing(result, tokens.shape[0], self.config.top_k, self.config.num_experts, origin)
        if mask is not None:
            routing = routing.masked(mask)
        if forced is not None and not torch.equal(forced, routing.topk_ids):
            raise RuntimeError(
                f"layer {self.name!r}: the custom or given routing chose other experts when recomputed; make it "
                "repeatable, or keep the layer out of the checkpointed function"
            )
        return routing

    def _check(self, x: Tensor, token_mask: Tensor | None) -> torch.dtype:
        """Checks the input; returns the dtype to compute in."""
        where = f"layer {self.name!r}: "
        weight = self.gate_up_proj
        if not isinstance(x, Tensor):
            raise ValueError(f"{where}{said('x', x)}: must be a tensor [..., {self.config.hidden_size}]")
        if self._unset_scales:
            self._refuse_unset_scales()
        if x.dim() < 1 or x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"{where}x has shape {tuple(x.shape)}, must be [..., {self.config.hidden_size}]")
        if weight.device.type == "meta" and x.device.type != "meta":
            raise ValueError(f"{where}parameters are on meta: call to_empty(device=...), then load or reset them")
        if x.device != weight.device:
            raise ValueError(f"{where}x is on {x.device}, the parameters on {weight.device}")
        if token_mask is not None and not isinstance(token_mask, Tensor):
            raise ValueError(
                f"{where}{said('token_mask', token_mask)}: must be a bool tensor {tuple(x.shape[:-1])}, or None"
            )
        if token_mask is not None and (token_mask.shape != x.shape[:-1] or token_mask.dtype != torch.bool):
            raise ValueError(
                f"{where}token_mask is {token_mask.dtype} {tuple(token_mask.shape)}, must be bool {tuple(x.shape[:-1])}"
            )
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        if x.dtype != self.dtype:
            raise ValueError(
                f"{where}x is {x.dtype}, the experts are {self.dtype}: convert one, or run under torch.autocast"
            )
        return x.dtype

"""What a layer is, before any tensor exists: frozen dataclasses that check themselves.

A wrong field raises `ValueError` naming the field, the value it had and what would be right. Everything here is plain
data, so two ranks can compare their configurations field by field (`comm.EPGroup.check_same`).

Letters: H hidden size, I expert intermediate size, E logical experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import torch

from epmoe.checks import check_bool, check_int, check_kind, check_name, is_number, require
from epmoe.placement import ExpertPlacement
from epmoe.quant.config import QuantConfig
from epmoe.quant.rows import ROW_SCHEMES

Scoring = Literal["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["max", "top2_sum"]

_ACTIVATIONS: dict[str, tuple[bool, float, float]] = {  # name: (gated, default alpha, default limit)
    "swiglu": (True, 1.0, math.inf),
    "geglu": (True, 1.0, math.inf),
    "geglu_tanh": (True, 1.0, math.inf),
    "reglu2": (True, 1.0, math.inf),
    "swiglu_oai": (True, 1.702, 7.0),
    "swiglu_clamped": (True, 1.0, 7.0),
    "silu": (False, 1.0, math.inf),
    "gelu": (False, 1.0, math.inf),
    "relu2": (False, 1.0, math.inf),
}
ACTIVATIONS = tuple(_ACTIVATIONS)
SHARED_EXPERTS_ORDERS = ("auto", "before", "during", "after")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Activation:
    """The function between the two expert GEMMs, of the gate g and the up projection u (or of g alone).

    | name | formula | used by |
    |---|---|---|
    | `swiglu` | silu(g) · u | Mixtral, Qwen, DeepSeek |
    | `geglu`, `geglu_tanh` | gelu(g) · u, exact or by tanh | Gemma-like |
    | `reglu2` | relu(g)² · u | |
    | `swiglu_oai` | g = min(g, limit), u = clamp(u, ±limit): (u + 1) · g · σ(alpha·g) | gpt-oss |
    | `swiglu_clamped` | the same clamps: u · g · σ(alpha·g) | |
    | `silu`, `gelu` (exact), `relu2` | not gated: f(g), w1 is `[L, I, H]` | Nemotron-like |

    `alpha` and `limit` are read only by the two clamped forms.
    """

    name: str = "swiglu"
    alpha: float = 1.0
    limit: float = math.inf

    def __post_init__(self) -> None:
        check_name("activation", self.name, ACTIVATIONS)
        require(is_number(self.limit) and self.limit > 0, "activation_limit", self.limit, "a number > 0")
        require(is_number(self.alpha) and math.isfinite(self.alpha), "activation_alpha", self.alpha, "a finite number")
        if self.name not in ("swiglu_oai", "swiglu_clamped"):
            require(self.alpha == 1.0, "activation_alpha", self.alpha, f"left unset: {self.name!r} does not read it")
            require(self.limit == math.inf, "activation_limit", self.limit, f"left unset: {self.name!r} has no clamp")

    @classmethod
    def named(cls, name: str, alpha: float | None = None, limit: float | None = None) -> Activation:
        """The activation `name` with its published defaults, overridden where `alpha` or `limit` is given."""
        check_name("activation", name, ACTIVATIONS)
        _, default_alpha, default_limit = _ACTIVATIONS[name]
        return cls(name, default_alpha if alpha is None else alpha, default_limit if limit is None else limit)

    @property
    def gated(self) -> bool:
        """Whether w1 holds gate and up rows (`2I`) rather than `I` rows."""
        return _ACTIVATIONS[self.name][0]


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How logits `[M, E]` become `topk_ids` and `topk_weights` `[M, K]`; see `router.Router` for the exact rules.

    Args:
        scoring: `softmax` (softmax over E, then top-k), `topk_softmax` (top-k of the logits, then softmax over the K),
            `sigmoid`, or `sqrt_softplus` (√softplus).
        renormalize: divide the K weights by their sum.
        scaling_factor: multiplies the weights last.
        num_groups, topk_groups: grouped top-k: the E experts form `num_groups` equal consecutive groups and only the
            best `topk_groups` of them may be chosen from. 1 and 1: no grouping.
        group_score: a group's score is its best expert's (`max`, DeepSeek-V2) or the sum of its two best
            (`top2_sum`, DeepSeek-V3).
        selection_bias: own a buffer `selection_bias [E]` fp32, added to the scores for choosing and not for weighting.
        bias: the router's linear map has a bias (gpt-oss).
        dtype: of logits, scores and weights, whatever the activations are.
    """

    scoring: Scoring = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "max"
    selection_bias: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        scorings = ("softmax", "topk_softmax", "sigmoid", "sqrt_softplus")
        check_name("RouterConfig.scoring", self.scoring, scorings)
        for field in ("renormalize", "selection_bias", "bias"):
            check_bool(f"RouterConfig.{field}", getattr(self, field))
        require(
            self.group_score in ("max", "top2_sum"), "RouterConfig.group_score", self.group_score, "max or top2_sum"
        )
        check_int("RouterConfig.num_groups", self.num_groups)
        check_int("RouterConfig.topk_groups", self.topk_groups)
        require(
            self.topk_groups <= self.num_groups,
            "RouterConfig.topk_groups",
            self.topk_groups,
            f"at most num_groups={self.num_groups}",
        )
        require(
            is_number(self.scaling_factor) and math.isfinite(self.scaling_factor) and self.scaling_factor != 0,
            "RouterConfig.scaling_factor",
            self.scaling_factor,
            "a number, finite and not 0",
        )
        require(
            self.dtype in (torch.float32, torch.float64),
            "RouterConfig.dtype",
            self.dtype,
            "torch.float32 or torch.float64",
        )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One MoE layer. Sizes are global: a rank's share follows from the `EPGroup` and the placement.

    Args:
        hidden_size: H, the width of the layer's input and output.
        intermediate_size: I, the width inside each routed expert.
        num_experts: E.
        top_k: K.
        activation, activation_alpha, activation_limit: see `Activation`; None takes the named form's own constants.
        router: see `RouterConfig`.
        router_weight_on_input: multiply each row by its router weight before GEMM1 instead of after GEMM2. Another
            function (the activation stands between), used by Llama-4; any K.
        expert_bias: `gate_up_bias [L, 2I]` and `down_bias [L, H]`.
        num_shared_experts: shared experts, each an MLP with the same activation that sees every token.
        shared_intermediate_size: width inside each shared expert; None takes `intermediate_size`.
        shared_expert_gate: multiply each shared expert's output by sigmoid(x · w), w `[H]`.
        latent_size: latent MoE: routed experts work on `latent_proj(x)` of this width and their sum is projected back;
            router and shared experts keep the full x.
        placement: `contiguous`, `strided`, or one tuple of expert ids per rank, as `ExpertPlacement.ranks` has them; an
            `ExpertPlacement` becomes its `ranks`.
        dispatcher: `auto`, `local`, `all_gather`, `all_to_all`, `all_to_all_fixed`, `hierarchical` or `symmetric`.
        experts: `auto`, `reference`, `torch_grouped`, `grouped`, `batched` or `monolithic`, or, to train with products
            in fp8, `grouped_fp8_train`. With quantized weights it stays `auto`, and `QuantConfig.experts` says:
            `grouped_fp8`, `grouped_int8`, `weight_only` or `reference`. `epmoe doctor --capabilities` tells them apart.
        max_tokens_per_rank: the most tokens any rank brings to one call, the same on all ranks. `all_to_all_fixed` and
            `symmetric` reserve room for it and need it; `auto` may take `symmetric` where it is set.
        dispatch_scheme: quantize rows before they are sent (`fp8_block`, `fp8_row`, `int8_row`, ...): short for
            `quant=QuantConfig(activations=...)`.
        quant: which numbers are held, sent and multiplied in eight bits or fewer; see `QuantConfig`.
        expert_capacity, overflow: places per expert of `batched` experts (None: room for every row), and what happens
            past them: `raise`, `chunk` or `drop`.
        chunk_tokens: compute at most this many received rows at a time (None: all at once).
        batch_invariant: a token's routed output, given its ids and weights, has the same bits in every batch: one
            kernel configuration for all sizes. Router, shared experts and latent projections are torch's products,
            which promise nothing.
        main_grad: backward adds the experts' gradients in float32 to the tensor `main_grad` of each expert parameter,
            which the user makes and clears, and leaves `.grad` None: Megatron's fused accumulation. See
            `experts.sum_gradients`.
        shared_experts_order: `auto`, `before` dispatch, `during` combine, or `after` it.
        comm_sms: SMs for rows that move beside a computation, which leaves them free; None: what the dispatcher needs.
        validate: check ids and weights of every call (waits for the device). Also set by EPMOE_VALIDATE=1.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    activation_alpha: float | None = None
    activation_limit: float | None = None
    router: RouterConfig = RouterConfig()
    router_weight_on_input: bool = False
    expert_bias: bool = False
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    latent_size: int | None = None
    placement: str | tuple[tuple[int, ...], ...] | ExpertPlacement = "contiguous"
    dispatcher: str = "auto"
    experts: str = "auto"
    max_tokens_per_rank: int | None = None
    dispatch_scheme: str | None = None
    quant: QuantConfig | None = None
    expert_capacity: int | None = None
    overflow: str = "raise"
    chunk_tokens: int | None = None
    main_grad: bool = False
    batch_invariant: bool = False
    shared_experts_order: str = "auto"
    comm_sms: int | None = None
    validate: bool = False

    def __post_init__(self) -> None:
        for field in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            check_int(f"MoEConfig.{field}", getattr(self, field))
        for field in (
            "shared_intermediate_size",
            "latent_size",
            "max_tokens_per_rank",
            "expert_capacity",
            "chunk_tokens",
            "comm_sms",
        ):
            check_int(f"MoEConfig.{field}", getattr(self, field), or_none=True)
        for field in (
            "router_weight_on_input",
            "expert_bias",
            "shared_expert_gate",
            "main_grad",
            "batch_invariant",
            "validate",
        ):
            check_bool(f"MoEConfig.{field}", getattr(self, field))
        check_kind(
            "MoEConfig.router", self.router, RouterConfig, "a RouterConfig, such as RouterConfig(scoring='softmax')"
        )
        check_kind(
            "MoEConfig.quant", self.quant, (QuantConfig, type(None)), "a QuantConfig, such as QuantConfig('fp8_block')"
        )
        require(
            self.top_k <= self.num_experts, "MoEConfig.top_k", self.top_k, f"at most num_experts={self.num_experts}"
        )
        check_int("MoEConfig.num_shared_experts", self.num_shared_experts, 0)
        if self.num_shared_experts == 0:
            for field, unset in (("shared_expert_gate", False), ("shared_intermediate_size", None)):
                value = getattr(self, field)
                require(value == unset, f"MoEConfig.{field}", value, "left unset, since num_shared_experts=0")
        self._check_names()
        require(
            self.quant is None or self.dispatch_scheme in (None, self.quant.rows),
            "MoEConfig.dispatch_scheme",
            self.dispatch_scheme,
            "left unset, since MoEConfig.quant says how rows are sent",
        )
        groups = self.router.num_groups
        require(
            self.num_experts % groups == 0,
            "MoEConfig.router.num_groups",
            groups,
            f"a divisor of num_experts={self.num_experts}",
        )
        selectable = self.num_experts // groups * self.router.topk_groups
        require(
            self.top_k <= selectable,
            "MoEConfig.top_k",
            self.top_k,
            f"at most {selectable}, the experts left in topk_groups={self.router.topk_groups} of {groups} groups",
        )
        self._check_placement()
        self.activation_function  # noqa: B018  (checks the three activation fields)

    def _check_names(self) -> None:
        from epmoe.capabilities import KINDS  # made of modules that need this one
        from epmoe.dispatch import DISPATCHERS
        from epmoe.dispatch.overflow import OverflowPolicy
        from epmoe.experts import EXPERTS, QUANTIZED_EXPERTS, TRAINING_EXPERTS

        check_name("MoEConfig.dispatcher", self.dispatcher, ("auto", *DISPATCHERS))
        check_name("MoEConfig.dispatch_scheme", self.dispatch_scheme, ROW_SCHEMES, none="rows as they are")
        check_name("MoEConfig.overflow", self.overflow, get_args(OverflowPolicy))
        check_name("MoEConfig.shared_experts_order", self.shared_experts_order, SHARED_EXPERTS_ORDERS)
        kinds, wanted = ("auto", *EXPERTS, *TRAINING_EXPERTS), self.experts
        if isinstance(wanted, str) and wanted in KINDS and wanted not in kinds:
            schemes = [scheme for scheme in KINDS[wanted].schemes if scheme is not None]
            raise ValueError(
                f"MoEConfig.experts={wanted!r}: these compute with quantized weights; set "
                f"quant=QuantConfig({schemes[0]!r}), or another of their schemes ({', '.join(schemes)}), and leave "
                "experts unset"
            )
        check_name("MoEConfig.experts", wanted, kinds)
        if self.quant is None or self.quant.weights is None:
            return
        if self.quant.experts not in KINDS:  # others say themselves why they can't compute with such weights
            check_name("QuantConfig.experts", self.quant.experts, ("auto", *QUANTIZED_EXPERTS))
        require(
            wanted == "auto",
            "MoEConfig.experts",
            wanted,
            f"left unset with weights in {self.quant.weights}: QuantConfig.experts names the kind"
            + (", and expert_capacity gives batched rows" if wanted == "batched" else ""),
        )
        require(
            self.expert_bias or not self.main_grad,
            "MoEConfig.main_grad",
            self.main_grad,
            f"left unset with weights in {self.quant.weights}, which have no gradients to add",
        )

    def _check_placement(self) -> None:
        placement, right = (
            self.placement,
            "contiguous, strided, an ExpertPlacement, or one tuple of expert ids per rank",
        )
        if isinstance(placement, str):
            require(placement in ("contiguous", "strided"), "MoEConfig.placement", placement, right)
            return
        if isinstance(placement, ExpertPlacement):
            placement = placement.ranks
        lists = isinstance(placement, (tuple, list)) and all(isinstance(ids, (tuple, list, range)) for ids in placement)
        require(lists, "MoEConfig.placement", placement, right)
        ranks = tuple(tuple(ids) for ids in placement)
        ExpertPlacement(self.num_experts, ranks)  # refuses what is no placement of these experts
        object.__setattr__(self, "placement", ranks)  # lists are what files have

    @property
    def activation_function(self) -> Activation:
        """The activation with its constants filled in."""
        return Activation.named(self.activation, self.activation_alpha, self.activation_limit)

    @property
    def experts_layout(self) -> str:
        """Layout of the experts' rows: `batched` where it was asked for or capacity says so, else `standard`."""
        return "batched" if self.experts == "batched" or self.expert_capacity is not None else "standard"

    @property
    def row_scheme(self) -> str | None:
        """The scheme that rows are sent in."""
        return self.dispatch_scheme if self.quant is None else self.quant.rows

    @property
    def expert_hidden_size(self) -> int:
        """Width of a routed expert's input and output: `latent_size` when set, else `hidden_size`."""
        return self.latent_size or self.hidden_size

    @property
    def shared_size(self) -> int:
        """Width inside each shared expert."""
        return self.shared_intermediate_size or self.intermediate_size

    def fields(self) -> dict[str, Any]:
        """Every field as text, nested ones as `router.scoring`: what ranks compare."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                out |= {f"{field.name}.{f.name}": str(getattr(value, f.name)) for f in dataclasses.fields(value)}
            else:
                out[field.name] = str(value)
        return out

"""What a layer is, before any tensor exists: frozen dataclasses that check themselves.

A wrong field raises `ValueError` naming the field, the value it had and what would be right. Everything here is plain
data, so two ranks can compare their configurations field by field (`comm.EPGroup.check_same`).

Letters: H hidden size, I expert intermediate size, E logical experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch

from epmoe.quant.config import QuantConfig

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
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _require(ok: bool, field: str, value: object, right: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: must be {right}")


def _positive_int(owner: str, field: str, value: object) -> None:
    _require(
        isinstance(value, int) and not isinstance(value, bool) and value > 0, f"{owner}.{field}", value, "an int > 0"
    )


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
        _require(self.name in _ACTIVATIONS, "activation", self.name, "one of " + ", ".join(ACTIVATIONS))
        _require(self.limit > 0, "activation_limit", self.limit, "> 0")
        _require(math.isfinite(self.alpha), "activation_alpha", self.alpha, "a finite float")
        if self.name not in ("swiglu_oai", "swiglu_clamped"):
            _require(self.alpha == 1.0, "activation_alpha", self.alpha, f"left unset: {self.name!r} does not read it")
            _require(self.limit == math.inf, "activation_limit", self.limit, f"left unset: {self.name!r} has no clamp")

    @classmethod
    def named(cls, name: str, alpha: float | None = None, limit: float | None = None) -> Activation:
        """The activation `name` with its published defaults, overridden where `alpha` or `limit` is given."""
        _, default_alpha, default_limit = _ACTIVATIONS.get(name, (True, 1.0, math.inf))
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
        _require(self.scoring in scorings, "RouterConfig.scoring", self.scoring, "one of " + ", ".join(scorings))
        _require(
            self.group_score in ("max", "top2_sum"), "RouterConfig.group_score", self.group_score, "max or top2_sum"
        )
        _positive_int("RouterConfig", "num_groups", self.num_groups)
        _positive_int("RouterConfig", "topk_groups", self.topk_groups)
        _require(
            self.topk_groups <= self.num_groups,
            "RouterConfig.topk_groups",
            self.topk_groups,
            f"at most num_groups={self.num_groups}",
        )
        _require(
            math.isfinite(self.scaling_factor) and self.scaling_factor != 0,
            "RouterConfig.scaling_factor",
            self.scaling_factor,
            "finite and not 0",
        )
        _require(
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
        placement: `contiguous`, `strided`, or one tuple of expert ids per rank.
        dispatcher: `auto`, `local`, `all_gather`, `all_to_all`, `all_to_all_fixed`, `hierarchical` or `symmetric`.
        experts: `auto`, `reference`, `torch_grouped`, `grouped` or `batched`, or `monolithic`.
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
    placement: str | tuple[tuple[int, ...], ...] = "contiguous"
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
            _positive_int("MoEConfig", field, getattr(self, field))
        for field in (
            "shared_intermediate_size",
            "latent_size",
            "max_tokens_per_rank",
            "expert_capacity",
            "chunk_tokens",
            "comm_sms",
        ):
            if getattr(self, field) is not None:
                _positive_int("MoEConfig", field, getattr(self, field))
        _require(
            self.top_k <= self.num_experts, "MoEConfig.top_k", self.top_k, f"at most num_experts={self.num_experts}"
        )
        _require(
            isinstance(self.num_shared_experts, int) and self.num_shared_experts >= 0,
            "MoEConfig.num_shared_experts",
            self.num_shared_experts,
            "an int >= 0",
        )
        if self.num_shared_experts == 0:
            for field, unset in (("shared_expert_gate", False), ("shared_intermediate_size", None)):
                value = getattr(self, field)
                _require(value == unset, f"MoEConfig.{field}", value, "left unset, since num_shared_experts=0")
        _require(
            self.quant is None or self.dispatch_scheme in (None, self.quant.rows),
            "MoEConfig.dispatch_scheme",
            self.dispatch_scheme,
            "left unset, since MoEConfig.quant says how rows are sent",
        )
        groups = self.router.num_groups
        _require(
            self.num_experts % groups == 0,
            "MoEConfig.router.num_groups",
            groups,
            f"a divisor of num_experts={self.num_experts}",
        )
        selectable = self.num_experts // groups * self.router.topk_groups
        _require(
            self.top_k <= selectable,
            "MoEConfig.top_k",
            self.top_k,
            f"at most {selectable}, the experts left in topk_groups={self.router.topk_groups} of {groups} groups",
        )
        if isinstance(self.placement, str):
            _require(
                self.placement in ("contiguous", "strided"),
                "MoEConfig.placement",
                self.placement,
                "contiguous, strided, or one tuple of expert ids per rank",
            )
        self.activation_function  # noqa: B018  (checks the three activation fields)

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

    def rows_are_storable(self, dtype: torch.dtype) -> bool:
        """Whether `auto` may store rows of `dtype` to peers one-sidedly; see `make_dispatcher`."""
        back = self.quant is not None and (self.quant.combine is not None or self.quant.gradients is not None)
        itemsize = dtype.itemsize if self.row_scheme is None else 1
        return not back and dtype != torch.float64 and self.expert_hidden_size * itemsize % 16 == 0

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

"""Logits -> which K experts a token meets, and with what weights: the first step on the path of a token.

`route` is the pure function whose docstring holds every rule (`ops.route` computes it); `Router` owns the linear map
before it; what both give is a `Routing` (`epmoe.routing`). The two losses and the bias update that keep experts evenly
loaded are here too. Nothing waits for the device.

Shapes: x `[M, H]`, logits and scores `[M, E]`, topk_ids and topk_weights `[M, K]`; M tokens of this rank, H hidden
size, E logical experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from epmoe.checks import as_device, check_int, check_kind, require_that
from epmoe.config import RouterConfig
from epmoe.ops.route import route_topk
from epmoe.ops.route_reference import RENORM_EPS, clean_logits
from epmoe.ops.wide_linear import wide_linear
from epmoe.routing import (
    RawLogits,
    Routing,
    check_mask,
    count_slots,
    int32_ids,
    no_autocast,
    visible_logits,
    visible_scores,
)


def route(
    logits: torch.Tensor,
    config: RouterConfig,
    top_k: int,
    *,
    selection_bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
) -> Routing:
    """The K experts of each token and their weights.

    | scoring | scores s `[M, E]` | chosen by | weights w of the chosen | as in |
    |---|---|---|---|---|
    | `softmax` | softmax(z) | s | s | Mixtral, Qwen-MoE, OLMoE; DeepSeek-V2 (groups by `max`, scaling) |
    | `topk_softmax` | softmax(z) | z | softmax of the K chosen z | gpt-oss (`bias`) |
    | `sigmoid` | σ(z) | s | s | DeepSeek-V3, GLM-4.x (groups by `top2_sum`, `selection_bias`); Llama-4 |
    | `sqrt_softplus` | √log(1 + exp z) | s | s | |

    Then, in this order: `renormalize` divides w by (Σ w + 1e-20); `scaling_factor` multiplies w.
    `selection_bias [E]` is added to what experts, and groups of experts, are chosen by; it never enters s or w. A bias
    of -inf or NaN takes the expert out of the choice.

    Slots are ordered by what they were chosen by, best first, and of equals the lower expert id wins, on every device.
    An expert whose logit is NaN or -inf is unusable for that token: never chosen, absent from every softmax and sum.
    +inf counts as the largest finite number. Slots left over when fewer than K experts are usable, or all K of a token
    whose `token_mask` is False, have id -1 and weight exactly 0. The gradient of logits is finite throughout.

    Args:
        logits: `[M, E]`, any floating dtype. All else is computed in `config.dtype`, under autocast too.
        topk_ids: integer `[M, K]`, forces the choice: only the weights are computed, at these ids (replay, recompute).
            They are trusted to be in [-1, E); `validate_routing` checks that.
        token_mask: bool `[M]`, False = padding.
    """
    require_that(logits.dim() == 2, f"logits has shape {list(logits.shape)}: must be [M, E]")
    num_tokens, num_experts = logits.shape
    _check_sizes(config, num_experts, top_k)
    if token_mask is not None:
        check_mask(token_mask, num_tokens)
    if selection_bias is not None:
        shape = list(selection_bias.shape)
        require_that(shape == [num_experts], f"selection_bias has shape {shape}: must be [E={num_experts}]")
    if topk_ids is not None:
        topk_ids = int32_ids(topk_ids, num_tokens, top_k)

    with no_autocast(logits):
        logits = logits.to(config.dtype)
        ids, weights = route_topk(logits, config, top_k, selection_bias, topk_ids, token_mask)
        if not torch.compiler.is_compiling():
            source = RawLogits(logits, token_mask, config.scoring, torch.is_grad_enabled())
            return Routing(ids, weights, num_experts=num_experts, source=source)
        # The compiler drops what nobody reads.
        scores = visible_scores(logits, token_mask, config.scoring)
        return Routing(ids, weights, visible_logits(logits, token_mask), scores, num_experts)


class Router(nn.Module):
    """The linear map H -> E and `route`. Parameters: `weight [E, H]`, and `bias [E]` if `config.bias`.

    Buffer, if `config.selection_bias`: `selection_bias [E]`, saved with the module and fp32 whatever the module is cast
    to or loaded from, since its updates are too small for bf16 (`update_selection_bias`).

    x and weight are raised to `config.dtype` before the product, under autocast too. A NaN in a row of x sends that
    token to no expert, yet makes the gradient of `weight` NaN as in any linear map: rows of padding belong in
    `token_mask`, and then may hold anything.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    selection_bias: torch.Tensor | None

    def __init__(
        self,
        config: RouterConfig,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size)
        check_int("num_experts", num_experts)
        check_int("top_k", top_k)
        device = None if device is None else as_device(device)
        _check_sizes(config, num_experts, top_k)
        self.config, self.hidden_size, self.num_experts, self.top_k = config, hidden_size, num_experts, top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if config.bias else None
        self.register_parameter("bias", bias)
        held = torch.empty(num_experts, device=device, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("selection_bias", held)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """weight normal with std H^-½, so that an x of unit variance gives logits of unit variance; biases zero."""
        self.weight.normal_(std=self.hidden_size**-0.5)
        for bias in (self.bias, self.selection_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self, x: torch.Tensor, *, topk_ids: torch.Tensor | None = None, token_mask: torch.Tensor | None = None
    ) -> Routing:
        """x `[M, H]` -> Routing; `topk_ids` and `token_mask` as in `route`."""
        return route(
            self.logits(x, token_mask),
            self.config,
            self.top_k,
            selection_bias=self.selection_bias,
            topk_ids=topk_ids,
            token_mask=token_mask,
        )

    def logits(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x `[M, H]` -> `[M, E]` in `config.dtype`; masked rows count as zeros."""
        shape = list(x.shape)
        require_that(
            x.dim() == 2 and shape[1] == self.hidden_size, f"x has shape {shape}: must be [M, H={self.hidden_size}]"
        )
        if token_mask is not None:
            check_mask(token_mask, shape[0])
            x = torch.where(token_mask[:, None], x, 0.0)  # NaN padding would reach weight.grad as 0 · NaN
        with no_autocast(x):
            return wide_linear(x, self.weight, self.bias, self.config.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        exact = self.selection_bias
        super()._apply(fn, recurse)
        if exact is not None and self.selection_bias is not None and self.selection_bias.dtype != torch.float32:
            self.selection_bias = exact.to(self.selection_bias.device)  # moved, with the bits the cast would have lost
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.selection_bias is not None:
            self.selection_bias = self.selection_bias.float()  # load_state_dict(assign=True) takes the file's dtype

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, {self.config}"


def load_balancing_loss(routing: Routing, num_experts: int) -> torch.Tensor:
    """E · Σ_e f_e · P_e (Switch Transformer, arXiv:2101.03961): 1 when both are uniform, at most E.

    f_e: the share of assignments that went to e. P_e: the mean over tokens of e's score, each token's scores divided by
    their sum. Tokens without an expert count in neither; with no token at all it is 0. The gradient flows through P.
    Scalar, of this rank's tokens: average over ranks and microbatches by their tokens.
    """
    if routing.scores is None:
        raise ValueError("routing.scores=None: load_balancing_loss needs a router that returns scores [M, E]")
    scores, counts = routing.scores, count_slots(routing.topk_ids, num_experts)
    live = (routing.topk_ids >= 0).any(-1)
    with no_autocast(scores):
        share = counts.to(scores.dtype) / counts.sum().clamp(min=1)
        scores = torch.where(live[:, None], scores, 0.0)
        mean = (scores / (scores.sum(-1, keepdim=True) + RENORM_EPS)).sum(0) / live.sum().clamp(min=1)
        return num_experts * (share * mean).sum()


def router_z_loss(routing: Routing) -> torch.Tensor:
    """Mean over tokens of logsumexp(logits)² (ST-MoE, arXiv:2202.08906). Scalar.

    Unusable experts are left out of the sum and tokens with none usable out of the mean; with no token at all it is 0.
    """
    if routing.logits is None:
        raise ValueError("routing.logits=None: router_z_loss needs a router that returns logits [M, E]")
    with no_autocast(routing.logits):
        z, usable = clean_logits(routing.logits)
        live = usable.any(-1)
        log_z = torch.where(usable | ~live[:, None], z, -math.inf).logsumexp(-1)
        return torch.where(live, log_z, 0.0).square().sum() / live.sum().clamp(min=1)


@torch.no_grad()
def update_selection_bias(router: Router, tokens_per_expert: torch.Tensor, rate: float) -> None:
    """selection_bias += rate · sign(mean load - load), in place: balance without a loss (arXiv:2408.15664).

    `tokens_per_expert`: integer `[E]`, already summed over every rank and microbatch of the step, so that all ranks
    make the same update. Compared in integers: an expert at exactly the mean load does not move.
    """
    bias, counts = router.selection_bias, tokens_per_expert
    if bias is None:
        raise ValueError("router has no selection_bias: set RouterConfig.selection_bias=True")
    shape = list(counts.shape)
    require_that(shape == list(bias.shape), f"tokens_per_expert has shape {shape}: must be [E={bias.shape[0]}]")
    integer = counts.dtype in (torch.int32, torch.int64)
    require_that(integer, f"tokens_per_expert has dtype {counts.dtype}: must be int32 or int64, exact counts")
    require_that(0 <= rate < math.inf, f"rate={rate}: must be finite and at least 0")
    counts = counts.to(bias.device, torch.int64)
    bias.add_((counts.sum() - counts * counts.numel()).sign().to(bias.dtype), alpha=rate)


def _check_sizes(config: RouterConfig, num_experts: int, top_k: int) -> None:
    check_kind("config", config, RouterConfig, "a RouterConfig, as RouterConfig(scoring='softmax')")
    groups = config.num_groups
    divides = num_experts > 0 and num_experts % groups == 0
    require_that(divides, f"num_experts={num_experts}: must be a positive multiple of RouterConfig.num_groups={groups}")
    most = num_experts // groups * config.topk_groups
    require_that(
        1 <= top_k <= most, f"top_k={top_k}: must be in [1, {most}], the experts in topk_groups={config.topk_groups}"
    )

"""Logits -> which K experts a token meets, and with what weights: the first step on the path of a token.

`route` is the pure function whose docstring holds every rule (`ops.route` computes it); `Router` owns the linear map
before it. The two losses and the bias update that keep experts evenly loaded are here too. Nothing waits for the device
except `validate_routing`.

Shapes: x `[M, H]`, logits and scores `[M, E]`, topk_ids and topk_weights `[M, K]`; M tokens of this rank, H hidden
size, E logical experts, K experts per token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from epmoe.checks import as_device, check_int, check_kind
from epmoe.config import RouterConfig
from epmoe.ops.route import route_topk
from epmoe.ops.route_reference import RENORM_EPS, clean_logits, score_logits
from epmoe.ops.wide_linear import wide_linear

_NEG_INF = -math.inf


class _Given(NamedTuple):
    """Logits and scores as somebody gave them."""

    logits: torch.Tensor | None
    scores: torch.Tensor | None

    def masked(self, token_mask: torch.Tensor) -> _Given:
        keep = token_mask[:, None]
        return _Given(
            None if self.logits is None else torch.where(keep, self.logits, _NEG_INF),
            None if self.scores is None else torch.where(keep, self.scores, 0.0),
        )


@dataclasses.dataclass(eq=False)
class _RawLogits:
    """What logits and scores of a Routing are made of when one is first read: most programs never read them."""

    raw: torch.Tensor
    token_mask: torch.Tensor | None
    scoring: str
    grad_enabled: bool  # as of `route`: logging under no_grad may come before the loss

    def __post_init__(self) -> None:
        self.versions = self._versions()

    @functools.cached_property
    def logits(self) -> torch.Tensor:
        with self._as_then():
            return _visible_logits(self.raw, self.token_mask)

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        with self._as_then():
            return _visible_scores(self.raw, self.token_mask, self.scoring)

    def masked(self, token_mask: torch.Tensor) -> _RawLogits:
        with self._as_then():
            both = token_mask if self.token_mask is None else self.token_mask & token_mask
            return dataclasses.replace(self, token_mask=both)

    def _versions(self) -> list[int]:
        tensors = [part for part in (self.raw, self.token_mask) if isinstance(part, torch.Tensor)]
        return [-1 if t.is_inference() else t._version for t in tensors]

    @contextlib.contextmanager
    def _as_then(self) -> Iterator[None]:
        if self._versions() != self.versions:
            raise RuntimeError(
                "logits or token_mask were changed in place after route: read Routing.logits and .scores before that"
            )
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad_enabled), _no_autocast(self.raw):
            yield


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class Routing:
    """Where each token goes. A slot without an expert has id -1 and weight 0.

    topk_ids: int32 `[M, K]`, logical ids. topk_weights: `[M, K]`, differentiable.
    logits: `[M, E]`, -inf where an expert is unusable for that token, and for every expert of a masked token.
    scores: `[M, E]`, after scoring and without the selection bias, 0 where unusable; differentiable, for the losses.
    logits and scores are None when a router of one's own gave only ids and weights. After `route` they are computed
    when first read, as of the call to `route`: RuntimeError if its logits or token_mask changed in place since.

    A dataclass and a pytree whose parts are what was computed already: so FSDP and DDP, which look through what a
    module returns, find the tensors that gradients will come back to, and reading them computes nothing.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int | None
    source: _Given | _RawLogits

    def __init__(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        logits: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        num_experts: int | None = None,
        *,
        source: _Given | _RawLogits | None = None,
    ) -> None:
        if source is None:
            source = _Given(logits, scores)
        elif logits is not None or scores is not None:  # dataclasses.replace of one
            source = _Given(source.logits if logits is None else logits, source.scores if scores is None else scores)
        if num_experts is None and logits is not None:
            num_experts = logits.shape[1]
        object.__setattr__(self, "topk_ids", topk_ids)
        object.__setattr__(self, "topk_weights", topk_weights)
        object.__setattr__(self, "num_experts", num_experts)
        object.__setattr__(self, "source", source)

    @property
    def logits(self) -> torch.Tensor | None:
        return self.source.logits

    @property
    def scores(self) -> torch.Tensor | None:
        return self.source.scores

    def tokens_per_expert(self) -> torch.Tensor:
        """How many slots name each expert: int64 `[E]`, exact."""
        if self.num_experts is None:
            raise ValueError("Routing.num_experts=None: must be set to count tokens per expert")
        return _count(self.topk_ids, self.num_experts)

    def masked(self, token_mask: torch.Tensor) -> Routing:
        """The same for tokens whose `token_mask`, bool `[M]`, is True; the others go to no expert, as in `route`."""
        ids, weights = _mask_slots(self.topk_ids, self.topk_weights, token_mask)
        return Routing(ids, weights, num_experts=self.num_experts, source=self.source.masked(token_mask))


def _unflatten(parts: Iterable[Any], num_experts: int | None) -> Routing:
    topk_ids, topk_weights, source = parts
    return Routing(topk_ids, topk_weights, num_experts=num_experts, source=source)


# FSDP of torch 2.11 looks through pytrees only, later ones through dataclasses.
pytree.register_pytree_node(
    Routing,
    lambda routing: ([routing.topk_ids, routing.topk_weights, routing.source], routing.num_experts),
    _unflatten,
)
pytree.register_pytree_node(
    _RawLogits,
    lambda source: ([source.raw, source.token_mask], (source.scoring, source.grad_enabled)),
    lambda parts, rules: _RawLogits(*parts, *rules),
)

RouterFn = Callable[[torch.Tensor], "Routing | tuple[torch.Tensor, torch.Tensor]"]
"""A router of one's own: x `[M, H]` -> a Routing or (topk_ids, topk_weights). See `as_routing`."""


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
    _require(logits.dim() == 2, f"logits has shape {list(logits.shape)}: must be [M, E]")
    num_tokens, num_experts = logits.shape
    _check_sizes(config, num_experts, top_k)
    if token_mask is not None:
        _check_mask(token_mask, num_tokens)
    if selection_bias is not None:
        shape = list(selection_bias.shape)
        _require(shape == [num_experts], f"selection_bias has shape {shape}: must be [E={num_experts}]")
    if topk_ids is not None:
        topk_ids = _int32_ids(topk_ids, num_tokens, top_k)

    with _no_autocast(logits):
        logits = logits.to(config.dtype)
        ids, weights = route_topk(logits, config, top_k, selection_bias, topk_ids, token_mask)
        if not torch.compiler.is_compiling():
            source = _RawLogits(logits, token_mask, config.scoring, torch.is_grad_enabled())
            return Routing(ids, weights, num_experts=num_experts, source=source)
        # The compiler drops what nobody reads.
        scores = _visible_scores(logits, token_mask, config.scoring)
        return Routing(ids, weights, _visible_logits(logits, token_mask), scores, num_experts)


def _visible_logits(raw: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    z, usable = clean_logits(raw)
    return torch.where(usable if token_mask is None else usable & token_mask[:, None], z, _NEG_INF)


def _visible_scores(raw: torch.Tensor, token_mask: torch.Tensor | None, scoring: str) -> torch.Tensor:
    z, usable = clean_logits(raw)
    return score_logits(z, usable if token_mask is None else usable & token_mask[:, None], scoring)


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
        _require(
            x.dim() == 2 and shape[1] == self.hidden_size, f"x has shape {shape}: must be [M, H={self.hidden_size}]"
        )
        if token_mask is not None:
            _check_mask(token_mask, shape[0])
            x = torch.where(token_mask[:, None], x, 0.0)  # NaN padding would reach weight.grad as 0 · NaN
        with _no_autocast(x):
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


def as_routing(
    result: Routing | tuple[torch.Tensor, torch.Tensor],
    num_tokens: int,
    top_k: int,
    num_experts: int,
    origin: str = "the router returned",
) -> Routing:
    """What a router of one's own returned, as a Routing: ids int32 `[M, K]`, weights fp32 (or fp64) `[M, K]`.

    `origin` begins the error about what is neither.
    Raises ValueError when shapes or dtypes are wrong; values are `validate_routing`'s.
    """
    if not isinstance(result, Routing):
        pair = isinstance(result, (tuple, list)) and len(result) == 2
        _require(
            pair and all(isinstance(part, torch.Tensor) for part in result),
            f"{origin} {type(result).__name__}: must be a Routing or two tensors (topk_ids, topk_weights)",
        )
        result = Routing(*result)
    ids, weights = _int32_ids(result.topk_ids, num_tokens, top_k), result.topk_weights
    shape, want = list(weights.shape), [num_tokens, top_k]
    _require(shape == want, f"topk_weights has shape {shape}: must be [M, K] = {want}")
    _require(weights.is_floating_point(), f"topk_weights has dtype {weights.dtype}: must be a floating dtype")
    _require(
        ids.device == weights.device, f"topk_ids is on {ids.device} and topk_weights on {weights.device}: must match"
    )
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    source = result.source
    if isinstance(source, _RawLogits):
        _check_part("logits", source.raw, num_tokens, num_experts)
    else:
        _check_part("logits", source.logits, num_tokens, num_experts)
        _check_part("scores", source.scores, num_tokens, num_experts)
    return Routing(ids, weights, num_experts=num_experts, source=source)


def validate_routing(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError naming the first id outside [-1, E) or weight that is not finite. Waits for the device.

    The weight of an id of -1 is never read: it may be anything.
    """
    bad_ids = (topk_ids < -1) | (topk_ids >= num_experts)
    bad_weights = ~topk_weights.isfinite() & (topk_ids != -1)
    for name, tensor, bad, right in (
        ("topk_ids", topk_ids, bad_ids, f"in [0, num_experts={num_experts}), or -1 for no expert"),
        ("topk_weights", topk_weights, bad_weights, "finite"),
    ):
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise ValueError(f"{name}[{at[0]}, {at[1]}]={tensor[at[0], at[1]].item()}: must be {right}")


def load_balancing_loss(routing: Routing, num_experts: int) -> torch.Tensor:
    """E · Σ_e f_e · P_e (Switch Transformer, arXiv:2101.03961): 1 when both are uniform, at most E.

    f_e: the share of assignments that went to e. P_e: the mean over tokens of e's score, each token's scores divided by
    their sum. Tokens without an expert count in neither; with no token at all it is 0. The gradient flows through P.
    Scalar, of this rank's tokens: average over ranks and microbatches by their tokens.
    """
    if routing.scores is None:
        raise ValueError("routing.scores=None: load_balancing_loss needs a router that returns scores [M, E]")
    scores, counts = routing.scores, _count(routing.topk_ids, num_experts)
    live = (routing.topk_ids >= 0).any(-1)
    with _no_autocast(scores):
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
    with _no_autocast(routing.logits):
        z, usable = clean_logits(routing.logits)
        live = usable.any(-1)
        log_z = torch.where(usable | ~live[:, None], z, _NEG_INF).logsumexp(-1)
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
    _require(shape == list(bias.shape), f"tokens_per_expert has shape {shape}: must be [E={bias.shape[0]}]")
    integer = counts.dtype in (torch.int32, torch.int64)
    _require(integer, f"tokens_per_expert has dtype {counts.dtype}: must be int32 or int64, exact counts")
    _require(0 <= rate < math.inf, f"rate={rate}: must be finite and at least 0")
    counts = counts.to(bias.device, torch.int64)
    bias.add_((counts.sum() - counts * counts.numel()).sign().to(bias.dtype), alpha=rate)


def _count(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 `[E]`. Ids move up by one, so that -1 falls into a bin that is dropped and no host wait is needed."""
    slots = topk_ids.reshape(-1).long() + 1
    bins = torch.zeros(num_experts + 1, dtype=torch.int64, device=topk_ids.device)
    return bins.scatter_add_(0, slots, torch.ones_like(slots))[1:]


def _int32_ids(topk_ids: torch.Tensor, num_tokens: int, top_k: int) -> torch.Tensor:
    shape, want = list(topk_ids.shape), [num_tokens, top_k]
    _require(shape == want, f"topk_ids has shape {shape}: must be [M, K] = {want}")
    integer = topk_ids.dtype in (torch.int32, torch.int64)
    _require(integer, f"topk_ids has dtype {topk_ids.dtype}: must be int32 or int64")
    return saturated_ids(topk_ids)


def saturated_ids(topk_ids: torch.Tensor) -> torch.Tensor:
    """int64 ids as int32, out of range at the ends: a wild id must not wrap around into a valid one. Others as they
    are."""
    if topk_ids.dtype != torch.int64:
        return topk_ids
    limits = torch.iinfo(torch.int32)
    return topk_ids.clamp(limits.min, limits.max).to(torch.int32)


def _check_sizes(config: RouterConfig, num_experts: int, top_k: int) -> None:
    check_kind("config", config, RouterConfig, "a RouterConfig, as RouterConfig(scoring='softmax')")
    groups = config.num_groups
    divides = num_experts > 0 and num_experts % groups == 0
    _require(divides, f"num_experts={num_experts}: must be a positive multiple of RouterConfig.num_groups={groups}")
    most = num_experts // groups * config.topk_groups
    _require(
        1 <= top_k <= most, f"top_k={top_k}: must be in [1, {most}], the experts in topk_groups={config.topk_groups}"
    )


def _check_part(name: str, part: torch.Tensor | None, num_tokens: int, num_experts: int) -> None:
    want = [num_tokens, num_experts]
    if part is not None:
        _require(list(part.shape) == want, f"{name} has shape {list(part.shape)}: must be [M, E] = {want}")


def _mask_slots(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, token_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_mask(token_mask, topk_ids.shape[0])
    keep = token_mask[:, None]
    return torch.where(keep, topk_ids, -1), torch.where(keep, topk_weights, 0.0)


def _check_mask(token_mask: torch.Tensor, num_tokens: int) -> None:
    right = token_mask.dtype == torch.bool and list(token_mask.shape) == [num_tokens]
    have = f"{token_mask.dtype} {list(token_mask.shape)}"
    _require(right, f"token_mask is {have}: must be torch.bool [M={num_tokens}]")


def _no_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)

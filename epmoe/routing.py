"""What a router says of its tokens: which K experts each meets, and with what weights. Made by `epmoe.router`, or from
what a router of one's own gives; read by dispatchers, layers and losses. Nothing waits for the device except
`validate_routing`.

Shapes: logits and scores `[M, E]`, topk_ids and topk_weights `[M, K]`; M tokens of this rank, E logical experts, K
experts per token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from epmoe.checks import require_that
from epmoe.ops.route_reference import clean_logits, score_logits


class GivenScores(NamedTuple):
    """Logits and scores as somebody gave them."""

    logits: torch.Tensor | None
    scores: torch.Tensor | None

    def masked(self, token_mask: torch.Tensor) -> GivenScores:
        keep = token_mask[:, None]
        return GivenScores(
            None if self.logits is None else torch.where(keep, self.logits, -math.inf),
            None if self.scores is None else torch.where(keep, self.scores, 0.0),
        )


@dataclasses.dataclass(eq=False)
class RawLogits:
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
            return visible_logits(self.raw, self.token_mask)

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        with self._as_then():
            return visible_scores(self.raw, self.token_mask, self.scoring)

    def masked(self, token_mask: torch.Tensor) -> RawLogits:
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
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad_enabled), no_autocast(self.raw):
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
    source: GivenScores | RawLogits

    def __init__(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        logits: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        num_experts: int | None = None,
        *,
        source: GivenScores | RawLogits | None = None,
    ) -> None:
        if source is None:
            source = GivenScores(logits, scores)
        elif logits is not None or scores is not None:  # dataclasses.replace of one
            source = GivenScores(
                source.logits if logits is None else logits, source.scores if scores is None else scores
            )
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
        return count_slots(self.topk_ids, self.num_experts)

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
    RawLogits,
    lambda source: ([source.raw, source.token_mask], (source.scoring, source.grad_enabled)),
    lambda parts, rules: RawLogits(*parts, *rules),
)


def visible_logits(raw: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """`[M, E]`, -inf where an expert is unusable for a token."""
    z, usable = clean_logits(raw)
    return torch.where(usable if token_mask is None else usable & token_mask[:, None], z, -math.inf)


def visible_scores(raw: torch.Tensor, token_mask: torch.Tensor | None, scoring: str) -> torch.Tensor:
    """`[M, E]`, the scores of raw logits, 0 where an expert is unusable for a token."""
    z, usable = clean_logits(raw)
    return score_logits(z, usable if token_mask is None else usable & token_mask[:, None], scoring)


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
        require_that(
            pair and all(isinstance(part, torch.Tensor) for part in result),
            f"{origin} {type(result).__name__}: must be a Routing or two tensors (topk_ids, topk_weights)",
        )
        result = Routing(*result)
    ids, weights = int32_ids(result.topk_ids, num_tokens, top_k), result.topk_weights
    shape, want = list(weights.shape), [num_tokens, top_k]
    require_that(shape == want, f"topk_weights has shape {shape}: must be [M, K] = {want}")
    require_that(weights.is_floating_point(), f"topk_weights has dtype {weights.dtype}: must be a floating dtype")
    require_that(
        ids.device == weights.device, f"topk_ids is on {ids.device} and topk_weights on {weights.device}: must match"
    )
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    source = result.source
    if isinstance(source, RawLogits):
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


def count_slots(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 `[E]`. Ids move up by one, so that -1 falls into a bin that is dropped and no host wait is needed."""
    slots = topk_ids.reshape(-1).long() + 1
    bins = torch.zeros(num_experts + 1, dtype=torch.int64, device=topk_ids.device)
    return bins.scatter_add_(0, slots, torch.ones_like(slots))[1:]


def int32_ids(topk_ids: torch.Tensor, num_tokens: int, top_k: int) -> torch.Tensor:
    shape, want = list(topk_ids.shape), [num_tokens, top_k]
    require_that(shape == want, f"topk_ids has shape {shape}: must be [M, K] = {want}")
    integer = topk_ids.dtype in (torch.int32, torch.int64)
    require_that(integer, f"topk_ids has dtype {topk_ids.dtype}: must be int32 or int64")
    return saturated_ids(topk_ids)


def saturated_ids(topk_ids: torch.Tensor) -> torch.Tensor:
    """int64 ids as int32, out of range at the ends: a wild id must not wrap around into a valid one. Others as they
    are."""
    if topk_ids.dtype != torch.int64:
        return topk_ids
    limits = torch.iinfo(torch.int32)
    return topk_ids.clamp(limits.min, limits.max).to(torch.int32)


def _check_part(name: str, part: torch.Tensor | None, num_tokens: int, num_experts: int) -> None:
    want = [num_tokens, num_experts]
    if part is not None:
        require_that(list(part.shape) == want, f"{name} has shape {list(part.shape)}: must be [M, E] = {want}")


def _mask_slots(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, token_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    check_mask(token_mask, topk_ids.shape[0])
    keep = token_mask[:, None]
    return torch.where(keep, topk_ids, -1), torch.where(keep, topk_weights, 0.0)


def check_mask(token_mask: torch.Tensor, num_tokens: int) -> None:
    right = token_mask.dtype == torch.bool and list(token_mask.shape) == [num_tokens]
    have = f"{token_mask.dtype} {list(token_mask.shape)}"
    require_that(right, f"token_mask is {have}: must be torch.bool [M={num_tokens}]")


def no_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)

"""Keeping experts evenly loaded over a whole training step: losses beyond one batch, exact counts, biases, metrics.

Stands after the layers. `epmoe.router` has the losses of one batch on one rank (`load_balancing_loss`, `router_z_loss`)
and the rule of one bias update; here they meet sequences, ranks, microbatches and recomputation. E experts, M tokens of
this rank, K experts per token, D data ranks; counts are int64 `[E]`, tokens per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epmoe.ops.route_reference import RENORM_EPS
from epmoe.recompute import current_tape
from epmoe.router import Router, update_selection_bias
from epmoe.routing import Routing

Groups = Sequence["dist.ProcessGroup | None"]
"""Process groups to sum over one after the other, such as `(ep.process_group, mesh.replicas)`; None entries are
skipped, no groups at all means this process alone."""


def sequence_balancing_loss(
    routing: Routing, num_sequences: int, sequence_ids: Tensor | None = None, *, per_token: bool = False
) -> Tensor:
    """Mean over sequences of E · Σ_e f_e · P_e, both taken within a sequence (DeepSeek-V3, arXiv:2412.19437, 2.1.2).

    f_e: the share of the sequence's assignments that went to e; P_e: the mean of its tokens' scores for e, each token's
    scores divided by their sum. 1 when both are uniform. Sequences none of whose tokens has an expert count in no mean.
    The gradient flows through P.

    Args:
        routing: of M tokens, with scores.
        num_sequences: S; without `sequence_ids` the M tokens are S equal runs, as `x [S, T, H]` is.
        sequence_ids: integer `[M]` in `[0, S)`, which sequence each token is of (packed batches).
        per_token: weight sequences by their tokens instead of equally.

    Raises:
        ValueError: no scores, or sizes that do not fit.
    """
    scores, ids = _scores(routing), routing.topk_ids
    tokens, num_experts = scores.shape
    if num_sequences < 1:
        raise ValueError(f"num_sequences={num_sequences}: must be at least 1")
    sequences = torch.arange(num_sequences, device=ids.device)
    packed = sequence_ids is not None
    if sequence_ids is None:
        if tokens % num_sequences:
            raise ValueError(f"num_sequences={num_sequences}: {tokens} tokens are no equal runs; pass sequence_ids")
        sequence_ids = sequences.repeat_interleave(tokens // num_sequences, output_size=tokens)
    elif sequence_ids.shape != (tokens,) or sequence_ids.is_floating_point():
        raise ValueError(
            f"sequence_ids is {sequence_ids.dtype} {list(sequence_ids.shape)}: must be integers [M={tokens}]"
        )
    sequence_ids = sequence_ids.long()
    live, shares = _shares(scores, ids)
    # one bin per (sequence, expert), and one more for slots without an expert
    bins = torch.where(ids >= 0, sequence_ids[:, None] * num_experts + ids, num_sequences * num_experts)
    counts = torch.zeros(num_sequences * num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, bins.reshape(-1), torch.ones_like(bins).reshape(-1))
    counts = counts[:-1].view(num_sequences, num_experts)
    lengths = torch.zeros_like(sequences).scatter_add_(0, sequence_ids, live.long())
    assigned = counts.to(scores.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    if packed:  # a product, since scattered sums of floats have no order on GPUs
        meant = (sequences[:, None] == sequence_ids).to(shares.dtype) @ shares
    else:
        meant = shares.view(num_sequences, -1, num_experts).sum(1) if tokens else torch.zeros_like(assigned)
    losses = num_experts * (assigned * meant / lengths.clamp(min=1)[:, None]).sum(-1)
    weights = (lengths if per_token else lengths > 0).to(scores.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def global_balancing_loss(
    routing: Routing, groups: Groups = (), *, counts: Tensor | None = None, average: bool = True
) -> Tensor:
    """This rank's part of E · Σ_e f_e · P_e over the batch of all ranks (global-batch balance, arXiv:2501.11873).

    Experts may then specialise within a rank's batch and still be even over all. What is minimised is the mean over the
    D ranks of what they return, as with every other loss (`epmoe.integrations.gradients`), also where ranks have uneven
    numbers of tokens. Collective: every rank calls it, with tokens or without.

    Args:
        routing: of this rank's tokens, with scores.
        groups: all data ranks.
        counts: what f is made of; None: of this batch, summed over `groups`. For the batch of a whole step give sums
            over ranks and microbatches, such as `LoadCounts.total` of the microbatches so far.
        average: False: the ranks' losses are summed instead (`reduce_gradients(average=False)`).

    Raises:
        ValueError: no scores, or counts that are not integers `[E]`.
    """
    scores = _scores(routing)
    num_experts = scores.shape[1]
    if counts is not None and (counts.shape != (num_experts,) or counts.is_floating_point()):
        raise ValueError(f"counts is {counts.dtype} {list(counts.shape)}: must be integers [E={num_experts}]")
    live, shares = _shares(scores, routing.topk_ids)
    own = _count_ids(routing.topk_ids, num_experts) if counts is None else counts.new_zeros(0)
    summed = all_reduce_counts(torch.cat([live.sum()[None], own.long()]), groups)
    tokens, counts = summed[0], summed[1:] if counts is None else counts
    assigned = counts.to(scores.dtype) / counts.sum().clamp(min=1)
    ranks = num_ranks(groups) if average else 1
    return num_experts * ranks * (assigned * shares.sum(0)).sum() / tokens.clamp(min=1)


@torch.no_grad()
def all_reduce_counts(counts: Tensor, groups: Groups = ()) -> Tensor:
    """`counts`, integers, summed exactly over the ranks of `groups`: a new int64 tensor. Collective."""
    if counts.is_floating_point():
        raise ValueError(f"counts has dtype {counts.dtype}: must be integers, which sum exactly")
    total = counts.to(torch.int64, copy=True)
    for group in groups:
        if group is not None:
            dist.all_reduce(total, group=group)
    return total


def num_ranks(groups: Groups = ()) -> int:
    """D: the product of the groups' sizes."""
    ranks = 1
    for group in groups:
        ranks *= 1 if group is None else dist.get_world_size(group)
    return ranks


class LoadCounts:
    """Counts the tokens of each expert in every `Router` of a model, exactly, over all forwards of a step.

    Forwards in training mode are counted, their recomputations in backward are not, nor are forwards in `eval()`. Sums
    are int64 from the first token on: accumulation steps lose nothing. Nothing waits for the device.

    A router of one's own is not seen: call `add` with its `Routing`, outside of what is recomputed.

    Args:
        model: as it trains; build this before `torch.compile` wraps it. Its routers are hooked until `close`.

    Example::

        load = LoadCounts(model)
        for batch in microbatches:
            loss(model(batch)).backward()
        load.update_biases(rate=1e-3, groups=(ep.process_group, mesh.replicas))
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
        self._counts: dict[str, Tensor] = {}
        self._hooks = [router.register_forward_hook(self._hook(name)) for name, router in self._routers.items()]

    def add(self, name: str, routing: Routing) -> None:
        """Counts `routing` under `name`."""
        self._add(name, routing.tokens_per_expert())

    def local(self) -> dict[str, Tensor]:
        """What this rank has counted so far, by the routers' names: int64 `[E]`, zeros before the first forward."""
        own = {name: counts.clone() for name, counts in self._counts.items()}
        for name, router in self._routers.items():
            if name not in own:
                own[name] = torch.zeros(router.num_experts, dtype=torch.int64, device=router.weight.device)
        return {name: own[name] for name in (*self._routers, *(n for n in own if n not in self._routers))}

    def total(self, groups: Groups = ()) -> dict[str, Tensor]:
        """The same, summed over the ranks of `groups` in one all-reduce. Collective."""
        local = self.local()
        if not local:
            return {}
        device = next(iter(local.values())).device
        flat = all_reduce_counts(torch.cat([c.to(device) for c in local.values()]), groups)
        parts = flat.split([len(c) for c in local.values()])
        return {name: part.to(c.device) for (name, c), part in zip(local.items(), parts, strict=True)}

    def take(self, groups: Groups = ()) -> dict[str, Tensor]:
        """`total`, and starts again from zero. Collective."""
        total = self.total(groups)
        self.reset()
        return total

    def update_biases(self, rate: float, groups: Groups = ()) -> dict[str, Tensor]:
        """`take`, and moves the `selection_bias` of every router that has one by it (`update_selection_bias`).

        Once per step, on all ranks alike, so the biases stay equal to the bit. Returns the counts, for metrics.
        """
        total = self.take(groups)
        for name, router in self._routers.items():
            if router.selection_bias is not None:
                update_selection_bias(router, total[name], rate)
        return total

    def reset(self) -> None:
        """Starts again from zero."""
        for counts in self._counts.values():
            counts.zero_()

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple, Routing], None]:
        def count(router: nn.Module, arguments: tuple, routing: Routing) -> None:
            if router.training and not _recomputing():
                self._add(name, _count_ids(routing.topk_ids, router.num_experts))  # type: ignore[arg-type]

        return count

    @torch.no_grad()
    def _add(self, name: str, counts: Tensor) -> None:
        if name in self._counts:
            self._counts[name] += counts  # in place: a CUDA graph that has seen one call before adds when replayed
        else:
            self._counts[name] = counts.clone()


class LoadMetrics(NamedTuple):
    """How evenly one layer's experts were used. Scalars on the counts' device, float64: reading one waits for it.

    Attributes:
        max_over_mean, min_over_mean: load of the busiest and of the idlest expert by the mean load; both 1 when even.
        entropy: of the shares, divided by log E: 1 when even, 0 when all goes to one expert.
        unused: experts without any token.
        dropped: slots that went to no expert, as a share of all slots; 0 where the slots are not given.
    """

    max_over_mean: Tensor
    min_over_mean: Tensor
    entropy: Tensor
    unused: Tensor
    dropped: Tensor


@torch.no_grad()
def load_metrics(counts: Tensor, slots: int | Tensor | None = None) -> LoadMetrics:
    """Metrics of `counts [..., E]`, any integers: one layer's, or all layers' stacked (then each metric is `[...]`).

    Args:
        slots: M · K over the same ranks and microbatches: what `counts` would sum to if every slot had an expert.
    """
    if counts.is_floating_point():
        raise ValueError(f"counts has dtype {counts.dtype}: must be integers")
    loads, num_experts = counts.double(), counts.shape[-1]
    total = loads.sum(-1)
    share = loads / total.clamp(min=1)[..., None]
    entropy = -torch.special.xlogy(share, share).sum(-1)
    if num_experts > 1:
        entropy = entropy / torch.log(torch.tensor(num_experts, dtype=torch.float64, device=counts.device))
    relative = share * num_experts
    dropped = torch.zeros_like(total)
    if slots is not None:
        wanted = torch.as_tensor(slots, dtype=torch.float64, device=counts.device)
        dropped = (wanted - total) / wanted.clamp(min=1)
    return LoadMetrics(relative.amax(-1), relative.amin(-1), entropy, (counts == 0).sum(-1), dropped)


def _scores(routing: Routing) -> Tensor:
    if routing.scores is None:
        raise ValueError("routing.scores=None: this loss needs a router that returns scores [M, E]")
    return routing.scores


def _shares(scores: Tensor, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens have an expert `[M]`, and each one's scores divided by their sum `[M, E]`, zeros for the others."""
    live = (topk_ids >= 0).any(-1)
    scores = torch.where(live[:, None], scores, 0.0)
    return live, scores / (scores.sum(-1, keepdim=True) + RENORM_EPS)


def _count_ids(topk_ids: Tensor, num_experts: int) -> Tensor:
    return Routing(topk_ids, topk_ids, num_experts=num_experts).tokens_per_expert()


def _recomputing() -> bool:
    """Whether this forward repeats one that was counted: by `epmoe.checkpoint`, or any other inside a backward."""
    tape = current_tape()
    if tape is not None and tape.replaying:
        return True
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

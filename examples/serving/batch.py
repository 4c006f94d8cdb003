"""One rank's requests under the model: a key/value cache whose rows come and go between steps.

    columns      0 1 2 3 4 5 6
    row a        . . . a a a a      every row ends in the last column: one mask of a padded left [B, L] says all, which
    row b        b b b b b b b      is how `transformers` generates for prompts of different lengths

A row is a request. It comes with a cache of its own prompt, which is put below the others; each step adds a column to
all rows; when rows leave, columns that none of the rest needs go too.

B rows, L columns, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from epmoe.integrations.transformers import routed_experts

PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class Batch:
    """The requests that run on this rank, each in a slot that names it.

    Args:
        model: a causal language model of `transformers`, in eval mode.

    Raises:
        ValueError: its layers keep more than keys and values (linear attention, indexers).
    """

    def __init__(self, model: Any) -> None:
        kept = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
        if other := kept.difference(PLAIN_LAYERS):
            raise ValueError(
                f"{type(model).__name__} keeps {', '.join(sorted(other))}: only keys and values of attention can be "
                "put together into one batch here"
            )
        self.model = model
        self.slots: list[int] = []  # of row b
        self.lengths: list[int] = []  # tokens of row b in the cache
        self._cache = DynamicCache()  # all positions, under sliding windows too: the mask hides what is out of sight
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self._settings: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        if "output_router_logits" in accepted:  # the loss that they are for knows no mask over cached tokens
            self._settings["output_router_logits"] = False

    @torch.inference_mode()
    def start(self, slot: int, prompt: list[int]) -> Tensor:
        """Takes a request in as the last row; logits `[1, V]` of its next token."""
        cache = DynamicCache()
        logits = self._forward([prompt], cache, [len(prompt)], [0])
        if self.slots:
            columns = max(*self.lengths, len(prompt))
            for ours, its in zip(self._cache.layers, cache.layers, strict=True):
                ours.keys = torch.cat([_widened(ours.keys, columns), _widened(its.keys, columns)])
                ours.values = torch.cat([_widened(ours.values, columns), _widened(its.values, columns)])
        else:
            self._cache = cache
        self.slots.append(slot)
        self.lengths.append(len(prompt))
        return logits

    @torch.inference_mode()
    def step(self, tokens: list[int]) -> Tensor:
        """Takes row b's newest token in; logits `[B, V]` of the next ones. There must be a row."""
        before, self.lengths = self.lengths, [length + 1 for length in self.lengths]
        return self._forward([[token] for token in tokens], self._cache, self.lengths, before)

    def leave(self, slots: Collection[int]) -> None:
        """Lets the requests in `slots` go."""
        rows = [row for row, slot in enumerate(self.slots) if slot not in slots]
        if len(rows) == len(self.slots):
            return
        self.slots, self.lengths = [self.slots[row] for row in rows], [self.lengths[row] for row in rows]
        if not rows:
            self._cache = DynamicCache()
            return
        columns = max(self.lengths)
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, -columns:], layer.values[rows, :, -columns:]

    def _forward(self, tokens: list[list[int]], cache: DynamicCache, lengths: list[int], before: list[int]) -> Tensor:
        """Logits `[B, V]` after `tokens`, rows of equal length; `cache` has `before` tokens of each, then `lengths`."""
        device = self.model.device
        columns, new = torch.arange(max(lengths), device=device), torch.arange(len(tokens[0]), device=device)
        first = max(lengths) - torch.tensor(lengths, device=device)
        return self.model(
            input_ids=torch.tensor(tokens, device=device),
            attention_mask=(columns >= first[:, None]).long(),
            position_ids=torch.tensor(before, device=device)[:, None] + new,
            **{self._cache_name: cache},
            **self._settings,
        ).logits[:, -1]


def _widened(states: Tensor, columns: int) -> Tensor:
    """`[B, heads, L, D]` with columns of zeros on the left."""
    return F.pad(states, (0, 0, columns - states.shape[2], 0))


@torch.inference_mode()
def serve_other_ranks(model: Any) -> None:
    """This rank's part in a forward for which it has no tokens: its experts, in the order that a forward meets them.

    Attention and all else is each rank's own and is left out.
    """
    for experts in routed_experts(model).values():
        nothing = torch.empty(0, experts.config.hidden_size, device=model.device, dtype=experts.dtype)
        ids = torch.empty(0, experts.config.top_k, device=model.device, dtype=torch.int64)
        experts(nothing, ids, ids.float())


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen; the same seed chooses the same tokens, whoever else is in the batch."""

    temperature: float = 1.0  # 0: always the likeliest
    top_p: float = 1.0  # of the likeliest tokens only so many as together have this probability
    seed: int = 0


class Sampler:
    """Draws one request's tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.greedy = sampling.temperature == 0
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """A token by `logits [V]`."""
        if self.greedy:
            return int(logits.argmax())
        scaled = logits.double().cpu() / self.sampling.temperature
        probabilities, order = scaled.softmax(-1).sort(descending=True, stable=True)
        before = probabilities.cumsum(-1) - probabilities
        kept = torch.where(before < self.sampling.top_p, probabilities, 0.0)  # the likeliest always stays
        kept[0] = probabilities[0]
        return int(order[torch.multinomial(kept, 1, generator=self._generator)])

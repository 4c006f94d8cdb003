"""One rank's requests under the model, and how their tokens are drawn.

    rows      0 1 2 | 3        rows 0 to B - 1 of a `Decoder` run; when row 1 is done, row 2 moves there: the rows that
    slots     5 0 7 |          run stay together, so that a step is no larger than it must be

B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor

from epmoe.integrations.transformers.decode import Decoder


class Batch:
    """The requests that run on this rank, each in a slot that names it.

    Args:
        decoder: with a row for each of them.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.slots: list[int] = []  # of row b
        self.lengths: list[int] = []  # tokens of row b in the cache

    def start(self, slot: int, prompt: list[int]) -> Tensor:
        """Takes a request in as the last row; logits `[1, V]` of its next token."""
        logits = self.decoder.fill(len(self.slots), prompt)
        self.slots.append(slot)
        self.lengths.append(len(prompt))
        return logits

    def step(self, tokens: list[int]) -> Tensor:
        """Takes row b's newest token in; logits `[B, V]` of the next ones, valid until the next step. Without rows this
        rank serves the others' tokens."""
        logits = self.decoder.step(tokens, self.lengths)
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def leave(self, slots: Collection[int]) -> None:
        """Lets the requests in `slots` go."""
        for row in reversed(range(len(self.slots))):
            if self.slots[row] in slots:
                slot, length = self.slots.pop(), self.lengths.pop()
                if row < len(self.slots):
                    self.decoder.move(len(self.slots), row, length)
                    self.slots[row], self.lengths[row] = slot, length


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

"""Keys and values in fixed places: the cache and the masks of decoding steps whose shapes and addresses never change.

    positions    0 1 2 3 4 5 . . L        row b's newest token stands at its own position p[b]; what is behind is
    row a        a a a a . . . . .        hidden by a mask made of p, whatever lies there of earlier requests
    row b        b b . . . . . . .

B rows of a step, S rows that there is room for, L positions, W positions that a step looks at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION = ("sdpa", "eager")
"""Implementations that take a mask of one's own."""


@dataclasses.dataclass
class Place:
    """Where the running step writes and looks; one for all layers.

    Attributes:
        rows: `[S]` int64, 0 to S - 1.
        positions: `[S]` int64, p.
        columns: W.
    """

    rows: Tensor
    positions: Tensor
    columns: int


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, `[S, heads, L, D]`: finite from the beginning, since what a mask hides still counts
    as zero times its value."""

    is_sliding = False  # all positions are kept, under sliding windows too

    def __init__(self, keys: Tensor, values: Tensor, place: Place) -> None:
        super().__init__()
        self.keys, self.values, self.place = keys, values, place
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """It is there from the beginning."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes `[B, heads, 1, D]` at the rows' positions; `[B, heads, W, D]` to attend to."""
        batch, place = key_states.shape[0], self.place
        rows, positions = place.rows[:batch], place.positions[:batch]
        assert self.keys is not None and self.values is not None
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[:batch, :, : place.columns], self.values[:batch, :, : place.columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(W, offset): masks come ready made, so nobody builds one of it."""
        return self.place.columns, 0

    def get_seq_length(self) -> int:
        """No number holds for all rows; steps bring positions of their own."""
        return 0

    def get_max_length(self) -> int:
        """L."""
        assert self.keys is not None
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.24


class SlotCache(Cache):
    """A `SlotLayer` for each layer of a model.

    Args:
        like: a cache that the model has filled, for the sizes: its layers hold `[1, heads, n, D]`.
        rows: S.
        length: L.
    """

    def __init__(self, like: Cache, rows: int, length: int, device: torch.device) -> None:
        ranges = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
        self.place = Place(*ranges, length)

        def room_for(states: Tensor) -> Tensor:
            shape = rows, states.shape[1], length, states.shape[3]
            return torch.zeros(shape, dtype=states.dtype, device=device)

        layers = [SlotLayer(room_for(layer.keys), room_for(layer.values), self.place) for layer in like.layers]
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def fill(self, row: int, other: Cache) -> None:
        """Takes over what a cache of one prompt holds, from position 0 on."""
        for ours, its in zip(self.layers, other.layers, strict=True):
            ours.keys[row, :, : its.keys.shape[2]] = its.keys[0]
            ours.values[row, :, : its.values.shape[2]] = its.values[0]

    def move(self, source: int, to: int, length: int) -> None:
        """Copies the first `length` positions of a row over another's."""
        for layer in self.layers:
            layer.keys[to, :, :length] = layer.keys[source, :, :length]
            layer.values[to, :, :length] = layer.values[source, :, :length]


class Sight:
    """Which positions each layer's attention sees, by the model's config.

    Args:
        config: the text model's.
        length: L.

    Raises:
        ValueError: attention of another kind, or an implementation that takes no mask.
    """

    def __init__(self, config: Any, length: int) -> None:
        implementation = config._attn_implementation
        if implementation not in ATTENTION:
            raise ValueError(
                f"attn_implementation={implementation!r}: rows at positions of their own need a mask of their own: use "
                f"{' or '.join(ATTENTION)}"
            )
        self.window: int | None = getattr(config, "sliding_window", None)
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        plain = "sliding_attention" if self.window else "chunked_attention" if self.chunk else "full_attention"
        self.kinds = sorted(set(getattr(config, "layer_types", None) or [plain]))
        if other := set(self.kinds).difference(("full_attention", "sliding_attention", "chunked_attention")):
            raise ValueError(f"layers of {', '.join(sorted(other))}: only attention over keys and values has rows")
        tuned, scale = getattr(config, "attn_temperature_tuning", False), getattr(config, "floor_scale", length)
        if tuned and length >= scale:
            raise ValueError(f"length={length}: must be below floor_scale={scale}, whence positions change queries")
        self.additive = implementation == "eager"

    def masks(self, positions: Tensor, columns: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """What the model takes as its attention mask for one token per row at `positions [B]`: `[B, 1, 1, W]`, or
        one of them for each kind of layers if there are several."""
        column, own = torch.arange(columns, device=positions.device), positions[:, None]
        behind = column <= own
        made = {}
        for kind in self.kinds:
            seen = behind
            if kind == "sliding_attention":
                assert self.window is not None
                seen = behind & (column > own - self.window)
            elif kind == "chunked_attention":
                assert self.chunk is not None
                seen = behind & (column // self.chunk == own // self.chunk)
            if self.additive:
                seen = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
            made[kind] = seen[:, None, None]
        return made if len(made) > 1 else made[self.kinds[0]]

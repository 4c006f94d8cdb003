"""A token dispatcher for torchtitan's MoE block: its router and experts stay, rows move by ours.

torchtitan's `RoutedExperts` calls two verbs around its own grouped experts (`models/common/token_dispatcher.py`):

    rows [R, D], counts [e], metadata = dispatch(x [T, D], scores [T, K], ids [T, K], counts [E])
    out [T, D]                        = combine(expert rows [R, D], metadata, x)

Each token crosses to a rank once, however many of its experts are there, and one weighted row per rank comes back. The
K copies of a row that the experts want, sorted by expert, are made where they are used.

Nothing is imported from torchtitan: give an object of this class where its config builds `AllToAllTokenDispatcher`.
T tokens of this rank, D width, E experts, e of them here, K per token, R (row, expert) pairs here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from epmoe.comm import EPGroup
from epmoe.dispatch import Dispatcher, Layout, make_dispatcher
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.ops.align import align_rows
from epmoe.placement import ExpertPlacement


class Metadata(NamedTuple):
    """What `combine` needs of one `dispatch`: any number may be in flight."""

    handle: Layout
    slot: Tensor  # [rows, K] int32, where each (row, k) pair stands among the R, -1 for none
    weights: Tensor  # [rows, K]


class TokenDispatcher:
    """Args:
    num_experts: E, a multiple of the EP mesh's size: experts are split over it in runs, as `Shard(0)` does.
    top_k: K.
    dispatcher: `auto`, `all_to_all` or `all_gather`.
    layer: names the layer in errors.
    """

    def __init__(self, num_experts: int, top_k: int, dispatcher: str = "auto", *, layer: str = "moe") -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self._name, self._layer = dispatcher, layer
        self._ep: EPGroup | None = None
        self._made: dict[torch.device, Dispatcher] = {}

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None, **_: Any) -> None:
        """Takes the ranks that share the experts; None: all are here.

        Raises:
            ValueError: they can't be split evenly.
        """
        ranks = 1 if ep_mesh is None else ep_mesh.size()
        if self.num_experts % ranks:
            raise ValueError(f"num_experts={self.num_experts}: must be a multiple of the {ranks} ranks of ep_mesh")
        device = "cpu" if ep_mesh is not None and ep_mesh.device_type == "cpu" else None
        self._ep = None if ep_mesh is None else EPGroup(ep_mesh.get_group(), device=device)
        self._made.clear()

    def init_buffer(self) -> None:
        """Nothing to do before the first dispatch."""

    def dispatch(
        self, x: Tensor, scores: Tensor, topk_ids: Tensor, num_local_tokens_per_expert: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Metadata]:
        """Rows in expert order `[R, D]`, how many each local expert has `[e]` int64, and what `combine` needs."""
        dispatcher = self._on(x.device)
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        arrived = dispatcher.dispatch(x.contiguous(), topk_ids.to(torch.int32), scores.to(precise))
        row_index, offsets, slot = align_rows(
            arrived.topk_ids, arrived.expert_map, arrived.num_local, arrived.max_assignments
        )
        if not dispatcher.capabilities.exact_pairs:
            row_index = row_index[: int(offsets[-1])]  # the rest names no row
        rows = arrived.x[row_index.clamp_min(0) // arrived.topk_ids.shape[1]]
        return rows, offsets.diff().long(), Metadata(arrived.handle, slot, arrived.topk_weights)

    def combine(self, expert_rows: Tensor, metadata: Metadata, x: Tensor, **_: Any) -> Tensor:
        """Each token's weighted sum `[T, D]`: summed in fp32 on each rank, then over ranks in their order."""
        output = ExpertOutput(expert_rows, "contiguous", metadata.slot, metadata.weights)
        return self._on(x.device).combine(output, metadata.handle).to(x.dtype)

    def _on(self, device: torch.device) -> Dispatcher:
        if device not in self._made:
            placement = ExpertPlacement.contiguous(self.num_experts, 1 if self._ep is None else self._ep.num_ranks)
            self._made[device] = make_dispatcher(self._name, self._ep, placement, device, layer=self._layer)
        return self._made[device]

"""What every way of moving rows promises: `dispatch` to the ranks that own a token's experts, and `combine` back.

    x [M,H] ── dispatch ──► ExpertInput: rows [T,H] ── experts ──► one reduced row each [T,H] ── combine ──► [M,H]

Both verbs have an async form that returns `Pending`. State travels in `ExpertInput.handle`; a dispatcher keeps none, so
any number of layers, microbatches and recomputations may be in flight. Backward of each verb moves rows as the other.

M tokens on this rank, T rows this rank received, H hidden size, K experts per token, E logical experts, L local
experts.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from epmoe.checks import check_kind, said
from epmoe.comm import EPGroup
from epmoe.comm.memory import Buffer, Step, buffer
from epmoe.dispatch.inputs import ExpertInput, Layout, Pending
from epmoe.dispatch.reduce import ExpertOutput, weight_and_reduce
from epmoe.dispatch.wire import RowBytes, RowSpec, narrowed_buffers
from epmoe.quant.rows import QuantizedRows


@dataclasses.dataclass(frozen=True)
class DispatcherCapabilities:
    """What a dispatcher can do and what it wants, stated so that nobody finds out by a crash."""

    asynchronous: bool = False
    cuda_graph: bool = False
    autograd: bool = True
    host_sync: bool = False  # waits for the device once per dispatch, to learn how many rows arrive
    backends: tuple[str, ...] = ()  # of torch.distributed; empty: needs none
    max_tokens: bool = False  # reserves room for max_tokens_per_rank, which must be given
    exact_pairs: bool = False  # ExpertInput.max_assignments is the number of pairs, not only a bound of it
    output_is_reduced: bool = True  # combine gives the sum over all ranks; else the caller adds it up over the group
    reduces: bool = False  # weights and sums the experts' rows itself, while it sends them
    topk_ids_dtype: torch.dtype = torch.int32
    quantized_back: bool = False  # rows of combine, and gradients of both verbs, may travel quantized


class Traffic(NamedTuple):
    """Rows of one call on this rank: S sent, T received, N (row, local expert) pairs among those received; where rows
    go by nodes, those that it relays for others and passes on to them."""

    sent: int
    received: int
    pairs: int
    relayed: int = 0
    passed_on: int = 0


class Dispatcher(ABC):
    """Base of `local`, `all_gather`, `all_to_all`, `all_to_all_fixed`, `hierarchical` and `symmetric`.

    Args:
        ep: the group, or None for one process.
        owner: `[E]` int32, the rank that owns each expert.
        expert_map: `[E]` int32, logical -> local id on this rank, or -1.
        num_local: L.
        layer: a name for error messages.
        max_tokens_per_rank: the most tokens any rank brings to one call; needed by those that reserve room for them.
        experts_per_rank: `ExpertPlacement.experts_per_rank`, which spares some of them looking owners up; 0: not known.
        rows: what will move; None: not known.
    """

    name: ClassVar[str]
    capabilities: ClassVar[DispatcherCapabilities]
    hands_on: ClassVar[bool] = False  # experts read the very rows that dispatch was given, or has quantized
    layout_type: ClassVar[type[Layout]] = Layout

    def __init__(
        self,
        ep: EPGroup | None,
        owner: Tensor,
        expert_map: Tensor,
        num_local: int,
        *,
        layer: str = "moe",
        max_tokens_per_rank: int | None = None,
        experts_per_rank: int = 0,
        rows: RowSpec | None = None,
    ) -> None:
        self.ep = ep
        self.owner = owner
        self.expert_map = expert_map
        self.num_local = num_local
        self.layer = layer
        self.max_tokens_per_rank = max_tokens_per_rank
        self.experts_per_rank = experts_per_rank
        self.rows = rows

    @property
    def where(self) -> str:
        """Layer and rank, as errors name them."""
        return f"layer {self.layer!r}, rank {self.ep.rank if self.ep is not None else 0} of {self.num_dispatchers}"

    @property
    def num_dispatchers(self) -> int:
        """R: how many dispatchers of this layer exchange rows with each other."""
        return self.ep.num_ranks if self.ep is not None else 1

    def sms_beside(self, copies: bool) -> int:
        """SMs that a computation should leave free for rows that move beside it, unless `comm_sms` says otherwise;
        `copies`: they may go by copy engines, which all ranks say alike.

        Measured where NCCL fills 32 SMs of an H200: with 16 left free its all-to-all and the experts' GEMMs together
        took 540 µs, with none 593, with all 32 578.
        """
        return 16

    @property
    def pays_beside_shared(self) -> bool:
        """Whether combine launched before the shared experts ends sooner than after them."""
        return self.capabilities.asynchronous

    def row_refusal(self, rows: RowSpec) -> str | None:
        """Why such rows can't move there and back, with the way out; None if they can."""
        return None

    def quantizes_in_flight(self, dtype: torch.dtype) -> bool:
        """Whether the launch that sends rows of `dtype` quantizes them, so that they never lie here quantized."""
        return False

    @abstractmethod
    def make_layout(self, topk_ids: Tensor) -> Layout:
        """The movement that `topk_ids [M, K]` ask for. Collective where ranks must tell each other sizes."""

    @abstractmethod
    def dispatch_async(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        layout: Layout | None = None,
        adapter_ids: Tensor | None = None,
        scheme: str | None = None,
        grad_scheme: str | None = None,
    ) -> Pending[ExpertInput]:
        """Launches `x [M, H]` and its routing towards the owners.

        Args:
            x: rows, or rows quantized by the caller: values and scales travel in one message and reach the experts as
                they are. No gradient reaches quantized rows.
            layout: reuses one made for the same ids.
            adapter_ids: `[M]` int32, travels with each row.
            scheme: quantize x before it is sent, or on its way; see `quant.rows`. Gradients take the rounding for the
                identity, and reach x through `ExpertInput.source`.
            grad_scheme: quantize the rows' gradient on its way back; where `capabilities.quantized_back`.
        """

    @abstractmethod
    def combine_async(
        self,
        rows: Tensor | ExpertOutput,
        handle: Layout,
        *,
        out: Tensor | None = None,
        scheme: str | None = None,
        grad_scheme: str | None = None,
    ) -> Pending[Tensor]:
        """Launches the experts' output back to its tokens: `[M, H]` when waited for.

        Args:
            rows: `[T, H]`, one reduced row per row received, or what experts gave and how it is to be weighted and
                summed. Until waited for they may be what the transfer reads: leave them as they are.
            out: `[M, H]` in the rows' dtype, to put the result into; where no gradient is asked for.
            scheme: quantize each rank's rows on their way, one by one; they are added up in fp32. With `fp8_block` the
                result of a token that one rank computes is off by about 2.6 % (relative L2), of one that several do by
                less where their parts are unlike. Where `capabilities.quantized_back`.
            grad_scheme: quantize the rows' gradient on its way there; as `scheme`.
        """

    @staticmethod
    def reduced(rows: Tensor | ExpertOutput, out: Tensor | None = None) -> Tensor:
        """One row per row received: the experts' strategy applied."""
        return rows if isinstance(rows, Tensor) else weight_and_reduce(rows, out=out)

    @abstractmethod
    def rows_by_rank(self, handle: Layout) -> Tensor:
        """`[2, R]` int64: rows that this rank sends to, and receives from, each rank in one dispatch, none for itself.

        On the host where the sizes are known there, else on the device, where nobody waits for them. `handle` is that
        of a dispatch that has arrived.
        """

    def wire_bytes(self, handle: Layout, row_bytes: int) -> tuple[int, int]:
        """Bytes that this rank sends to and receives from other ranks in one dispatch of rows of `row_bytes`; waits for
        the device where `rows_by_rank` is there."""
        sent, received = self.rows_by_rank(handle).sum(1).tolist()
        return sent * row_bytes, received * row_bytes

    def bytes_by_movement(self, handle: Layout, row: RowBytes) -> dict[str, tuple[int, int]]:
        """Bytes that this rank sends to and receives from other ranks in each movement of one call, by its name in
        `RowBytes`. Rows go back the way that they came, so sender and receiver change places there."""
        sent = {name: self.wire_bytes(handle, nbytes) for name, nbytes in row._asdict().items()}
        back = ("combine", "dispatch_backward")
        return {name: pair[::-1] if name in back else pair for name, pair in sent.items()}

    @abstractmethod
    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        """The most that a call can move if every rank brings `num_tokens`, whatever the routing."""

    def memory_plan(self, num_tokens: int, rows: RowSpec, traffic: Traffic, *, reduced: bool = False) -> list[Buffer]:
        """What dispatch and combine of a forward without gradients allocate for `traffic` of such rows, which go back
        quantized only by dispatchers whose `quantized_back` says so.

        Args:
            reduced: combine gets one reduced row per row received, which this plan holds from the step `reduce` on;
                else what it is to weight and sum itself. Dispatchers that move rows by collectives get the former.
        """
        made: tuple[Step, ...] = ("reduce", "combine") if reduced else ("combine",)
        shape = (num_tokens, rows.width)
        if rows.combine_scheme is None:  # the reduced rows are the output
            return [buffer("output", shape, rows.dtype, *made, "sum")]
        return [
            buffer("reduced rows", shape, rows.dtype, *made),
            *narrowed_buffers("reduced rows", num_tokens, rows.width, rows.combine_scheme, "combine"),
            buffer("output", shape, rows.dtype, "combine", "sum"),
        ]

    def dispatch(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        layout: Layout | None = None,
        adapter_ids: Tensor | None = None,
        scheme: str | None = None,
    ) -> ExpertInput:
        """`dispatch_async(...).wait()`."""
        pending = self.dispatch_async(x, topk_ids, topk_weights, layout=layout, adapter_ids=adapter_ids, scheme=scheme)
        return pending.wait()

    def combine(self, rows: Tensor | ExpertOutput, handle: Layout, *, out: Tensor | None = None) -> Tensor:
        """`combine_async(...).wait()`."""
        return self.combine_async(rows, handle, out=out).wait()

    def expert_input(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        handle: Layout,
        *,
        x_scale: Tensor | None = None,
        scheme: str | None = None,
        adapter_ids: Tensor | None = None,
        source: Tensor | None = None,
    ) -> ExpertInput:
        """Puts what arrived beside this rank's expert map."""
        expected_m = None
        if not self.capabilities.exact_pairs:
            experts = self.expert_map.shape[0]
            expected_m = (handle.num_tokens * self.num_dispatchers * topk_ids.shape[1] + experts) // experts
        return ExpertInput(
            x,
            topk_ids,
            topk_weights,
            self.expert_map,
            self.num_local,
            handle.max_assignments,
            handle,
            expected_m,
            x_scale,
            scheme,
            adapter_ids,
            source,
        )

    def check(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        adapter_ids: Tensor | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Raises `ValueError` for shapes, dtypes, devices or strides that can't be dispatched, and for a layout of
        another kind or number of tokens."""
        where = f"layer {self.layer!r}: "
        if isinstance(x, QuantizedRows):
            if torch.is_grad_enabled() and topk_weights.requires_grad:
                raise ValueError(
                    f"{where}rows quantized by the caller (scheme={x.scheme!r}) with router weights that need a "
                    "gradient: none would reach what was quantized; use torch.no_grad(), or give wide rows and a "
                    "dispatch scheme"
                )
            x = x.values
        for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{where}{said(name, tensor)}: must be a tensor")
        if x.dim() != 2 or topk_ids.dim() != 2 or topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"{where}dispatch takes x [M, H], topk_ids [M, K], topk_weights [M, K], got {tuple(x.shape)}, "
                f"{tuple(topk_ids.shape)}, {tuple(topk_weights.shape)}"
            )
        if x.shape[0] != topk_ids.shape[0]:
            raise ValueError(f"{where}x has {x.shape[0]} rows and topk_ids {topk_ids.shape[0]}: one per token each")
        if layout is not None:
            self.check_layout("layout", layout)
            if not torch.compiler.is_compiling() and layout.num_tokens != topk_ids.shape[0]:
                raise ValueError(
                    f"{where}layout is of {layout.num_tokens} tokens, topk_ids of {topk_ids.shape[0]}: give the layout "
                    "that was made for these ids, or None"
                )
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{where}x.stride(-1)={x.stride(-1)}: rows must be dense, call x.contiguous()")
        wanted = self.capabilities.topk_ids_dtype
        if topk_ids.dtype != wanted:
            raise ValueError(f"{where}topk_ids.dtype={topk_ids.dtype}: must be {wanted}")
        precise = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
        if topk_weights.dtype not in precise:
            raise ValueError(
                f"{where}topk_weights.dtype={topk_weights.dtype}: must be torch.float32 (float64 beside float64 rows)"
            )
        if adapter_ids is not None and (adapter_ids.dtype != torch.int32 or adapter_ids.shape != x.shape[:1]):
            raise ValueError(
                f"{where}adapter_ids is {adapter_ids.dtype} {tuple(adapter_ids.shape)}: must be int32 ({x.shape[0]},)"
            )
        named = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "adapter_ids": adapter_ids}
        for name, given in named.items():
            if given is not None and given.device != self.owner.device:
                raise ValueError(f"{where}{name} is on {given.device}, the layer on {self.owner.device}")

    def check_layout(self, name: str, layout: object) -> None:
        """Raises `ValueError` for what no dispatcher of this kind has made."""
        if not isinstance(layout, self.layout_type):
            right = f"what make_layout or a dispatch of {self.name!r} gave, a {self.layout_type.__name__}"
            raise ValueError(f"layer {self.layer!r}: {said(name, layout)}: must be {right}")

    def check_back(self, rows: Tensor | ExpertOutput, handle: Layout, out: Tensor | None) -> None:
        """Raises `ValueError` for rows that are not those of the dispatch that `handle` is from, or an `out` that can't
        take their sums."""
        if not isinstance(handle, self.layout_type):
            self.check_layout("handle", handle)
        if isinstance(rows, Tensor):
            values, slot = rows, None
        else:
            check_kind("rows", rows, ExpertOutput, "a tensor [T, H], or an ExpertOutput")
            values, slot = rows.rows, rows.slot
        shape = values.shape
        received, width = (shape if slot is None else slot.shape), shape[-1] if shape else 0
        # sizes of a compiled graph may be unknown
        other = (slot is None and len(shape) != 2) or (
            not torch.compiler.is_compiling() and received[0] != handle.num_rows
        )
        if other:
            raise ValueError(
                f"layer {self.layer!r}: combine takes one row per row dispatched, [{handle.num_rows}, H], got "
                f"{tuple(shape)}" + ("" if slot is None else f" and a slot {tuple(received)}")
            )
        if self.rows is not None and width != self.rows.width:
            raise ValueError(
                f"layer {self.layer!r}: combine got rows {width} wide: must be {self.rows.width}, as dispatched"
            )
        if out is None:
            return
        right = (handle.num_tokens, width)
        if out.shape != right or out.dtype != values.dtype or out.device != values.device:
            raise ValueError(
                f"layer {self.layer!r}: out is {out.dtype} {tuple(out.shape)} on {out.device}: must be {values.dtype} "
                f"{right} on {values.device}"
            )

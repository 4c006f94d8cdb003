"""What a forward of `MoEKernel` will allocate: the dispatcher's buffers, the experts' and what lies between."""

from __future__ import annotations

import torch

from epmoe.capabilities import KINDS
from epmoe.comm.memory import STEPS, Buffer, MemoryPlan, Step, buffer
from epmoe.comm.workspace import Workspace
from epmoe.dispatch.base import Dispatcher, Traffic
from epmoe.dispatch.wire import RowSpec
from epmoe.experts.base import Experts
from epmoe.quant.rows import row_dtype, scales_per_row


def planning_kinds(scheme: str | None) -> list[type[Experts]]:
    """Kinds of experts that plan their scratch, of those for weights in `scheme` (None: not quantized)."""
    return [
        kind
        for kind in KINDS.values()
        if kind.workspace_shapes is not Experts.workspace_shapes and scheme in kind.schemes
    ]


def plan_forward(
    dispatcher: Dispatcher,
    experts: Experts,
    layout: str,
    workspace: Workspace | None,
    *,
    num_tokens: int,
    sent: RowSpec,
    chunk_tokens: int | None,
    capacity: int | None,
    traffic: Traffic | None,
) -> MemoryPlan:
    """The plan of a forward without gradients; see `MoEKernel.memory_plan`."""
    num_experts, top_k, dispatch_scheme = dispatcher.owner.shape[0], sent.top_k, sent.scheme
    if num_tokens < 0 or not 1 <= top_k <= num_experts:
        raise ValueError(f"num_tokens={num_tokens}, top_k={top_k}: must be at least 0, and in [1, {num_experts}]")
    width, dtype = sent.width, sent.dtype
    moved = traffic if traffic is not None else dispatcher.traffic(num_tokens, top_k)
    buffers: list[Buffer] = []
    if dispatch_scheme is not None and (sent.quantized_before or not dispatcher.quantizes_in_flight(dtype)):
        scales = scales_per_row(width, dispatch_scheme)
        held: tuple[Step, ...] = ("dispatch", "experts", "reduce") if dispatcher.hands_on else ("dispatch",)
        if sent.quantized_before:  # an argument of the call, which lives until it returns
            held = STEPS
        buffers += [
            buffer("quantized rows", (num_tokens, width), row_dtype(dispatch_scheme), *held),
            buffer("their scales", (num_tokens, scales), torch.float32, *held),
        ]
    rows = moved.received if chunk_tokens is None else min(chunk_tokens, moved.received)
    pairs = moved.pairs if rows == moved.received else min(rows * top_k, moved.pairs)
    chunked = rows < moved.received
    whole = dispatcher.ep is None or (dispatcher.capabilities.reduces and chunk_tokens is None)
    buffers += dispatcher.memory_plan(num_tokens, sent, moved, reduced=chunked or not whole)
    if not experts.takes_rows(dispatch_scheme, layout):
        buffers.append(buffer("rows dequantized", (rows, width), dtype, "experts"))
    if layout == "batched":
        places = dispatcher.num_local * (capacity or rows)
        if dispatch_scheme is not None and experts.takes_rows(dispatch_scheme, layout):
            buffers += [
                buffer("places of the batched layout", (places, width), row_dtype(dispatch_scheme), "experts"),
                buffer("scales of places", (places, scales_per_row(width, dispatch_scheme)), torch.float32, "experts"),
            ]
        else:
            buffers.append(buffer("places of the batched layout", (places, width), dtype, "experts"))
        pairs = places
    shapes = experts.workspace_shapes(pairs if layout == "batched" else rows, pairs)
    if shapes is None:
        able = " or ".join(repr(kind.name) for kind in planning_kinds(experts.spec.scheme))
        raise ValueError(f"experts={experts.name!r} allocate as they go: memory_plan needs experts={able}")
    # whoever reduces reads workspace13; parts are reduced one after another, each with its own
    read: tuple[Step, ...] = ("experts",) if chunked else ("experts", "reduce", *(("combine",) if whole else ()))
    index_of = (pairs,) if layout == "standard" else (rows, top_k)
    buffers += [
        buffer("rows in expert order", index_of, torch.int32, "experts"),
        buffer("places of pairs", (rows, top_k), torch.int32, *read),
    ]
    if workspace is not None:
        space = max(workspace.nbytes, shapes.workspace13.nbytes + shapes.workspace2.nbytes)
        buffers.append(Buffer(workspace.name, space, STEPS))
    else:
        # kinds that reduce by themselves do it once the activation is gone
        own = buffer("", (rows, width), dtype).nbytes if experts.weight_and_reduce[layout] == "no_op" else 0
        buffers += [
            Buffer("workspace13", shapes.workspace13.nbytes, read),
            Buffer("workspace2, then reduced rows", max(shapes.workspace2.nbytes, own), ("experts",)),
        ]
    if chunked:
        buffers.append(buffer("reduced rows of all parts", (moved.received, width), dtype, "experts"))
    return MemoryPlan(tuple(buffers))

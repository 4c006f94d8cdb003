"""What a forward of `MoEKernel` will allocate: the dispatcher's buffers, the experts' and what lies between."""

from __future__ import annotations

import torch

from epmoe.comm.memory import STEPS, Buffer, MemoryPlan, Step, buffer
from epmoe.comm.workspace import Workspace
from epmoe.dispatch.base import Dispatcher, Traffic
from epmoe.dispatch.wire import row_bytes
from epmoe.experts.base import Experts
from epmoe.quant.rows import row_dtype, scales_per_row


def plan_forward(
    dispatcher: Dispatcher,
    experts: Experts,
    layout: str,
    workspace: Workspace | None,
    *,
    num_tokens: int,
    top_k: int,
    dispatch_scheme: str | None,
    combine_scheme: str | None,
    chunk_tokens: int | None,
    capacity: int | None,
    traffic: Traffic | None,
) -> MemoryPlan:
    """The plan of a forward without gradients; see `MoEKernel.memory_plan`."""
    spec, num_experts = experts.spec, dispatcher.owner.shape[0]
    if num_tokens < 0 or not 1 <= top_k <= num_experts:
        raise ValueError(f"num_tokens={num_tokens}, top_k={top_k}: must be at least 0, and in [1, {num_experts}]")
    width, dtype = spec.hidden_size, spec.dtype
    moved = traffic if traffic is not None else dispatcher.traffic(num_tokens, top_k)
    buffers: list[Buffer] = []
    if dispatch_scheme is not None and not dispatcher.quantizes_in_flight(dtype):
        scales = scales_per_row(width, dispatch_scheme)
        buffers += [
            buffer("quantized rows", (num_tokens, width), row_dtype(dispatch_scheme), "dispatch"),
            buffer("their scales", (num_tokens, scales), torch.float32, "dispatch"),
        ]
    message_bytes = row_bytes(width, dtype, top_k, scheme=dispatch_scheme).dispatch
    back = {} if combine_scheme is None else {"combine_scheme": combine_scheme}
    buffers += dispatcher.memory_plan(num_tokens, width, dtype, message_bytes, moved, **back)

    rows = moved.received if chunk_tokens is None else min(chunk_tokens, moved.received)
    pairs = moved.pairs if rows == moved.received else min(rows * top_k, moved.pairs)
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
        raise ValueError(
            f"experts={experts.name!r} allocate as they go, in sizes that depend on the routing: memory_plan needs "
            "experts='grouped' or 'batched', or 'grouped_fp8' for weights in fp8"
        )
    chunked = rows < moved.received
    # combine reads workspace13, unless parts have been reduced before it
    read: tuple[Step, ...] = ("experts",) if chunked else ("experts", "combine")
    index_of = (pairs,) if layout == "standard" else (rows, top_k)
    buffers += [
        buffer("rows in expert order", index_of, torch.int32, *read),
        buffer("places of pairs", (rows, top_k), torch.int32, *read),
    ]
    if workspace is not None:
        held = max(workspace.nbytes, shapes.workspace13.nbytes + shapes.workspace2.nbytes)
        buffers.append(Buffer(workspace.name, held, STEPS))
    else:
        buffers += [
            Buffer("workspace13", shapes.workspace13.nbytes, read),
            Buffer("workspace2", shapes.workspace2.nbytes, ("experts",)),
        ]
    if chunked:
        buffers += [
            buffer("reduced rows of the other parts", (moved.received - rows, width), dtype, "experts"),
            buffer("reduced rows of all parts", (moved.received, width), dtype, "combine"),
        ]
    return MemoryPlan(tuple(buffers))

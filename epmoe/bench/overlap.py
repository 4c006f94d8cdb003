"""Bench `overlap`: steps of a few transformer blocks, one part of the batch after another and overlapped.

    serial         attention │ dispatch │ experts │ combine │ shared experts
    shared         shared experts under combine
    microbatches   two parts of the batch, each one's rows under the other's work
    both           both
    no_comm        serial, with rows that do not move: what overlap could reach at best
    split_no_comm  microbatches with rows that do not move: what parts of a batch could, which fill the chip less

*Hidden* is (serial - overlapped) / (serial - no_comm) of the best way. All are timed in the same rounds, with equal
weights and tokens. A block is RMSNorm, attention (causal, grouped queries, no position encoding), RMSNorm, MoE layer.

M tokens on this rank, T rows received, H width, S length of a sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from epmoe.bench import problem as problems
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.shapes import Shape, is_train, named_shape
from epmoe.bench.timing import max_over_ranks
from epmoe.config import MoEConfig
from epmoe.dispatch import DISPATCHERS, make_dispatcher
from epmoe.dispatch.base import Dispatcher, DispatcherCapabilities, Traffic
from epmoe.dispatch.inputs import ExpertInput, Layout, Pending
from epmoe.dispatch.reduce import ExpertOutput
from epmoe.layer import MoELayer
from epmoe.overlap import current_microbatch, run_microbatched, trace
from epmoe.quant.rows import QuantizedRows

SEQUENCE = 4096  # the longest
HEADS = {"qwen3-30b": (32, 4, 128), "qwen3-235b": (64, 4, 128)}  # of queries, of keys, width
SWITCHES = 2000


@dataclasses.dataclass(frozen=True)
class OverlapCase:
    """`tokens` is per rank; `shared_experts` of the routed experts' width each; `layers` blocks, since the last rows of
    a step have nothing to hide behind; `graph` times CUDA graphs of a step, which cost the host nothing. Routing
    other than `uniform` is simulated; that is the layers' own, with random weights."""

    shape: str
    shared_experts: int
    tokens: int
    mode: str
    dispatcher: str
    ranks: int
    layers: int = 4
    graph: bool = False
    routing: str = "uniform"

    def __post_init__(self) -> None:
        problems.check_names(self.shape, self.routing, dispatcher=self.dispatcher, ranks=self.ranks, mode=self.mode)
        if self.tokens < 2 or self.layers < 1 or self.shared_experts < 0:
            raise ValueError(
                f"tokens={self.tokens}, layers={self.layers}, shared_experts={self.shared_experts}: must be at least "
                "2, 1 and 0"
            )
        known = DISPATCHERS.get(self.dispatcher)
        if self.graph and (known is None or not known.capabilities.cuda_graph):
            raise ValueError(
                f"graph=True with dispatcher={self.dispatcher!r}: must be a dispatcher that captures, by name"
            )


class Block(nn.Module):
    """x `[B, S, H]` -> `[B, S, H]`."""

    def __init__(self, shape: Shape, moe: MoELayer, dtype: torch.dtype) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads, self.kv_heads, self.size = HEADS.get(shape.name, (max(1, width // 128), 1, min(128, width)))
        device = moe.gate_up_proj.device
        self.norms = nn.ModuleList([nn.RMSNorm(width, device=device, dtype=dtype) for _ in range(2)])
        inner = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = nn.Linear(width, inner, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(self.heads * self.size, width, bias=False, device=device, dtype=dtype)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        B, S, _ = x.shape
        rows = self.qkv(self.norms[0](x)).view(B, S, -1, self.size).transpose(1, 2)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(B, S, -1))
        return x + self.moe(self.norms[1](x))

    def attention_flops(self, tokens: int, sequence: int) -> int:
        """Forward: both projections, and half of the S×S scores and of their sums."""
        weights = self.qkv.weight.numel() + self.out.weight.numel()
        return tokens * (2 * weights + 2 * sequence * self.heads * self.size)


class _Stay(torch.autograd.Function):
    """The rows that came once, as if they came from x `[M, H]` now; their gradient's first M rows for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, rows: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.tokens = x.shape[0]
        return rows.view_as(rows), row_weights.view_as(row_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return rows[: ctx.tokens], weights[: ctx.tokens], None, None


class _Home(torch.autograd.Function):
    """The first M of T rows; backward takes rows that lie ready for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gradient: Tensor, tokens: int) -> Tensor:
        ctx.gradient = gradient
        return rows[:tokens].view(tokens, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient, None, None


class UnmovedRows(Dispatcher):
    """Hands out what the dispatcher `of` delivered the first time, and moves nothing: experts get as many rows.

    What it gives back is wrong, and takes no time.
    """

    name = "unmoved"
    capabilities = DispatcherCapabilities(cuda_graph=True)

    def __init__(self, of: Dispatcher) -> None:
        super().__init__(None, of.owner, of.expert_map, of.num_local, layer=of.layer)
        self.of = of
        self.kept: dict[int, tuple[ExpertInput, Tensor]] = {}  # by M: rows, and their gradient

    def make_layout(self, topk_ids: Tensor) -> Layout:
        """Of the rows that are kept."""
        return self.kept[topk_ids.shape[0]][0].handle

    def dispatch_async(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        layout: Layout | None = None,
        **others: Any,
    ) -> Pending[ExpertInput]:
        assert isinstance(x, Tensor)
        if x.shape[0] not in self.kept:
            with torch.no_grad():
                came = self.of.dispatch(x, topk_ids, topk_weights)
            fields = ("x", "topk_ids", "topk_weights")
            rows_came = dataclasses.replace(came, **{name: getattr(came, name).clone() for name in fields})
            # slots that hold no row must not hold NaN either: nothing is masked here
            rows_came.x.nan_to_num_(0.0)
            self.kept[x.shape[0]] = rows_came, torch.randn_like(rows_came.x)
        kept, _ = self.kept[x.shape[0]]
        rows, weights = _Stay.apply(x, topk_weights, kept.x, kept.topk_weights)
        return Pending.done(dataclasses.replace(kept, x=rows, topk_weights=weights))

    def combine_async(self, rows: Tensor | ExpertOutput, handle: Layout, **others: Any) -> Pending[Tensor]:
        _, gradient = self.kept[handle.num_tokens]
        return Pending.done(_Home.apply(self.reduced(rows), gradient, handle.num_tokens))

    def traffic(self, num_tokens: int, top_k: int) -> Traffic:
        return self.of.traffic(num_tokens, top_k)

    def rows_by_rank(self, handle: Layout) -> Tensor:
        return torch.zeros(2, 1, dtype=torch.int64, device="cpu")


class Model:
    """Blocks of one case, and the ways to run a step of them."""

    def __init__(self, case: OverlapCase, session: Session) -> None:
        shape, ep = named_shape(case.shape), session.ep
        self.case, self.device, self.dtype = case, session.device, problems.DTYPE
        config = MoEConfig(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_experts,
            shape.top_k,
            activation=shape.activation.name,
            num_shared_experts=case.shared_experts,
            dispatcher=case.dispatcher,
            max_tokens_per_rank=case.tokens,
        )
        torch.manual_seed(0)
        made = []
        for n in range(case.layers):
            router = None if case.routing == "uniform" else problems.make_router(case.routing, shape, seed=1 + n)
            made.append(MoELayer(config, ep, device=self.device, dtype=self.dtype, router=router, name=f"{n}"))
        self.blocks = nn.Sequential(*(Block(shape, moe, self.dtype) for moe in made))
        self.kernels = [moe.kernel(self.device, self.dtype) for moe in made]
        self.moving = [kernel.dispatcher for kernel in self.kernels]
        self.unmoved = [UnmovedRows(dispatcher) for dispatcher in self.moving]
        sequence = min(SEQUENCE, case.tokens // 2)
        self.moving_parts = self.moving
        if self.moving[0].capabilities.max_tokens:  # a part reserves room for a part
            most = -(-(case.tokens // sequence) // 2) * sequence
            self.moving_parts = [
                make_dispatcher(d.name, ep, moe.placement, self.device, layer=d.layer, max_tokens_per_rank=most)
                for d, moe in zip(self.moving, made, strict=True)
            ]
        self.unmoved_parts = [UnmovedRows(dispatcher) for dispatcher in self.moving_parts]
        generator = torch.Generator(self.device).manual_seed(1 + ep.rank)
        size = (case.tokens // sequence, sequence, shape.hidden_size)
        self.x, self.dout = (
            torch.empty(size, dtype=self.dtype, device=self.device).normal_(generator=generator) for _ in range(2)
        )
        self.x.requires_grad_(is_train(case.mode))

    @contextmanager
    def _set(self, order: str, dispatchers: list[Any]) -> Iterator[None]:
        before = [(kernel.shared_experts_order, kernel.dispatcher) for kernel in self.kernels]
        for kernel, dispatcher in zip(self.kernels, dispatchers, strict=True):
            kernel.shared_experts_order, kernel.dispatcher = order, dispatcher
        try:
            yield
        finally:
            for kernel, (order, dispatcher) in zip(self.kernels, before, strict=True):
                kernel.shared_experts_order, kernel.dispatcher = order, dispatcher

    def step(self, *, split: bool, order: str, moves: bool = True, interleave: bool = True) -> tuple[Tensor, ...]:
        """Output, and in training the gradients of x and of every parameter."""
        whole, parts = (self.moving, self.moving_parts) if moves else (self.unmoved, self.unmoved_parts)
        dispatchers = parts if split else whole
        with self._set(order, dispatchers), torch.set_grad_enabled(is_train(self.case.mode)):
            y = run_microbatched(self.blocks, self.x, interleave=interleave) if split else self.blocks(self.x)
            if not is_train(self.case.mode):
                return (y,)
            y.backward(self.dout)
        leaves = [self.x, *self.blocks.parameters()]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for leaf in leaves:
            leaf.grad = None
        return (y.detach(), *gradients)

    def ways(self) -> dict[str, Callable[[], object]]:
        """A step in each of them, by name."""
        calls: dict[str, Callable[[], object]] = {"serial": lambda: self.step(split=False, order="after")}
        if self.case.shared_experts:
            calls["shared"] = lambda: self.step(split=False, order="during")
        calls["microbatches"] = lambda: self.step(split=True, order="after")
        if self.case.shared_experts:
            calls["both"] = lambda: self.step(split=True, order="during")
        calls["no_comm"] = lambda: self.step(split=False, order="after", moves=False)
        calls["split_no_comm"] = lambda: self.step(split=True, order="after", moves=False)
        return calls

    def wire(self) -> tuple[int, int]:
        """Bytes that this rank sends and receives in a step, by the rows that came in the first that moved none."""
        sent = received = 0
        for kernel, unmoved in zip(self.kernels, self.unmoved, strict=True):
            handle = unmoved.kept[self.case.tokens][0].handle
            moved = kernel.wire_bytes(handle, named_shape(self.case.shape).top_k)
            steps = ("dispatch", "combine", "combine_backward", "dispatch_backward")
            for step in steps if is_train(self.case.mode) else steps[:2]:
                sent, received = sent + moved[step][0], received + moved[step][1]
        return sent, received

    def flops(self) -> int:
        """Of a step on one rank at balanced load; training three times the forward."""
        case, shape = self.case, named_shape(self.case.shape)
        sequence = self.x.shape[1]
        block = self.blocks[0]
        assert isinstance(block, Block)
        attention = block.attention_flops(case.tokens, sequence) * (3 if is_train(case.mode) else 1)
        shared = dataclasses.replace(shape, top_k=max(1, case.shared_experts)).flops(case.tokens, case.mode)
        experts = shape.flops(case.tokens, case.mode) + (shared if case.shared_experts else 0)
        return case.layers * (attention + experts)


def measure_overlap(case: OverlapCase, session: Session, traces: Path | None = None) -> Record:
    """One record: `median_us` of the fastest way that overlaps, `<way>_us` of each, `hidden_fraction`, `switch_us` of
    a microbatch's yield; bytes of the busiest rank's links, and how much of their time they need at the rate of one
    large exchange. Floor: the step's operations at the ceiling, rows in no time.

    Args:
        traces: a folder for a timeline of each way.

    Raises:
        RuntimeError: interleaved microbatches do not give the bits of one after another, or gradients too far apart.
    """
    assert case.ranks == session.ep.num_ranks
    model = Model(case, session)
    ways = model.ways()
    order = "during" if case.shared_experts else "after"
    in_turn = model.step(split=True, order=order)
    one_by_one = model.step(split=True, order=order, interleave=False)
    if not torch.equal(in_turn[0], one_by_one[0]):
        raise RuntimeError("microbatches in turn give other bits than one after another")
    # attention's own backward repeats its bits on no GPU
    names = [f"gradient {number}" if number else "output" for number in range(len(in_turn))]
    problems.check_agreement(in_turn, one_by_one, names, "microbatches one after another", session.ep)
    del in_turn, one_by_one
    times = session.time(ways, graph=case.graph)
    if traces is not None:
        for name, call in ways.items():
            call()
            stem = "-".join(str(value) for value in dataclasses.astuple(case))
            with trace(traces / f"{stem}-{name}-rank{session.ep.rank}.json", device=session.device):
                call()
    overlapped = {name: value for name, value in times.items() if name in ("shared", "microbatches", "both")}
    best = min(overlapped.values())
    exposed = times["serial"] - times["no_comm"]
    flops = model.flops()
    figures: dict[str, Any] = {f"{name}_us": value for name, value in times.items()}
    figures["hidden_fraction"] = (times["serial"] - best) / exposed if exposed > 0 else 0.0
    most = max_over_ranks(torch.tensor(model.wire(), dtype=torch.int64, device=session.device), session.ep).tolist()
    figures |= {"sent_mb": most[0] * 1e-6, "received_mb": most[1] * 1e-6}
    figures["link_percent"] = 100 * session.ceilings.wire_us(max(most)) / best
    fields = dataclasses.asdict(case)
    if case.routing == "uniform":  # records of before have no routing
        del fields["routing"]
    return make_record(
        "overlap",
        fields,
        median_us=best,
        floor_us=session.ceilings.compute_us(flops),
        tflops=flops / best * 1e-6,
        peers={},
        device=session.device,
        switch_us=switch_us(session.device),
        **figures,
    )


def switch_us(device: torch.device) -> float:
    """Microseconds of the host for a microbatch to yield and the next one to go on."""

    def spin(x: Tensor, count: int) -> Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        for _ in range(count):
            microbatch.let_others_run()
        return x

    x = torch.zeros(2, 1, device=device)
    best = []
    for count in (0, SWITCHES):
        took = []
        for _ in range(3):
            started = time.perf_counter()
            run_microbatched(spin, x, count, randomness=False)
            took.append(time.perf_counter() - started)
        best.append(min(took))
    return (best[1] - best[0]) / (2 * SWITCHES) * 1e6

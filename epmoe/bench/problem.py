"""What a bench computes on: seeded tokens, routing and experts made where they are used, the calls that are timed, and
the checks that must hold before they are.

    simulated router ─ topk_ids, topk_weights ─┐
    x [M,H] ─────────────────────── dispatch ─ experts ─ combine ──► y [M,H]      what `infer` and `train` time

M tokens on this rank, H width, I expert width, E experts, L on this rank, K per token, R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import simulated
from epmoe.bench.shapes import Shape, is_train, named_shape
from epmoe.bench.timing import Ceilings, max_over_ranks
from epmoe.comm import EPGroup
from epmoe.dispatch import DISPATCHERS, Dispatcher, ExpertInput, make_dispatcher
from epmoe.dispatch.exchange import Rows
from epmoe.experts import EXPERTS, QUANTIZED_EXPERTS, ExpertsSpec, ExpertWeights, select_experts
from epmoe.kernel import MoEKernel
from epmoe.ops.activation import apply_activation
from epmoe.ops.symmetric_configs import LATENCY_TOKENS
from epmoe.placement import ExpertPlacement
from epmoe.quant import quantize_weights

DTYPE = torch.bfloat16
OUTPUT_LIMIT = 1e-2  # relative L2 between two bf16 computations, or one and float64
GRADIENT_LIMIT = 2e-2  # one more rounded product away
CHECKED_TOKENS = 8  # of each rank, against float64

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`x, topk_ids, topk_weights, w1, w2 -> y`."""
Outcome = tuple[Tensor, ...]
"""`y`, and in training the gradients of `x`, `topk_weights`, `w1`, `w2`."""
OUTCOMES = ("output", "gradient of x", "gradient of topk_weights", "gradient of w1", "gradient of w2")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One rank's tokens with their routing and an upstream gradient."""

    shape: Shape
    ep: EPGroup
    placement: ExpertPlacement
    x: Tensor  # [M, H]
    topk_ids: Tensor  # [M, K] int32
    topk_weights: Tensor  # [M, K] float32
    dout: Tensor  # [M, H]


@dataclasses.dataclass(frozen=True)
class Problem(Tokens):
    """One rank's share: its tokens and its experts."""

    weights: ExpertWeights

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What training has gradients of, in the order of `OUTCOMES`."""
        return self.x, self.topk_weights, self.weights.gate_up_proj, self.weights.down_proj

    def call(self, forward: Forward, mode: str) -> Callable[[], Outcome]:
        """The call that is timed: forward without autograd, or forward and backward to every leaf."""
        arguments = (self.x, self.topk_ids, self.topk_weights, self.weights.gate_up_proj, self.weights.down_proj)

        def infer() -> Outcome:
            with torch.no_grad():
                return (forward(*arguments),)

        def train() -> Outcome:
            y = forward(*arguments)
            return y.detach(), *torch.autograd.grad(y, self.leaves, self.dout)

        return train if is_train(mode) else infer

    def in_a_row(self, forward: Forward, turns: int) -> Callable[[], list[Tensor]]:
        """`turns` forwards without autograd, each by other experts: `topk_ids` moved on around the circle of them. So
        equally many have tokens each time, and no weights are in a cache still. What a graph is captured from."""
        ids, num_experts = self.topk_ids, self.shape.num_experts
        step = max(1, num_experts // turns)
        moved = [torch.where(ids < 0, ids, (ids + turn * step) % num_experts) for turn in range(turns)]
        weights = self.weights.gate_up_proj, self.weights.down_proj

        def several() -> list[Tensor]:
            with torch.no_grad():
                return [forward(self.x, ids, self.topk_weights, *weights) for ids in moved]

        return several

    def kernel(self, dispatcher: str, experts: str, scheme: str | None = None) -> tuple[MoEKernel, Forward]:
        """epmoe's routed path by the dispatcher and the experts of these names (`auto` for either chooses).

        With a `scheme` the weights are quantized once and for all, and those that the forward is given do not matter.
        """
        device = self.x.device
        ep = None if dispatcher == "local" else self.ep
        shape, dtype = self.shape, self.x.dtype
        spec = ExpertsSpec(shape.activation, shape.hidden_size, shape.intermediate_size, dtype, device, scheme=scheme)
        known = DISPATCHERS.get(dispatcher)
        most = self.x.shape[0] if known is not None and known.capabilities.max_tokens else None
        kernel = MoEKernel(
            make_dispatcher(dispatcher, ep, self.placement, device, layer="bench", max_tokens_per_rank=most),
            select_experts(spec, experts).experts,
        )
        if scheme is None:
            return kernel, lambda x, ids, p, w1, w2: kernel(x, ids, p, ExpertWeights(w1, w2)).routed
        one, two = (quantize_weights(w, scheme) for w in (self.weights.gate_up_proj, self.weights.down_proj))
        own = ExpertWeights(one.values, two.values, gate_up_scale=one.scales, down_scale=two.scales)
        return kernel, lambda x, ids, p, *_: kernel(x, ids, p, own).routed


def make_weights(shape: Shape, ep: EPGroup, dtype: torch.dtype = DTYPE) -> ExpertWeights:
    """This rank's experts, drawn on its device; std 1/√fan-in, so that no width loses its signal."""
    local = ExpertPlacement.contiguous(shape.num_experts, ep.num_ranks).num_local(ep.rank)
    h, i = shape.hidden_size, shape.intermediate_size
    generator = torch.Generator(ep.device).manual_seed(ep.rank)

    def drawn(rows: int, fan_in: int) -> Tensor:
        weight = torch.empty(local, rows, fan_in, dtype=dtype, device=ep.device)
        for expert in weight:
            expert.normal_(std=fan_in**-0.5, generator=generator)
        return weight.requires_grad_()

    return ExpertWeights(drawn(shape.gate_up_size, h), drawn(h, i))


def make_tokens(shape: Shape, ep: EPGroup, tokens: int, routing: str, dtype: torch.dtype = DTYPE) -> Tokens:
    """`tokens` tokens on this rank, routed by a simulated router of a seed of its own; experts in consecutive runs.

    Raises:
        ValueError: an unknown routing.
    """
    router = make_router(routing, shape, seed=1 + ep.rank)
    generator = torch.Generator(ep.device).manual_seed(1000 + ep.rank)
    x, dout = (
        torch.empty(tokens, shape.hidden_size, dtype=dtype, device=ep.device).normal_(generator=generator)
        for _ in range(2)
    )
    routed = router(x)
    placement = ExpertPlacement.contiguous(shape.num_experts, ep.num_ranks)
    topk_weights = routed.topk_weights.requires_grad_()
    return Tokens(shape, ep, placement, x.requires_grad_(), routed.topk_ids, topk_weights, dout)


def check_names(
    shape: str,
    routing: str,
    *,
    dispatcher: str | None = None,
    ranks: int = 1,
    experts: str | None = None,
    mode: str | None = None,
) -> Shape:
    """The shape, after every name of a case has been checked: `ValueError` before any rank is started."""
    made = named_shape(shape)
    make_router(routing, made, seed=0)
    kinds = EXPERTS | QUANTIZED_EXPERTS
    for field, name, known in (("dispatcher", dispatcher, DISPATCHERS), ("experts", experts, kinds)):
        if name is not None and name != "auto" and name not in known:
            raise ValueError(f"{field}={name!r}: must be auto, {', '.join(known)}")
    check_moves(dispatcher, ranks)
    if mode is not None:
        is_train(mode)
    return made


def check_moves(dispatcher: str | None, ranks: int) -> None:
    """Raises `ValueError` for `local` on several ranks."""
    if dispatcher == "local" and ranks > 1:
        raise ValueError(f"dispatcher='local' with ranks={ranks}: it moves nothing, so ranks must be 1")


def make_router(routing: str, shape: Shape, seed: int) -> simulated.SimulatedRouter:
    """`uniform`; `zipf:EXPONENT` for a load that is skewed over the experts; `one_hot`, every token to the first K."""
    kind, _, exponent = routing.partition(":")
    if kind == "uniform" and not exponent:
        return simulated.uniform(shape.num_experts, shape.top_k, seed)
    if kind == "zipf" and exponent.replace(".", "", 1).isdigit():
        return simulated.zipf(shape.num_experts, shape.top_k, float(exponent), seed)
    if routing == "one_hot":
        popularity = [float(expert < shape.top_k) for expert in range(shape.num_experts)]
        return simulated.SimulatedRouter(routing, shape.top_k, popularity, seed)
    raise ValueError(f"routing={routing!r}: must be uniform, one_hot, or zipf:EXPONENT such as zipf:1.0")


# --- what a floor is made of ------------------------------------------------------------------------------------------


def wire_bytes(dispatcher: Dispatcher, rows: ExpertInput, tokens: Tokens, mode: str) -> dict[str, int]:
    """Bytes that cross this rank's link in each step, in one direction: what it sends, or receives if that is more.

    Combine and the backward of dispatch move the same rows the other way. Counted by the dispatcher, rows to oneself
    left out.
    """
    messages = row_messages(tokens, mode).items()
    return {step: max(dispatcher.wire_bytes(rows.handle, message)) for step, message in messages}


def link_figures(
    dispatcher: Dispatcher, rows: ExpertInput, messages: Mapping[str, int], median_us: float, ceilings: Ceilings
) -> dict[str, float]:
    """What a record says of the links: `sent_mb` and `received_mb` of the rank that sends, or receives, the most, and
    `link_percent` of the time in which one large exchange would move the larger of them; collective.

    Args:
        messages: bytes of a row in each step; in `combine` and `dispatch_backward` rows go back the way they came.
    """
    assert dispatcher.ep is not None
    sent = received = 0
    for step, message in messages.items():
        there, here = dispatcher.wire_bytes(rows.handle, message)
        back = step in ("combine", "dispatch_backward")
        sent, received = sent + (here if back else there), received + (there if back else here)
    totals = torch.tensor([sent, received], dtype=torch.int64, device=dispatcher.ep.device)
    most = max_over_ranks(totals, dispatcher.ep).tolist()
    percent = 100 * ceilings.wire_us(max(most)) / median_us
    return {"sent_mb": most[0] * 1e-6, "received_mb": most[1] * 1e-6, "link_percent": percent}


def row_messages(tokens: Tokens, mode: str) -> dict[str, int]:
    """Bytes of one row's message in each step: H values; dispatch adds K weights and K ids, its backward K gradients of
    weights."""
    x, ids, p = tokens.x, tokens.topk_ids, tokens.topk_weights
    message = {"dispatch": Rows(x, p, ids), "combine": Rows(x, None, None)}
    if is_train(mode):
        message |= {"combine_backward": Rows(x, None, None), "dispatch_backward": Rows(x, p, None)}
    return {step: row.message_bytes for step, row in message.items()}


def weight_bytes(problem: Problem, rows: ExpertInput, mode: str) -> int:
    """Bytes of expert weights that must cross device memory, of the experts that got rows.

    Once in forward; in training twice more: read for the rows' gradient, and the weights' own gradient written.
    """
    ids = rows.topk_ids
    local = rows.expert_map[ids[(ids >= 0) & (ids < rows.expert_map.shape[0])].long()]
    active = int(local[local >= 0].unique().numel())
    return active * problem.shape.expert_parameters * problem.x.element_size() * (3 if is_train(mode) else 1)


def of_busiest_rank(steps: Mapping[str, int], weights: int, ep: EPGroup) -> tuple[dict[str, int], int]:
    """Each step's wire bytes and the weight bytes, of the rank with the most; collective."""
    values = torch.tensor([*steps.values(), weights], dtype=torch.int64, device=ep.device)
    *wires, weights = max_over_ranks(values, ep).tolist()
    return dict(zip(steps, wires, strict=True)), weights


def floor_us(ceilings: Ceilings, flops: float, weights: float, wire: float) -> float:
    """No path that moves, computes and moves back in turn can take less: max(FLOPs at the bf16 ceiling, weight bytes at
    the memory's) + wire bytes at the link's. A path that overlaps the two may go below, down to the larger of them."""
    return max(ceilings.compute_us(flops), ceilings.memory_us(weights)) + ceilings.wire_us(wire)


# --- what must hold before anything is timed --------------------------------------------------------------------------


def check_agreement(
    ours: Outcome,
    theirs: Outcome,
    names: Sequence[str],
    peer: str,
    ep: EPGroup,
    output_limit: float = OUTPUT_LIMIT,
) -> None:
    """Raises `RuntimeError` on every rank when a relative L2 difference is beyond its limit on one; collective."""
    errors = [relative(a, b) for a, b in zip(ours, theirs, strict=True)]
    worst = max_over_ranks(torch.tensor(errors, dtype=torch.float64, device=ep.device), ep).tolist()
    limits = [output_limit] + [GRADIENT_LIMIT] * (len(names) - 1)
    wrong = [f"{n} {e:.2e} > {m:g}" for n, e, m in zip(names, worst, limits, strict=True) if not e <= m]
    if wrong:
        raise RuntimeError(f"epmoe and {peer} disagree, so nothing was timed: {', '.join(wrong)} (relative L2 error)")


def check_reference(ours: Outcome, problem: Problem, output_limit: float = OUTPUT_LIMIT) -> None:
    """Compares the first tokens of every rank with float64: output, and in training the gradients of a token.

    Raises `RuntimeError` on every rank when they are too far apart; collective.
    """
    rows = min(CHECKED_TOKENS, problem.x.shape[0])
    token_outcomes = tuple(tensor[:rows] for tensor in ours[:3])
    names = OUTCOMES[: len(token_outcomes)]
    expected = reference(problem, rows)[: len(names)]
    check_agreement(token_outcomes, expected, names, "float64", problem.ep, output_limit)


def turns_of(tokens: int) -> int:
    """How many calls a graph holds, so that its launch counts for little: up to twenty where one decodes."""
    return max(1, min(20, LATENCY_TOKENS // max(1, tokens)))


def relative(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖, slice by slice along the first dimension of large tensors; inf for what is not finite."""
    difference = scale = torch.zeros((), dtype=torch.float64, device=a.device)
    slices = range(a.shape[0]) if a.dim() == 3 else [slice(None)]
    for part in slices:
        left, right = a[part].double(), b[part].double()
        difference = difference + (left - right).square().sum()
        scale = scale + right.square().sum()
    error = (difference / scale).sqrt() if scale else difference.sqrt()
    return error.nan_to_num(nan=torch.inf).item()


def reference(problem: Problem, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of x and of topk_weights for this rank's first `rows` tokens, in float64; collective.

    Every rank holds the first tokens of all ranks and adds what its own experts give, one expert at a time.
    """
    ep, act = problem.ep, problem.shape.activation
    held = (problem.x, problem.topk_ids, problem.topk_weights, problem.dout)
    x, ids, p, dout = (_gathered(tensor.detach()[:rows], ep) for tensor in held)
    x, p, dout = x.double().requires_grad_(), p.double().requires_grad_(), dout.double()
    y, x.grad, p.grad = torch.zeros_like(dout), torch.zeros_like(x), torch.zeros_like(p)
    for local, expert in enumerate(problem.placement.local_experts(ep.rank)):
        t, k = (ids == expert).nonzero(as_tuple=True)
        if t.numel() == 0:
            continue
        w1, w2 = (w[local].detach().double() for w in (problem.weights.gate_up_proj, problem.weights.down_proj))
        part = apply_activation(x[t] @ w1.T, act.name, act.alpha, act.limit) @ w2.T * p[t, k, None]
        part.backward(dout[t])
        y.index_add_(0, t, part.detach())
    mine = slice(ep.rank * rows, (ep.rank + 1) * rows)
    for share in (y, x.grad, p.grad):
        dist.all_reduce(share, group=ep.process_group)
    return y[mine], x.grad[mine], p.grad[mine]


def _gathered(tensor: Tensor, ep: EPGroup) -> Tensor:
    gathered, work = ep.all_gather_async(tensor.contiguous())
    ep.wait(work, "bench: gathering the tokens to check")
    return gathered

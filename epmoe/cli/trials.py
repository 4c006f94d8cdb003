"""Things the doctor tries for real, each in processes of its own, so that a crash or a hang of one is only a finding.

A trial is a whole layer (or a compiler) on a small case, forward and backward, against a float64 formula that shares no
code with the experts. M tokens, H hidden size, I intermediate size, E experts, K experts per token, R ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from epmoe.cli.finding import Finding
from epmoe.comm import EPGroup
from epmoe.config import Activation, MoEConfig, RouterConfig
from epmoe.dispatch import make_dispatcher
from epmoe.experts import EXPERTS, ExpertsSpec, ExpertWeights
from epmoe.kernel import MoEKernel
from epmoe.layer import MoELayer
from epmoe.ops._triton import HAVE_TRITON, jit, tl
from epmoe.placement import ExpertPlacement
from epmoe.router import route
from epmoe.testing import RankFailed, RanksTimedOut, run_ranks

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 64, 32, 8, 2
# relative L2 error of any output or gradient: rounding of a few chained products, with room; wrong scales are far off
TOLERANCE = {"float64": 1e-12, "float32": 5e-5, "float16": 5e-3, "bfloat16": 2e-2}
_LONGEST_REASON = 400


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Returned by a trial's function: what it tries declares that it can't do this here, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Trial:
    """`fn(rank, world_size, *args)` says how it went, returns a `Refusal`, or raises. See `run_ranks` for the rest."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world_size: int = 1
    backend: str = "gloo"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float | None = None  # seconds; None: the doctor's own
    advice: str = ""  # when it fails


def run_apart(trial: Trial, timeout: float, log: IO[bytes]) -> Any:
    """What rank 0 returned; a `Finding` that says why not when a rank raised, died or did not end in time.

    What the ranks print goes to `log`.
    """
    start = log.seek(0, os.SEEK_END)
    try:
        with _output_to(log):
            return run_ranks(
                trial.fn,
                trial.world_size,
                args=trial.args,
                backend=trial.backend,
                env=trial.env,
                timeout=trial.timeout or timeout,
            )[0]
    except RankFailed as failure:
        who = f"rank {failure.rank} of {failure.world_size}: " if failure.world_size > 1 else ""
        reason = who + _why(failure, log, start)
    except RanksTimedOut as late:
        rank, stack = next(iter(sorted(late.stacks.items())))
        frame = next((line.strip() for line in stack.splitlines() if line.startswith("  File")), stack)
        who = f"rank {rank} was" if trial.world_size > 1 else "it was"
        reason = f"no end after {late.timeout:g} s; {who} at {frame}"
    except Exception as error:  # this process could not even start it: that is what there is to report
        reason = "could not be started: " + _shorten(f"{type(error).__name__}: {error}".splitlines())
    return Finding(trial.name, False, reason, trial.advice)


def attempt(trial: Trial, timeout: float, log: IO[bytes]) -> Finding:
    """Runs the trial and says how it ended, whatever it did."""
    result = run_apart(trial, timeout, log)
    if isinstance(result, Finding):
        return result
    if isinstance(result, Refusal):
        return Finding(trial.name, None, f"refuses: {result.reason}")
    return Finding(trial.name, True, result)


@contextlib.contextmanager
def _output_to(log: IO[bytes]) -> Iterator[None]:
    """Ranks inherit stdout and stderr: neither a crash's last words nor NCCL's log may end up in a report."""
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for fd in saved:
            os.dup2(log.fileno(), fd)
        yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)


def _why(failure: RankFailed, log: IO[bytes], start: int) -> str:
    lines = failure.traceback.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(failure.kind)]
    if starts:
        message = lines[starts[-1] :]
        cxx = next((n for n, line in enumerate(message) if line.startswith("Exception raised from")), len(message))
        message[0] = message[0].removeprefix(f"{__name__}.{WrongResult.__name__}: ")
        return _shorten(message[:cxx] or message)
    log.seek(start)
    said = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return _shorten([f"its process ended with {failure.kind}" + (f"; last output: {said[-1]}" if said else "")])


def _shorten(lines: list[str]) -> str:
    """The first line of a message and, where it says something else, the last: libraries put the cause in either."""
    lines = [line.strip() for line in lines if line.strip()]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."


class WrongResult(RuntimeError):
    """A layer ran to its end and gave something else than the formula does."""


def reference(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Σ_e weight[m,e] · w2[e]·(silu(g)·u), (g, u) = w1[e]·x[m], over all experts: `[M, H]`; id -1 is no expert."""
    table = x.new_zeros(x.shape[0], w1.shape[0]).scatter_add(1, ids.clamp_min(0).long(), weights * (ids >= 0))
    gate, up = torch.einsum("mh,eih->mei", x, w1).chunk(2, dim=-1)
    return torch.einsum("me,mei,ehi->mh", table, F.silu(gate) * up, w2)


def layer_is_right(rank: int, world_size: int, dispatcher: str, experts: str, dtype: str, device: str) -> str | Refusal:
    """A `MoELayer` over all ranks, with uneven token counts, against `reference` over the tokens of all of them."""
    kind = getattr(torch, dtype)
    on = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    spec = ExpertsSpec(Activation(), HIDDEN, INTERMEDIATE, kind, on)
    if (reason := EXPERTS[experts].refusal(spec)) is not None:
        return Refusal(reason)
    if EXPERTS[experts].monolithic:
        return _monolithic_is_right(experts, spec)
    started = time.monotonic()

    tokens = [5 + 3 * r for r in range(world_size)]
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    g = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=g, device="cpu")
    uniform = functools.partial(torch.rand, generator=g, device="cpu")
    ids = uniform(sum(tokens), NUM_EXPERTS).topk(TOP_K).indices.to(torch.int32)
    ids[0, 0] = -1
    data = {
        "x": normal(sum(tokens), HIDDEN).to(kind),
        "topk_weights": uniform(sum(tokens), TOP_K).to(torch.promote_types(kind, torch.float32)),
        "gate_up_proj": (normal(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).to(kind),
        "down_proj": (normal(NUM_EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).to(kind),
    }
    dout = normal(sum(tokens), HIDDEN).to(kind)
    exact = {name: tensor.double().clone().requires_grad_() for name, tensor in data.items()}
    want = reference(exact["x"], ids, exact["topk_weights"], exact["gate_up_proj"], exact["down_proj"])
    want.backward(dout.double())

    x = data["x"][mine].to(on).requires_grad_()
    weights = data["topk_weights"][mine].to(on).requires_grad_()
    layer = MoELayer(
        MoEConfig(
            HIDDEN,
            INTERMEDIATE,
            NUM_EXPERTS,
            TOP_K,
            dispatcher=dispatcher,
            experts=experts,
            max_tokens_per_rank=max(tokens),
        ),
        None if dispatcher == "local" else EPGroup(),
        device=on,
        dtype=kind,
        router=lambda _: (ids[mine].to(on), weights),
        name="doctor",
    )
    layer.load_experts({name: data[name] for name in ("gate_up_proj", "down_proj")})
    out = layer(x)
    out.backward(dout[mine].to(on))

    owned = list(layer.local_experts)
    pairs = {
        "the output": (out, want[mine]),
        "the gradient of x": (x.grad, exact["x"].grad[mine]),
        "the gradient of topk_weights": (weights.grad, exact["topk_weights"].grad[mine]),
        "the gradient of gate_up_proj": (layer.gate_up_proj.grad, exact["gate_up_proj"].grad[owned]),
        "the gradient of down_proj": (layer.down_proj.grad, exact["down_proj"].grad[owned]),
    }
    return f"right to {_largest_error(pairs, dtype):.0e}, {time.monotonic() - started:.2f} s"


def _monolithic_is_right(experts: str, spec: ExpertsSpec) -> str:
    """The same of experts that route for themselves: from router logits to the output, without a gradient."""
    started = time.monotonic()
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    x = normal(7, HIDDEN).to(spec.dtype)
    logits = normal(7, NUM_EXPERTS)
    w1 = (normal(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).to(spec.dtype)
    w2 = (normal(NUM_EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).to(spec.dtype)
    routing = route(logits, RouterConfig(), TOP_K)
    want = reference(x.double(), routing.topk_ids, routing.topk_weights.double(), w1.double(), w2.double())
    dispatcher = make_dispatcher("local", None, ExpertPlacement.contiguous(NUM_EXPERTS, 1), spec.device)
    kernel = MoEKernel(dispatcher, EXPERTS[experts](spec))
    on = spec.device
    with torch.no_grad():
        weights = ExpertWeights(w1.to(on), w2.to(on))
        out = kernel.from_logits(x.to(on), logits.to(on), weights, router=RouterConfig(), top_k=TOP_K).routed
    error = _largest_error({"the output": (out, want)}, str(spec.dtype).removeprefix("torch."))
    return f"right to {error:.0e}, {time.monotonic() - started:.2f} s"


def _largest_error(pairs: Mapping[str, tuple[Tensor | None, Tensor]], dtype: str) -> float:
    """Of what a trial gave against what is right; raises `WrongResult` where it is more than rounding."""
    largest = 0.0
    for name, (got, right) in pairs.items():
        if got is None:
            raise WrongResult(f"{name} is missing")
        error = ((got.detach().cpu().double() - right).norm() / right.norm()).item()
        if not error <= TOLERANCE[dtype]:  # also when it is NaN
            raise WrongResult(f"{name} is off by {error:.1e} against float64, where {TOLERANCE[dtype]:.0e} is rounding")
        largest = max(largest, error)
    return largest


@jit
def _double(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


def triton_compiles(rank: int, world_size: int, device: str) -> str | Refusal:
    """A small kernel: run on the GPU where there is one, else compiled for Hopper, which needs none."""
    if not HAVE_TRITON:
        return Refusal("Triton can't be imported; kernels' torch twins run instead")
    started = time.monotonic()
    if device == "cuda":
        x = torch.arange(100.0, device="cuda")
        out = torch.empty_like(x)
        _double[(1,)](x, out, 100, BLOCK=128)
        if not torch.equal(out, x * 2):
            raise WrongResult("a kernel that doubles 100 numbers gave other ones")
        return f"compiles and runs, {time.monotonic() - started:.1f} s"
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(_double, {"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return (
        f"compiles for sm_90 ({len(binary.asm['cubin'])} bytes), {time.monotonic() - started:.1f} s; no GPU to run it"
    )


def torch_compile_works(rank: int, world_size: int, device: str) -> str:
    """Inductor on a GPU; on CPU only the tracing, because building C++ may take a minute."""
    started = time.monotonic()
    compiled = torch.compile(
        lambda x: F.silu(x) * 2, backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True
    )
    x = torch.randn(64, device=device)
    torch.testing.assert_close(compiled(x), F.silu(x) * 2)
    done = "compiles and runs by inductor" if device == "cuda" else "traces; inductor's C++ was not tried"
    return f"{done}, {time.monotonic() - started:.1f} s"

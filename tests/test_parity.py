"""Router × dispatcher × experts × activation × dtype × ranks against float64: outputs and every gradient.

Each rank count runs many random cases in one set of processes. A failing case prints itself; EPMOE_TEST_SEED repeats.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from epmoe import ACTIVATIONS, DISPATCHERS, EPGroup, MoEConfig, MoELayer, RouterConfig
from epmoe.testing import run_ranks
from tests import naive
from tests.dispatch.hierarchical_cases import NODES

# output, gradients of x and of expert weights, gradient of the router (each one more rounded product away)
TOLERANCE = {torch.float32: (1e-5, 2e-5, 5e-5), torch.float16: (1e-3, 2e-3, 5e-3), torch.bfloat16: (5e-3, 1e-2, 2e-2)}
EXPERT_TENSORS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


@dataclasses.dataclass(frozen=True)
class Case:
    config: MoEConfig
    dtype: torch.dtype
    tokens: tuple[int, ...]  # per rank
    seed: int
    device: str = "cpu"
    nodes: tuple[int, ...] | None = None  # pretended: each rank's, for `hierarchical`
    one_sided: bool = False


def make_case(seed: int, ranks: int, device: str = "cpu") -> Case:
    rng = random.Random(seed)
    num_experts = rng.choice([max(ranks, 4), 6, 8, 13])
    top_k = rng.randint(1, min(4, num_experts))
    on_input = rng.random() < 0.25
    groups = 2 if num_experts % 2 == 0 and top_k <= num_experts // 2 and rng.random() < 0.3 else 1
    scorings = ["softmax", "topk_softmax", "sigmoid", "sqrt_softplus"]
    if top_k == 1:  # a single normalised weight is the constant 1: its gradient is rounding noise in any precision
        scorings.remove("topk_softmax")
    router = RouterConfig(
        scoring=rng.choice(scorings),
        renormalize=rng.random() < 0.5 and top_k > 1,
        scaling_factor=rng.choice([1.0, 2.5]),
        num_groups=groups,
        topk_groups=1,
        group_score=rng.choice(["max", "top2_sum"]),
        selection_bias=rng.random() < 0.3,
        bias=rng.random() < 0.3,
    )
    order = rng.sample(range(num_experts), num_experts)
    cuts = sorted(rng.sample(range(1, num_experts), ranks - 1))
    lists = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, num_experts], strict=True))
    experts = rng.choice(["reference", "grouped", "grouped", "torch_grouped", "batched", "batched"])
    sizes = [0, 1, 77, 300] if device == "cuda" else [0, 1, 3, 9]
    tokens = [rng.choice(sizes) for _ in range(ranks)]
    tokens[rng.randrange(ranks)] = sizes[-1]
    dtype = rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    activation = rng.choice(ACTIVATIONS)
    limit = None
    if activation in ("swiglu_oai", "swiglu_clamped"):
        # The slope jumps at the clamp, so a rounded pre-activation next to it has another gradient: fp32 alone leaves a
        # gap to clamp in, where rows do not depend on the router's rounding.
        limit = 1.5 if dtype == torch.float32 and not on_input else 64.0
    big = device == "cuda"
    config = MoEConfig(
        hidden_size=rng.choice([80, 192, 512, 2880] if big else [16, 48, 80]),
        intermediate_size=rng.choice([80, 192, 1408] if big else [16, 24, 40]),
        num_experts=num_experts,
        top_k=top_k,
        activation=activation,
        activation_limit=limit,
        router=router,
        router_weight_on_input=on_input,
        expert_bias=rng.random() < 0.4,
        placement=rng.choice(["contiguous", "strided", lists]),
        dispatcher=rng.choice([*DISPATCHERS, "all_to_all"] if ranks == 1 else [d for d in DISPATCHERS if d != "local"]),
        experts=experts,
        max_tokens_per_rank=sizes[-1],
        chunk_tokens=rng.choice([None, None, 1, 5]),
    )  # fmt: skip
    nodes, one_sided = None, False
    if config.dispatcher == "hierarchical":
        nodes = rng.choice([tuple(of_rank) for of_rank in NODES.values() if len(of_rank) == ranks] or [(0,)])
        one_sided = device == "cpu" and rng.random() < 0.5
    case = Case(config, dtype, tuple(tokens), seed, device, nodes, one_sided)
    if limit == 1.5:
        config = dataclasses.replace(config, activation_limit=widest_gap(case, 1.3, 1.7))
    return dataclasses.replace(case, config=config)


def widest_gap(case: Case, low: float, high: float) -> float:
    """Where to clamp (`naive.widest_gap`) all pre-activations that any expert could have."""
    data = {name: tensor.double() for name, tensor in inputs(case).items()}
    h = torch.einsum("mh,enh->emn", data["x"], data["gate_up_proj"])
    if "gate_up_bias" in data:
        h += data["gate_up_bias"][:, None]
    return naive.widest_gap(h, low, high)


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """The global batch and all experts, the same on every rank: small enough that fp16 does not overflow."""
    c, g = case.config, torch.Generator().manual_seed(case.seed)
    h, i, e = c.hidden_size, c.intermediate_size, c.num_experts
    width = 2 * i if c.activation_function.gated else i
    total = sum(case.tokens)
    tensors = {
        "x": torch.randn(total, h, generator=g),
        "dout": torch.randn(total, h, generator=g),
        "router.weight": torch.randn(e, h, generator=g) * h**-0.5 * 2,
        "gate_up_proj": torch.randn(e, width, h, generator=g) * h**-0.5,
        "down_proj": torch.randn(e, h, i, generator=g) * i**-0.5,
    }
    if c.router.bias:
        tensors["router.bias"] = torch.randn(e, generator=g)
    if c.router.selection_bias:
        tensors["router.selection_bias"] = torch.randn(e, generator=g) * 0.1
    if c.expert_bias:
        tensors["gate_up_bias"] = torch.randn(e, width, generator=g)
        tensors["down_bias"] = torch.randn(e, h, generator=g)
    return {k: v if k == "router.selection_bias" else v.to(case.dtype) for k, v in tensors.items()}


def run_case(case: Case, rank: int, ep: EPGroup | None) -> dict[str, Any]:
    data = {name: tensor.to(case.device) for name, tensor in inputs(case).items()}
    layer = MoELayer(case.config, ep, device=case.device, dtype=case.dtype)
    if case.one_sided:
        layer.kernel(layer.gate_up_proj.device, case.dtype).dispatcher.one_sided = True  # type: ignore[attr-defined]
    with torch.no_grad():
        layer.load_experts({name: data[name] for name in EXPERT_TENSORS if name in data})
        for name in ("weight", "bias", "selection_bias"):
            if f"router.{name}" in data:
                getattr(layer.router, name).copy_(data[f"router.{name}"])
    start = sum(case.tokens[:rank])
    mine = slice(start, start + case.tokens[rank])
    x = data["x"][mine].clone().requires_grad_()
    y, routing = layer(x, return_routing=True)
    y.backward(data["dout"][mine])
    grads = {f"grad {name}": p.grad for name, p in layer.named_parameters()}
    assert all(g is not None for g in grads.values()), f"no gradient: {[n for n, g in grads.items() if g is None]}"
    return {"y": y.detach(), "ids": routing.topk_ids, "grad x": x.grad, "experts": layer.local_experts, **grads}


def run_cases(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, ...] | None, EPGroup] = {}
    results = []
    for case in cases:
        if case.config.dispatcher != "local" and case.nodes not in groups:
            groups[case.nodes] = EPGroup(timeout=60, nodes=case.nodes)
        results.append(run_case(case, rank, None if case.config.dispatcher == "local" else groups[case.nodes]))
    return results


def reference(case: Case, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    leaf = {name: tensor.double().requires_grad_() for name, tensor in inputs(case).items()}
    c, act = case.config, case.config.activation_function
    logits = leaf["x"] @ leaf["router.weight"].T
    if "router.bias" in leaf:
        logits = logits + leaf["router.bias"]
    weights = naive.router_weights(logits, ids, c.router.scoring, c.router.renormalize, c.router.scaling_factor)
    experts = {name: leaf[name] for name in EXPERT_TENSORS if name in leaf}
    y = naive.routed(leaf["x"], ids, weights, experts, (act.name, act.alpha, act.limit), c.router_weight_on_input)
    y.backward(leaf["dout"].detach())
    zero = {name: torch.zeros_like(tensor) for name, tensor in leaf.items()}
    return {"y": y.detach()} | {f"grad {n}": zero[n] if t.grad is None else t.grad for n, t in leaf.items()}


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    scale = ref.norm().item()
    return (out.double().cpu() - ref).norm().item() / scale if scale else out.double().norm().item()


def compare(case: Case, results: list[dict[str, Any]]) -> list[str]:
    ids = torch.cat([r["ids"].cpu() for r in results])
    want = reference(case, ids)
    tolerance = TOLERANCE[case.dtype]
    if case.config.experts == "torch_grouped" and case.dtype != torch.float32:
        # grouped_mm gives the pre-activation rounded to 8 (11) bits: one more error, which a square doubles
        tolerance = tuple(
            limit * (1.6 if case.config.activation in ("relu2", "reglu2") else 1.2) for limit in tolerance
        )
    got = {"y": torch.cat([r["y"] for r in results]), "grad x": torch.cat([r["grad x"] for r in results])}
    for name in EXPERT_TENSORS:
        if f"grad {name}" in want:
            got[f"grad {name}"] = torch.empty(want[f"grad {name}"].shape, dtype=case.dtype)
            for r in results:
                got[f"grad {name}"][list(r["experts"])] = r[f"grad {name}"].cpu()
    for name in ("router.weight", "router.bias"):
        if f"grad {name}" in want:
            got[f"grad {name}"] = torch.stack([r[f"grad {name}"].double() for r in results]).sum(0)
    wrong = []
    for name, tensor in got.items():
        limit = tolerance[0] if name == "y" else tolerance[2] if "router" in name else tolerance[1]
        error = relative(tensor, want[name])
        if not error <= limit:
            c = case.config
            wrong.append(f"{name}: {error:.2e} > {limit:g}, {c.experts}, {c.dispatcher}, {case.dtype}: {case}")
    return wrong


def check(cases: list[Case], ranks: int, backend: str, env: dict[str, str] | None = None) -> None:
    by_rank = run_ranks(run_cases, ranks, args=(cases,), backend=backend, timeout=150, env=env)
    wrong = [line for n, case in enumerate(cases) for line in compare(case, [results[n] for results in by_rank])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_outputs_and_gradients_match_float64_for_any_combination(ranks: int, seed: int) -> None:
    check([make_case(seed + n, ranks) for n in range(40)], ranks, "gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run compiled here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_triton_kernels_match_float64_in_the_interpreter(ranks: int, seed: int) -> None:
    cases = [make_case(seed + n, ranks) for n in range(5)]
    cases = [dataclasses.replace(c, config=dataclasses.replace(c.config, experts="grouped")) for c in cases]
    check(cases, ranks, "gloo", {"EPMOE_CPU_KERNELS": "triton"})


# A case compiles a dozen kernels, so few of them make a test and workers share the tests.
@pytest.mark.gpu
@pytest.mark.parametrize("part", range(6))
def test_outputs_and_gradients_match_float64_on_one_gpu(part: int, seed: int) -> None:
    check([make_case(seed + n, 1, "cuda") for n in range(3)], 1, "nccl")


@pytest.mark.gpu2
@pytest.mark.parametrize("part", range(6))
def test_outputs_and_gradients_match_float64_on_two_gpus(part: int, seed: int) -> None:
    check([make_case(seed + n, 2, "cuda") for n in range(3)], 2, "nccl")

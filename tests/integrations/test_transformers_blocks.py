"""Blocks laid out as those of transformers, without that library: on CPU ranks and on GPUs, in fp32 and bf16.

The reference computes in float64 with the ids that the model's router chose.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epmoe import EPGroup
from epmoe.integrations.gradients import reduce_gradients
from epmoe.integrations.transformers import ExpertTensors, Preset, parallelize, routed_experts, unparallelize
from epmoe.integrations.transformers.gather import whole_experts
from epmoe.integrations.transformers.layouts import to_ours
from epmoe.testing import run_ranks
from tests import naive

E, H, I, K = 10, 256, 128, 3
PRESETS = {
    "Qwen-like": Preset("Qwen-like", ("Block",), ("qwen",)),
    "gpt-oss-like": Preset(
        "gpt-oss-like",
        ("Block",),
        ("oss",),
        tensors=ExpertTensors("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", True, True),
        activation="swiglu_oai",
    ),
}


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k = K
        self.weight = nn.Parameter(torch.randn(E, H) * H**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        weights, ids = logits.float().softmax(-1).topk(K)
        return logits, weights.to(x.dtype), ids


class Experts(nn.Module):
    def __init__(self, tensors: ExpertTensors) -> None:
        super().__init__()
        self.act_fn, self.alpha, self.limit = nn.SiLU(), 1.702, math.inf
        inward, outward = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
        if tensors.transposed:
            inward, outward = inward.mT.contiguous(), outward.mT.contiguous()
        self.gate_up_proj, self.down_proj = nn.Parameter(inward), nn.Parameter(outward)
        if tensors.gate_up_bias:
            self.gate_up_proj_bias, self.down_proj_bias = (nn.Parameter(torch.randn(E, n)) for n in (2 * I, H))


class Block(nn.Module):
    def __init__(self, tensors: ExpertTensors, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate, self.experts = Router(), Experts(tensors)

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights)


def reference(block: Block, tensors: ExpertTensors, x: Tensor, ids: Tensor) -> Tensor:
    """What a float64 copy of the block gives for x with these ids."""
    own, weights = block.experts, F.linear(x, block.gate.weight).softmax(-1).gather(1, ids)
    w1, w2 = (to_ours(tensors, n, getattr(own, n)) for n in ("gate_up_proj", "down_proj"))
    out = torch.zeros_like(x)
    for expert in range(E):
        token, k = (ids == expert).nonzero(as_tuple=True)
        h = F.linear(x[token], w1[expert])
        if tensors.gate_up_bias:
            h = h + to_ours(tensors, "gate_up_bias", own.gate_up_proj_bias)[expert]
        gate, up = h.chunk(2, -1)
        if tensors.gate_up_bias:
            gate, up = gate.clamp(max=own.limit), up.clamp(-own.limit, own.limit) + 1
        y = F.linear(gate * torch.sigmoid((1.702 if tensors.gate_up_bias else 1.0) * gate) * up, w2[expert])
        if tensors.gate_up_bias:
            y = y + own.down_proj_bias[expert]
        out = out.index_add(0, token, y * weights[token, k, None])
    return out


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def batch(rank: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of a rank, and gradients of their outputs."""
    generator = torch.Generator().manual_seed(seed + rank)
    x, g = (torch.randn(40 + 9 * rank, H, generator=generator).to(dtype) for _ in range(2))
    return x, g


def clamp_limit(exact: Block, tensors: ExpertTensors, seed: int, ranks: int, dtype: torch.dtype) -> float:
    """In a gap that fp32 leaves between pre-activations; in bf16, where there is none, beyond them all."""
    if dtype != torch.float32:
        return 64.0
    x = torch.cat([batch(rank, seed, dtype)[0] for rank in range(ranks)]).to(exact.gate.weight)
    h = torch.einsum("mh,enh->emn", x, to_ours(tensors, "gate_up_proj", exact.experts.gate_up_proj))
    if tensors.gate_up_bias:
        h = h + to_ours(tensors, "gate_up_bias", exact.experts.gate_up_proj_bias)[:, None]
    return naive.widest_gap(h, 0.8, 1.2)


def exercise(rank: int, ranks: int, device_type: str, seed: int) -> dict[str, float]:
    """Errors of output and gradients by case; 1 where tensors gathered from all ranks are not those given away."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    ep = EPGroup(timeout=60) if ranks > 1 else None
    errors = {}
    for preset in PRESETS.values():
        for dtype in (torch.float32, torch.bfloat16):
            untouched, model = (Block(preset.tensors, seed).to(device, dtype) for _ in range(2))
            exact = Block(preset.tensors, seed).to(device, torch.float64)
            exact.load_state_dict(untouched.state_dict())
            limit = clamp_limit(exact, preset.tensors, seed, ranks, dtype)
            for block in (untouched, model, exact):
                block.experts.limit = limit
            parallelize(model, ep, presets=(preset,))
            (name, layer), *_ = routed_experts(model).items()
            for other in range(ranks):
                x, g = (t.to(device) for t in batch(other, seed, dtype))
                right = reference(exact, preset.tensors, x.double(), untouched.gate(x)[2])
                right.backward(g.double())
                if other == rank:
                    y = model(x)
                    y.backward(g)
                    found = {"output": error(y, right)}
            reduce_gradients(model, ep, average=False)
            found["router"] = error(model.gate.weight.grad, exact.gate.weight.grad)
            for our, theirs in preset.tensors.names().items():
                whole = to_ours(preset.tensors, our, exact.experts.get_parameter(theirs).grad)
                found[our] = error(layer.get_parameter(our).grad, whole[list(layer.local_experts)])
            gathered, before = whole_experts(layer, everywhere=False), untouched.state_dict()
            after = unparallelize(model).state_dict()
            same = list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)
            if rank == 0:
                assert gathered is not None
                same &= all(torch.equal(t, before[f"{name}.{n}"].cpu()) for n, t in gathered.state_dict().items())
            found["gathered"] = 0.0 if same and (gathered is None) == (rank > 0) else 1.0
            errors |= {f"{preset.family} {dtype} {what} of rank {rank}": value for what, value in found.items()}
    return errors


@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        ("cpu", 1),
        ("cpu", 2),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=pytest.mark.gpu2),
    ],
)
def test_output_gradients_and_gathered_tensors_are_right_on_any_device(device, ranks, seed):
    run = partial(exercise, device_type=device, seed=seed)
    backend = "nccl" if device == "cuda" else "gloo"
    results = [run(0, 1)] if ranks == 1 else run_ranks(run, ranks, backend=backend, timeout=150)
    limits = {"float32": 1e-5, "bfloat16": 8e-3}  # bf16: inputs of the second product and the sums' results are rounded
    wrong = [
        f"{case}: {value:.2e}"
        for errors in results
        for case, value in errors.items()
        if not value <= next(limit for dtype, limit in limits.items() if dtype in case)
    ]
    assert not wrong, "\n".join(wrong)

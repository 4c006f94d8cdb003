"""Four and eight ranks of one host, every dispatcher: outputs, gradients and rows on the wire against float64, for even
and uneven experts, for uniform, skewed and one-hot routing, and ranks without tokens; on eight also rows in fp8, and a
whole layer with its gradients. One start of the processes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import EPGroup, ExpertPlacement, MoEConfig, MoELayer, RouterConfig
from epmoe.dispatch import DISPATCHERS, Dispatcher, make_dispatcher
from epmoe.quant.rows import QuantizedRows, dequantize_rows, quantize_rows
from epmoe.testing import run_ranks

H, K, C = 32, 2, 5
TOKENS = [C, 0, C - 1, 1, 2, 3, 0, 4]
ROUTINGS = ("uniform", "zipf", "one_hot", "empty_ranks")
ONCE_PER_RANK = ("all_to_all", "symmetric")


def brought(rank: int, experts: int, routing: str, seed: int, tokens: list[int]) -> tuple[Tensor, ...]:
    """x, ids, weights and an upstream gradient of one rank, which any rank can draw."""
    g = torch.Generator().manual_seed(seed * 100 + rank)
    count = tokens[rank] if routing != "empty_ranks" else C * (rank == 3)
    odds = torch.ones(experts) if routing != "zipf" else 1 / torch.arange(1, experts + 1)
    ids = torch.multinomial(odds.expand(max(count, 1), -1), K, generator=g)[:count].int()
    if routing == "one_hot":
        ids = torch.arange(K, dtype=torch.int32).expand(count, K).contiguous()
    elif count > 1:
        ids[1, 1:] = -1
    return (
        torch.randn(count, H, generator=g), ids, torch.rand(count, K, generator=g), torch.randn(count, H, generator=g)
    )  # fmt: skip


def check(d: Dispatcher, experts: int, routing: str, seed: int, tokens: list[int], gradients: bool = True) -> None:
    """Each expert is a factor, e + 1, weighted by the router where the row is."""
    assert d.ep is not None
    where = (d.name, d.ep.num_ranks, experts, routing)
    x, ids, weights, upstream = brought(d.ep.rank, experts, routing, seed, tokens)
    x.requires_grad_(gradients), weights.requires_grad_(gradients)
    rows = d.dispatch(x, ids, weights)
    known = (rows.topk_ids >= 0) & (rows.topk_ids < experts)
    pairs = known & (rows.expert_map[torch.where(known, rows.topk_ids, 0).long()] >= 0)
    factor = torch.where(pairs, rows.topk_weights * (1 + rows.topk_ids), 0).sum(1, keepdim=True)
    out = d.combine(torch.where(pairs.any(1)[:, None], rows.x, 0) * factor, rows.handle)

    wide = torch.where(ids >= 0, weights.detach().double() * (1 + ids), 0).sum(1, keepdim=True)
    factors = torch.where(ids >= 0, 1.0 + ids, 0)
    given, expected = [out], [x.detach().double() * wide]
    sizes = [expected[0].norm()]
    if gradients:
        products = x.detach().double() * upstream.double()
        given += torch.autograd.grad(out, [x, weights], upstream)
        expected += [upstream.double() * wide, factors * products.sum(1, keepdim=True)]
        # a weight's gradient is a sum that may cancel: what rounding does to it grows with the terms, not with the sum
        sizes += [expected[1].norm(), (factors * products.norm(dim=1, keepdim=True)).norm()]
    for part, (a, b, size) in enumerate(zip(given, expected, sizes, strict=True)):
        assert (a.detach() - b).norm() <= 1e-5 * size, (*where, part)
    if d.name in ONCE_PER_RANK:
        owners = torch.where(ids >= 0, d.owner[ids.clamp_min(0).long()], -1)
        leave = sum(int((owners == r).any(1).sum()) for r in range(d.ep.num_ranks) if r != d.ep.rank)
        sent, received = d.wire_bytes(rows.handle, 3)
        totals = torch.tensor([sent, received])
        dist.all_reduce(totals, group=d.ep.process_group)
        assert sent == 3 * leave and totals[0] == totals[1], (*where, sent, received)


def check_fp8(d: Dispatcher, experts: int, seed: int, tokens: list[int]) -> None:
    """Rows that travel in fp8 arrive as their quantization, and no other."""
    assert d.ep is not None
    x, ids, weights, _ = brought(d.ep.rank, experts, "zipf", seed, tokens)
    with torch.no_grad():
        rows = d.dispatch(x, ids, weights, scheme="fp8_block")
        known = (rows.topk_ids >= 0) & (rows.topk_ids < experts)
        pairs = known & (rows.expert_map[torch.where(known, rows.topk_ids, 0).long()] >= 0)
        factor = torch.where(pairs, rows.topk_weights * (1 + rows.topk_ids), 0).sum(1, keepdim=True)
        assert rows.x.dtype == torch.float8_e4m3fn and rows.x_scale is not None
        came = dequantize_rows(QuantizedRows(rows.x, rows.x_scale, "fp8_block"), torch.float32)
        out = d.combine(torch.where(pairs.any(1)[:, None], came, 0) * factor, rows.handle)
    wide = torch.where(ids >= 0, weights.double() * (1 + ids), 0).sum(1, keepdim=True)
    expected = dequantize_rows(quantize_rows(x, "fp8_block"), torch.float64) * wide
    assert (out - expected).norm() <= 1e-5 * expected.norm(), (d.name, d.ep.num_ranks)


def check_layer(ep: EPGroup, dispatcher: str, seed: int) -> None:
    """A layer's output and all its gradients are those of one process with everybody's tokens."""
    router = RouterConfig(dtype=torch.float64)
    config = MoEConfig(H, 8, 10, K, router=router, num_shared_experts=1, expert_bias=True, max_tokens_per_rank=C)
    torch.manual_seed(seed)
    layer = MoELayer(dataclasses.replace(config, dispatcher=dispatcher), ep, device="cpu", dtype=torch.float64)
    torch.manual_seed(seed)
    alone = MoELayer(config, dtype=torch.float64)
    tokens = TOKENS[: ep.num_ranks]
    first = sum(tokens[: ep.rank])
    mine = slice(first, first + tokens[ep.rank])
    generator = torch.Generator().manual_seed(seed)
    whole, upstream = torch.randn(2, sum(tokens), H, dtype=torch.float64, generator=generator)
    x, everyones = whole[mine].clone().requires_grad_(), whole.requires_grad_()
    y, expected = layer(x), alone(everyones)
    (y * upstream[mine]).sum().backward()
    (expected * upstream).sum().backward()
    pairs = {"y": (y, expected[mine]), "x": (x.grad, everyones.grad[mine])}
    for name, parameter in layer.named_parameters():
        right = alone.get_parameter(name).grad
        if name in layer.expert_parameters():
            pairs[name] = parameter.grad, right[list(layer.local_experts)]
        else:
            summed = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(summed, group=ep.process_group)
            pairs[name] = summed, right
    for name, (found, right) in pairs.items():
        assert (found - right).norm() <= 1e-12 + 1e-9 * right.norm(), (dispatcher, name)


def everything(rank: int, ranks: int, seed: int) -> int:
    halves = [dist.new_group(list(range(first, first + 4))) for first in (0, 4)]
    cases = 0
    for group, nodes in ((None, 4), (halves[rank // 4], 2)):
        ep, two_levels = EPGroup(group, device="cpu", timeout=60), EPGroup(group, device="cpu", timeout=60, nodes=nodes)
        tokens = TOKENS if group is None else TOKENS[rank // 4 * 4 :][:4]
        for experts in (10, 16):
            placement = ExpertPlacement.contiguous(experts, ep.num_ranks)
            for name in (*(n for n in DISPATCHERS if n != "local"), "hierarchical, one-sided"):
                kind, _, one_sided = name.partition(", ")
                d: Any = make_dispatcher(
                    kind, two_levels if kind == "hierarchical" else ep, placement, "cpu", max_tokens_per_rank=C
                )
                if one_sided:
                    d.one_sided = True
                for routing in ROUTINGS if experts == 10 else ROUTINGS[:1]:
                    check(d, experts, routing, seed + cases, tokens)
                    cases += 1
                if experts == 10 and group is None:
                    check_fp8(d, experts, seed, tokens)
        if group is None:
            for dispatcher in ONCE_PER_RANK:
                check_layer(ep, dispatcher, seed)
    os.environ["EPMOE_CPU_KERNELS"] = "triton"  # tokens few, for they are slow: a path of its own beyond two ranks
    for group, few in ((None, [1, 0, 1, 0, 0, 1, 0, 0]), (halves[rank // 4], [1, 0, 1, 1])):
        ep = EPGroup(group, device="cpu", timeout=60)
        d = make_dispatcher("symmetric", ep, ExpertPlacement.contiguous(10, ep.num_ranks), "cpu", max_tokens_per_rank=1)
        check(d, 10, "uniform", seed + cases, few, gradients=group is not None)
        cases += 1
    return cases


def test_four_and_eight_ranks_match_float64_by_every_dispatcher(seed: int) -> None:
    assert run_ranks(everything, 8, args=(seed,), timeout=150) == [2 * 6 * (4 + 1) + 2] * 8

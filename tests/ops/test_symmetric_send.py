"""Rows quantized in the launch that sends them: the bits of `ops.quantize`, no more words on the wire than a scheme
has, and slots that are empty afterwards. Real processes, by kernels and by twins."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epmoe import EPGroup
from epmoe.comm.symmetric import EMPTY, channel_for
from epmoe.ops.quantize import quantize
from epmoe.ops.symmetric_send import Sent, send_rows
from epmoe.ops.symmetric_slots import travelling
from epmoe.quant.rows import ROW_SCHEMES
from epmoe.testing import run_ranks

K, UNTOUCHED = 2, 77
BYTES = {"fp8_block": 1032 + 4 * 9, "fp8_block_ue8m0": 1032 + 4 * 9, "fp8_row": 1032 + 4, "int8_row": 1032 + 4}


def awkward_rows(rank: int, tokens: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows whose largest number stands anywhere and differs by decades, then one with an inf, a NaN, and zeros."""
    g = torch.Generator().manual_seed(seed * 10 + rank)
    x = torch.randn(tokens, width, generator=g) * torch.logspace(-4, 3, tokens)[:, None]
    x[torch.arange(tokens), torch.randint(width, (tokens,), generator=g)] *= 30
    for row, number in ((1, float("inf")), (2, float("nan"))):
        x[row, int(torch.randint(width, (), generator=g))] = number
    x[3] = 0
    return x.to(dtype)


def sent_and_expected(
    ep: EPGroup, scheme: str, dtype: torch.dtype, width: int, capacity: int, profile: str, seed: int
) -> tuple[Sent, Tensor, Tensor]:
    """What came, and `values`, `scales` of `[R·C]` rows as their sources quantize them; all tokens go everywhere."""
    ranks, device = ep.num_ranks, ep.device
    rows = [awkward_rows(r, capacity, width, dtype, seed) for r in range(ranks)]
    x = rows[ep.rank].to(device)
    ids = torch.arange(ranks, dtype=torch.int32, device=device).expand(capacity, ranks).contiguous()
    weights = torch.ones(capacity, ranks, device=device)
    owner = torch.arange(ranks, dtype=torch.int32, device=device)
    plan = travelling(x, ids, weights, scheme)
    words = device.type == "cuda" or os.environ["EPMOE_CPU_KERNELS"] == "triton"
    channel = channel_for(ep, plan.half_bytes(ranks, capacity), words)
    halves = channel.buffers[ep.rank][channel.control_bytes :].view(2, -1)
    slots = halves[:, : plan.half_bytes(ranks, capacity)].view(torch.int32).view(2, ranks * capacity, plan.slot)
    slots[:, :, plan.row :] = UNTOUCHED
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group=ep.process_group)
    sent = send_rows(
        channel, x, ids, owner, capacity, operation="send", words=ids, weights=weights, scheme=scheme, profile=profile
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    channel.check()
    dist.barrier(group=ep.process_group)
    assert bool((slots[:, :, plan.row :] == UNTOUCHED).all()), "more was stored than the plan says"
    if words:
        assert bool((slots[:, :, : plan.row] == EMPTY).all()), "a word was left in its slot"
    slots[:, :, plan.row :] = EMPTY
    return sent, *quantize(torch.cat(rows).to(device), scheme)


def in_flight(rank: int, ranks: int, seed: int) -> None:
    ep = EPGroup(timeout=60)
    for mode, dtype, schemes in (
        ("torch", torch.bfloat16, ROW_SCHEMES),
        ("triton", torch.bfloat16, ("fp8_block_ue8m0", "fp8_row")),
        ("triton", torch.float16, ("int8_row",)),
    ):
        os.environ["EPMOE_CPU_KERNELS"] = mode
        for scheme in schemes:  # five parts a row, the last of few words, and two of them to a program
            sent, values, scales = sent_and_expected(ep, scheme, dtype, 1032, 4, "latency", seed)
            assert sent.scales is not None and sent.values.dtype == values.dtype
            assert torch.equal(sent.values.view(torch.uint8), values.view(torch.uint8)), (mode, scheme)
            assert torch.equal(sent.scales.isnan(), scales.isnan()) and bool(scales.isnan().any())
            assert torch.equal(sent.scales.nan_to_num(-1), scales.nan_to_num(-1)), (mode, scheme)


def test_rows_quantized_in_the_launch_have_the_bits_of_quantize(seed: int) -> None:
    run_ranks(in_flight, 2, args=(seed,), timeout=120)


@pytest.mark.parametrize("scheme", ROW_SCHEMES)
def test_a_quantized_row_is_a_byte_a_number_and_its_scales_on_the_wire(scheme: str) -> None:
    x, ids, weights = torch.empty(3, 1032, dtype=torch.bfloat16), torch.zeros(3, K).int(), torch.empty(3, K)
    assert 4 * travelling(x, ids, weights, scheme).row == BYTES[scheme] + 4 * (1 + 2 * K)
    assert 4 * travelling(x, ids, weights, None).row == 2 * 1032 + 4 * (1 + 2 * K)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ValueError, match="scheme='fp8_tensor': must be fp8_block, fp8_block_ue8m0, fp8_row, int8_row"):
        travelling(torch.empty(1, 64), None, None, "fp8_tensor")


def in_flight_on_gpus(rank: int, ranks: int, seed: int) -> None:
    ep = EPGroup(timeout=60)
    for width, capacity, profile in ((7168, 5, "latency"), (7168, 600, "latency"), (2056, 40, "throughput")):
        for dtype in (torch.bfloat16, torch.float16):
            for scheme in ROW_SCHEMES:
                sent, values, scales = sent_and_expected(ep, scheme, dtype, width, capacity, profile, seed)
                assert sent.scales is not None
                where = (width, capacity, dtype, scheme)
                assert torch.equal(sent.values.view(torch.uint8), values.view(torch.uint8)), where
                assert torch.equal(sent.scales.isnan(), scales.isnan()), where
                assert torch.equal(sent.scales.nan_to_num(-1), scales.nan_to_num(-1)), where


@pytest.mark.gpu2
def test_on_gpus_rows_quantized_in_the_launch_have_the_bits_of_quantize(seed: int) -> None:
    run_ranks(in_flight_on_gpus, 2, args=(seed,), backend="nccl", timeout=150)

"""Bytes on the wire: what the dispatcher says a row costs is what it hands to the network, in every movement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epmoe import DISPATCHERS, EPGroup
from epmoe.dispatch.wire import RowBytes, row_bytes
from epmoe.testing import run_ranks
from tests.dispatch.test_quantized_training import BACK, H, K, batch_of, kernel_of, trained

MOVEMENTS = ("dispatch", "combine", "combine_backward", "dispatch_backward")


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block_ue8m0"])
def test_a_row_in_fp8_blocks_is_its_values_a_scale_per_block_its_ids_and_weights(scheme: str) -> None:
    for width, k in ((7168, 8), (2048, 8), (256, 3)):
        scales = 4 * width // 128
        sent = row_bytes(width, torch.bfloat16, k, scheme=scheme)
        assert sent.dispatch == width + scales + 2 * 4 * k
        assert sent[1:] == row_bytes(width, torch.bfloat16, k)[1:], "only what dispatch sends is narrower"
        padded = -(-(4 * k + scales) // 16) * 16
        back = row_bytes(width, torch.bfloat16, k, combine_scheme=scheme, grad_scheme=scheme)
        assert back[1:] == (width + -(-scales // 16) * 16,) * 2 + (width + padded,)
    assert (
        row_bytes(7168, torch.bfloat16, 8, scheme=scheme).dispatch < 0.52 * row_bytes(7168, torch.bfloat16, 8).dispatch
    )


def test_wide_rows_rows_of_one_scale_and_adapters_are_counted_too() -> None:
    assert row_bytes(2048, torch.bfloat16, 8) == RowBytes(4096 + 64, 4096, 4096, 4096 + 32)
    assert row_bytes(2048, torch.bfloat16, 8, scheme="int8_row").dispatch == 2048 + 80  # 17 words, to 16 bytes
    assert row_bytes(2048, torch.bfloat16, 8, scheme="int8_row", adapters=True).dispatch == 2048 + 80
    assert row_bytes(64, torch.float64, 2) == RowBytes(512 + 32, 512, 512, 512 + 16)
    with pytest.raises(ValueError, match="scheme='fp9'"):
        row_bytes(64, torch.bfloat16, 2, grad_scheme="fp9")


def counted(rank: int, ranks: int, seed: int, schemes: dict[str, str | None]) -> dict[str, Any]:
    """By dispatcher, what the kernel says and what left this rank, movement by movement."""
    ep = EPGroup(timeout=60)
    sent: list[int] = []
    honest_exchange, honest_gather = EPGroup.all_to_all_async, EPGroup.all_gather_async

    def exchange(self: EPGroup, buffer: Tensor, to: Any = None, come: Any = None, **options: Any) -> Any:
        if buffer.dtype == torch.uint8:  # counts are int64
            share = [buffer.shape[0] // ranks] * ranks if to is None else to
            sent.append((sum(share) - share[rank]) * buffer.shape[1])
        return honest_exchange(self, buffer, to, come, **options)

    def gather(self: EPGroup, buffer: Tensor) -> Any:
        if buffer.dtype == torch.uint8:
            sent.append(buffer.numel() * (ranks - 1))
        return honest_gather(self, buffer)

    results = {}
    EPGroup.all_to_all_async, EPGroup.all_gather_async = exchange, gather  # type: ignore[method-assign]
    try:
        for name in ("all_gather", "all_to_all", "all_to_all_fixed"):
            kernel, weights = kernel_of(rank, ranks, name, "reference", "standard", ep, seed, **schemes)
            batch = batch_of(rank, seed)
            layout = kernel.dispatcher.make_layout(batch[1])
            sent.clear()
            trained(kernel, weights, batch)
            results[name] = (kernel.wire_bytes(layout, K), list(sent))
    finally:
        EPGroup.all_to_all_async, EPGroup.all_gather_async = honest_exchange, honest_gather  # type: ignore[method-assign]
    return results


@pytest.mark.parametrize("schemes", [
    {},
    {"dispatch_scheme": "fp8_block"},
    {"dispatch_scheme": "fp8_row", "grad_scheme": "fp8_block", "combine_scheme": "int8_row"},
], ids=["wide", "dispatch", "all"])  # fmt: skip
def test_every_byte_that_leaves_a_rank_is_foreseen(schemes: dict[str, str | None], seed: int) -> None:
    by_rank = run_ranks(counted, 3, args=(seed, schemes))
    each = row_bytes(H, torch.float32, K, **{n.replace("dispatch_", ""): s for n, s in schemes.items()})  # type: ignore[arg-type]
    for name in by_rank[0]:
        said, sent = zip(*(results[name] for results in by_rank), strict=True)
        for rank, bytes_sent in enumerate(sent):
            assert bytes_sent == [said[rank][movement][0] for movement in MOVEMENTS], (name, rank)
        for movement, row in zip(MOVEMENTS, each, strict=True):
            leave, arrive = (sum(rank[movement][side] for rank in said) for side in (0, 1))
            assert leave == arrive > 0 and leave % row == 0, (name, movement)


def test_the_dispatchers_that_quantize_both_ways_are_those_that_are_tested() -> None:
    assert {"local", "all_gather", "all_to_all", "all_to_all_fixed"} <= set(BACK) <= set(DISPATCHERS)


def test_one_process_sends_nothing(seed: int) -> None:
    kernel, weights = kernel_of(0, 1, "local", "reference", "standard", None, seed, dispatch_scheme="fp8_block")
    x, ids, p = batch_of(0, seed)
    layout = kernel.dispatcher.make_layout(ids)
    assert kernel.wire_bytes(layout, K) == dict.fromkeys(MOVEMENTS, (0, 0))

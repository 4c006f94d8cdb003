"""Launches beside a computation: who leaves SMs free and when, and launches that are put off until they are waited
for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import epmoe.kernel
from epmoe import EPGroup, MoEConfig, MoEKernel, MoELayer, run_microbatched
from epmoe.comm.copies import Copies
from epmoe.ops._leases import leased_sms
from epmoe.testing import run_ranks
from tests.test_kernel import batch_of, local_kernel

H, CPU = 16, torch.device("cpu")


class Block(nn.Module):
    def __init__(self, ep: EPGroup, dispatcher: str, **options: Any) -> None:
        super().__init__()
        config = MoEConfig(H, 24, 6, 2, dispatcher=dispatcher, num_shared_experts=1, max_tokens_per_rank=8, **options)
        self.maps = nn.ModuleList([nn.Linear(H, H) for _ in range(2)])
        self.moes = nn.ModuleList([MoELayer(config, ep, name=f"moe {n}") for n in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, moe in zip(self.maps, self.moes, strict=True):
            x = x + moe(linear(x))
        return x


def results(block: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    x.grad = None
    y = run_microbatched(block, x, **options)
    y.square().sum().backward()
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients]


def put_off(rank: int, ranks: int, seed: int) -> list[bool]:
    ep, found = EPGroup(timeout=60), []
    for dispatcher in ("all_to_all", "all_gather", "all_to_all_fixed"):
        torch.manual_seed(seed)
        block = Block(ep, dispatcher)
        x = torch.randn([7, 1][rank], H, requires_grad=True)
        ep.beside.puts_off = False
        want = results(block, x, interleave=False)
        ep.beside.puts_off = True
        for interleave in (False, True):
            found.append(
                all(torch.equal(a, b) for a, b in zip(want, results(block, x, interleave=interleave), strict=True))
            )
        with torch.no_grad():
            found.append(torch.equal(run_microbatched(block, x), want[0]))
    return found


def test_launches_that_are_put_off_change_no_bit(seed: int) -> None:
    assert run_ranks(put_off, 2, args=(seed,), timeout=90) == [[True] * 9] * 2


def fetched(rank: int, ranks: int, seed: int) -> list[bool]:
    ep, found = EPGroup(timeout=60), []
    for dispatcher in ("all_to_all", "all_to_all_fixed"):
        torch.manual_seed(seed)
        block = Block(ep, dispatcher)
        for tokens in ([2, 0, 1], [7, 1, 8]):  # the second time more than the memory has room for
            x = torch.randn(tokens[rank], H, requires_grad=True)
            ep.beside.copies = False
            want = results(block, x)
            ep.beside.copies = True
            fetches, fetch = [], Copies.all_to_all
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Copies, "all_to_all", lambda *a, f=fetch, n=fetches, **k: n.append(1) or f(*a, **k))
                got = results(block, x)
            # dispatch and combine of two parts in two layers, and backward
            found.append(len(fetches) == 16 and all(torch.equal(a, b) for a, b in zip(want, got, strict=True)))
    return found


def test_rows_that_peers_fetch_are_those_that_the_backend_sends(seed: int) -> None:
    assert run_ranks(fetched, 3, args=(seed,), timeout=90) == [[True] * 4] * 3


def order_of_launches(rank: int, ranks: int) -> list[str]:
    ep, events = EPGroup(timeout=30), list[str]()
    block = Block(ep, "all_to_all")
    launch = ep.all_to_all_async
    ep.beside.puts_off = True

    def launched(*args: Any, **kwargs: Any) -> Any:
        events.append("rows" if args[0].dtype == torch.uint8 else "counts")
        return launch(*args, **kwargs)

    ep.all_to_all_async = launched  # type: ignore[method-assign]
    for number, linear in enumerate(block.maps):
        linear.register_forward_hook(lambda *_, n=number: events.append(f"map {n}"))
    with torch.no_grad():
        run_microbatched(block, torch.randn(4, H))
    return events


def test_a_launch_that_reads_counts_comes_after_the_other_microbatch_s_kernels() -> None:
    part = ["counts", "rows"] * 2  # of both: to the experts; then back, and on to the next layer
    expected = ["map 0"] * 2 + part + ["rows", "map 1"] * 2 + part + ["rows"] * 2
    assert run_ranks(order_of_launches, 2, timeout=60) == [expected] * 2


def leases(rank: int, ranks: int, least: int) -> dict[str, list[int]]:
    ep = EPGroup(timeout=30)
    epmoe.kernel.MIN_TOKENS_BESIDE = least
    block = Block(ep, "all_to_all_fixed", comm_sms=5)
    seen: dict[str, list[int]] = {"experts": [], "shared": [], "backward": []}
    for moe in block.moes:
        kernel = moe.kernel(CPU, torch.float32)  # type: ignore[operator]
        compute = kernel._compute

        def computing(*args: Any, compute: Any = compute) -> Any:
            seen["experts"].append(leased_sms(CPU))
            output = compute(*args)
            output.rows.register_hook(lambda _: seen["backward"].append(leased_sms(CPU)))
            return output

        kernel._compute = computing
        moe.shared_experts.register_forward_hook(lambda *_: seen["shared"].append(leased_sms(CPU)))  # type: ignore[union-attr]
    x = torch.randn(8, H, requires_grad=True)
    block(x).sum().backward()
    run_microbatched(block, x).sum().backward()
    assert leased_sms(CPU) == 0
    return seen


def test_experts_leave_sms_free_while_rows_are_on_their_way_and_only_then() -> None:
    for seen in run_ranks(leases, 2, args=(8,), timeout=60):
        # alone: nothing moves beside the experts, combine beside the shared ones
        assert seen["experts"][:2] == [0, 0] and seen["shared"][:2] == [5, 5] and seen["backward"][:2] == [0, 0]
        # two parts in two layers: the other part's rows are always on their way
        assert seen["experts"][2:] == [5] * 4 and seen["shared"][2:] == [5] * 4
        assert seen["backward"][2:] == [5] * 4
    for seen in run_ranks(leases, 2, args=(9,), timeout=60):
        assert seen["shared"] == [0, 0, 5, 5, 5, 5]  # too few tokens for another stream, but for microbatches


def test_an_error_before_the_wait_leaves_no_lease(seed: int) -> None:
    kernel, weights = local_kernel("reference", "standard")
    kernel = MoEKernel(kernel.dispatcher, kernel.experts, comm_sms=3)

    def fails(*args: Any) -> Any:
        raise KeyError("experts")

    kernel._compute = fails  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="experts"):
        run_microbatched(lambda *batch: kernel(*batch, weights).routed, *batch_of(0, 1, "uneven", seed))
    assert leased_sms(CPU) == 0


def test_no_sms_at_all_are_refused() -> None:
    kernel, _ = local_kernel("reference", "standard")
    with pytest.raises(ValueError, match="comm_sms=0: must be an int > 0"):
        MoEKernel(kernel.dispatcher, kernel.experts, comm_sms=0)
    with pytest.raises(ValueError, match="MoEConfig.comm_sms=0"):
        MoEConfig(16, 24, 6, 2, comm_sms=0)

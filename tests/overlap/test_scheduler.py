"""Microbatches: interleaved they give the bits of one after another and hide waits; errors inside reach the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epmoe
from epmoe import EPGroup, MoEConfig, MoEKernel, MoELayer
from epmoe.dispatch.base import DispatcherCapabilities
from epmoe.dispatch.inputs import Pending
from epmoe.dispatch.local import LocalDispatcher
from epmoe.overlap import Whole, current_microbatch, run_microbatched
from epmoe.testing import RankFailed, poisoned_empty, run_ranks
from tests.overlap.microbatch_cases import Block, H, both_ways, same
from tests.test_kernel import batch_of, local_kernel


def over_ranks(rank: int, ranks: int, seed: int) -> list[bool]:
    ep = EPGroup(timeout=60)
    equal = []
    for dispatcher in ("all_to_all", "all_gather", "all_to_all_fixed", "symmetric"):
        torch.manual_seed(seed)
        block = Block(ep, dispatcher, dropout=0.5)
        tokens = [7, 1, 0][rank]  # the second part of a rank with one token, and both of one without, are empty
        x = torch.randn(tokens, H, requires_grad=True)
        for parts in (2, 3):
            equal.append(same(both_ways(block, x, seed, num_microbatches=parts, ep=ep)))
        block.eval()
        with torch.no_grad(), poisoned_empty():
            want = run_microbatched(block, x, interleave=False)
            equal.append(torch.equal(run_microbatched(block, x), want))
        kernel, lanes = block.moes[0].kernel(x.device, x.dtype), []  # type: ignore[operator]
        run_microbatched(lambda part, kernel=kernel, lanes=lanes: lanes.append(kernel._scratch()) or part, x)
        equal.append(lanes == [ep.workspace(0), ep.workspace(1)])
    return equal


def test_interleaved_and_one_after_another_are_the_same_bits_over_ranks_forward_and_backward(seed: int) -> None:
    assert run_ranks(over_ranks, 3, args=(seed,), timeout=120) == [[True] * 16] * 3


@pytest.mark.parametrize("split", [None, [5, 2], [0, 7], [7, 0]])
def test_any_split_gives_the_whole_batch_s_result(split: list[int] | None, seed: int) -> None:
    torch.manual_seed(seed)
    block = Block(None)
    x = torch.randn(7, H, requires_grad=True)
    torch.testing.assert_close(run_microbatched(block, x, split=split), block(x))
    assert same(both_ways(block, x, seed, split=split))


def test_activation_checkpointing_inside_microbatches_changes_no_bit(seed: int) -> None:
    torch.manual_seed(seed)
    block = Block(None, dropout=0.3)
    x = torch.randn(9, H, requires_grad=True)
    kept = both_ways(block, x, seed)
    again = both_ways(block, x, seed, fn=lambda part: epmoe.checkpoint(block, part))
    assert same(kept) and same(again) and same([kept[1], again[1]])


def test_selective_checkpointing_inside_microbatches_changes_no_bit(seed: int) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(seed)
    block = Block(None)
    x = torch.randn(9, H, requires_grad=True)

    def selective(part: torch.Tensor) -> torch.Tensor:
        kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        return checkpoint(
            block, part, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(kept)
        )

    assert same(both_ways(block, x, seed, fn=selective))


# ---- that they do overlap


class SlowLink(LocalDispatcher):
    """Rows arrive `delay` after the launch, whatever happens meanwhile, by a clock that others move too."""

    capabilities = DispatcherCapabilities(asynchronous=True, exact_pairs=True)
    delay = 1.0
    now = 0.0

    def late(self, pending: Pending[Any]) -> Pending[Any]:
        due = self.now + self.delay

        def finish() -> Any:
            self.now = max(self.now, due)
            return pending.wait()

        return Pending(finish)

    def dispatch_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        return self.late(super().dispatch_async(*args, **kwargs))

    def combine_async(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        return self.late(super().combine_async(*args, **kwargs))


def test_one_microbatch_computes_while_the_other_s_rows_are_on_their_way(seed: int) -> None:
    plain, weights = local_kernel("reference", "standard")
    d = plain.dispatcher
    link = SlowLink(None, d.owner, d.expert_map, d.num_local)
    kernel = MoEKernel(link, plain.experts)
    compute, work = kernel._compute, 1.0

    def slow(*args: Any) -> Any:
        link.now += work
        return compute(*args)

    kernel._compute = slow  # type: ignore[method-assign]

    def layers(x: torch.Tensor, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            link.now += work  # attention
            x = kernel(x, ids, p, weights).routed
        return x

    batch = batch_of(0, 1, "uneven", seed)
    took, results = [], []
    for interleave in (False, True):
        link.now = 0.0
        results.append(run_microbatched(layers, *batch, interleave=interleave))
        took.append(link.now)
    assert torch.equal(*results)
    # alone a layer takes 2 delays and 2 works; together the delays hide behind the works but for the last
    assert took == [6 * (2 * link.delay + 2 * work), 6 * 2 * work + link.delay]


def test_the_backward_launches_one_microbatch_s_gradient_before_it_waits_for_the_other_s() -> None:
    assert run_ranks(backward_order, 2, timeout=60) == [True, True]


def backward_order(rank: int, ranks: int) -> bool:
    ep = EPGroup(timeout=30)
    events: list[str] = []
    launch, wait = ep.all_to_all_async, ep.wait

    def launched(*args: Any, **kwargs: Any) -> Any:
        events.append("launch")
        return launch(*args, **kwargs)

    def waited(work: Any, operation: str) -> None:
        if "backward" in operation:
            events.append("wait")
        wait(work, operation)

    layer = MoELayer(MoEConfig(H, 24, 6, 2, dispatcher="all_to_all_fixed", max_tokens_per_rank=8), ep)
    x = torch.randn(8, H, requires_grad=True)
    y = run_microbatched(layer, x)
    ep.all_to_all_async, ep.wait = launched, waited  # type: ignore[method-assign]
    y.sum().backward()
    # combine's backward of both, then each one's experts and dispatch's backward: one after the other it would be
    # launch, wait, launch, wait, ...
    return events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


# ---- what goes wrong inside


def test_an_exception_in_one_reaches_the_caller_and_ends_the_others() -> None:
    cleaned: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        try:
            microbatch.let_others_run()
            if microbatch.index == 1:
                raise KeyError("no such layer")
            microbatch.let_others_run()
            microbatch.let_others_run()
        finally:
            cleaned.append(microbatch.index)
        return x

    with torch.no_grad(), pytest.raises(KeyError, match="no such layer"):
        run_microbatched(fn, torch.zeros(3, 1), num_microbatches=3)
    assert sorted(cleaned) == [0, 1, 2] and current_microbatch() is None and torch.is_grad_enabled()


def test_a_cleanup_that_fails_hides_neither_the_error_nor_the_others_cleanup() -> None:
    cleaned: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        try:
            with torch.no_grad():
                microbatch.let_others_run()
                if microbatch.index == 0:
                    raise KeyError("the cause")
        finally:
            cleaned.append(microbatch.index)
            if microbatch.index == 1:
                raise OSError("disk full")
        return x

    with pytest.warns(UserWarning, match="microbatch 1 raised OSError"), pytest.raises(KeyError, match="the cause"):
        run_microbatched(fn, torch.zeros(4, 1), num_microbatches=4)
    assert sorted(cleaned) == [0, 1, 2, 3] and torch.is_grad_enabled()


def resharded(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    block = Block(EPGroup(timeout=30))
    experts = {p for moe in block.moes for p in moe.expert_parameters().values()}  # type: ignore[operator]
    fully_shard(block.maps[1], mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=True)
    fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)), ignored_params=experts, reshard_after_forward=True)
    run_microbatched(lambda x: block.moes[1](block.maps[1](x)), torch.randn(4, H))


def test_weights_that_fsdp_takes_away_from_a_part_are_explained() -> None:
    with pytest.raises(RankFailed, match=r"use\s+fully_shard\(\.\.\., reshard_after_forward=False\)"):
        run_ranks(resharded, 2, timeout=60)


# ---- arguments


def test_mistakes_name_what_to_change() -> None:
    x = torch.zeros(4, 2)
    for call, message in [
        (lambda: run_microbatched(lambda x: x, x, split=[1, 2]), r"split=\[1, 2\]: must be 2 sizes >= 0.*batch, 4"),
        (lambda: run_microbatched(lambda x: x, x, phase="prefil"), "phase='prefil': must be prefill or decode"),
        (lambda: run_microbatched(lambda x: x, x, num_microbatches=0), "num_microbatches=0"),
        (
            lambda: run_microbatched(lambda x: x, x, min_tokens="always"),
            "min_tokens='always': must be 'auto', a MinTokens",
        ),
        (lambda: run_microbatched(lambda x: x, x, min_tokens=-1), "min_tokens=-1: must be"),
        (lambda: run_microbatched(lambda x: x, 3), "nothing to split"),
        (lambda: run_microbatched(lambda x: x.mean(), x), "without dimensions.*merge="),
        (lambda: run_microbatched(lambda x: run_microbatched(lambda y: y, x), x), "outermost"),
        (lambda: run_microbatched(lambda x: current_microbatch().index, x), "merge= to join what is no tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_inputs_are_split_where_they_have_the_batch_and_merged_as_asked() -> None:
    x, table = torch.arange(6.0).view(6, 1), torch.ones(3)

    def fn(x: torch.Tensor, rest: dict[str, Any]) -> dict[str, Any]:
        return {"sum": x.sum(), "rows": x + rest["each"], "table": rest["table"].shape[0]}

    rest = {"each": x * 10, "table": table, "word": "as it is"}
    merged = run_microbatched(fn, x, rest, merge=lambda parts: [(int(p["sum"]), p["table"]) for p in parts])
    assert merged == [(3, 3), (12, 3)]
    assert torch.equal(run_microbatched(lambda *a: fn(*a)["rows"], x, rest), x * 11)


def test_an_input_of_the_batch_s_length_stays_whole_if_it_says_so() -> None:
    x, table = torch.zeros(4, 2), torch.arange(4.0)
    assert torch.equal(run_microbatched(lambda x, t: x + t.sum(), x, Whole(table), split=[1, 1, 2]), x + 6)
    assert torch.equal(run_microbatched(lambda x, t: x + t.sum(), x, Whole(table), min_tokens=100), x + 6)

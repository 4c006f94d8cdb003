"""What a microbatch keeps to itself: modes, hooks and random generators are as it left them, whoever ran meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epmoe.overlap import current_microbatch, run_microbatched
from tests.overlap.microbatch_cases import Block, H


def test_a_switch_sets_nothing_that_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: Any) -> None:
        raise AssertionError("set again")

    def spin(x: torch.Tensor) -> torch.Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        for _ in range(3):
            microbatch.let_others_run()
        return x

    for name in ("set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled", "set_rng_state"):
        monkeypatch.setattr(torch, name, called)
    monkeypatch.setattr(torch._C, "_set_grad_enabled", called)
    run_microbatched(spin, torch.randn(2, 3), randomness=False)


def test_grad_mode_autocast_and_randomness_stay_with_their_microbatch(seed: int) -> None:
    seen: list[tuple[Any, ...]] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        odd = microbatch.index == 1
        with torch.set_grad_enabled(not odd), torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
            for _ in range(3):
                microbatch.let_others_run()
                seen.append((odd, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return x + torch.rand(())

    torch.manual_seed(seed)
    run_microbatched(fn, torch.zeros(4, 1), randomness=True)
    after = torch.rand(3)
    assert len(seen) == 6 and all(grad is not odd and cast is odd for odd, grad, cast in seen)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    torch.manual_seed(seed)
    torch.randint(2**62, (2,))
    assert torch.equal(torch.rand(3), after)  # the caller's generator moved by the seeds alone


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_parts_draw_on_host_and_device_does_not_depend_on_turns(device: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        for _ in range(3):
            x = x + torch.rand(x.shape).to(device) + torch.rand_like(x)
            microbatch.let_others_run()
        return x

    drawn = []
    for interleave in (False, True):
        torch.manual_seed(1)
        y = run_microbatched(fn, torch.zeros(6, 2, device=device), interleave=interleave, randomness=True)
        drawn.append(torch.cat([y.cpu(), torch.rand(2, 2), torch.rand(2, 2, device=device).cpu()]))
    assert torch.equal(*drawn) and len(drawn[0].unique()) == drawn[0].numel()


def test_modes_and_hooks_entered_inside_stay_with_their_microbatch() -> None:
    seen: list[tuple[int, str, int]] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        microbatch = current_microbatch()
        assert microbatch is not None
        packed: list[int] = []
        device = "meta" if microbatch.index == 0 else "cpu"

        def pack(t: torch.Tensor) -> torch.Tensor:
            packed.append(1)
            return t

        with torch.device(device), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            for _ in range(2):
                microbatch.let_others_run()
            y = x.exp()
            seen.append((microbatch.index, str(torch.empty(1).device), len(packed)))
        return y

    outer: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: outer.append(1) or t, lambda t: t):
        run_microbatched(fn, torch.randn(4, 2, requires_grad=True))
        before = len(outer)
        torch.ones(1, requires_grad=True).exp()
        assert len(outer) > before  # the caller's own are where they were
    assert seen == [(0, "meta", 1), (1, "cpu", 1)] and torch.empty(1).device.type == "cpu"


def test_an_inference_mode_inside_is_refused_and_one_around_it_works(seed: int) -> None:
    torch.manual_seed(seed)
    block = Block(None).eval()
    x = torch.randn(6, H)
    with torch.inference_mode():
        want = run_microbatched(block, x, interleave=False)
        assert torch.equal(run_microbatched(block, x), want)
    with pytest.raises(RuntimeError, match="enter it around run_microbatched"):
        run_microbatched(torch.inference_mode()(block), x)
    assert not torch.is_inference_mode_enabled()
    block(x).sum().backward()  # training goes on

"""Layers made and run where torch's default device and dtype are others: `with torch.device("cuda"):`,
`set_default_device`, `set_default_dtype`. What the package makes for itself says where and of what."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer, QuantConfig, quantize_
from epmoe.testing import run_ranks

PACKAGE = Path(epmoe.__file__).parent
DISPATCHERS = ("auto", "all_gather", "all_to_all", "all_to_all_fixed", "symmetric", "hierarchical")


def factories_without_device(source: str) -> list[str]:
    """Calls of torch's factories, those that the default device decides for, that neither name a device nor take it
    from `**options`."""
    names = {f.__name__ for f in _device_constructors() if getattr(torch, f.__name__, None) is f}
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in {("torch", name) for name in names}
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_tensor_the_package_makes_says_on_which_device() -> None:
    assert factories_without_device("import torch\nx = torch.zeros(3, dtype=torch.int32)") != []
    assert factories_without_device("import torch\nx = torch.zeros(3, **options)\ny = torch.cat([x])") == []
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in PACKAGE.rglob("*.py")
        if (calls := factories_without_device(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def make_and_run(ep: EPGroup, dispatcher: str, seed: int, shared: int = 1) -> dict[str, torch.Tensor]:
    """A layer's output and gradients, and its output with quantized experts; all that is random is drawn on the CPU."""
    here = ep.device
    generator = torch.Generator().manual_seed(seed)
    config = MoEConfig(32, 32, 4, 2, dispatcher=dispatcher, num_shared_experts=shared, max_tokens_per_rank=8)
    layer = MoELayer(config, ep, device=here, dtype=torch.float32)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, device="cpu", dtype=torch.float32) * 0.2)
    x = torch.randn(7, 32, generator=generator, device="cpu", dtype=torch.float32).to(here).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    got = {"y": y, "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    quantize_(layer, QuantConfig("int8_row"))
    with torch.no_grad():
        got["quantized"] = layer(x)
    return {name: t.detach().to("cpu") for name, t in got.items() if t is not None}


def elsewhere(rank: int, world_size: int, default: str, seed: int) -> None:
    ep = EPGroup()
    for dispatcher in DISPATCHERS:
        want = make_and_run(ep, dispatcher, seed)
        torch.set_default_device(default)
        torch.set_default_dtype(torch.bfloat16)  # as transformers does while it makes a model
        with_default = make_and_run(ep, dispatcher, seed)
        again = EPGroup()
        made_there = make_and_run(again, dispatcher, seed)  # the group's own first messages, too
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        for got in (with_default, made_there):
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=f"{dispatcher}: {name}")
        with torch.device(ep.device):
            inside = MoELayer(MoEConfig(32, 32, 4, 2, dispatcher=dispatcher, max_tokens_per_rank=8), EPGroup())
            assert inside.gate_up_proj.device == torch.empty(0).device
            assert inside(torch.randn(3, 32)).shape == (3, 32)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_do_not_care_which_device_and_dtype_are_the_default(ranks: int, seed: int) -> None:
    run_ranks(elsewhere, ranks, args=("meta", seed))


@pytest.mark.gpu2
def test_layers_over_nccl_do_not_care_which_device_is_the_default(seed: int) -> None:
    """`with device:` around a model, as it is often written, made the host's own buffers on the GPU."""
    run_ranks(elsewhere, 2, args=("cuda", seed), backend="nccl")

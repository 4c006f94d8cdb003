"""Quick launches tell the launcher what Triton's own would: in another process, since here kernels are interpreted. On
a GPU no kernel is left to Triton's search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epmoe import MoEConfig, MoELayer

pytest.importorskip("triton")


def test_a_quick_launch_is_tritons_own_without_its_search() -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("launch_cases.py"))], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    plain, quick = (json.loads(done.stdout)[way] for way in ("plain", "quick"))
    assert quick["seen"] == plain["seen"]
    assert plain["searches"] == plain["launches"] > 80 and plain["compilations"] > 15
    # the first launch of a kind, another order of the same constants, and grids that ask for the arguments
    assert quick["searches"] <= plain["compilations"] + 3


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_of_a_step_is_launched_quickly() -> None:
    layer = MoELayer(MoEConfig(256, 128, 8, 2), device="cuda", dtype=torch.bfloat16)
    for tokens in (3, 700):
        layer(torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)).sum().backward()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("epmoe.ops.")]
    things = {id(thing): thing for module in modules for thing in vars(module).values()}.values()
    searched = [t for t in things if any(caches[0] for caches in getattr(t, "device_caches", {}).values())]
    assert len(searched) > 5
    assert not [t.__name__ for t in searched if not getattr(t, "_compiled", None)]

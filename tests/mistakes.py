"""What the tests of messages share: a small configuration, and errors by parts of their text."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from epmoe import (
    Activation,
    ExpertPlacement,
    ExpertsSpec,
    ExpertWeights,
    MoEConfig,
    MoEKernel,
    QuantConfig,
    make_dispatcher,
    select_experts,
)

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 6, "top_k": 2}
CONFIG, FP8 = MoEConfig(**SMALL), QuantConfig("fp8_block")
SPEC = ExpertsSpec(Activation(), 16, 24, torch.float32, torch.device("cpu"))


def raises(*parts: str) -> Any:
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def dispatcher(name: str, ep: Any = None, placement: Any = None, device: str = "cpu", **options: Any) -> Any:
    return make_dispatcher(name, ep, placement or ExpertPlacement.contiguous(6, 1), device, **options)


def kernel(**options: Any) -> tuple[MoEKernel, ExpertWeights]:
    weights = ExpertWeights(torch.randn(6, 48, 16), torch.randn(6, 16, 24))
    return MoEKernel(dispatcher("local"), select_experts(SPEC).experts, **options), weights

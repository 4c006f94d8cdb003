"""What goes with what: every combination works, or is refused by the words that the table has."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epmoe import MoEKernel
from epmoe.capabilities import KINDS, LAYOUTS, combinations
from epmoe.dispatch import DISPATCHERS
from epmoe.dispatch.base import Dispatcher
from epmoe.experts.base import Experts
from epmoe.quant.rows import ROW_SCHEMES
from tests.test_kernel import local_kernel


def test_every_combination_works_or_is_refused_with_a_reason_and_a_way_out() -> None:
    kernel, _ = local_kernel("reference", "standard")
    d = kernel.dispatcher
    assert len(combinations()) == len(DISPATCHERS) * len(KINDS) * len(LAYOUTS)
    refused = 0
    for dispatcher, experts, layout, reason in combinations():
        parts = object.__new__(DISPATCHERS[dispatcher])  # no process group: only its declarations are asked
        Dispatcher.__init__(parts, None, d.owner, d.expert_map, d.num_local, layer="blocks.1")
        spec = kernel.experts.spec
        if None not in KINDS[experts].schemes:
            spec = dataclasses.replace(spec, dtype=torch.bfloat16, scheme=KINDS[experts].schemes[0])
        made = KINDS[experts](spec)
        if reason is None:
            MoEKernel(parts, made, layout=layout)
            continue
        refused += 1
        assert f"experts={experts!r}" in reason or f"experts {experts!r}" in reason
        with pytest.raises(ValueError, match="use |choose ") as caught:
            MoEKernel(parts, made, layout=layout)
        assert str(caught.value) == reason
    assert refused > 0


def test_experts_declare_what_they_are() -> None:
    for name, cls in KINDS.items():
        assert issubclass(cls, Experts) and set(cls.layouts) <= set(LAYOUTS), name
        assert all(layout in cls.weight_and_reduce for layout in cls.layouts), name
        assert set(cls.row_schemes) <= {None, *ROW_SCHEMES}, name

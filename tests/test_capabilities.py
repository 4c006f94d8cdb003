"""What goes with what: every combination works, or is refused by the words that the table has."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epmoe import MoEConfig, MoEKernel, QuantConfig
from epmoe.capabilities import KINDS, LAYOUTS, combinations
from epmoe.dispatch import DISPATCHERS
from epmoe.dispatch.base import Dispatcher
from epmoe.experts import EXPERTS, QUANTIZED_EXPERTS, TRAINING_EXPERTS
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
        Dispatcher.__init__(parts, None, d.owner, d.expert_map, d.num_local, layer="blocks.1", max_tokens_per_rank=8)
        spec = kernel.experts.spec
        if experts not in EXPERTS:
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


def test_every_kind_is_in_the_table_and_the_settings_docstrings_name_it() -> None:
    def subclasses(cls: type) -> set[type]:
        return {below for c in cls.__subclasses__() for below in (c, *subclasses(c))}

    shipped = {c for c in subclasses(Experts) if c.__module__.startswith("epmoe.")}
    assert shipped == set(KINDS.values())
    for name in KINDS:
        assert f"`{name}`" in str(MoEConfig.__doc__), name
    for name in (*EXPERTS, *TRAINING_EXPERTS):  # names that a layer of wide weights takes, and only these
        assert MoEConfig(8, 8, 4, 1, experts=name).experts == name
    for name in QUANTIZED_EXPERTS:
        assert QuantConfig(weights="fp8_block", experts=name).experts == name

"""Selection: what is chosen for each layout, and that everything passed over is there with its reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epmoe.config import Activation
from epmoe.experts import EXPERTS_BY_LAYOUT, BatchedExperts, ExpertsSpec, select_experts

SPEC = ExpertsSpec(Activation(), 24, 40, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("layout, names", list(EXPERTS_BY_LAYOUT.items()))
def test_every_candidate_takes_the_layout_it_is_offered_for(layout, names):
    assert "reference" in names
    for name in names:
        experts = select_experts(SPEC, name, layout).experts
        assert experts.name == name and layout in experts.layouts
    assert select_experts(SPEC, layout=layout).experts.name in names


def test_another_layouts_experts_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match="'batched' takes batched rows and these are standard: must be auto, grouped"):
        select_experts(SPEC, "batched")
    with pytest.raises(ValueError, match="'grouped' takes standard rows and these are batched: must be auto, batched"):
        select_experts(SPEC, "grouped", "batched")
    with pytest.raises(ValueError, match="experts='fast': must be auto"):
        select_experts(SPEC, "fast", "batched")
    with pytest.raises(ValueError, match="layout='ragged': must be one of standard, batched"):
        select_experts(SPEC, layout="ragged")


def test_each_one_passed_over_is_named_with_its_reason(monkeypatch):
    cuda = dataclasses.replace(SPEC, device=torch.device("cuda"))
    monkeypatch.setattr(BatchedExperts, "refusal", classmethod(lambda cls, spec: "because of the test"))
    selection = select_experts(cuda, layout="batched")
    assert selection.experts.name == "reference" and selection.passed_over == (("batched", "because of the test"),)
    assert str(selection) == "reference; not batched: because of the test"


def test_when_all_refuse_each_says_why():
    with pytest.raises(
        ValueError, match="no experts can take batched rows.*reference: dtype=torch.int8.*batched: dtype"
    ):
        select_experts(dataclasses.replace(SPEC, dtype=torch.int8), layout="batched")

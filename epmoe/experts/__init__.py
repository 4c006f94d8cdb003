"""Ways of computing experts; `select_experts` picks one and says why."""

from epmoe.experts.base import Experts, ExpertsSpec, ExpertWeights
from epmoe.experts.grouped import GroupedExperts
from epmoe.experts.reference import ReferenceExperts
from epmoe.experts.select import EXPERTS, Selection, select_experts
from epmoe.experts.torch_grouped import TorchGroupedExperts

__all__ = [
    "EXPERTS",
    "ExpertWeights",
    "Experts",
    "ExpertsSpec",
    "GroupedExperts",
    "ReferenceExperts",
    "Selection",
    "TorchGroupedExperts",
    "select_experts",
]

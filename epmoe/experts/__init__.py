"""Ways of computing experts; `select_experts` picks one and says why."""

from epmoe.experts.base import Experts
from epmoe.experts.batched import BatchedExperts
from epmoe.experts.gradient_sums import sum_gradients
from epmoe.experts.grouped import GroupedExperts
from epmoe.experts.grouped_fp8 import GroupedFp8Experts
from epmoe.experts.grouped_int8 import GroupedInt8Experts
from epmoe.experts.lora import ExpertLora, merge_adapter, stack_adapters
from epmoe.experts.monolithic import MonolithicExperts
from epmoe.experts.problem_size import ProblemSize, moe_problem_size
from epmoe.experts.reference import ReferenceExperts
from epmoe.experts.select import (
    EXPERTS,
    EXPERTS_BY_LAYOUT,
    QUANTIZED_EXPERTS,
    TRAINING_EXPERTS,
    Candidate,
    Selection,
    select_experts,
    select_experts_impl,
)
from epmoe.experts.spec import ExpertsSpec, ExpertWeights
from epmoe.experts.torch_grouped import TorchGroupedExperts
from epmoe.experts.weight_only import WeightOnlyExperts

__all__ = [
    "EXPERTS_BY_LAYOUT",
    "EXPERTS",
    "QUANTIZED_EXPERTS",
    "TRAINING_EXPERTS",
    "BatchedExperts",
    "Candidate",
    "ExpertLora",
    "ExpertWeights",
    "Experts",
    "ExpertsSpec",
    "GroupedExperts",
    "GroupedFp8Experts",
    "GroupedInt8Experts",
    "MonolithicExperts",
    "ProblemSize",
    "ReferenceExperts",
    "Selection",
    "TorchGroupedExperts",
    "WeightOnlyExperts",
    "merge_adapter",
    "moe_problem_size",
    "select_experts",
    "select_experts_impl",
    "stack_adapters",
    "sum_gradients",
]

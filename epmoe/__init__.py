"""epmoe: an expert-parallel Mixture-of-Experts layer for PyTorch that trains and serves."""

from epmoe.comm import EPGroup, PeerError
from epmoe.config import ACTIVATIONS, Activation, MoEConfig, RouterConfig
from epmoe.dense import SharedExperts
from epmoe.dispatch import DISPATCHERS, Dispatcher, ExpertInput, Pending, make_dispatcher
from epmoe.experts import EXPERTS, Experts, ExpertsSpec, ExpertWeights, select_experts, select_experts_impl
from epmoe.kernel import KernelOutput, MoEKernel
from epmoe.layer import MoELayer
from epmoe.overlap import run_microbatched, trace
from epmoe.overlap.trace import trace_process
from epmoe.placement import ExpertPlacement
from epmoe.quant.config import QuantConfig
from epmoe.quantized import quantize_
from epmoe.recompute import checkpoint, reuse_routing
from epmoe.router import Router, route
from epmoe.routing import Routing

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "DISPATCHERS",
    "EXPERTS",
    "Activation",
    "Dispatcher",
    "EPGroup",
    "ExpertInput",
    "ExpertPlacement",
    "ExpertWeights",
    "Experts",
    "ExpertsSpec",
    "KernelOutput",
    "MoEConfig",
    "MoEKernel",
    "MoELayer",
    "PeerError",
    "Pending",
    "QuantConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "SharedExperts",
    "checkpoint",
    "make_dispatcher",
    "quantize_",
    "reuse_routing",
    "route",
    "run_microbatched",
    "select_experts",
    "select_experts_impl",
    "trace",
]

trace_process()  # if `epmoe trace` started this process

"""`GradientSums`: where the backwards of several parts of a batch add up the gradients of one set of expert weights, in
float32. On the path of a token backwards: between the experts' backward and the weights.

Autograd by itself adds the parts' gradients in the weights' dtype, and rounds for every part:

    w ── _Sum ──┬── part 1     backward: each part adds its dw to one float32 buffer and gives autograd nothing; _Sum,
                ├── part 2     which autograd runs after all of them, rounds that sum once to w's dtype. With a
                └── part 3     `main_grad` the buffer is that tensor, which outlives the backward; w.grad stays None.

Our kernels add in their epilogue; gradients that autograd computes are added by `_Part`. Parts follow each other in one
order and every element has one owner: the same inputs give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from epmoe.experts.spec import ExpertWeights

SUMMED = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


class GradientSums:
    """The sums of one forward's weights, by their names in `ExpertWeights`.

    Args:
        main: parameters whose `main_grad` takes the sums, by name; None: the sums become the weights' gradients.
    """

    def __init__(self, main: Mapping[str, nn.Parameter] | None = None) -> None:
        self._main = main
        self._sums: dict[str, Tensor] = {}
        self._task = -1

    def buffer(self, name: str) -> Tensor | None:
        """What a kernel adds to: `main_grad`, or the sum so far; None where nothing has been added in this backward."""
        if self._main is not None:
            return self._main[name].main_grad  # type: ignore[attr-defined]
        self._drop_stale()
        return self._sums.get(name)

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a gradient, rounding nothing; float32 ones may become the buffer."""
        into = self.buffer(name)
        if into is None:
            self._sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        else:
            into.add_(gradient)

    def _drop_stale(self) -> None:
        """What another backward through the same graph left, because it failed halfway, must not count in this one."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._sums = task, {}

    def _take(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The weight's gradient, once all parts have been added."""
        if self._main is None:
            self._drop_stale()
            total = self._sums.pop(name, None)
            return None if total is None else total.to(dtype)
        parameter = self._main[name]
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        # Megatron's hooks on the parameter run only if it gets a gradient, and leave it aside where this is set.
        parameter.grad_added_to_main_grad = True
        return torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)


class PartSums:
    """Where the backward of one part, the autograd node `ctx`, leaves its weights' gradients. Without `sums`, and for
    weights that are not summed: with autograd."""

    def __init__(self, ctx: Any, sums: GradientSums | None) -> None:
        self._sums = sums
        nodes = [] if sums is None else [node for node, _ in ctx.next_functions if getattr(node, "sums", None) is sums]
        # whether this backward wants them at all: `torch.autograd.grad` of other tensors does not
        self._asked = {node.weight_name: torch._C._will_engine_execute_node(node) for node in nodes}

    def dtype(self, of_weight: torch.dtype) -> torch.dtype:
        """What gradients are to be computed in."""
        return torch.promote_types(of_weight, torch.float32) if self._asked else of_weight

    def buffer(self, name: str) -> Tensor | None:
        """What a kernel is to add this weight's gradient to; None: it is to `give` it."""
        return self._sums.buffer(name) if self._sums is not None and self._asked.get(name) else None

    def give(self, name: str, gradient: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Adds the gradient, or returns what autograd gets, in the weight's `dtype`."""
        if name not in self._asked:
            return gradient.to(dtype)
        if self._sums is not None and self._asked[name]:
            self._sums.add(name, gradient)
        return None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: GradientSums, name: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.weight_name, ctx.dtype = sums, name, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is not None:  # of somebody who does not know that sums are made here
            ctx.sums.add(ctx.weight_name, gradient.clone())
        return ctx.sums._take(ctx.weight_name, ctx.dtype), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: GradientSums, name: str) -> Tensor:
        ctx.sums, ctx.weight_name = sums, name
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.sums.add(ctx.weight_name, gradient.clone())
        return None, None, None


def _mapped(weights: ExpertWeights, function: Any, sums: GradientSums) -> ExpertWeights:
    changed = {}
    for name in SUMMED:
        weight = getattr(weights, name)
        if weight is not None and weight.requires_grad:
            changed[name] = function.apply(weight, sums, name)
    return dataclasses.replace(weights, sums=sums, **changed)


def sum_gradients(weights: ExpertWeights, main: Mapping[str, nn.Parameter] | None = None) -> ExpertWeights:
    """The same weights, for a forward in parts: their gradients are added up in float32 and rounded once.

    Adapters' gradients (`weights.lora`) are left to autograd, as is everything in a compiled graph.

    Args:
        main: parameters by name, to whose `main_grad` the gradients are added instead: float32, contiguous, of the
            parameter's shape. Whoever made it clears it; `.grad` stays None. A parameter that has the attribute
            `grad_added_to_main_grad` gets it set, and zeros as its gradient, as Megatron's hooks expect.

    Raises:
        ValueError: a `main_grad` that is missing or does not fit, or one in a compiled graph.
    """
    tensors = {name: getattr(weights, name) for name in SUMMED}
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors.values()):
        return weights
    if torch.compiler.is_compiling():
        if main is not None:
            raise ValueError("main_grad in a compiled graph, which can't add to it: unset it")
        return weights
    for name, parameter in (main or {}).items():
        if name in SUMMED and parameter.requires_grad:
            _check_main_grad(name, parameter)
    return _mapped(weights, _Sum, GradientSums(main))


def summed_by_autograd(weights: ExpertWeights) -> ExpertWeights:
    """The weights for one part that leaves their gradients to autograd: they are added to the sums all the same."""
    return weights if weights.sums is None else dataclasses.replace(_mapped(weights, _Part, weights.sums), sums=None)


def _check_main_grad(name: str, parameter: nn.Parameter) -> None:
    into = getattr(parameter, "main_grad", None)
    if into is None:
        raise ValueError(
            f"main_grad=True and parameter {name} has none: set {name}.main_grad to a float32 tensor of its shape, "
            f"{tuple(parameter.shape)}"
        )
    right = (torch.float32, torch.float64) if parameter.dtype == torch.float64 else (torch.float32,)
    fits = type(into) is Tensor and into.shape == parameter.shape and into.dtype in right and into.is_contiguous()
    if not fits or into.device != parameter.device or into.requires_grad:
        raise ValueError(
            f"{name}.main_grad is {type(into).__name__} {into.dtype} {tuple(into.shape)} on {into.device}: must be a "
            f"contiguous Tensor {' or '.join(map(str, right))} {tuple(parameter.shape)} on {parameter.device}, without "
            "requires_grad"
        )

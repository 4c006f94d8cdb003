"""The expert MLP on segments of rows, by our kernels: what `grouped` and `batched` share, forward and backward.

    x ── GEMM1 (w1, + b1) ── activation ── GEMM2 (w2, + b2) ──► y, one row per row of a segment

N rows of the experts' buffers, H width, I intermediate size, L local experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.comm.workspace import Part, Workspace
from epmoe.config import DTYPES, Activation
from epmoe.experts.gradient_sums import PartSums
from epmoe.experts.spec import ExpertsSpec, ExpertWeights, WorkspaceShapes
from epmoe.ops.activation import activation_backward
from epmoe.ops.grouped_gemm import grouped_gemm, grouped_gemm_act, grouped_gemm_act_into, grouped_gemm_into
from epmoe.ops.grouped_wgrad import grouped_wgrad
from epmoe.ops.permute_rows import permute_rows


class Rows(NamedTuple):
    """Which rows each expert has, and where their inputs lie.

    Row n < num_rows of expert e, row_start[e] <= n < row_end[e], takes row `row_index[n] // divisor` of x (and of the
    output's gradient), or row n where `row_index` is None. `expected_m` only picks configurations.
    """

    row_start: Tensor
    row_end: Tensor
    row_index: Tensor | None
    divisor: int
    num_rows: int
    expected_m: int | None = None


class Gradients(NamedTuple):
    """What `mlp_backward` gives; biases' are None unless asked for, and what was added to sums is None.

    `rows [N, H]` is the gradient of each row after the weight on the input, `weight [N]` that of its router weight on
    the output; both are unwritten outside the segments.
    """

    rows: Tensor
    w1: Tensor | None
    w2: Tensor | None
    b1: Tensor | None
    b2: Tensor | None
    weight: Tensor


def mlp_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    rows: Rows,
    weight_in: Tensor | None,
    activation: Activation,
    save_preact: bool,
) -> tuple[Tensor, Tensor]:
    """y = act(s·x·w1ᵀ + b1)·w2ᵀ + b2 for each row of a segment.

    Args:
        x: `[*, H]`, found through `rows`.
        w1, w2, b1, b2: as in `ExpertWeights`.
        weight_in: flat router weights s on the input, by `rows.row_index` (None: by row), or None.
        save_preact: also return what the activation saw.

    Returns:
        `y [N, H]` and `h [N, 2I]` (`[N, I]` not gated, `[0]` unless `save_preact`), unwritten outside the segments.
    """
    start, end, index, divisor, n, expected_m = rows
    act = (activation.name, activation.alpha, activation.limit)
    a, h = grouped_gemm_act(
        x, w1, b1, start, end, index, divisor, n, weight_in, *act, save_preact, expected_m=expected_m
    )
    return grouped_gemm(a, w2, b2, start, end, None, 1, n, False, expected_m=expected_m), h


def mlp_workspace_shapes(spec: ExpertsSpec, num_rows: int, num_pairs: int) -> WorkspaceShapes:
    """What `mlp_infer` writes: the activation is fused, so that GEMM2 alone needs workspace13."""
    h, i, dtype = spec.hidden_size, spec.intermediate_size, spec.dtype
    return WorkspaceShapes(Part((num_pairs, h), dtype), Part((num_pairs, i), dtype), Part((num_rows, h), dtype))


def mlp_infer(
    x: Tensor,
    weights: ExpertWeights,
    rows: Rows,
    weight_in: Tensor | None,
    activation: Activation,
    y: Tensor,
    a: Tensor,
) -> None:
    """`mlp_forward` without a gradient: writes the activation into `a [N, I]` and the result into `y [N, H]`."""
    start, end, index, divisor, _, expected_m = rows
    w1, b1, w2, b2 = weights.gate_up_proj, weights.gate_up_bias, weights.down_proj, weights.down_bias
    name, alpha, limit = activation.name, activation.alpha, activation.limit
    grouped_gemm_act_into(a, None, x, w1, b1, start, end, index, divisor, weight_in, name, alpha, limit, expected_m)
    grouped_gemm_into(y, a, w2, b2, start, end, None, 1, False, expected_m)


def may_use_workspace(workspace: Workspace | None, x: Tensor) -> bool:
    """Whether a forward on `x` may write into `workspace`: nobody will want a gradient, and nobody traces."""
    return workspace is not None and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and x.numel() > 0


def mlp_backward(
    dout: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    h: Tensor,
    rows: Rows,
    slot: Tensor | None,
    weight_in: Tensor | None,
    weight_out: Tensor | None,
    activation: Activation,
    with_b1: bool,
    with_b2: bool,
    sums: PartSums,
) -> Gradients:
    """The adjoint of `mlp_forward`, followed by the router weight p on the output where `weight_out` gives it.

    With g = dout·w2: dp = ⟨g, a⟩, dh = act'(h) ⊙ p·g, dw2 = Σ dout ⊗ p·a, db2 = Σ dout (without p), rows = dh·w1,
    dw1 = Σ dh ⊗ s·x, db1 = Σ dh. Where rows are found by index, dout and then s·x are copied into expert order first;
    each copy goes before the next buffer of its size is made, so that dh, h and one `[N, H]` are all that is held.

    Args:
        dout: `[*, H]`, found through `rows` as x is.
        h: from `mlp_forward`.
        slot: `[T, K]`, where each entry of `rows.row_index` stands; None where that is None.
        weight_out: flat, read like `weight_in`. None is p = 1.
        sums: takes gradients of weights that are summed over parts.
    """
    start, end, index, _, n, expected_m = rows
    assert (slot is None) == (index is None)
    act = (activation.name, activation.alpha, activation.limit)
    if slot is not None:
        dout = permute_rows(dout, slot, None, n)
    g = grouped_gemm(dout, w2, None, start, end, None, 1, n, True, expected_m=expected_m)
    dh, weighted_a, dp = activation_backward(h, g, start, end, None if weight_out is None else index, weight_out, *act)
    del g
    into = sums.buffer("down_proj")
    dw2, db2 = grouped_wgrad(
        dout, weighted_a, start, end, None, 1, None, 1, None, None, with_b2, sums.dtype(w2.dtype), expected_m, into
    )
    given_w2 = sums.give("down_proj", dw2, w2.dtype) if into is None else None
    given_b2 = sums.give("down_bias", db2, w2.dtype) if with_b2 else None
    del dout, weighted_a, dw2
    if slot is not None:
        x, weight_in = permute_rows(x, slot, None if weight_in is None else weight_in.view(slot.shape), n), None
    into = sums.buffer("gate_up_proj")
    dw1, db1 = grouped_wgrad(
        dh, x, start, end, None, 1, None, 1, weight_in, None, with_b1, sums.dtype(w1.dtype), expected_m, into
    )
    given_w1 = sums.give("gate_up_proj", dw1, w1.dtype) if into is None else None
    given_b1 = sums.give("gate_up_bias", db1, w1.dtype) if with_b1 else None
    del x, dw1
    dx = grouped_gemm(dh, w1, None, start, end, None, 1, n, True, expected_m=expected_m)
    return Gradients(dx, given_w1, given_w2, given_b1, given_b2, dp)


def kernel_refusal(spec: ExpertsSpec) -> str | None:
    """Why our kernels (on CPU: their torch twins) can't take `spec`, or None."""
    dtypes = DTYPES if spec.device.type == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    if spec.dtype not in dtypes:
        return f"dtype={spec.dtype} on {spec.device.type}: must be one of {', '.join(map(str, dtypes))}"
    if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (8, 0):
        return f"{torch.cuda.get_device_name(spec.device)}: Triton's bf16 kernels need compute capability 8.0"
    return None

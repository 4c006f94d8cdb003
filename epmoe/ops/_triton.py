"""Where every op meets Triton: its import, whether kernels are interpreted, and whether a tensor gets a kernel or the
pure-torch twin. Stands beside the path of a token: every file of `ops/` begins here.

Without Triton (it ships for Linux only) everything still imports, `jit` leaves kernels as plain functions that nobody
calls, and every op runs its twin.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

jit: Any  # decorator of a kernel: `@jit` or `@jit(do_not_specialize=[...])`

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    HAVE_TRITON = True
    # Triton decides when a function is decorated: its own library functions show what it saw when it was imported.
    INTERPRET: bool = not isinstance(tl.sigmoid, triton.runtime.jit.JITFunction)
    TL_DTYPES: dict[torch.dtype, Any] = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
    }
except ImportError:
    triton = tl = None  # type: ignore[assignment]
    HAVE_TRITON = False
    INTERPRET = False
    TL_DTYPES = {}

    def jit(fn: Any = None, **options: Any) -> Any:
        return fn if fn is not None else lambda kernel: kernel


@jit
def cast_from_float32(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 block `x` as `dtype`, rounded to nearest even everywhere: the interpreter's own cast to bf16 truncates."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            even = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            x = tl.where(x == x, even, x)
    return x.to(dtype)


@jit
def dot_accumulate(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b, fp32 operands never as tf32: the interpreter's own dot of bf16 multiplies the raw bits."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Floating dtypes that kernels accept; float64 always takes the twin."""


def use_triton(t: Tensor) -> bool:
    """Whether an op on `t` runs its Triton kernel (else its pure-torch twin).

    CUDA tensors do, CPU tensors only under `EPMOE_CPU_KERNELS=triton` (through Triton's interpreter), float64 never.

    Raises:
        ValueError: `EPMOE_CPU_KERNELS` is neither `triton` nor `torch`.
        RuntimeError: `EPMOE_CPU_KERNELS=triton`, but Triton is missing or was imported without its interpreter.
    """
    if t.dtype == torch.float64:
        return False
    if t.is_cuda:
        return HAVE_TRITON
    if t.device.type != "cpu":
        return False
    wanted = os.environ.get("EPMOE_CPU_KERNELS", "torch")
    if wanted not in ("torch", "triton"):
        raise ValueError(f"EPMOE_CPU_KERNELS={wanted!r}: must be 'triton' or 'torch' (the default)")
    if wanted == "torch":
        return False
    if not HAVE_TRITON:
        raise RuntimeError("EPMOE_CPU_KERNELS=triton needs Triton, which cannot be imported here: unset it")
    if not INTERPRET:
        raise RuntimeError(
            "EPMOE_CPU_KERNELS=triton runs kernels on CPU through Triton's interpreter: set TRITON_INTERPRET=1 "
            "before triton is first imported, or unset EPMOE_CPU_KERNELS"
        )
    return True


def unit_stride(t: Tensor, name: str) -> int:
    """The row stride of 2-D `t`, whose rows may be views into a wider buffer but must themselves be dense.

    Raises:
        ValueError: `t` is not 2-D, or its last dimension has a stride other than 1.
    """
    if t.dim() != 2 or (t.stride(1) != 1 and t.shape[1] > 1 and t.shape[0] > 0):
        raise ValueError(
            f"{name} has shape {tuple(t.shape)} and strides {t.stride()}: must be 2-D with stride 1 along its rows"
        )
    return t.stride(0)

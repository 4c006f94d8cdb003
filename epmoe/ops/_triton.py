"""Where every op meets Triton and torch: its import, whether kernels are interpreted, whether a tensor gets a kernel or
the pure-torch twin, and whether a call passes torch's dispatcher. Stands beside the path of a token: every file of
`ops/` begins here.

Without Triton (it ships for Linux only) everything still imports, `jit` leaves kernels as plain functions that nobody
calls, and every op runs its twin.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from epmoe.ops._launch import quick_jit

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

jit: Any  # decorator of a kernel: `@jit` or `@jit(do_not_specialize=[...])`

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = quick_jit(triton.jit)
    HAVE_TRITON = True
    # Triton decides when a function is decorated: its own library functions show what it saw when it was imported.
    INTERPRET: bool = not isinstance(tl.sigmoid, triton.runtime.jit.JITFunction)
    TL_DTYPES: dict[torch.dtype, Any] = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
    }
except ImportError:
    triton = tl = TensorDescriptor = None  # type: ignore[assignment]
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
        RuntimeError: `EPMOE_CPU_KERNELS=triton`, but Triton is missing, was imported without its interpreter, or is too
            old for this numpy.
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
    if not torch.compiler.is_compiling() and (why := interpreter_refusal()) is not None:
        raise RuntimeError(why)
    return True


@functools.cache
def interpreter_refusal() -> str | None:
    """Why this Triton's interpreter can't compute here; None if it can. Asked once: it needs no kernel, which would end
    somewhere inside with numpy's error."""
    import numpy
    from triton.runtime import interpreter

    found: dict[str, Any] = {}
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return None
    one = types.SimpleNamespace(handle=types.SimpleNamespace(data=numpy.ones(1, numpy.int32)))
    try:
        patch(object, types.SimpleNamespace(set_attr=lambda _, name, value: found.update({name: value})))
        found["__index__"](one)
    except TypeError as error:
        return (
            f"EPMOE_CPU_KERNELS=triton: the interpreter of Triton {triton.__version__} can't use numpy "
            f"{numpy.__version__} ({error}): pip install 'numpy<2.4', or unset EPMOE_CPU_KERNELS"
        )
    except (AttributeError, KeyError):  # another Triton's interpreter, which has this in another form
        return None
    return None


_NOT_TENSORS = frozenset((type(None), int, float, bool, str, torch.dtype))
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))


def runs_directly(arguments: Iterable[object]) -> bool:
    """Whether a call with these arguments needs nothing from torch's dispatcher: nobody traces or watches it, and no
    gradient has to be recorded.

    A `torch.library.custom_op` costs 11 µs of host time a call, this question 1.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0  # fake tensors, make_fx, selective checkpointing, FLOP counters
        or torch._C._are_functorch_transforms_active()
    ):
        return False
    records = torch.is_grad_enabled()
    for argument in arguments:
        kind = type(argument)
        if kind in _NOT_TENSORS:
            continue
        if kind not in _PLAIN_TENSORS:  # a subclass such as FakeTensor, a symbolic int, anything unforeseen
            return False
        if records and argument.requires_grad:  # type: ignore[attr-defined]
            return False
    return True


class Op(Generic[Parameters, Result]):
    """A function that is also the op `epmoe::name`: run directly in plain eager mode, else through the dispatcher."""

    def __init__(
        self, name: str, run: Callable[Parameters, Result], schema: str | None, mutates_args: Iterable[str] = ()
    ) -> None:
        self._run = run
        changed, parameters = tuple(mutates_args), inspect.signature(run).parameters
        self._defaults: list[tuple[str, object]] = []  # what the schema leaves to this side
        if any(parameters[p].default is not inspect.Parameter.empty for p in changed):
            # torch's dispatcher drops arguments that have their default, and torch 2.11 then looks for a changed one at
            # its place in the schema and fails.
            schema = re.sub("=[^,)]+", "", torch.library.infer_schema(run, mutates_args=changed))
            self._defaults = [(p.name, p.default) for p in parameters.values()]
        self._registered = torch.library.custom_op(f"epmoe::{name}", run, mutates_args=changed, schema=schema)
        self.register_fake = self._registered.register_fake
        self.register_autograd = self._registered.register_autograd
        functools.update_wrapper(self, run)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if runs_directly((*args, *kwargs.values()) if kwargs else args):
            return self._run(*args, **kwargs)
        if self._defaults:
            rest = [kwargs.pop(name, default) for name, default in self._defaults[len(args) :]]
            return self._registered(*args, *rest, **kwargs)
        return self._registered(*args, **kwargs)


def op(
    name: str, schema: str | None = None, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[Parameters, Result]], Op[Parameters, Result]]:
    """Decorator: makes a function that changes none of its arguments, or only those named, an `Op`."""
    return lambda run: Op(name, run, schema, mutates_args)


_HERE = contextlib.nullcontext()


def on_device_of(t: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the GPU of `t` current, as a launch needs; costs next to nothing where it is already."""
    if not t.is_cuda or t.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(t.device)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own of this name costs the host 2 µs outside a kernel, as does the next."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def check_flat(t: Tensor | None, name: str, *dtypes: torch.dtype) -> None:
    """Raises `ValueError` unless `t` is None, or 1-D, contiguous and of one of `dtypes`: kernels read it as such.

    A column of a message, reshaped to one dimension, is a view with a stride: call `.contiguous()` on it.
    """
    if t is not None and (t.dim() != 1 or t.dtype not in dtypes or not t.is_contiguous()):
        raise ValueError(
            f"{name} is {t.dtype} {tuple(t.shape)} with strides {t.stride()}: must be 1-D, contiguous and "
            + " or ".join(map(str, dtypes))
        )


def check_buffer(t: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, beside: Tensor) -> None:
    """Raises `ValueError` unless `t` can be written as contiguous `shape` of `dtype` on the device of `beside`."""
    if tuple(t.shape) != shape or t.dtype != dtype or t.device != beside.device or not t.is_contiguous():
        raise ValueError(
            f"{name} is {t.dtype} {tuple(t.shape)} on {t.device} with strides {t.stride()}: must be contiguous {dtype} "
            f"{shape} on {beside.device}"
        )


def scale_dtypes(rows: Tensor) -> tuple[torch.dtype, ...]:
    """What a scale or router weight beside `rows` may be: float32, and float64 beside float64."""
    return (torch.float32, torch.float64) if rows.dtype == torch.float64 else (torch.float32,)


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

"""Memory nobody wrote, made visible: `torch.empty` and its kin return NaN, or a number of your choice, while
`poisoned_empty()` is active.

Padding that leaks into a result, an unwritten slot read as an expert id, `NaN * 0`: all of them hide behind a fresh
allocation that happens to be zero. Tests of every stage of a token's path run inside this. A maximum or a comparison
passes over NaN, though, and a rounding to integers makes zero of it: a large number finds those.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided")


def poison_(tensor: torch.Tensor, value: float = math.nan) -> torch.Tensor:
    """Fill `tensor`, any shape, in place with what no right program reads; returns it.

    Args:
        value: what floating and complex dtypes (both parts) hold, at most the largest finite number of each; uint8,
            which messages are made of, the bytes of `value` in float32 over and over. NaN sets all bits of uint8.

    The most negative value for signed integers, all bits set for other unsigned ones and for packed float4, which has
    no NaN; True for bool. Tensors without plain strided storage (sparse, quantized) are left alone.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    dtype = tensor.dtype
    with torch.no_grad():
        if dtype is torch.float4_e2m1fn_x2:
            tensor.view(torch.uint8).fill_(0xFF)
        elif dtype.is_complex:
            tensor.fill_(complex(value, value))
        elif dtype.is_floating_point:
            most = torch.finfo(dtype).max
            tensor.fill_(value if math.isnan(value) else max(-most, min(value, most)))
        elif dtype is torch.uint8 and not math.isnan(value):
            word = torch.tensor([value], dtype=torch.float32, device="cpu").view(torch.uint8).to(tensor.device)
            tensor.copy_(word.repeat(-(-tensor.numel() // 4))[: tensor.numel()].view(tensor.shape))
        elif dtype is torch.bool:
            tensor.fill_(True)
        else:
            info = torch.iinfo(dtype)
            tensor.fill_(info.min if info.min < 0 else info.max)
    return tensor


def _poisoning(allocate: Callable[..., torch.Tensor], value: float) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison_(allocate(*args, **kwargs), value)

    return poisoned


@contextlib.contextmanager
def poisoned_empty(value: float = math.nan) -> Iterator[None]:
    """While active, `torch.empty`, `empty_like`, `empty_strided`, `empty_permuted`, `Tensor.new_empty` and
    `Tensor.new_empty_strided` return memory filled by `poison_` with `value`. Contexts nest; the innermost one's value
    is what stays.

    The names are replaced on `torch` and `torch.Tensor`, for the whole process and every thread. That reaches what a
    `TorchDispatchMode` does not (a mode is off while the implementation of a `torch.library` operation runs, and
    belongs to one thread), costs the other operations nothing, and does not change which kernels run, as
    `torch.use_deterministic_algorithms` would.

    Not reached: `from torch import empty` done before entering, `torch.ops.aten.empty` called directly,
    `torch.Tensor(n)`, a growing `resize_`, allocations made in C++, symmetric memory, and code compiled by
    `torch.compile` before entering. The ranks of `run_ranks` are other processes: enter it there.
    """
    with contextlib.ExitStack() as undo:
        for name in _FUNCTIONS:
            undo.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, _poisoning(getattr(torch, name), value))
        for name in _METHODS:
            # The originals live on TensorBase; an entry of torch.Tensor's own would outlive the context if put back.
            if name in vars(torch.Tensor):
                undo.callback(setattr, torch.Tensor, name, vars(torch.Tensor)[name])
            else:
                undo.callback(delattr, torch.Tensor, name)
            setattr(torch.Tensor, name, _poisoning(getattr(torch.Tensor, name), value))
        yield

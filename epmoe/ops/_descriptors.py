"""Tensor descriptors for kernels that are launched often. Beside the path of a token: launchers of grouped GEMM use it.

A descriptor's own constructor checks alignment, strides and block on every call, 5 µs of the 50 that a launch costs the
host. Here the caller has checked them once for a plan.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor


@functools.cache
def _defaults(kind: type) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}


def unchecked_descriptor(
    kind: Any, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], **more: Any
) -> Any:
    """A `kind` (Triton's or Gluon's `TensorDescriptor`) of a tensor at `base`, without the checks of its constructor.

    The caller sees to it that `base` and all strides but the last are multiples of 16 bytes, the last stride is 1, and
    `shape` and `block_shape` are positive.
    """
    descriptor = object.__new__(kind)
    descriptor.__dict__.update(
        _defaults(kind), base=base, shape=shape, strides=strides, block_shape=block_shape, **more
    )
    return descriptor

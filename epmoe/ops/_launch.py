"""Launches that find their compiled kernel quickly. Beside the path of a token: every kernel here is decorated by it.

Triton finds a compiled kernel by all arguments, constants included, in a dictionary and a list made anew and options
that it prints: 28 µs of host time for 45 parameters, of which 16 are spared here, on every launch. The first launch of
its kind is Triton's own; for later ones Triton's own rule is asked about each run-time argument (its dtype, whether 16
divides it, whether it is 1), constants are compared as they stand, and what the first one compiled is called.

    first    kernel[grid](x, n, BLOCK=64) ──► Triton: bind, specialize, compile, launch ──► compiled, kept by key
    later    kernel[grid](x, n, BLOCK=64) ──► key ──► compiled ──► launch

Whoever watches launches (a profiler's hooks, Triton's debug and instrumentation settings) gets Triton's own way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import repeat, takewhile
from typing import Any

try:
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
    from triton.runtime.jit import native_specialize_impl as _specialize
except ImportError:  # no Triton, or none like those that this was written for, 3.6 to 3.9: launches are its own
    _specialize = None


def _hooked(chain: Any) -> bool:
    """Whether anybody hangs in a hook, which is None, a function or a chain of them."""
    return chain is not None and bool(getattr(chain, "calls", True))


def _watched() -> bool:
    runtime = knobs.runtime
    return (
        _hooked(runtime.launch_enter_hook)
        or _hooked(runtime.launch_exit_hook)
        or bool(runtime.debug)
        or bool(knobs.compilation.instrumentation_mode)
        or getattr(runtime, "add_stages_inspection_hook", None) is not None
    )


class _Quick:
    """What stands before a jit function's own class, and knows its launches.

    Attributes:
        _leading: how many parameters come before the first constant.
        _asks: what Triton's rule wants to know of each of these beside the argument: whether it is const, whether it
            is specialized, and on alignment too; each a tuple over parameters.
        _compiled: by device, names and values of the keyword arguments, and the rule's answers about the positional
            ones: the compiled kernel, and the arguments that follow them.
    """

    _leading: int
    _asks: tuple[tuple[bool, ...], tuple[bool, ...], tuple[bool, ...]]
    _compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]

    def __getitem__(self: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            if len(args) > self._leading or self.pre_run_hooks or callable(grid) or _watched():
                return self.run(*args, grid=grid, warmup=False, **constants)
            active = driver.active
            device = active.get_current_device()
            answers = map(_specialize, repeat(self.device_caches[device][3]), args, *self._asks)
            key = (device, tuple(constants), tuple(constants.values()), tuple(answers))
            found = self._compiled.get(key)
            if found is None:
                compiled = self.run(*args, grid=grid, warmup=False, **constants)
                rest = self.params[len(args) :]
                if compiled is not None and all(p.is_constexpr or p.name not in constants for p in rest):
                    self._compiled[key] = compiled, tuple(constants.get(p.name, p.default) for p in rest)
                return compiled
            compiled, rest = found
            columns, rows, layers = (*grid, 1, 1)[:3]
            compiled.run(
                columns, rows, layers, active.get_current_stream(device), compiled.function, compiled.packed_metadata,
                None, None, None, *args, *rest,
            )  # fmt: skip
            return compiled

        return launch


@functools.cache
def _quick_kind(kind: Any) -> Any:
    return type(kind.__name__, (_Quick, kind), {})


def quick(kernel: Any) -> Any:
    """`kernel`, a jit function of Triton or Gluon, as one that launches quickly; itself where that can't be.

    Launches that pass a constant by its place or a run-time argument by its name are Triton's own, always.
    """
    if _specialize is None or not isinstance(kernel, JITFunction):
        return kernel
    if any(p.annotation_type and not p.is_constexpr for p in kernel.params):  # Triton would not ask its rule alone
        return kernel
    kind: Any = type(kernel)
    kernel.__class__ = _quick_kind(kind)
    leading = list(takewhile(lambda p: not p.is_constexpr, kernel.params))
    kernel._leading = len(leading)
    kernel._asks = (
        tuple(p.is_const for p in leading),
        tuple(not p.do_not_specialize for p in leading),
        tuple(not p.do_not_specialize_on_alignment for p in leading),
    )
    kernel._compiled = {}
    return kernel


def quick_jit(jit: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator `jit` (`triton.jit` or `gluon.jit`), with or without options, whose kernels launch quickly."""

    def decorate(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda kernel: quick(jit(**options)(kernel))
        return quick(jit(fn, **options))

    return decorate

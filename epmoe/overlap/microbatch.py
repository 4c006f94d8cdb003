"""A microbatch: a greenlet with the thread state that torch code expects to be its own.

Greenlets of one thread share what torch keeps per thread: grad mode, autocast, hooks on saved tensors, the current
stream, random generators. A microbatch takes its own along through every switch. Context variables are kept apart by
greenlet itself.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.utils._python_dispatch import _pop_mode, _push_mode

try:
    import greenlet

    _Base: Any = greenlet.greenlet
    HAVE_GREENLET = True
except ImportError:
    _Base = object
    HAVE_GREENLET = False


# bound once: every switch asks them
_any_autocast = torch._C._is_any_autocast_enabled
_grad = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_top_hooks = _autograd._top_saved_tensors_default_hooks
_pop_hooks = _autograd._pop_saved_tensors_default_hooks
_push_hooks = _autograd._push_saved_tensors_default_hooks


class ThreadState:
    """What torch keeps per thread and a microbatch may change, as it is when this is made.

    Every switch passes here twice, so what is as it was costs a look at most: autocast's dtype and cache none, as long
    as it is off before and after.

    Args:
        device: whose autocast, stream and random generator count.
        randomness: include the random generators, the device's and the host's; the latter costs a copy of its 5 kB.
    """

    __slots__ = (
        *("any_autocast", "autocast", "cached", "cuda_generator", "device", "dtype", "generator", "grad", "hooks"),
        *("index", "inference", "kind", "raw_stream", "stream"),
    )

    def __init__(self, device: torch.device, randomness: bool) -> None:
        self.device, self.kind = device, device.type
        self.index = -1  # of a CUDA device
        if device.type == "cuda":
            self.index = torch.cuda.current_device() if device.index is None else device.index
        self.raw_stream, self.stream = 0, None
        self.inference = _inference()
        self.generator: Tensor | None = None  # of the host
        self.cuda_generator: Any = None
        self.hooks: list[Any] | None = None
        self._look_at_autocast()
        self.look(randomness)
        if self.index >= 0:
            self.stream = torch.cuda.current_stream(self.index)

    def _look_at_autocast(self) -> None:
        self.any_autocast = _any_autocast()
        self.autocast = torch.is_autocast_enabled(self.kind)
        self.dtype = torch.get_autocast_dtype(self.kind)
        self.cached = torch.is_autocast_cache_enabled()

    def look(self, randomness: bool) -> None:
        """Becomes the state as it is now; inference mode can't have changed."""
        self.grad = _grad()
        if self.any_autocast or _any_autocast():
            self._look_at_autocast()
        if self.index >= 0:
            raw = torch._C._cuda_getCurrentRawStream(self.index)
            if raw != self.raw_stream:
                self.raw_stream, self.stream = raw, torch.cuda.current_stream(self.index)
        if randomness:
            self.generator = torch.get_rng_state()
            if self.kind == "cuda":
                self.cuda_generator = _cuda_generator(self.device).graphsafe_get_state()
        if _top_hooks(False) is not None:
            self.hooks = _take_hooks()
            _put_hooks(self.hooks)
        else:
            self.hooks = None

    def restore(self, left: ThreadState | None = None) -> None:
        """Makes the thread what it was; what has not changed is left alone, since every switch passes here.

        Args:
            left: the thread's present state, where it is known: nearly always the same, which needs no further look.
        """
        if (
            left is not None  # by who ran last
            and self.grad is left.grad
            and self.raw_stream == left.raw_stream
            and not (self.any_autocast or left.any_autocast)
            and self.hooks is None
            and left.hooks is None
            and self.generator is None
        ):
            return
        if _grad() is not self.grad:
            torch._C._set_grad_enabled(self.grad)
        if self.any_autocast or _any_autocast():
            kind = self.kind
            if torch.is_autocast_enabled(kind) is not self.autocast:
                torch.set_autocast_enabled(kind, self.autocast)
            if torch.get_autocast_dtype(kind) is not self.dtype:
                torch.set_autocast_dtype(kind, self.dtype)
            if torch.is_autocast_cache_enabled() is not self.cached:
                torch.set_autocast_cache_enabled(self.cached)
        if self.index >= 0 and torch._C._cuda_getCurrentRawStream(self.index) != self.raw_stream:
            assert self.stream is not None
            torch.cuda.set_stream(self.stream)
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        if self.cuda_generator is not None:
            _cuda_generator(self.device).graphsafe_set_state(self.cuda_generator)
        if self.hooks is not None or _top_hooks(False) is not None:
            _take_hooks()
            _put_hooks(self.hooks or [])

    def with_seed(self, seed: int) -> ThreadState:
        """The same, with random generators of its own."""
        made = copy.copy(self)
        made.generator = torch.Generator().manual_seed(seed).get_state()
        if self.kind == "cuda":
            made.cuda_generator = _cuda_generator(self.device).clone_state()
            made.cuda_generator.manual_seed(seed)
        return made


def _take_hooks() -> list[Any]:
    """All hooks on saved tensors, innermost first, off the thread's stack."""
    hooks = []
    while (top := _top_hooks(False)) is not None:
        hooks.append(top)
        _pop_hooks()
    return hooks


def _put_hooks(hooks: list[Any]) -> None:
    for pack, unpack in reversed(hooks):
        _push_hooks(pack, unpack)


# how many dispatch modes (as of selective checkpointing) and function modes (as of default devices) there are
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def _leave_modes(outer: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """Takes off the thread's stacks what came after `outer`, innermost first."""
    dispatch, function = [], []
    while _dispatch_modes() > outer[0]:
        dispatch.append(_pop_mode())
    while _function_modes() > outer[1]:
        function.append(torch._C._pop_torch_function_stack())
    return dispatch, function


def _enter_modes(modes: tuple[list[Any], list[Any]]) -> None:
    for mode in reversed(modes[0]):
        _push_mode(mode)
    for mode in reversed(modes[1]):
        torch._C._push_on_torch_function_stack(mode)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


class Microbatch(_Base):  # type: ignore[misc]
    """One part of a batch on its way through the caller's function.

    Attributes:
        index: its place in the batch, and the workspace lane that is its own.
    """

    def __init__(self, index: int, run: Callable[[], Any], state: ThreadState, randomness: bool) -> None:
        super().__init__(run)
        self.gr_context = contextvars.copy_context()
        self.index = index
        self.randomness = randomness
        self.state = state
        self._outer = _dispatch_modes(), _function_modes()  # entered by the caller, around all microbatches

    def resume(self, left: ThreadState | None = None) -> Any:
        """Runs until it yields or ends; the thread's state is its own meanwhile. Called by the scheduler, which may
        know how the thread was left."""
        self.state.restore(left)
        return self.switch()

    def let_others_run(self) -> None:
        """Yields, called from inside: others run until this one is resumed.

        Raises:
            RuntimeError: inside an inference mode that began inside `run_microbatched`, which can't be left and entered
                again.
        """
        if _inference() is not self.state.inference:
            raise RuntimeError(
                "a microbatch would yield inside torch.inference_mode(): enter it around run_microbatched, or use "
                "torch.no_grad() inside"
            )
        self.state.look(self.randomness)
        modes = None
        if _dispatch_modes() != self._outer[0] or _function_modes() != self._outer[1]:
            modes = _leave_modes(self._outer)
        self.parent.switch()
        if modes is not None:
            _enter_modes(modes)


def current_microbatch() -> Microbatch | None:
    """The microbatch that is running, if any; none in a compiled graph, which can't yield."""
    if not HAVE_GREENLET or torch.compiler.is_compiling():
        return None
    running = greenlet.getcurrent()
    return running if isinstance(running, Microbatch) else None

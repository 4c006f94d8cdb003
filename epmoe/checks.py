"""What arguments are refused by, in the same words everywhere: the argument, its value, and what would be right.

Called where something is made, not where tokens pass. Wrong kinds are `ValueError` too, as wrong values are.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection

import torch

_DEVICES = ("cpu", "cuda", "meta")
_LONGEST = 120


def said(name: str, value: object) -> str:
    """`name=value`, or `name is <class>` where the value's text would fill the screen or look at a device."""
    big = isinstance(value, torch.Tensor | torch.nn.Module)
    text = "" if big else repr(value)
    if big or len(text) > _LONGEST or "\n" in text or " at 0x" in text:
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        return f"{name} is {kind}"
    return f"{name}={text}"


def require(ok: bool, name: str, value: object, right: str) -> None:
    """Raises `ValueError` unless `ok`."""
    if not ok:
        raise ValueError(f"{said(name, value)}: must be {right}")


def require_that(ok: bool, message: str) -> None:
    """`ValueError(message)` unless `ok`: where the message is not of one value alone."""
    if not ok:
        raise ValueError(message)


def check_bool(name: str, value: object, or_none: bool = False) -> None:
    """True or False: every text is true, and so is a tensor of one."""
    require(isinstance(value, bool) or (or_none and value is None), name, value, "True or False")


def check_int(name: str, value: object, least: int = 1, *, or_none: bool = False, right: str | None = None) -> None:
    """A whole number of at least `least`, and no bool."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    wanted = right or f"an int {'> 0' if least == 1 else f'>= {least}'}{', or None' if or_none else ''}"
    require(fits or (or_none and value is None), name, value, wanted)


def check_ids(name: str, values: object, limit: int) -> list[int]:
    """Distinct ids in [0, limit), as ints; those of numpy and of integer tensors count."""
    right = f"distinct ids in [0, {limit})"
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    require(not isinstance(values, str) and hasattr(values, "__iter__"), name, values, right)
    ids = list(values)  # type: ignore[call-overload]
    whole = all(hasattr(i, "__index__") and not isinstance(i, bool) for i in ids)
    require(whole and len(set(ids)) == len(ids) and all(0 <= i < limit for i in ids), name, ids, right)
    return [i.__index__() for i in ids]


def is_number(value: object) -> bool:
    """Whether it is a real number other than NaN, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def check_seconds(name: str, value: object) -> None:
    """A finite time above 0."""
    require(is_number(value) and 0 < value < math.inf, name, value, "seconds, finite and > 0")  # type: ignore[operator]


def check_name(name: str, value: object, allowed: Collection[str], none: str | None = None) -> None:
    """One of the names `allowed`; None too, where `none` says what it stands for."""
    fits = isinstance(value, str) and value in allowed
    choice = f"{', '.join(allowed)}" + (f", or None for {none}" if none else "")
    require(fits or (none is not None and value is None), name, value, f"one of {choice}")


def check_kind(name: str, value: object, kind: type | tuple[type, ...], right: str, hint: str = "") -> None:
    """An instance of `kind`; `hint` follows what would be right."""
    if not isinstance(value, kind):
        raise ValueError(f"{said(name, value)}: must be {right}{f'; {hint}' if hint else ''}")


def as_device(device: object, name: str = "device", *, here: bool = True) -> torch.device:
    """The device that a text or a `torch.device` names: a CPU, a GPU, or meta.

    Args:
        here: it has to be on this machine; a GPU of fake tensors is.

    Raises:
        ValueError: it is none, or is not here.
    """
    try:
        found = device if isinstance(device, torch.device) else torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in _DEVICES:
        raise ValueError(f"{said(name, device)}: must be cpu, cuda, cuda:N or meta")
    if here:
        check_here(found, name)
    return found


def check_here(device: torch.device, name: str = "device") -> None:
    """Raises `ValueError` for a GPU that this machine does not have; compiled graphs and fake tensors need none."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(f"{name}={str(device)!r}: there is no GPU here that torch can use: must be cpu or meta")
    if device.index is not None and device.index >= count:
        raise ValueError(f"{name}={str(device)!r}: must be cuda:0 to cuda:{count - 1}, the GPUs that torch sees here")

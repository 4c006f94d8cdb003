"""Types in Triton's interpreter, asked once: each operation makes and compares types that it made many times before.

A tile of a kernel costs a dozen types and tensors for one numpy operation. A type is its name, so those of one name are
one object here, with what tensors of it have in common kept beside them.
"""

from __future__ import annotations

import inspect
import math
from types import FunctionType
from typing import Any


def takes_in(place: Any, name: str, *parameters: str) -> bool:
    """Whether `place.name` is a plain function of just these parameters: this Triton has it in the form known here."""
    found = getattr(place, name, None)
    return isinstance(found, FunctionType) and tuple(inspect.signature(found).parameters) == parameters


def keep_types(interpreter: Any) -> None:
    """Replaces, in Triton's `interpreter` module and the language under it, what makes, checks and compares types; each
    gives what it gave. What this Triton has in another form stays as it is."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    if takes_in(core, "_unwrap_if_constexpr", "o"):
        core._unwrap_if_constexpr = _unwrapped(core)
    if takes_in(core.dtype, "__eq__", "self", "other"):
        core.dtype.__eq__ = _same_first(core.dtype.__eq__)
    if takes_in(core.dtype, "is_int", "self"):
        core.dtype.is_int = _named_among({*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES})
    if takes_in(core.block_type, "__init__", "self", "element_ty", "shape"):
        _one_of_each(core.block_type, core)
    if takes_in(core.block_type, "with_element_ty", "self", "scalar_ty"):
        core.block_type.with_element_ty = _beside(core.block_type.with_element_ty)
    if takes_in(core.tensor, "__init__", "self", "handle", "type"):
        core.tensor.__init__ = _with_shared_shape(core.tensor.__init__, core)
    handle = interpreter.TensorHandle
    if takes_in(handle, "__init__", "self", "data", "dtype", "attr") and takes_in(handle, "__post_init__", "self"):
        handle.__init__ = _fitting(handle.__post_init__, core.pointer_type)
    if takes_in(semantic, "computation_type_impl", "self", "a_ty", "a_is_scalar", "b_ty", "b_is_scalar", "div_or_mod"):
        semantic.computation_type_impl = _asked_once(semantic.computation_type_impl)
    options = ("allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod")
    if takes_in(semantic, "binary_op_type_checking_impl", "self", "lhs", "rhs", *options):
        semantic.binary_op_type_checking_impl = _alike_as_they_are(semantic.binary_op_type_checking_impl, core)


def _unwrapped(core: Any) -> Any:
    """`_unwrap_if_constexpr`; most of what it gets is a constexpr or nothing to unwrap."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = frozenset({int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type})

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    return unwrapped


def _same_first(equal: Any) -> Any:
    def same_or_equal(one: Any, other: Any) -> Any:
        return one is other or equal(one, other)

    return same_or_equal


def _named_among(names: set[str]) -> Any:
    def named(dtype: Any) -> bool:
        return dtype.name in names

    return named


def _one_of_each(block_type: Any, core: Any) -> None:
    """`block_type(element, shape)` is the one made before, if any: nothing changes a type once it is made."""
    init = block_type.__init__
    known: dict[tuple[Any, ...], Any] = {}

    def new(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:  # of nothing: a copy's, filled later
        if cls is not block_type or type(element_ty) not in (core.dtype, core.pointer_type):
            return object.__new__(cls)
        plain = [n if type(n) is int else core._unwrap_if_constexpr(n) for n in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *plain)
        found = known.get(key)
        if found is None:
            found = object.__new__(cls)
            init(found, element_ty, shape)  # refuses a shape that no block has, before it is kept
            known[key] = found
        return found

    def once(made: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(made):
            init(made, element_ty, shape)

    block_type.__new__ = new
    block_type.__init__ = once


def _beside(with_element: Any) -> Any:
    """`block_type.with_element_ty`; a block keeps those of its shape that were asked for, pointers aside."""

    def beside(block: Any, element: Any) -> Any:
        if element.is_ptr():
            return with_element(block, element)
        others = vars(block).setdefault("_beside", {})
        found = others.get(element.name)
        if found is None:
            found = others[element.name] = with_element(block, element)
        return found

    return beside


def _with_shared_shape(init: Any, core: Any) -> Any:
    """`tensor.__init__`; the shape and the number of elements are made once for each type and kept with it."""
    known_kinds = (core.dtype, core.block_type, core.pointer_type)

    def shared(tensor: Any, its: Any, kind: Any) -> None:
        if type(kind) not in known_kinds:
            return init(tensor, its, kind)
        parts = vars(kind).get("_of_tensors")
        if parts is None:
            shape = kind.shape if kind.is_block() else ()
            parts = (core.constexpr(math.prod(shape)), kind.scalar, core.tuple([core.constexpr(n) for n in shape]))
            kind._of_tensors = parts
        tensor.handle, tensor.type = its, kind
        tensor.numel, tensor.dtype, tensor.shape = parts

    return shared


def _fitting(check: Any, pointer_type: Any) -> Any:
    """`TensorHandle.__init__`: numbers wider than their type are still refused, by the check it had."""
    widths: dict[str, int] = {}

    def fitting(handle: Any, data: Any, dtype: Any, kept: Any = None) -> None:
        handle.data, handle.dtype, handle.attr = data, dtype, {} if kept is None else kept
        width = widths.get(dtype.name)
        if width is None:
            width = 8 if isinstance(dtype, pointer_type) else max(1, dtype.primitive_bitwidth // 8)
            widths[dtype.name] = width
        if data.itemsize > width:
            check(handle)

    return fitting


def _asked_once(computation_type: Any) -> Any:
    known: dict[tuple[Any, ...], Any] = {}

    def asked_once(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, divides)
        found = known.get(key)
        if found is None:
            found = known[key] = computation_type(self, a, a_is_scalar, b, b_is_scalar, divides)
        return found

    return asked_once


def _alike_as_they_are(check: Any, core: Any) -> Any:
    """Two tensors of one type of full width need neither a cast nor a broadcast; narrow floats are cast to be divided,
    and pointers are refused."""
    tensor, full = core.tensor, frozenset({"fp32", "fp64", *core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES})

    def alike(self: Any, a: Any, b: Any, *options: Any, **named: Any) -> Any:
        if type(a) is tensor and type(b) is tensor and a.type is b.type and a.dtype.name in full:
            return a, b
        return check(self, a, b, *options, **named)

    return alike

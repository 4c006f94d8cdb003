"""Triton's interpreter without the work it throws away: more than half the time of a kernel that runs on CPU.

A kernel computes what it did, except that a row of a product has the same bits wherever it lies in its tile. Whoever
runs many kernels with `TRITON_INTERPRET=1` calls `quicken_interpreter()` once; ranks of `run_ranks` have it done.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from epmoe.testing.interpreter_types import keep_types, takes_in


def quicken_interpreter() -> None:
    """Changes the interpreter of this process for good; what this Triton has in another form stays as it is.

    - A launch looks through all of `triton.language` for functions to replace, and each call of a device function does
      again; here their names are looked up once, and a device function finds them replaced.
    - Sums and products of integers are computed again in int64 for an overflow check whose verdict is read only under
      `debug`, which the interpreter never sets; here they aren't.
    - The table from Triton's dtypes to numpy's is made anew at each use, and so are types; here they are kept.
    - Floats of 8 and 16 bits are taken apart to become others; here each is once, and then looked up.
    - Each function of `triton.language` is called through two others; here through one.
    - Products are numpy's, whose sums depend on a row's place in the tile, as no GPU's do; here they are float64's,
      which round to the same float32 everywhere.
    - Triton 3.6 turns arrays of one element into numbers in a way that numpy 2.4 refuses; here in one that any takes.
    """
    from triton.runtime import interpreter

    takes = functools.partial(takes_in, interpreter)

    core = interpreter.tl.core
    if takes("_patch_builtin", "pkg", "builder", "scope") and takes(
        "_patch_attr", "obj", "name", "member", "builder", "scope"
    ):
        patch_attr = _directly(interpreter._patch_attr, core.builtin, interpreter.interpreter_semantic)
        interpreter._patch_builtin = _NamesOnce(core.is_builtin, patch_attr)
    if takes("_patch_lang", "fn") and hasattr(getattr(interpreter, "_LangPatchScope", None), "restore"):
        interpreter._patch_lang = _PatchedOnce(interpreter._patch_lang, (interpreter.tl, core))
    if takes("_patch_lang_tensor", "tensor", "scope"):
        interpreter._patch_lang_tensor = _with_numbers(interpreter._patch_lang_tensor)
    if takes("_get_np_dtype", "tt_dtype"):
        interpreter._get_np_dtype = _DtypesOnce(interpreter._get_np_dtype)
    if takes("_convert_float", "input", "input_dtype", "output_dtype", "rounding_mode"):
        interpreter._convert_float = _ConvertedOnce(interpreter._convert_float)
    keep_types(interpreter)

    builder = interpreter.InterpreterBuilder
    if takes_in(builder, "create_dot", "self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"):
        builder.create_dot = _rows_alike(builder.create_dot, interpreter.TensorHandle)

    options: Any = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "debug", None) is False and hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


class _NamesOnce:
    """The interpreter's `_patch_builtin`; the names of each module or class are looked for at its first time."""

    def __init__(self, is_builtin: Any, patch_attr: Any) -> None:
        self.is_builtin, self.patch_attr = is_builtin, patch_attr
        self.names: dict[Any, list[str]] = {}

    def __call__(self, pkg: Any, builder: Any, scope: Any) -> None:
        names = self.names.get(pkg)
        if names is None:
            # A module or class is met here before any of its functions is replaced, since only this replaces them.
            names = [name for name, member in inspect.getmembers(pkg) if self.is_builtin(member)]
            self.names[pkg] = names
        for name in names:
            member = getattr(pkg, name)
            if self.is_builtin(member):
                self.patch_attr(pkg, name, member, builder, scope)


def _directly(patch_attr: Any, builtin: Any, semantic: Any) -> Any:
    """The interpreter's `_patch_attr`; a function that `builtin` wrapped, which only asks for `_semantic`, is called
    without its wrapper."""
    code = builtin(lambda: None).__code__
    only_asks = code.co_freevars == ("fn",) and set(code.co_names) <= {"ValueError"}

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if not (only_asks and getattr(member, "__code__", None) is code):
            return patch_attr(obj, name, member, builder, scope)
        fn = member.__wrapped__

        def direct(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return fn(*args, _semantic=semantic, **kwargs)

        scope.set_attr(obj, name, direct)

    return patch


class _PatchedOnce:
    """The interpreter's `_patch_lang`. A launch calls it and restores what it changed at its end; a device function
    calls it too, restores nothing, and is spared it where the modules it sees were replaced before."""

    def __init__(self, patch_lang: Any, modules: tuple[Any, ...]) -> None:
        self.patch_lang, self.modules = patch_lang, modules
        self.seen: dict[Any, frozenset[int]] = {}
        self.launch: frozenset[int] = frozenset()  # replaced until the launch ends
        self.kept: frozenset[int] = frozenset()  # replaced for good

    def __call__(self, fn: Any) -> Any:
        seen = self.seen.get(fn)
        if seen is None:
            seen = self.seen[fn] = frozenset(
                n for n, module in enumerate(self.modules) if any(v is module for v in fn.__globals__.values())
            )
        if not self.launch:
            scope = self.patch_lang(fn)
            self.launch = seen
            return _Launch(self, scope)
        if not seen <= self.launch | self.kept:
            self.patch_lang(fn)
            self.kept |= seen - self.launch
        return None


class _Launch:
    def __init__(self, patched: _PatchedOnce, scope: Any) -> None:
        self.patched, self.scope = patched, scope

    def restore(self) -> None:
        self.patched.launch = frozenset()
        self.scope.restore()


class _DtypesOnce:
    """The interpreter's `_get_np_dtype`, asked once for each name: types of pointers and blocks can't be hashed."""

    def __init__(self, numpy_dtype: Any) -> None:
        self.numpy_dtype = numpy_dtype
        self.known: dict[str, Any] = {}

    def __call__(self, dtype: Any) -> Any:
        found = self.known.get(dtype.name)
        if found is None:
            found = self.known[dtype.name] = self.numpy_dtype(dtype)
        return found


class _ConvertedOnce:
    """The interpreter's `_convert_float`: of each of the few numbers that 8 or 16 bits can be, once."""

    def __init__(self, convert: Any) -> None:
        self.convert = convert
        self.tables: dict[tuple[Any, ...], Any] = {}

    def __call__(self, numbers: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        bits = from_dtype.primitive_bitwidth
        if bits > 16 or numbers.itemsize * 8 != bits:
            return self.convert(numbers, from_dtype, to_dtype, rounding_mode)
        import numpy

        key = (from_dtype.name, to_dtype.name, str(rounding_mode))
        table = self.tables.get(key)
        if table is None:
            every = numpy.arange(1 << bits).astype(f"uint{bits}")
            table = self.tables[key] = self.convert(every, from_dtype, to_dtype, rounding_mode)
        return numpy.asarray(table[numbers.view(f"uint{bits}")])


def _with_numbers(patch_tensor: Any) -> Any:
    """The interpreter's `_patch_lang_tensor`, after which a tensor of one element is an index under any numpy."""

    def patch(lang_tensor: Any, scope: Any) -> None:
        patch_tensor(lang_tensor, scope)
        scope.set_attr(lang_tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch


def _rows_alike(create_dot: Any, handle: Any) -> Any:
    """The interpreter's `create_dot`, with products of floats summed in float64."""
    import numpy

    def in_float64(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        x, y, z = a.data, b.data, d.data
        if not (x.dtype.kind == y.dtype.kind == "f" and z.dtype == numpy.float32):
            return create_dot(self, a, b, d, *how)
        with numpy.errstate(over="ignore", invalid="ignore"):  # infinities and NaN go through kernels on purpose
            wide = numpy.matmul(x.astype(numpy.float64), y.astype(numpy.float64))
            return handle(wide.astype(numpy.float32) + z, d.dtype.scalar)

    return in_float64

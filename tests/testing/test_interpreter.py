"""The quickened interpreter: device functions, failures and what is left of `triton.language` after a launch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from epmoe.ops._triton import INTERPRET
from epmoe.testing import quicken_interpreter
from epmoe.testing.interpreter import _ConvertedOnce, _DtypesOnce, _NamesOnce, _PatchedOnce
from epmoe.testing.interpreter_types import keep_types

pytestmark = pytest.mark.skipif(not INTERPRET, reason="Triton was imported without its interpreter")


@triton.jit
def _twice(x):
    return tl.where(x > 0, x + x, x * 2)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, N: tl.constexpr, FAIL: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + tl.arange(0, N))
    for _ in tl.static_range(2):
        x = _twice(x)
    tl.store(out_ptr + row, tl.sum(x, 0) + tl.max(x, 0))
    tl.static_assert(not FAIL)


def launch(fail: bool = False) -> None:
    x, out = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), torch.full((3,), float("nan"))
    _rows_kernel[(3,)](x, out, N=16, FAIL=fail)
    torch.testing.assert_close(out, 4 * (x.sum(1) + x.amax(1)))


def test_this_triton_is_quickened_and_only_once():
    from triton.runtime import interpreter

    def ours() -> tuple[Any, ...]:
        dot = interpreter.InterpreterBuilder.create_dot
        numbers = interpreter._patch_lang_tensor
        once = interpreter._patch_builtin, interpreter._patch_lang, interpreter._get_np_dtype
        return *once, interpreter._convert_float, dot, numbers

    def types() -> list[Any]:
        core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
        places = [core.dtype.__eq__, core.dtype.is_int, core.block_type.__new__, core.block_type.__init__]
        places.append(core.block_type.with_element_ty)
        places += [core._unwrap_if_constexpr, core.tensor.__init__, interpreter.TensorHandle.__init__]
        return [*places, semantic.computation_type_impl, semantic.binary_op_type_checking_impl]

    replaced, kept = ours(), types()
    assert {one.__module__ for one in kept} == {keep_types.__module__}
    assert interpreter._patch_builtin.patch_attr.__module__ == _NamesOnce.__module__
    assert [type(one) for one in replaced[:4]] == [_NamesOnce, _PatchedOnce, _DtypesOnce, _ConvertedOnce]
    assert [one.__name__ for one in replaced[4:]] == ["in_float64", "patch"]
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    quicken_interpreter()
    assert replaced == ours() and kept == types()


def test_types_of_one_name_are_one_and_what_no_block_can_be_is_still_refused():
    from triton.runtime.interpreter import TensorHandle

    core = tl.core
    for pointer in (False, True):
        made = [core.block_type(core.pointer_type(tl.int8) if pointer else tl.int8, [4, tl.constexpr(8)]) for _ in "ab"]
        assert made[0] is made[1] and made[0].shape == core.tuple([4, 8]) and made[0].numel == 32
        assert all(made[0].with_element_ty(tl.int16) is core.block_type(tl.int16, [4, 8]) for _ in "ab")
    assert copy.copy(made[0]) == made[0] != core.block_type(core.pointer_type(tl.int16), [4, 8])
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            core.block_type(tl.int8, [3])
        with pytest.raises(TypeError, match="0d"):
            core.block_type(tl.int8, [])
        with pytest.raises(ValueError, match="exceeds"):
            TensorHandle(np.zeros(4, np.int64), tl.int32)


# Two of as many bits go by way of fp32.
@pytest.mark.parametrize(
    ("source", "target"),
    [(few, more) for few in ("float8e4nv", "float8e5") for more in ("bfloat16", "float16", "float32")]
    + [(much, less) for much in ("bfloat16", "float16") for less in ("float8e4nv", "float8e5", "float32")],
)
def test_floats_that_are_looked_up_are_those_that_are_converted(source, target, seed):
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import _convert_float

    kinds = getattr(tl, source), getattr(tl, target)
    bits = kinds[0].primitive_bitwidth
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, (64, 32)).astype(f"uint{bits}")
    if source == "float16":
        numbers = numbers.view(np.float16)
    for mode in (None, ir.ROUNDING_MODE.RTNE, ir.ROUNDING_MODE.RTZ):
        for some in (numbers, numbers[::3, 1::2].T, np.broadcast_to(numbers[:1], (4, 32)), numbers[0, 0].reshape(())):
            got, want = (f(some, *kinds, mode) for f in (_convert_float, _convert_float.convert))
            assert isinstance(got, np.ndarray) and got.dtype == want.dtype and np.array_equal(got, want)


@triton.jit
def _kinds_kernel(x, i, out, N: tl.constexpr):
    n = tl.arange(0, N)
    narrow, words = tl.load(x + n), tl.load(i + n)
    tl.store(out + n, (narrow / narrow).to(tl.float32) + (words % 3 + words // 2 + 1.5) * (narrow + 1))


def test_operands_are_promoted_as_ever(seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(16, generator=g) + 1).half()
    i, out = torch.randint(0, 9, (16,), generator=g, dtype=torch.int32), torch.empty(16)
    _kinds_kernel[(1,)](x, i, out, N=16)
    torch.testing.assert_close(out, 1 + (i % 3 + i // 2 + 1.5) * (x + 1).float(), rtol=1e-3, atol=0)


def test_device_functions_of_ones_own_and_of_triton_are_interpreted_in_any_launch():
    names = ("load", "arange", "where", "program_id", "range", "static_assert")
    before = [getattr(tl, name) for name in names]
    for _ in range(3):
        launch()
        assert [getattr(tl, name) for name in names] == before, "a launch puts back what it replaced"


def test_a_launch_that_fails_spoils_no_later_one():
    before = tl.load
    for _ in range(2):
        with pytest.raises(Exception, match="(?i)assert"):
            launch(fail=True)
        assert tl.load is before
        launch()


@triton.jit
def _product_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    i, k, j = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    product = tl.dot(tl.load(a + i[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + j[None, :]))
    tl.store(out + i[:, None] * N + j[None, :], product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_of_a_product_has_the_same_bits_at_each_place(dtype, seed):
    g = torch.Generator().manual_seed(seed)
    b = torch.randn(32, 16, generator=g).to(dtype)
    row, out = torch.randn(1, 32, generator=g).to(dtype), torch.empty(16, 16)
    _product_kernel[(1,)](row.expand(16, -1).contiguous(), b, out, M=16, K=32, N=16)
    assert torch.equal(out, out[:1].expand(16, -1))
    torch.testing.assert_close(out[:1].double(), row.double() @ b.double(), rtol=1e-5, atol=1e-5)

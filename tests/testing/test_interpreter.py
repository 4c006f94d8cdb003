"""The quickened interpreter: device functions, failures and what is left of `triton.language` after a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from epmoe.ops._triton import INTERPRET
from epmoe.testing import quicken_interpreter
from epmoe.testing.interpreter import _DtypesOnce, _NamesOnce, _PatchedOnce

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
        return interpreter._patch_builtin, interpreter._patch_lang, interpreter._get_np_dtype, dot, numbers

    replaced = ours()
    assert [type(one) for one in replaced[:3]] == [_NamesOnce, _PatchedOnce, _DtypesOnce]
    assert [one.__name__ for one in replaced[3:]] == ["in_float64", "patch"]
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    quicken_interpreter()
    assert replaced == ours()


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

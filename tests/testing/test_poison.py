"""`poisoned_empty`: whatever allocates without writing returns NaN, or a number, wherever it is called from."""

from __future__ import annotations

import threading

import pytest
import torch

from epmoe.testing import poison_, poisoned_empty

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]


def allocations(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    like = torch.zeros(3, 4, dtype=dtype)
    return {
        "empty": torch.empty(3, 4, dtype=dtype),
        "empty of a shape": torch.empty((3, 4), dtype=dtype),
        "empty_like": torch.empty_like(like),
        "empty_strided": torch.empty_strided((3, 4), (1, 3), dtype=dtype),
        "empty_permuted": torch.empty_permuted((3, 4), (1, 0), dtype=dtype),
        "new_empty": like.new_empty(3, 4),
        "new_empty of a parameter": torch.nn.Parameter(like, requires_grad=False).new_empty((3, 4)),
        "new_empty_strided": like.new_empty_strided((3, 4), (1, 3)),
    }


def unpoisoned(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not tensor.double().isnan().all()]


@torch.library.custom_op("epmoe_test_poison::allocate", mutates_args=())
def allocate_in_op(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape) + x.new_empty(x.shape)


class AllocateInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_every_allocation_of_a_floating_dtype_is_nan(dtype):
    with poisoned_empty():
        made = allocations(dtype)
    assert unpoisoned(made) == []
    assert all(tensor.dtype is dtype and tensor.shape == (3, 4) for tensor in made.values())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_a_number_is_in_every_allocation_at_most_the_dtypes_largest(dtype):
    want = min(1e4, torch.finfo(dtype).max)
    for value in (1e4, -1e4):
        with poisoned_empty(value):
            made = allocations(dtype)
        held = torch.tensor(want, dtype=dtype).double().copysign(torch.tensor(value))
        assert all((tensor.double() == held).all() for tensor in made.values())


def test_bytes_of_messages_hold_the_number_for_who_reads_words_and_other_integers_stay_absurd():
    with poisoned_empty(1e4):
        message = torch.empty(3, 8, dtype=torch.uint8)
        assert (message.view(torch.float32) == 1e4).all() and message.view(torch.bfloat16).isfinite().all()
        assert torch.empty(5, dtype=torch.uint8).tolist() == [*message.view(-1)[:4].tolist(), 0]
        assert torch.empty(0, dtype=torch.uint8).numel() == 0
        assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).min).all()
        value = torch.empty(1, dtype=torch.complex64)
        assert value.real == 1e4 and value.imag == 1e4
    with poisoned_empty(0.0), poisoned_empty(1e4):
        assert torch.empty(3).tolist() == [1e4] * 3
    with poisoned_empty(0.0):
        assert not torch.empty(7, dtype=torch.uint8).any() and not torch.empty(7).any()


def test_strides_and_keywords_are_kept():
    with poisoned_empty():
        assert torch.empty_strided((3, 4), (1, 3)).stride() == (1, 3)
        assert torch.empty_permuted((3, 4), (1, 0)).stride() == (1, 3)
        assert torch.empty(2, requires_grad=True).requires_grad
        assert torch.empty(2, device="meta").device.type == "meta"
        out = torch.zeros(2)
        assert torch.empty(2, out=out) is out and out.isnan().all()
        assert torch.empty(0).numel() == 0 and torch.empty(()).isnan()


@pytest.mark.parametrize("dtype", SIGNED, ids=str)
def test_signed_integers_are_the_most_negative(dtype):
    with poisoned_empty():
        assert (torch.empty(5, dtype=dtype) == torch.iinfo(dtype).min).all()


def test_unsigned_bool_complex_and_float4_are_absurd_too():
    with poisoned_empty():
        assert torch.empty(3, dtype=torch.uint8).tolist() == [0xFF] * 3
        assert torch.empty(3, dtype=torch.uint32).tolist() == [2**32 - 1] * 3
        assert torch.empty(3, dtype=torch.bool).all()
        value = torch.empty(1, dtype=torch.complex64)
        assert value.real.isnan().all() and value.imag.isnan().all()
        assert torch.empty(3, dtype=torch.float4_e2m1fn_x2).view(torch.uint8).tolist() == [0xFF] * 3


def test_an_allocation_inside_a_custom_op_is_nan():
    with poisoned_empty():
        assert allocate_in_op(torch.zeros(8)).isnan().all()


def test_an_allocation_inside_backward_is_nan():
    x = torch.ones(8, requires_grad=True)
    with poisoned_empty():
        AllocateInBackward.apply(x).sum().backward()
    assert x.grad is not None and x.grad.isnan().all()


@pytest.mark.gpu
def test_an_allocation_inside_backward_on_a_device_thread_is_nan():
    x = torch.ones(8, requires_grad=True, device="cuda")
    with poisoned_empty():
        AllocateInBackward.apply(x).sum().backward()
        assert torch.empty(8, device="cuda", dtype=torch.float8_e4m3fn).float().isnan().all()
    assert x.grad is not None and x.grad.isnan().all()


def test_an_allocation_in_another_thread_is_nan():
    made: dict[str, torch.Tensor] = {}
    with poisoned_empty():
        thread = threading.Thread(target=lambda: made.update(allocations()))
        thread.start()
        thread.join()
    assert made and unpoisoned(made) == []


def test_everything_is_put_back_even_after_an_error_and_nested():
    before = (torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, torch.Tensor.new_empty)
    with pytest.raises(KeyError), poisoned_empty():
        with poisoned_empty():
            assert torch.empty(3).isnan().all()
        assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(3).isnan().all()
        raise KeyError
    after = (torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, torch.Tensor.new_empty)
    assert before == after
    assert "new_empty" not in vars(torch.Tensor) and "new_empty_strided" not in vars(torch.Tensor)


def test_other_operations_are_untouched():
    with poisoned_empty():
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(x @ x.T, torch.tensor([[5.0, 14.0], [14.0, 50.0]]))
        assert torch.nn.Linear(3, 3).weight.isfinite().all()
        assert torch.zeros_like(x).sum() == 0


def test_poison_fills_a_view_and_nothing_around_it():
    buffer = torch.zeros(4, 6)
    view = buffer[1:3, ::2]
    assert poison_(view) is view
    assert view.isnan().all() and buffer.isnan().sum() == view.numel()


def test_a_version_check_of_autograd_accepts_a_poisoned_leaf():
    with poisoned_empty():
        leaf = torch.empty(3, requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3

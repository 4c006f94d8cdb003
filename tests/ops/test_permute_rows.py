"""Rows copied into expert order: twin against indexing, kernel (interpreted on CPU) against the twin."""

from __future__ import annotations

import math

import pytest
import torch

from epmoe.ops.permute_rows import permute_rows, permute_rows_reference
from epmoe.testing import poisoned_empty

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(rows: int, k: int, width: int, dtype: torch.dtype, seed: int):
    """x inside a wider NaN buffer; a third of the slots name nothing, and not every row of the result is named."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((rows, width + 3), math.nan, dtype=dtype)
    x[:, :width] = torch.randn(rows, width, generator=generator).to(dtype)
    num_rows = rows * k + 2
    slot = torch.randperm(num_rows, generator=generator)[: rows * k].view(rows, k).int()
    absent = torch.rand(rows, k, generator=generator) < 1 / 3
    slot[absent] = torch.where(torch.rand(rows, k, generator=generator) < 0.5, -1, num_rows).int()[absent]
    weight = torch.rand(rows, k, generator=generator)
    weight[absent] = math.nan
    return x[:, :width], slot, weight, num_rows


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_twin_puts_each_row_where_its_slots_say_and_touches_no_other(weighted, seed):
    x, slot, weight, num_rows = case(5, 3, 4, torch.float64, seed)
    with poisoned_empty():
        got = permute_rows_reference(x, slot, weight if weighted else None, num_rows)
    for n in range(num_rows):
        at = (slot == n).nonzero()
        if len(at) == 0:
            assert got[n].isnan().all()
        else:
            t, k = at[0].tolist()
            assert torch.equal(got[n], x[t] * weight[t, k].double() if weighted else x[t])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, k, width", [(7, 3, 40), (1, 1, 1), (4, 2, 2050)])
def test_kernel_equals_the_twin_to_the_bit(rows, k, width, dtype, weighted, device, seed):
    rows = rows if device == "cpu" else 300 * rows
    x, slot, weight, num_rows = case(rows, k, width, dtype, seed)
    x, slot, weight = x.to(device), slot.to(device), weight.to(device) if weighted else None
    with poisoned_empty():
        got, want = (f(x, slot, weight, num_rows) for f in (permute_rows, permute_rows_reference))
    assert got.dtype == dtype and torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_nothing_to_copy(device):
    slot = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    x = torch.ones(2, 3, device=device)
    assert permute_rows(x, slot, None, 0).shape == (0, 3)
    assert permute_rows(x[:0], slot[:0], None, 4).shape == (4, 3)
    assert permute_rows(x[:, :0], slot, None, 4).shape == (4, 0)


def test_mistakes_are_named():
    x, slot = torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="index is torch.int64"):
        permute_rows(x, slot.long(), None, 8)
    with pytest.raises(ValueError, match="weight is .*: must be float32"):
        permute_rows(x, slot, torch.zeros(2, 3), 8)
    with pytest.raises(ValueError, match="x has 3 rows: must have one per row of slot, 2"):
        permute_rows(torch.zeros(3, 3), slot, None, 8)


def test_op_has_a_faithful_fake(seed):
    x, slot, weight, num_rows = case(4, 2, 5, torch.float32, seed)
    slot = torch.arange(8, dtype=torch.int32).view(4, 2)  # every row named: what is compared holds no garbage
    args = (x.contiguous(), slot, weight.nan_to_num(1.0), 8)
    assert num_rows > 8
    torch.library.opcheck(torch.ops.epmoe.permute_rows.default, args, test_utils=("test_schema", "test_faketensor"))

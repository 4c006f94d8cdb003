"""Packed rows against a byte by byte construction: twin and kernel (interpreted on CPU), and views back out of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epmoe.ops.pack_rows import RowLayout, pack_rows, pack_rows_reference, row_layout, unpack_rows

GARBAGE = 2**31 - 1
GUARD = 64
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int32,
]


@pytest.fixture
def guarded(monkeypatch):
    """The message buffer starts poisoned and lies between guard bytes; returns a check of the guards."""
    bases = []
    real = torch.Tensor.new_empty

    def new_empty(self, *size, dtype=None, **kwargs):
        if kwargs:  # not ours: the interpreter asks for a device
            return real(self, *size, dtype=dtype, **kwargs)
        shape = torch.Size(size)
        base = torch.full((shape.numel() + 2 * GUARD,), 0xAB, dtype=torch.uint8, device=self.device)
        bases.append(base)
        return base[GUARD : GUARD + shape.numel()].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def check():
        for base in bases:
            assert (base[:GUARD] == 0xAB).all() and (base[-GUARD:] == 0xAB).all()

    return check


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every bit pattern, NaN payloads included: packing moves bytes, not numbers."""
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def naive(values: Tensor, extras: Tensor | None, index: list[int], layout: RowLayout) -> Tensor:
    rows = []
    for n in index:
        absent = not 0 <= n < len(values)
        row = bytearray(layout.row_bytes)
        if not absent:
            row[: layout.values_bytes] = bytes(values[n].contiguous().view(torch.uint8).tolist())
        words = [] if extras is None else [-1] * extras.shape[1] if absent else extras[n].tolist()
        for k, word in enumerate(words):
            at = layout.extras_offset + 4 * k
            row[at : at + 4] = word.to_bytes(4, "little", signed=True)
        rows.append(list(row))
    return torch.tensor(rows, dtype=torch.uint8).view(len(index), layout.row_bytes)


def check(values: Tensor, extras: Tensor | None, index: Tensor | None, device: str) -> None:
    layout = row_layout(values.shape[1], values.dtype, 0 if extras is None else extras.shape[1])
    want = naive(values, extras, list(range(len(values))) if index is None else index.tolist(), layout)
    assert torch.equal(pack_rows_reference(values, extras, index), want), "twin"
    moved = (None if t is None else _to(t, device) for t in (values, extras, index))
    assert torch.equal(pack_rows(*moved).cpu(), want), "kernel"


def _to(t: Tensor, device: str) -> Tensor:
    """On `device` with the same strides and offset."""
    if device == "cpu" or t.is_contiguous():
        return t.to(device)
    return t._base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [1, 7, 24, 130])
@pytest.mark.parametrize("W", [None, 1, 4, 11])
def test_rows_hold_the_bytes_of_values_and_words_and_zero_padding(dtype, H, W, device, guarded, seed):
    generator = torch.Generator().manual_seed(seed)
    values = any_bits((5, H), dtype, generator)
    extras = None if W is None else torch.randint(-(2**31), GARBAGE, (5, W), dtype=torch.int32, generator=generator)
    check(values, extras, torch.tensor([4, -1, 0, 0, GARBAGE, 5, 2], dtype=torch.int32), device)
    guarded()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_an_index_all_rows_go_in_order(dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    values = any_bits((4, 24), dtype, generator)
    check(values, torch.randint(0, 9, (4, 3), dtype=torch.int32, generator=generator), None, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("offset, width", [(16, 96), (8, 96), (1, 96), (2, 90), (1, 65)])
def test_values_and_words_may_be_views_at_any_alignment(dtype, offset, width, device, guarded, seed):
    generator = torch.Generator().manual_seed(seed)
    values = any_bits((3, width), dtype, generator)[:, offset : offset + 64]
    extras = torch.randint(0, 9, (3, 7), dtype=torch.int32, generator=generator)[:, 1:6]
    check(values, extras, torch.tensor([2, 0, 1, -1], dtype=torch.int32), device)
    guarded()


def test_a_row_wider_than_one_program_is_whole(device, guarded, seed):
    generator = torch.Generator().manual_seed(seed)
    values = any_bits((2, 5001), torch.bfloat16, generator)
    check(values, torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), device)
    guarded()


@pytest.mark.parametrize("transposed", ["values", "extras"])
def test_transposed_inputs_are_accepted(transposed, device):
    values = torch.arange(12, dtype=torch.float32).view(3, 4)
    extras = torch.arange(6, dtype=torch.int32).view(3, 2)
    if transposed == "values":
        values = values.t().contiguous().t()
    else:
        extras = extras.t().contiguous().t()
    want = naive(values, extras, [2, 0], row_layout(4, torch.float32, 2))
    index = torch.tensor([2, 0], dtype=torch.int32, device=device)
    assert torch.equal(pack_rows(values.to(device), extras.to(device), index).cpu(), want)


@pytest.mark.parametrize("M, index", [(0, None), (4, []), (0, [-1, 0])])
def test_no_values_and_no_rows(M, index, device, guarded):
    values = torch.zeros(M, 7, dtype=torch.bfloat16)
    extras = torch.zeros(M, 3, dtype=torch.int32)
    check(values, extras, None if index is None else torch.tensor(index, dtype=torch.int32), device)
    guarded()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, W, S", [(7, 3, 4), (24, 0, 4), (1, 1, 1), (130, 5, 0)])
def test_unpacking_gives_back_views_of_the_same_bits(dtype, H, W, S, device, seed):
    generator = torch.Generator().manual_seed(seed)
    values = any_bits((S, H), dtype, generator).to(device)
    extras = torch.randint(0, 99, (S, W), dtype=torch.int32, generator=generator).to(device)
    buf = pack_rows(values, extras)
    got_values, got_extras = unpack_rows(buf, H, dtype, W)
    assert got_values.shape == (S, H) and got_values.dtype == dtype and got_extras.shape == (S, W)
    assert torch.equal(got_values.contiguous().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got_extras, extras)
    buf.zero_()
    assert not got_values.contiguous().view(torch.uint8).any() and not got_extras.any()


def test_unpacking_takes_some_rows_of_a_buffer(device):
    values = torch.arange(40, dtype=torch.bfloat16, device=device).view(8, 5)
    buf = pack_rows(values)
    assert torch.equal(unpack_rows(buf[3:6], 5, torch.bfloat16, 0)[0], values[3:6])


@pytest.mark.parametrize(
    "H, dtype, W, want",
    [
        (7, torch.bfloat16, 3, (14, 16, 32)),
        (8, torch.bfloat16, 0, (16, 16, 16)),
        (5, torch.float64, 4, (40, 48, 64)),
        (7168, torch.float8_e4m3fn, 65, (7168, 7168, 7440)),
    ],
)
def test_layout(H, dtype, W, want):
    assert row_layout(H, dtype, W) == RowLayout(*want)


@pytest.mark.parametrize("with_extras, with_index", [(True, True), (False, True), (True, False), (False, False)])
def test_op_registration_holds(with_extras, with_index, device):
    values = torch.randn(3, 9, dtype=torch.bfloat16, device=device)
    extras = torch.ones(3, 2, dtype=torch.int32, device=device) if with_extras else None
    index = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device) if with_index else None
    torch.library.opcheck(torch.ops.epmoe.pack_rows.default, (values, extras, index))


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("values", (torch.zeros(3),)),
        ("extras", (torch.zeros(3, 2), torch.zeros(3, 2))),
        ("extras", (torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.int32))),
        ("index", (torch.zeros(3, 2), None, torch.zeros(2, dtype=torch.int64))),
        ("H=0", (torch.zeros(3, 0),)),
    ],
)
def test_a_wrong_argument_is_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        pack_rows(*arguments)


@pytest.mark.parametrize(
    "buf",
    [
        torch.zeros(2, 31, dtype=torch.uint8),
        torch.zeros(2, 32, dtype=torch.int8),
        torch.zeros(2, 40, dtype=torch.uint8)[:, 8:],
        torch.zeros(32, 2, dtype=torch.uint8).t(),
    ],
)
def test_a_buffer_that_holds_no_such_rows_is_named(buf):
    with pytest.raises(ValueError, match="buf"):
        unpack_rows(buf, 7, torch.bfloat16, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, dtype, W", [(7168, torch.bfloat16, 16), (7168, torch.float8_e4m3fn, 72), (2047, torch.bfloat16, 8)]
)
def test_large_messages_agree_with_the_twin(H, dtype, W, seed):
    generator = torch.Generator().manual_seed(seed)
    values = any_bits((4096, H), dtype, generator).cuda()
    extras = torch.randint(0, 9, (4096, W), dtype=torch.int32, generator=generator).cuda()
    index = torch.randint(-1, 4096, (16384,), dtype=torch.int32, generator=generator).cuda()
    assert torch.equal(pack_rows(values, extras, index), pack_rows_reference(values, extras, index))


@pytest.mark.gpu
def test_addresses_past_two_to_the_31_are_right():
    values = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device="cuda")
    values[-1] = 3.0
    buf = pack_rows(values)
    unpacked = unpack_rows(buf, 8192, torch.bfloat16, 0)[0]
    assert (unpacked[-1] == 3.0).all() and not unpacked[:-1].any()


@pytest.mark.gpu
def test_the_host_never_waits_and_a_graph_replays():
    values = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    extras = torch.ones(64, 3, dtype=torch.int32, device="cuda")
    index = torch.randint(-1, 64, (128,), dtype=torch.int32, device="cuda")
    pack_rows(values, extras, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buf = pack_rows(values, extras, index)
    index.copy_(index.flip(0))
    graph.replay()
    assert torch.equal(buf, pack_rows_reference(values, extras, index))

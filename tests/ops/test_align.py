"""`align_rows` against loops over pairs; kernels on the device under test (interpreted on CPU), twin beside them."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from epmoe.ops.align import align_rows, align_rows_reference, align_rows_triton

GARBAGE = 2**31 - 1
GUARD = 64


align = importlib.import_module("epmoe.ops.align")
PATHS = {
    "chosen": {},
    "all-pairs": {"ALL_PAIRS_MAX": 10**9},
    "by-expert": {"ALL_PAIRS_MAX": 0, "BY_EXPERT_MAX": 10**9, "BY_EXPERT_WORK": 10**9, "BY_EXPERT_BLOCK": 512},
    "three-launches": {"ALL_PAIRS_MAX": 0, "BY_EXPERT_MAX": 0},
}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Which kernels sort, whatever the number of pairs."""
    for name, value in PATHS[request.param].items():
        monkeypatch.setattr(align, name, value)
    return request.param


@pytest.fixture
def guarded(monkeypatch):
    """Every buffer the op allocates starts poisoned and lies between guard words; returns a check of the guards."""
    bases = []

    real = torch.Tensor.new_empty

    def new_empty(self, *size, **kwargs):
        if kwargs:  # not ours: the interpreter asks for a device
            return real(self, *size, **kwargs)
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        base = torch.full((shape.numel() + 2 * GUARD,), GARBAGE, dtype=self.dtype, device=self.device)
        bases.append(base)
        return base[GUARD : GUARD + shape.numel()].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def check():
        assert bases
        for base in bases:
            assert (base[:GUARD] == GARBAGE).all() and (base[-GUARD:] == GARBAGE).all()

    return check


def naive(topk_ids: Tensor, expert_map: Tensor, num_local: int, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs: list[list[int]] = [[] for _ in range(num_local)]
    for pair, expert in enumerate(topk_ids.flatten().tolist()):
        local = expert_map[expert].item() if 0 <= expert < len(expert_map) else -1
        if 0 <= local < num_local:
            pairs[int(local)].append(pair)
    row_index, slot, offsets = [-1] * max_rows, [-1] * topk_ids.numel(), [0]
    n = 0
    for mine in pairs:
        for pair in mine:
            if n < max_rows:
                row_index[n], slot[pair] = pair, n
            n += 1
        offsets.append(min(n, max_rows))
    as_int32 = [torch.tensor(t, dtype=torch.int32) for t in (row_index, offsets, slot)]
    return as_int32[0], as_int32[1], as_int32[2].view(topk_ids.shape)


def make_map(E: int, L: int, generator: torch.Generator) -> Tensor:
    """`L` of `E` experts are local, scattered; local ids in random order."""
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[torch.randperm(E, generator=generator)[:L]] = torch.randperm(L, generator=generator).to(torch.int32)
    return expert_map


def check(topk_ids: Tensor, expert_map: Tensor, num_local: int, max_rows: int, device: str) -> None:
    want = naive(topk_ids, expert_map, num_local, max_rows)
    twin = align_rows_reference(topk_ids, expert_map, num_local, max_rows)
    got = align_rows(topk_ids.to(device), expert_map.to(device), num_local, max_rows)
    for name, w, t, g in zip(("row_index", "offsets", "slot"), want, twin, got, strict=True):
        torch.testing.assert_close(t, w, rtol=0, atol=0, msg=lambda m, name=name: f"twin {name}: {m}")
        torch.testing.assert_close(g.cpu(), w, rtol=0, atol=0, msg=lambda m, name=name: f"kernel {name}: {m}")


# T, K, E, L
SHAPES = [
    (0, 8, 16, 4),
    (1, 1, 4, 1),
    (1, 8, 16, 16),
    (5, 3, 7, 1),
    (37, 4, 10, 3),
    (64, 8, 512, 90),
    (193, 7, 24, 11),
]


@pytest.mark.parametrize("T, K, E, L", SHAPES)
def test_rows_are_expert_major_and_stable_and_ids_without_an_expert_have_none(T, K, E, L, path, device, guarded, seed):
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(-1, E, (T, K), dtype=torch.int32, generator=generator)
    wrong = torch.tensor([-(2**31), -7, E, E + 1, GARBAGE], dtype=torch.int32)
    is_wrong = torch.rand(T, K, generator=generator) < 0.1
    topk_ids[is_wrong] = wrong[torch.randint(0, 5, (int(is_wrong.sum()),), generator=generator)]
    check(topk_ids, make_map(E, L, generator), L, T * K + 5, device)
    guarded()


def test_all_pairs_may_name_one_expert(path, device):
    T = 150
    topk_ids = torch.full((T, 4), 3, dtype=torch.int32)
    check(topk_ids, torch.tensor([-1, 0, 1, 2, 3], dtype=torch.int32), 4, T * 4, device)


@pytest.mark.parametrize("bad", [-1, GARBAGE])
def test_no_valid_id_gives_no_rows(bad, path, device):
    T = 40
    topk_ids = torch.full((T, 4), bad, dtype=torch.int32)
    row_index, offsets, slot = align_rows(
        topk_ids.to(device), torch.arange(8, dtype=torch.int32, device=device), 8, T * 4
    )
    assert (row_index == -1).all() and (offsets == 0).all() and (slot == -1).all()


@pytest.mark.parametrize("max_rows", [0, 1, 33])
def test_rows_past_max_rows_are_never_written(max_rows, path, device, guarded, seed):
    T = 150
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(0, 6, (T, 4), dtype=torch.int32, generator=generator)
    check(topk_ids, torch.tensor([0, 1, -1, 2, 3, -1], dtype=torch.int32), 4, max_rows, device)
    guarded()


def test_a_map_to_local_experts_that_do_not_exist_counts_as_none(path, device, seed):
    T = 150
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(0, 6, (T, 4), dtype=torch.int32, generator=generator)
    check(topk_ids, torch.tensor([0, 7, -3, 1, GARBAGE, 2], dtype=torch.int32), 3, T * 4, device)


def test_many_more_rows_than_pairs_are_filled_with_none(path, device, guarded):
    topk_ids = torch.tensor([[1, 0]], dtype=torch.int32)
    check(topk_ids, torch.tensor([0, 1], dtype=torch.int32), 2, 1000, device)
    guarded()


def test_what_waits_for_zeros_gets_one_for_each_expert(path, device, seed):
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(-1, 8, (40, 3), dtype=torch.int32, generator=generator).to(device)
    words = torch.full((7,), GARBAGE, dtype=torch.int32, device=device)
    align_rows_triton(topk_ids, torch.arange(8, dtype=torch.int32, device=device), 5, 120, words[1:6])
    assert words.tolist() == [GARBAGE, 0, 0, 0, 0, 0, GARBAGE]


@pytest.mark.parametrize("T", [30, 700])
def test_ids_may_be_a_view_with_strides(T, device, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-1, 8, (T, 8), dtype=torch.int32, generator=generator)
    check(wide[:, 1:6:2], torch.arange(8, dtype=torch.int32), 8, T * 3, device)


def test_the_example_in_the_docstring():
    topk_ids = torch.tensor([[3, 1], [0, 3], [1, -1]], dtype=torch.int32)
    row_index, offsets, slot = align_rows(topk_ids, torch.tensor([-1, 0, -1, 1], dtype=torch.int32), 2, 6)
    assert row_index.tolist() == [1, 4, 0, 3, -1, -1]
    assert offsets.tolist() == [0, 2, 4]
    assert slot.tolist() == [[2, 0], [-1, 3], [1, -1]]


@pytest.mark.parametrize("T", [4, 600])
def test_op_registration_holds(T, device):
    topk_ids = torch.randint(-1, 6, (T, 4), dtype=torch.int32, device=device)
    expert_map = torch.tensor([0, 1, -1, 2, 3, -1], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.epmoe.align_rows.default, (topk_ids, expert_map, 4, T * 4))


@pytest.mark.parametrize(
    "name, change",
    [
        ("topk_ids", {"topk_ids": torch.zeros(3, 2, dtype=torch.int64)}),
        ("topk_ids", {"topk_ids": torch.zeros(3, dtype=torch.int32)}),
        ("expert_map", {"expert_map": torch.zeros(4, dtype=torch.int64)}),
        ("expert_map", {"expert_map": torch.zeros(0, dtype=torch.int32)}),
        ("num_local", {"num_local": 0}),
        ("max_rows", {"max_rows": -1}),
    ],
)
def test_a_wrong_argument_is_named(name, change):
    right = {
        "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
        "expert_map": torch.zeros(4, dtype=torch.int32),
        "num_local": 1,
        "max_rows": 6,
    }
    with pytest.raises(ValueError, match=name):
        align_rows(**(right | change))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "T, K, E, L",
    [(128, 8, 256, 32), (2000, 8, 256, 256), (4096, 8, 128, 128), (37500, 8, 512, 512), (131072, 8, 64, 7)],
)
def test_large_inputs_agree_with_the_twin(T, K, E, L, seed):
    generator = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(-1, E + 2, (T, K), dtype=torch.int32, generator=generator).cuda()
    expert_map = make_map(E, L, generator).cuda()
    got = align_rows(topk_ids, expert_map, L, T * K)
    want = align_rows_reference(topk_ids, expert_map, L, T * K)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [16, 4096])
def test_the_host_never_waits_and_a_graph_replays_new_ids(T):
    expert_map = torch.arange(32, dtype=torch.int32, device="cuda")
    topk_ids = torch.randint(0, 32, (T, 8), dtype=torch.int32, device="cuda")
    align_rows(topk_ids, expert_map, 32, T * 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = align_rows(topk_ids, expert_map, 32, T * 8)
    topk_ids.copy_(torch.randint(-1, 40, (T, 8), dtype=torch.int32))
    graph.replay()
    for g, w in zip(got, align_rows_reference(topk_ids, expert_map, 32, T * 8), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)

"""`destinations` against loops over tokens; kernels on the device under test (interpreted on CPU), twin beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epmoe.ops import destinations as module
from epmoe.ops.destinations import destinations, destinations_reference

GARBAGE = 2**31 - 1
GUARD = 64


@pytest.fixture
def guarded(monkeypatch):
    """Every buffer the op allocates starts poisoned and lies between guard words; returns a check of the guards."""
    bases = []

    real = torch.Tensor.new_empty

    def new_empty(self, *size, **kwargs):
        if "device" in kwargs:  # the interpreter's own
            return real(self, *size, **kwargs)
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        dtype = kwargs.get("dtype", self.dtype)
        base = torch.full((shape.numel() + 2 * GUARD,), GARBAGE, dtype=dtype, device=self.device)
        bases.append(base)
        return base[GUARD : GUARD + shape.numel()].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def check():
        assert len(bases) == 4
        for base in bases:
            assert (base[:GUARD] == GARBAGE).all() and (base[-GUARD:] == GARBAGE).all()

    return check


def naive(topk_ids: Tensor, owner: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """`send_index [S]` (only what is used), `slot`, `counts`."""
    owners = [[int(owner[e]) if 0 <= e < len(owner) else -1 for e in row] for row in topk_ids.tolist()]
    slot = torch.full((len(topk_ids), num_ranks), -1, dtype=torch.int32)
    counts = torch.zeros(num_ranks, 2, dtype=torch.int64)
    send_index: list[int] = []
    for rank in range(num_ranks):
        for token, row in enumerate(owners):
            if rank in row:
                slot[token, rank] = len(send_index)
                send_index.append(token)
                counts[rank, 0] += 1
                counts[rank, 1] += row.count(rank)
    return torch.tensor(send_index, dtype=torch.int32), slot, counts


def check(topk_ids: Tensor, owner: Tensor, num_ranks: int, device: str) -> None:
    want = naive(topk_ids, owner, num_ranks)
    sent = want[0].shape[0]
    twin = destinations_reference(topk_ids, owner, num_ranks)
    got = destinations(topk_ids.to(device), owner.to(device), num_ranks)
    assert got[0].shape == twin[0].shape == (topk_ids.shape[0] * num_ranks,)
    twin, got = (twin[0][:sent], *twin[1:]), (got[0][:sent], *got[1:])
    for name, w, t, g in zip(("send_index", "slot", "counts"), want, twin, got, strict=True):
        torch.testing.assert_close(t, w, rtol=0, atol=0, msg=lambda m, name=name: f"twin {name}: {m}")
        torch.testing.assert_close(g.cpu(), w, rtol=0, atol=0, msg=lambda m, name=name: f"kernel {name}: {m}")


def make_ids(M: int, K: int, E: int, generator: torch.Generator) -> Tensor:
    """Ids of which some are -1, some garbage and some twice in a row."""
    topk_ids = torch.randint(-1, E, (M, K), dtype=torch.int32, generator=generator)
    wrong = torch.tensor([-(2**31), -7, E, E + 1, GARBAGE], dtype=torch.int32)
    is_wrong = torch.rand(M, K, generator=generator) < 0.1
    topk_ids[is_wrong] = wrong[torch.randint(0, 5, (int(is_wrong.sum()),), generator=generator)]
    return topk_ids


# M, K, E, R. More tokens than BLOCK take several blocks.
SHAPES = [
    (0, 8, 16, 4),
    (1, 1, 4, 1),
    (1, 8, 16, 16),
    (5, 3, 7, 2),
    (256, 8, 32, 5),
    (257, 1, 6, 3),
    (700, 6, 72, 11),
    (1024, 4, 16, 2),
]


@pytest.mark.parametrize("M, K, E, R", SHAPES)
def test_each_token_goes_once_to_each_owner_in_order_and_ids_without_an_expert_go_nowhere(
    M, K, E, R, device, guarded, seed
):
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, R, (E,), dtype=torch.int32, generator=generator)
    check(make_ids(M, K, E, generator), owner, R, device)
    guarded()


def test_more_blocks_than_are_added_up_at_once(device, monkeypatch, seed):
    monkeypatch.setattr(module, "SUM_BLOCK", 16)
    monkeypatch.setattr(module, "BLOCK", 16)
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, 3, (9,), dtype=torch.int32, generator=generator)
    check(make_ids(16 * 20 + 1, 2, 9, generator), owner, 3, device)


def test_large_blocks_and_wide_rows_give_the_same(device, monkeypatch, seed):
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(module, "TILE", 1024)
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, 4, (40,), dtype=torch.int32, generator=generator)
    for K in (1, 22):
        check(make_ids(1500, K, 40, generator), owner, 4, device)


@pytest.mark.parametrize("M", [3, 700])
def test_all_tokens_may_go_to_one_rank(M, device):
    check(torch.full((M, 4), 3, dtype=torch.int32), torch.tensor([0, 1, 2, 2], dtype=torch.int32), 4, device)


@pytest.mark.parametrize("M", [3, 700])
def test_no_valid_id_sends_nothing(M, device):
    topk_ids = torch.full((M, 4), GARBAGE, dtype=torch.int32, device=device)
    _, slot, counts = destinations(topk_ids, torch.zeros(8, dtype=torch.int32, device=device), 2)
    assert (slot == -1).all() and (counts == 0).all()


def test_an_expert_of_a_rank_that_does_not_exist_is_nowhere(device, seed):
    generator = torch.Generator().manual_seed(seed)
    check(make_ids(300, 4, 6, generator), torch.tensor([0, 3, -1, 1, GARBAGE, 2], dtype=torch.int32), 3, device)


def test_ids_and_owners_may_be_views_with_strides(device, seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-1, 8, (300, 8), dtype=torch.int32, generator=generator).to(device)
    owners = torch.randint(0, 3, (16,), dtype=torch.int32, generator=generator).to(device)
    got = destinations(wide[:, 1:6:2], owners[::2], 3)
    want = naive(wide[:, 1:6:2].cpu(), owners[::2].cpu(), 3)
    assert torch.equal(got[0][: want[0].shape[0]].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_counts_are_put_where_the_caller_says(kernels, monkeypatch, seed):
    monkeypatch.setenv("EPMOE_CPU_KERNELS", kernels)
    generator = torch.Generator().manual_seed(seed)
    topk_ids, owner = make_ids(40, 2, 6, generator), torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
    both = torch.full((2, 3, 2), -5, dtype=torch.int64)
    counts = destinations(topk_ids, owner, 3, counts=both[1])[2]
    assert counts.data_ptr() == both[1].data_ptr()
    assert torch.equal(both[1], naive(topk_ids, owner, 3)[2]) and (both[0] == -5).all()


def test_the_example_in_the_docstring(device):
    topk_ids = torch.tensor([[0, 1], [1, 3], [2, 3]], dtype=torch.int32, device=device)
    send_index, slot, counts = destinations(topk_ids, torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=device), 2)
    assert send_index[:4].tolist() == [0, 1, 1, 2] and send_index.shape == (6,)
    assert slot.tolist() == [[0, -1], [1, 2], [-1, 3]]
    assert counts.tolist() == [[2, 3], [2, 3]]


@pytest.mark.parametrize("M", [4, 300])
def test_op_registration_holds(M, device):
    # every token goes to both ranks: then nothing of send_index is left unwritten
    topk_ids = torch.tensor([[0, 3, -1, 1]], dtype=torch.int32, device=device).repeat(M, 1)
    owner = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.epmoe.destinations.default, (topk_ids, owner, 2))


@pytest.mark.parametrize(
    "name, change",
    [
        ("topk_ids", {"topk_ids": torch.zeros(3, 2, dtype=torch.int64)}),
        ("topk_ids", {"topk_ids": torch.zeros(3, dtype=torch.int32)}),
        ("topk_ids", {"num_ranks": 2**30}),
        ("owner", {"owner": torch.zeros(4, dtype=torch.int64)}),
        ("owner", {"owner": torch.zeros(0, dtype=torch.int32)}),
        ("num_ranks", {"num_ranks": 0}),
    ],
)
def test_a_wrong_argument_is_named(name, change):
    right = {"topk_ids": torch.zeros(3, 2, dtype=torch.int32), "owner": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(ValueError, match=name):
        destinations(**(right | {"num_ranks": 1} | change))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "M, K, E, R", [(128, 8, 256, 8), (8192, 8, 128, 2), (37500, 6, 512, 64), (262144, 8, 64, 8), (40000, 22, 512, 72)]
)
def test_large_inputs_agree_with_the_twin(M, K, E, R, seed):
    generator = torch.Generator().manual_seed(seed)
    topk_ids = make_ids(M, K, E, generator).cuda()
    owner = torch.randint(0, R, (E,), dtype=torch.int32, generator=generator).cuda()
    got = destinations(topk_ids, owner, R)
    want = destinations_reference(topk_ids, owner, R)
    sent = int(want[2][:, 0].sum())
    for g, w in zip((got[0][:sent], *got[1:]), (want[0][:sent], *want[1:]), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [16, 4096])
def test_the_host_never_waits_and_a_graph_replays_new_ids(M):
    owner = (torch.arange(32, device="cuda") // 8).to(torch.int32)
    topk_ids = torch.randint(0, 32, (M, 8), dtype=torch.int32, device="cuda")
    destinations(topk_ids, owner, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = destinations(topk_ids, owner, 4)
    topk_ids.copy_(torch.randint(-1, 40, (M, 8), dtype=torch.int32))
    graph.replay()
    want = destinations_reference(topk_ids, owner, 4)
    sent = int(want[2][:, 0].sum())
    for g, w in zip((got[0][:sent], *got[1:]), (want[0][:sent], *want[1:]), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)

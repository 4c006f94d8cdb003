"""`gather_sum` and the two ops of its backward, `scatter_rows` and `gather_dot`: kernels on the device under test
(interpreted on CPU) against their twins, twins against loops, gradients in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from epmoe.ops.gather_dot import gather_dot, gather_dot_reference
from epmoe.ops.gather_sum import gather_sum, gather_sum_reference
from epmoe.ops.scatter_rows import scatter_rows, scatter_rows_reference

module = importlib.import_module("epmoe.ops.gather_sum")
GARBAGE = 2**31 - 1
GUARD = 64
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def guarded(monkeypatch):
    """Every buffer an op allocates starts poisoned and lies between guard words; returns a check of the guards."""
    bases = []

    real = torch.Tensor.new_empty

    def new_empty(self, *size, dtype=None, **kwargs):
        if kwargs:  # not ours: the interpreter asks for a device
            return real(self, *size, dtype=dtype, **kwargs)
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        dtype = self.dtype if dtype is None else dtype
        poison = float("nan") if dtype.is_floating_point else GARBAGE
        base = torch.full((shape.numel() + 2 * GUARD,), poison, dtype=dtype, device=self.device)
        bases.append((base, base.clone()))
        return base[GUARD : GUARD + shape.numel()].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def check():
        assert bases
        for base, before in bases:
            for edge in (slice(None, GUARD), slice(-GUARD, None)):
                torch.testing.assert_close(base[edge], before[edge], rtol=0, atol=0, equal_nan=True)

    return check


def case(M: int, J: int, H: int, S: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Source rows inside a wider NaN buffer, each named at most once, absent terms with garbage ids and NaN weights;
    rows that no term names are NaN."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.full((M * J,), -1, dtype=torch.int32)
    named = min(S, M * J)
    index[torch.randperm(M * J, generator=generator)[:named]] = torch.randperm(S, generator=generator)[:named].int()
    absent = torch.rand(M * J, generator=generator) < 0.3
    wrong = torch.tensor([-1, -5, S, GARBAGE, -(2**31)], dtype=torch.int32)
    index[absent] = wrong[torch.randint(0, 5, (int(absent.sum()),), generator=generator)]
    index = index.view(M, J)
    valid = (index >= 0) & (index < S)
    weight = torch.where(valid, torch.randn(M, J, generator=generator), torch.nan)
    wide = torch.full((S, H + 48), torch.nan, dtype=dtype)
    src = wide[:, 16 : 16 + H]
    rows = index[valid].long()
    src[rows] = torch.randn(len(rows), H, generator=generator).to(dtype)
    return src, index, weight


def naive_sum(src: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
    out = torch.zeros(index.shape[0], src.shape[1], dtype=torch.float64)
    for m in range(index.shape[0]):
        for j in range(index.shape[1]):
            n = int(index[m, j])
            if 0 <= n < len(src):
                out[m] += src[n].double() * (1.0 if weight is None else float(weight[m, j]))
    return out


def to_device(t: Tensor, device: str) -> Tensor:
    """On `device` with the same strides, the wider buffer and its NaN along."""
    if t.is_contiguous() or device == "cpu":
        return t.to(device)
    return t._base.to(device)[:, 16 : 16 + t.shape[1]]


def assert_same(got: Tensor, want: Tensor, device: str) -> None:
    """Interpreted kernels do what the twin does, to the bit; on a GPU a multiply and an add may be one rounding."""
    exact = device == "cpu"
    eps = torch.finfo(want.dtype).eps
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 4 * eps, "atol": 4e-6}
    torch.testing.assert_close(got.cpu(), want, **tolerance)


# M, J, H, S
SHAPES = [(1, 1, 8, 1), (5, 2, 129, 7), (7, 8, 64, 40), (3, 3, 2100, 6), (2, 16, 130, 50), (0, 4, 16, 3), (4, 2, 16, 0)]


@pytest.mark.parametrize("M, J, H, S", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_twin_sums_the_named_rows_and_nothing_else(M, J, H, S, weighted, seed):
    src, index, weight = case(M, J, H, S, torch.float32, seed)
    got = gather_sum_reference(src, index, weight if weighted else None)
    torch.testing.assert_close(got.double(), naive_sum(src, index, weight if weighted else None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("M, J, H, S", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [True, False])
def test_kernel_agrees_with_twin(M, J, H, S, dtype, weighted, device, guarded, seed, monkeypatch):
    few = {"FEW_PROGRAMS": [0, 10**9][seed % 2], "FEW_ROWS": [0, 10**9][seed // 2 % 2]}  # columns of a program
    for name, value in few.items():
        monkeypatch.setattr(module, name, value)
    src, index, weight = case(M, J, H, S, dtype, seed)
    weight = weight if weighted else None
    got = gather_sum(
        to_device(src, device), index.to(device), None if weight is None else weight.to(device), torch.float32
    )
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert_same(got, gather_sum_reference(src, index, weight, torch.float32), device)
    guarded()


@pytest.mark.parametrize("dtype", FLOATS)
def test_result_has_the_dtype_asked_for_or_that_of_the_source(dtype, device, seed):
    src, index, weight = case(4, 2, 40, 9, dtype, seed)
    arguments = (to_device(src, device), index.to(device), weight.to(device))
    assert gather_sum(*arguments).dtype == dtype
    got = gather_sum(*arguments, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    if device == "cpu":  # one rounding at the end, of equal float32 sums
        assert_same(got, gather_sum_reference(src, index, weight, torch.bfloat16), device)


def test_rows_without_terms_are_exactly_zero(device):
    src = torch.full((6, 32), torch.nan, device=device)
    index = torch.tensor([[-1, 6], [GARBAGE, -1]], dtype=torch.int32, device=device)
    weight = torch.full((2, 2), torch.nan, device=device)
    assert (gather_sum(src, index, weight) == 0).all()
    assert (gather_sum(src, index) == 0).all()
    assert (gather_dot(torch.full((2, 32), torch.inf, device=device), src, index) == 0).all()


def test_terms_are_added_in_order(device):
    src = torch.tensor([[1e8], [1.0], [-1e8]], device=device).expand(3, 4).contiguous()
    index = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32, device=device)
    assert gather_sum(src, index)[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("M, J, H, S", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_scatter_writes_each_named_row_and_zeros_elsewhere(M, J, H, S, dtype, weighted, device, guarded, seed):
    _, index, weight = case(M, J, H, S, dtype, seed)
    dout = torch.randn(M, H + 16, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, :H]
    want = torch.zeros(S, H, dtype=dtype)
    for m in range(M):
        for j in range(J):
            if 0 <= (n := int(index[m, j])) < S:
                want[n] = (dout[m].float() * (weight[m, j] if weighted else 1.0)).to(dtype)
    weight = weight if weighted else None
    twin = scatter_rows_reference(dout, index, weight, S)
    torch.testing.assert_close(twin, want, rtol=0, atol=0)
    got = scatter_rows(dout.to(device), index.to(device), None if weight is None else weight.to(device), S)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
    guarded()


@pytest.mark.parametrize("M, J, H, S", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dots_are_those_of_the_named_rows(M, J, H, S, dtype, device, guarded, seed):
    src, index, _ = case(M, J, H, S, dtype, seed)
    a = torch.randn(M, H, generator=torch.Generator().manual_seed(seed)).to(dtype)
    want = torch.zeros(M, J, dtype=torch.float64)
    for m in range(M):
        for j in range(J):
            if 0 <= (n := int(index[m, j])) < S:
                want[m, j] = a[m].double() @ src[n].double()
    bound = {"rtol": 1e-5, "atol": 1e-5 * H**0.5}
    torch.testing.assert_close(gather_dot_reference(a, src, index).double(), want, **bound)
    got = gather_dot(a.to(device), to_device(src, device), index.to(device))
    torch.testing.assert_close(got.cpu().double(), want, **bound)
    guarded()


def test_gradients_in_float64(seed):
    torch.manual_seed(seed)
    index = torch.tensor([[4, -1, 0], [2, 7, GARBAGE], [-1, -1, -1]], dtype=torch.int32)
    src = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, w: gather_sum(s, index, w), (src, weight))
    assert torch.autograd.gradcheck(lambda s: gather_sum(s, index), (src,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_gradients_agree_with_autograd_through_indexing(dtype, device, seed):
    src, index, weight = case(6, 4, 72, 20, dtype, seed)
    dout = torch.randn(6, 72, generator=torch.Generator().manual_seed(seed))
    s, w = (t.detach().requires_grad_() for t in (to_device(src, device), weight.to(device)))
    gather_sum(s, index.to(device), w, torch.float32).backward(dout.to(device))

    s64, w64 = src.double().requires_grad_(), weight.double().requires_grad_()
    terms = [
        w64[m, j] * s64[int(index[m, j])] @ dout[m].double()
        for m in range(6)
        for j in range(4)
        if 0 <= index[m, j] < 20
    ]
    torch.stack(terms).sum().backward()
    torch.testing.assert_close(s.grad.cpu(), s64.grad.to(dtype))
    torch.testing.assert_close(w.grad.cpu(), w64.grad.float(), rtol=1e-5, atol=1e-5)


def test_an_expanded_gradient_is_accepted(device, seed):
    src, index, weight = case(4, 2, 40, 12, torch.float32, seed)
    s, w = to_device(src, device).detach().requires_grad_(), weight.to(device)
    gather_sum(s, index.to(device), w).sum().backward()
    want = scatter_rows_reference(torch.ones(4, 40), index, weight, 12)
    torch.testing.assert_close(s.grad.cpu(), want, rtol=0, atol=0)


def test_source_gradient_alone_does_not_keep_the_source(seed):
    src, index, weight = case(4, 2, 40, 12, torch.float32, seed)
    out = gather_sum(src.contiguous().requires_grad_(), index, weight)
    shapes = [t.shape for t in out.grad_fn.saved_tensors if t is not None]
    assert torch.Size((12, 40)) not in shapes


@pytest.mark.parametrize("weighted", [True, False])
def test_op_registration_holds(weighted, device, seed):
    src, index, weight = case(3, 2, 24, 8, torch.float32, seed)
    src, index = src.nan_to_num().contiguous().to(device), index.to(device)
    weight = weight.nan_to_num().to(device) if weighted else None
    dout = torch.randn(3, 24, device=device)
    torch.library.opcheck(torch.ops.epmoe.scatter_rows.default, (dout, index, weight, 8, torch.bfloat16))
    torch.library.opcheck(torch.ops.epmoe.gather_dot.default, (dout, src, index))
    src.requires_grad_()
    torch.library.opcheck(
        torch.ops.epmoe.gather_sum.default, (src, index, weight.requires_grad_() if weighted else None, torch.bfloat16)
    )


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("src", (torch.zeros(3), torch.zeros(1, 1, dtype=torch.int32))),
        ("src", (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))),
        ("index", (torch.zeros(3, 2), torch.zeros(1, 1, dtype=torch.int64))),
        ("weight", (torch.zeros(3, 2), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1))),
        ("weight", (torch.zeros(3, 2), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.float64))),
    ],
)
def test_a_wrong_argument_is_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        gather_sum(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("M, J, H", [(4096, 8, 7168), (16384, 8, 2048), (37500, 8, 129)])
def test_large_inputs_agree_with_the_twin(M, J, H, seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    index = torch.randperm(M * J, generator=generator, device="cuda").int().view(M, J)
    index[torch.rand(M, J, generator=generator, device="cuda") < 0.2] = -1
    src = torch.randn(M * J, H, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(M, J, generator=generator, device="cuda")
    got = gather_sum(src, index, weight, torch.float32)
    torch.testing.assert_close(got, gather_sum_reference(src, index, weight, torch.float32), rtol=1e-5, atol=1e-5)
    dout = torch.randn(M, H, generator=generator, device="cuda", dtype=torch.bfloat16)
    got, want = scatter_rows(dout, index, weight, M * J), scatter_rows_reference(dout, index, weight, M * J)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    got, want = gather_dot(dout, src, index), gather_dot_reference(dout, src, index)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_addresses_past_two_to_the_31_are_right():
    src = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device="cuda")  # 2.46e9 elements
    src[-1] = 3.0
    index = torch.tensor([[299_999]], dtype=torch.int32, device="cuda")
    assert (gather_sum(src, index) == 3.0).all()
    assert (gather_dot(torch.ones(1, 8192, device="cuda"), src, index) == 3.0 * 8192).all()
    scattered = scatter_rows(torch.ones(1, 8192, dtype=torch.bfloat16, device="cuda"), index, None, 300_000)
    assert (scattered[-1] == 1.0).all() and not scattered[:-1].any()


@pytest.mark.gpu
def test_the_host_never_waits_and_a_graph_replays(seed):
    src, index, weight = (t.cuda() for t in case(64, 8, 256, 512, torch.bfloat16, seed))
    gather_sum(src, index, weight), scatter_rows(src[:64], index, weight, 512), gather_dot(src[:64], src, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gather_sum(src, index, weight, torch.float32)
        scattered = scatter_rows(out, index, weight, 512)
        gather_dot(out, src, index)
    index.copy_(index.flip(0))
    weight.copy_(weight.flip(0))
    graph.replay()
    want = gather_sum_reference(src, index, weight, torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scattered, scatter_rows_reference(out, index, weight, 512), rtol=0, atol=0)

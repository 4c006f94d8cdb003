"""Ops called past torch's dispatcher, only where nobody would notice; and whether kernels can run here at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from epmoe.ops._segments import standard_segments
from epmoe.ops._triton import INTERPRET, check_flat, interpreter_refusal, op, runs_directly, use_triton
from epmoe.ops.gather_sum import gather_sum
from epmoe.ops.grouped_gemm import grouped_gemm

CALLS: list[str] = []


@op("test_triton_twice")
def twice(x: Tensor, scale: int = 2) -> Tensor:
    """Twice x."""
    CALLS.append(type(x).__name__)
    return x * scale


@twice.register_fake
def _(x, scale=2):
    return torch.empty_like(x)


class Recorder(TorchDispatchMode):
    """Names of the ops that pass through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_eager_calls_are_direct(monkeypatch):
    def through(*args, **kwargs):
        raise AssertionError("went through the dispatcher")

    monkeypatch.setattr(twice, "_registered", through)
    for x in (torch.ones(3), torch.nn.Parameter(torch.ones(3), requires_grad=False)):
        assert twice(x).tolist() == [2, 2, 2] and twice(x, scale=3).tolist() == [3, 3, 3]
    with torch.no_grad():
        assert twice(torch.nn.Parameter(torch.ones(2))).tolist() == [2, 2]
    assert twice.__doc__ == "Twice x."


def test_a_dispatch_mode_sees_the_op():
    with Recorder() as seen:
        assert twice(torch.ones(2)).tolist() == [2, 2]
    assert "epmoe.test_triton_twice.default" in seen.names
    assert runs_directly((torch.ones(2),)), "the mode is over"


def test_fake_tensors_meet_the_fake_and_not_the_kernel():
    CALLS.clear()
    with FakeTensorMode() as mode:
        inside = twice(torch.ones(3))
        outside = mode.from_tensor(torch.ones(3))
    assert twice(outside).shape == inside.shape == (3,) and CALLS == []


def test_tracing_records_the_op_and_transforms_go_through_it():
    graph = make_fx(lambda x: twice(x), tracing_mode="fake")(torch.ones(3))
    assert "test_triton_twice" in graph.code
    compiled = torch.compile(lambda x: twice(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [3, 3, 3]
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(runs_directly((x,))) or x)(torch.ones(3, 2))
    assert seen == [False]


def test_subclasses_and_recorded_gradients_are_left_to_the_dispatcher():
    class Special(Tensor):
        pass

    assert not runs_directly((torch.ones(2), torch.ones(2).as_subclass(Special)))
    leaf = torch.ones(2, requires_grad=True)
    assert not runs_directly((None, 1, leaf))
    with torch.no_grad():
        assert runs_directly((None, 1.0, "swiglu", True, torch.float32, leaf))


def test_a_gradient_that_an_op_does_not_have_is_an_error_and_one_it_has_arrives(seed):
    torch.manual_seed(seed)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(1, 6, 8)
    segments = standard_segments(torch.tensor([0, 4], dtype=torch.int32))
    y = grouped_gemm(x, w, None, *segments, None, 1, 4, False)
    with pytest.raises(RuntimeError, match="autograd"):
        y.sum().backward()
    index = torch.tensor([[2], [0]], dtype=torch.int32)
    gather_sum(x, index).sum().backward()
    assert x.grad is not None and x.grad.sum(1).tolist() == [8, 0, 8, 0]


def test_flat_arguments_must_be_flat():
    message = torch.rand(4, 3)
    check_flat(None, "scale", torch.float32)
    check_flat(message[:, 0].contiguous(), "scale", torch.float32)
    check_flat(message[:1, 0], "scale", torch.float32)  # of one entry every stride is right
    for wrong in (message[:, 0], message[:, :1].reshape(-1), message[:, :1], message[:, 0].contiguous().double()):
        with pytest.raises(ValueError, match="scale is .*: must be 1-D, contiguous and torch.float32"):
            check_flat(wrong, "scale", torch.float32)


@pytest.mark.skipif(not INTERPRET, reason="Triton was imported without its interpreter")
def test_an_interpreter_that_can_not_use_this_numpy_is_refused_before_a_kernel_runs(monkeypatch):
    from triton.runtime import interpreter

    def of_one(tensor, scope):
        def index(self):
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

        scope.set_attr(tensor, "__index__", index)

    assert interpreter_refusal() is None
    monkeypatch.setenv("EPMOE_CPU_KERNELS", "triton")
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", of_one)
    interpreter_refusal.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"Triton .* can't use numpy .*0-dimensional.*pip install 'numpy<2.4'"):
            use_triton(torch.zeros(1))
    finally:
        monkeypatch.undo()
        interpreter_refusal.cache_clear()

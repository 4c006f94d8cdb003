"""What can't move is refused when a layer or a dispatcher is made, by all ranks alike: one that could be made computes,
by every dispatcher, for every scheme on the way, and widths that some of them can't store."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epmoe import Activation, EPGroup, ExpertPlacement, MoEConfig, MoEKernel, MoELayer, QuantConfig
from epmoe.comm.symmetric import HALF_BYTES, Channel
from epmoe.dispatch import DISPATCHERS, Dispatcher, HierarchicalDispatcher, RowSpec, make_dispatcher
from epmoe.dispatch.storable import half_bytes, refusal
from epmoe.experts import ExpertsSpec, select_experts
from epmoe.testing import run_ranks

NODES = [0, 0, 1]
NAMES = (*(name for name in DISPATCHERS if name != "local"), "hierarchical, one-sided")
STORING = ("symmetric", "hierarchical, one-sided")
QUANTS = {
    "wide": None,
    "rows": QuantConfig(activations="fp8_block"),
    "combine": QuantConfig(activations=None, combine="int8_row"),
    "gradients": QuantConfig(activations=None, gradients="fp8_row"),
    "weights": QuantConfig("int8_row"),
    "static fp8_row": QuantConfig("fp8_row", scales="static"),
    "static int8_row": QuantConfig("int8_row", scales="static"),
}
ROWS = ((20, torch.float32), (24, torch.bfloat16), (24, torch.float32), (64, torch.float16))


def can_be_stored(quant: QuantConfig | None, width: int, dtype: torch.dtype) -> bool:
    """As the slots are words of rows of 16 bytes, wide on their way back."""
    if quant is not None and (quant.combine or quant.gradients):
        return False
    return width * dtype.itemsize % 16 == 0 and (quant is None or quant.rows is None or width % 16 == 0)


def make(name: str, groups: tuple[EPGroup, EPGroup], quant: QuantConfig | None, width: int, dtype: Any) -> MoELayer:
    kind, _, one_sided = name.partition(", ")
    config = MoEConfig(width, 16, 4, 2, dispatcher=kind, max_tokens_per_rank=4, quant=quant)
    layer = MoELayer(config, groups[kind == "hierarchical"], dtype=dtype, name="blocks.3")
    if one_sided:
        dispatcher = layer.kernel(layer.gate_up_proj.device, dtype).dispatcher
        assert isinstance(dispatcher, HierarchicalDispatcher)
        dispatcher.one_sided = True
    return layer


def cases() -> list[tuple[str, str, tuple[int, torch.dtype]]]:
    """All rows where they are stored, elsewhere those of each scheme in turn: other dispatchers take any."""
    made = []
    for name, (n, label) in itertools.product(NAMES, enumerate(QUANTS)):
        turn = (n + NAMES.index(name)) % len(ROWS)
        made += [(name, label, row) for row in (ROWS if name in STORING else ROWS[turn : turn + 1])]
    return made


def every_layer(rank: int, ranks: int) -> list[str]:
    groups, computed = (EPGroup(timeout=60), EPGroup(timeout=60, nodes=NODES)), []
    for name, label, (width, dtype) in cases():
        where, quant = (name, label, width, dtype), QUANTS[label]
        if name in STORING and not can_be_stored(quant, width, dtype):
            with pytest.raises(ValueError, match="layer 'blocks.3': |_scheme='") as refused:
                make(name, groups, quant, width, dtype)
            assert ("'all_to_all'" if name == "symmetric" else "one_sided to False") in str(refused.value), where
            continue
        layer = make(name, groups, quant, width, dtype)
        if quant is not None and quant.scales == "static":
            layer.set_input_scale(0.01)
        for train in {False, quant is None or quant.weights is None}:
            x = torch.randn(3 - rank, width).to(dtype).requires_grad_(train)
            with torch.set_grad_enabled(train):
                y = layer(x)
                assert isinstance(y, torch.Tensor) and y.shape == x.shape and y.isfinite().all(), where
            if train:
                y.float().sum().backward()
        computed.append(name)
    return computed


def test_a_layer_that_could_be_made_computes_with_every_dispatcher_and_scheme() -> None:
    few = sum(can_be_stored(quant, *row) for quant in QUANTS.values() for row in ROWS)
    assert 0 < few < len(QUANTS) * len(ROWS)
    for computed in run_ranks(every_layer, 3, timeout=120):
        counts = {name: computed.count(name) for name in NAMES}
        assert counts == {name: few if name in STORING else len(QUANTS) for name in NAMES}


# ---- a dispatcher alone, and what is known only where a kernel is made


def alone(rank: int, ranks: int) -> None:
    flat, nodes = EPGroup(timeout=30), EPGroup(timeout=30, nodes=NODES)
    placement = ExpertPlacement.contiguous(4, ranks)
    narrow, wide = RowSpec(24, torch.bfloat16, scheme="fp8_row"), RowSpec(32, torch.bfloat16, scheme="fp8_row")
    options: dict[str, Any] = {"layer": "blocks.3", "max_tokens_per_rank": 8}

    with pytest.raises(ValueError, match="layer 'blocks.3': fp8_row rows of 24 bytes.*use dispatcher='all_to_all'"):
        make_dispatcher("symmetric", flat, placement, "cpu", rows=narrow, **options)
    symmetric = make_dispatcher("symmetric", flat, placement, "cpu", rows=wide, **options)
    with pytest.raises(ValueError, match="1048576 rows of each of 3 ranks need .* bytes of slots"):
        rows = RowSpec(7168, torch.bfloat16, 8)
        make_dispatcher("symmetric", flat, placement, "cpu", rows=rows, max_tokens_per_rank=1 << 20)
    assert not flat.channels

    two = make_dispatcher("hierarchical", nodes, placement, "cpu", rows=narrow, **options)
    for refused in (narrow, RowSpec(32, torch.bfloat16, combine_scheme="fp8_row")):
        two.rows = refused
        with pytest.raises(ValueError, match="layer 'blocks.3': .*rows .* can't be stored .*one_sided to False"):
            two.one_sided = True  # type: ignore[attr-defined]
        assert not two.one_sided  # type: ignore[attr-defined]
    roomless = make_dispatcher("hierarchical", nodes, placement, "cpu", layer="blocks.3")
    with pytest.raises(ValueError, match="layer 'blocks.3': one_sided=True reserves room for max_tokens_per_rank"):
        roomless.one_sided = True  # type: ignore[attr-defined]
    if rank < 2:
        nodes.node_group().reachability = "GPU 0 has no peer access to GPU 1"
    two.rows = wide
    with pytest.raises(ValueError, match="one_sided=True: GPU 0 has no peer access to GPU 1"):
        two.one_sided = True  # type: ignore[attr-defined]

    # a kernel refuses what a dispatcher could not know
    nodes.node_group().reachability = ""
    unknowing = make_dispatcher("hierarchical", nodes, placement, "cpu", **options)
    unknowing.one_sided = True  # type: ignore[attr-defined]
    for d, schemes in (
        (unknowing, {"dispatch_scheme": "fp8_row"}),
        (unknowing, {"combine_scheme": "fp8_row"}),
        (unknowing, {"grad_scheme": "fp8_row"}),
        (symmetric, {"dispatch_scheme": "int8_row"}),
        (symmetric, {"dispatch_scheme": "int8_row", "quantized_before": True}),
    ):
        with pytest.raises(ValueError, match="can't be stored to peers"):
            kernel_of(d, **schemes)
    with pytest.raises(ValueError, match="quantized_before=True with dispatch_scheme=None"):
        kernel_of(symmetric, quantized_before=True)


def kernel_of(d: Dispatcher, **options: Any) -> MoEKernel:
    spec = ExpertsSpec(Activation(), 24, 16, torch.bfloat16, torch.device("cpu"))
    return MoEKernel(d, select_experts(spec).experts, **options)


def test_a_dispatcher_that_is_told_its_rows_refuses_them_and_a_kernel_what_it_was_not_told() -> None:
    run_ranks(alone, 3, timeout=60)


def test_what_is_refused_is_what_slots_can_not_hold() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert refusal(RowSpec(32, torch.float64), 2, 8, cpu) is None
    assert "float64 rows" in str(refusal(RowSpec(32, torch.float64), 2, 8, cuda))
    assert refusal(RowSpec(32, torch.bfloat16, scheme="fp8_row"), 2, 8, cuda) is None
    assert refusal(RowSpec(64, torch.bfloat16), 2, (1 << 21) - 1, cpu) is None
    assert "must be less than 2097152" in str(refusal(RowSpec(64, torch.bfloat16), 2, 1 << 21, cpu))

    rows, ep = RowSpec(7168, torch.bfloat16, 8), SimpleNamespace(num_ranks=64)
    slot = -(-(2 * 7168 + 4 * 17) // 128) * 128
    assert half_bytes(rows, 64, 8192) == 64 * 8192 * slot < HALF_BYTES < 64 * 16384 * slot
    assert half_bytes(RowSpec(7168, torch.bfloat16, 8, "fp8_row"), 1, 1) == 2 * 7168, "wide on their way back"
    assert half_bytes(RowSpec(7168, torch.bfloat16, 1000, "fp8_row"), 1, 1) > 2 * 7168, "ids and weights count"
    assert refusal(rows, 64, 8192, cpu) is None and "bytes of slots" in str(refusal(rows, 64, 16384, cpu))
    with pytest.raises(ValueError, match="a channel with halves of"):  # what it would come to
        Channel(ep, half_bytes(rows, 64, 16384), words=True)  # type: ignore[arg-type]

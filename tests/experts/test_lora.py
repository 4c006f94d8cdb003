"""Adapters as data: merging, stacking, batched rows, quantized experts, and everything that is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epmoe import ExpertPlacement, MoEKernel, make_dispatcher
from epmoe.config import Activation
from epmoe.dispatch.inputs import BatchedInput, ExpertInput, Layout
from epmoe.experts import EXPERTS, EXPERTS_BY_LAYOUT, ExpertsSpec, select_experts
from epmoe.experts.lora import ExpertLora, low_rank_update, merge_adapter, stack_adapters
from epmoe.quant import dequantize_weights, quantize_weights
from tests.experts.lora_cases import GARBAGE, LOCAL, TOLERANCE, A, H, I, close, draw, rows_of, weights_of


def test_one_adapter_equals_the_experts_it_is_merged_into(seed: int) -> None:
    for kind, dtype, limit in [("reference", torch.float64, 1e-12), ("grouped", torch.float32, 1e-5)]:
        leaves = draw(seed, 13, len(LOCAL), dtype, Activation(), True)
        leaves["adapters"].fill_(1)
        experts = EXPERTS[kind](ExpertsSpec(Activation(), H, I, dtype, torch.device("cpu"), lora=True))
        weights = weights_of(leaves)
        merged = merge_adapter(weights, 1)
        assert merged.lora is None and not torch.equal(merged.down_proj, weights.down_proj)
        want = experts(dataclasses.replace(rows_of(leaves), adapter_ids=None), merged)
        close(experts(rows_of(leaves), weights), want.double(), limit, kind)
    with pytest.raises(ValueError, match=r"adapter=3: must be in \[0, 3\)"):
        merge_adapter(weights, A)
    with pytest.raises(ValueError, match="adapter=0: there is no lora"):
        merge_adapter(merged, 0)
    with pytest.raises(ValueError, match="weights are quantized"):
        merge_adapter(dataclasses.replace(weights, gate_up_scale=torch.ones(len(LOCAL), 1)), 1)


def test_stacked_adapters_of_different_ranks_update_as_each_alone(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def one(rank: int, alpha: float) -> ExpertLora:
        shapes = ((2, 1, rank, H), (2, 1, 2 * I, rank), (2, 1, rank, I), (2, 1, H, rank))
        tensors = (torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes)
        return ExpertLora(*tensors, torch.tensor([alpha / rank]))

    adapters = [one(2, 1.0), one(5, 3.0)]
    stacked = stack_adapters(adapters)
    assert (stacked.num_adapters, stacked.rank) == (2, 5) and torch.equal(stacked.scaling, torch.tensor([0.5, 0.6]))
    x = torch.randn(7, H, generator=g, dtype=torch.float64)
    ids = torch.tensor([0, 1, -1, 1, 0, 2, 1], dtype=torch.int32)
    got = low_rank_update(x, stacked.gate_up_a[1], stacked.gate_up_b[1], stacked.scaling, ids)
    for n, adapter in enumerate(ids.tolist()):
        if not 0 <= adapter < 2:
            assert not got[n].any()
            continue
        alone = adapters[adapter]
        s = alone.scaling.double()[0]
        torch.testing.assert_close(got[n], s * (alone.gate_up_b[1, 0] @ (alone.gate_up_a[1, 0] @ x[n])))
    got.sum().backward()
    assert adapters[0].gate_up_a.grad is not None and adapters[0].gate_up_a.grad.shape == (2, 1, 2, H)
    with pytest.raises(ValueError, match="adapters is empty"):
        stack_adapters([])


# ---- refusals


def test_experts_without_lora_refuse_it_and_name_those_with() -> None:
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"))
    with_lora = dataclasses.replace(spec, lora=True)
    able = r"no LoRA adapters here; use experts='(grouped|reference)' or '(grouped|reference)'"
    for layout, kinds in EXPERTS_BY_LAYOUT.items():
        assert EXPERTS[select_experts(with_lora, layout=layout).experts.name].lora
        for kind in kinds:
            if EXPERTS[kind].lora:
                continue
            with pytest.raises(ValueError, match=f"experts={kind!r}: {able}"):
                select_experts(with_lora, kind, layout)
    on_gpu = dataclasses.replace(with_lora, device=torch.device("cuda"), dtype=torch.float64)
    assert dict(select_experts(on_gpu).passed_over)["torch_grouped"].startswith("no LoRA adapters here")

    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(len(LOCAL), 1), "cpu")
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    leaves["ids"].clamp_(0, len(LOCAL) - 1)
    batch = (leaves["x"], leaves["ids"], leaves["p"])
    kernel = MoEKernel(moves, select_experts(spec, "torch_grouped").experts)
    moves.dispatch_async = lambda *_, **__: pytest.fail("rows moved")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"experts='torch_grouped': weights.lora is given, {able}"):
        kernel(*batch, weights_of(leaves), adapter_ids=leaves["adapters"])


def test_quantized_experts_take_adapters_where_they_are_dequantized(seed: int) -> None:
    leaves = draw(seed, 13, len(LOCAL), torch.bfloat16, Activation(), False)
    weights = weights_of(leaves)
    w1, w2 = (quantize_weights(w, "fp8_row") for w in (weights.gate_up_proj, weights.down_proj))
    spec = ExpertsSpec(Activation(), H, I, torch.bfloat16, torch.device("cpu"), lora=True, scheme="fp8_row")
    with pytest.raises(ValueError, match="'grouped_fp8': no LoRA adapters here; use experts='reference'$"):
        select_experts(spec, "grouped_fp8")
    quantized = dataclasses.replace(
        weights, gate_up_proj=w1.values, gate_up_scale=w1.scales, down_proj=w2.values, down_scale=w2.scales
    )
    got = select_experts(spec).experts(rows_of(leaves), quantized)
    plain = dataclasses.replace(
        weights, gate_up_proj=dequantize_weights(w1, torch.bfloat16), down_proj=dequantize_weights(w2, torch.bfloat16)
    )
    want = EXPERTS["reference"](dataclasses.replace(spec, scheme=None))(rows_of(leaves), plain)
    close(got, want.double(), TOLERANCE[torch.bfloat16][0], "dequantized to bf16, once in float32")
    assert not torch.equal(
        got, select_experts(spec).experts(dataclasses.replace(rows_of(leaves), adapter_ids=None), quantized)
    )


def test_mistakes_are_named() -> None:
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
    experts, rows, weights = EXPERTS["grouped"](spec), rows_of(leaves), weights_of(leaves)
    lora = weights.lora
    assert lora is not None
    for match, ids, wrong in [
        ("rows have adapter_ids and weights.lora is None", rows.adapter_ids, None),
        (r"lora.gate_up_b has shape \(3, 3, 39, 6\), must be \(3, 3, 40, 6\)", rows.adapter_ids,
         dataclasses.replace(lora, gate_up_b=lora.gate_up_b[:, :, :-1])),
        (r"lora.down_a has shape \(3, 2, 6, 20\), must be \(3, 3, 6, 20\)", rows.adapter_ids,
         dataclasses.replace(lora, down_a=lora.down_a[:, :2])),
        (r"lora.down_b is torch.float16 and the experts torch.float32", rows.adapter_ids,
         dataclasses.replace(lora, down_b=lora.down_b.half())),
        ("lora.scaling is torch.float64", rows.adapter_ids, dataclasses.replace(lora, scaling=lora.scaling.double())),
        (r"adapter_ids is torch.int64 \(4,\) on cpu, must be int32 \(4,\)", rows.adapter_ids.long(), lora),
        (r"adapter_ids is torch.int32 \(3,\)", rows.adapter_ids[:3], lora),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            experts(dataclasses.replace(rows, adapter_ids=ids), dataclasses.replace(weights, lora=wrong))


def test_adapter_ids_out_of_range_are_named_when_validating_and_no_adapter_otherwise() -> None:
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    leaves["ids"] = torch.tensor([[0, 1], [1, 2], [2, -1], [0, 2]], dtype=torch.int32)
    moves = make_dispatcher("local", None, ExpertPlacement.contiguous(len(LOCAL), 1), "cpu")
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
    for kind in ("grouped", "reference"):
        experts = select_experts(spec, kind).experts
        batch = (leaves["x"], leaves["ids"], leaves["p"], weights_of(leaves))
        none, wrong = (torch.tensor([0, 1, n, 2], dtype=torch.int32) for n in (-1, 3))
        MoEKernel(moves, experts, validate=True)(*batch, adapter_ids=none)
        with pytest.raises(ValueError, match=r"adapter_ids\[2\]=3: must be in \[-1, 3\)"):
            MoEKernel(moves, experts, validate=True)(*batch, adapter_ids=wrong)
        results = [MoEKernel(moves, experts, validate=False)(*batch, adapter_ids=ids).routed for ids in (none, wrong)]
        assert torch.equal(*results)


def test_more_experts_and_adapters_than_a_sort_takes_are_refused() -> None:
    many = 4096 // len(LOCAL)
    leaves = draw(1, 4, len(LOCAL), torch.float32, Activation(), False)
    shapes = ((many, 1, H), (many, 2 * I, 1), (many, 1, I), (many, H, 1))
    lora = ExpertLora(*(torch.zeros(len(LOCAL), *shape) for shape in shapes), torch.ones(many))
    experts = EXPERTS["grouped"](ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True))
    with pytest.raises(ValueError, match="3 local experts with 1365 adapters make 4098 pairs.*experts='reference'"):
        experts(rows_of(leaves), dataclasses.replace(weights_of(leaves), lora=lora))


def test_batched_rows_keep_their_adapters_whatever_padding_holds(seed: int) -> None:
    """Places past an expert's count may hold any id."""
    leaves = draw(seed, 6, len(LOCAL), torch.float32, Activation(), False)
    counts = torch.tensor([2, 0, 3], dtype=torch.int32)
    x = torch.randn(len(LOCAL), 4, H, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[0, -1, 9, 1], [GARBAGE] * 4, [2, 1, 0, 0]], dtype=torch.int32)
    spec = ExpertsSpec(Activation(), H, I, torch.float32, torch.device("cpu"), lora=True)
    rows = BatchedInput(x, counts, Layout(6, 6, 12), adapter_ids=ids)
    y = EXPERTS["reference"](spec)(rows, weights_of(leaves))
    one = ExpertInput(
        x.view(-1, H), torch.arange(len(LOCAL), dtype=torch.int32).repeat_interleave(4)[:, None].contiguous(),
        torch.ones(12, 1), torch.arange(len(LOCAL), dtype=torch.int32), len(LOCAL), 12, Layout(12, 12, 12),
        adapter_ids=ids.view(-1),
    )  # fmt: skip
    want = EXPERTS["reference"](spec)(one, weights_of(leaves)).view(y.shape)
    for e, n in enumerate(counts.tolist()):
        torch.testing.assert_close(y[e, :n], want[e, :n])

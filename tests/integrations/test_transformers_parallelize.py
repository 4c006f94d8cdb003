"""A parallelized model is the model, on any number of ranks: logits, loss, gradients, generation and saved files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from epmoe import EPGroup  # noqa: E402
from epmoe.integrations.gradients import reduce_gradients  # noqa: E402
from epmoe.integrations.transformers import (  # noqa: E402
    PRESETS,
    parallelize,
    routed_experts,
    unparallelize,
)
from epmoe.integrations.transformers.layouts import to_theirs  # noqa: E402
from epmoe.quant.config import QuantConfig  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402
from tests.integrations.transformers_families import RECENT, TINY, batch, tiny_model  # noqa: E402

FAMILIES = [preset.family for preset in PRESETS]
HOW: dict[int, dict[str, Any]] = {
    1: {},
    2: {"dispatcher": "all_to_all", "placement": "strided"},
    4: {"dispatcher": "all_gather"},
}
NEW_TOKENS = (6, 3, 5, 4)  # of each rank: they finish at different times
GREEDY = {"do_sample": False, "output_router_logits": False}  # transformers 5.17 fails on them while it decodes


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach().double(), expected.detach().double()
    return bool((found - expected).norm() <= 1e-5 * expected.norm())


def prompt(rank: int, seed: int) -> Tensor:
    return batch(rank, seed)[:, :2]


def own_gradients(model: nn.Module) -> dict[str, tuple[list[int] | None, Tensor | None]]:
    """By the untouched model's names and in its layout: which experts' rows, None for all of a tensor, and them."""
    found: dict[str, tuple[list[int] | None, Tensor | None]] = {}
    for name, parameter in model.named_parameters():
        parent, _, our = name.rpartition(".")
        module = model.get_submodule(parent)
        if parent not in routed_experts(model):
            found[name] = None, parameter.grad
            continue
        tensors, gradient = module.preset.tensors, parameter.grad
        gradient = None if gradient is None else to_theirs(tensors, our, gradient)
        found[f"{parent}.{tensors.names()[our]}"] = list(module.local_experts), gradient
    return found


def auxiliary(out: Any) -> list[Tensor]:
    """The auxiliary loss and every layer's router logits, of models that have them."""
    loss, logits = getattr(out, "aux_loss", None), getattr(out, "router_logits", None) or ()
    return [] if loss is None else [loss.detach(), *(each.detach() for each in logits)]


def exercise(rank: int, ranks: int, seed: int, directory: str) -> dict[str, dict[str, Any]]:
    """What this rank's model gives, by family; leaves the saved models in `directory`."""
    ep = EPGroup(device="cpu", timeout=50) if ranks > 1 else None
    results = {}
    for family in FAMILIES:
        model = tiny_model(family, seed)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        returned = parallelize(model, ep, **HOW[ranks])
        assert returned is model
        x = batch(rank, seed)
        out = model(x, labels=x, use_cache=False)
        out.loss.backward()
        reduce_gradients(model, ep)
        layers = routed_experts(model).values()
        results[family] = {
            "logits": out.logits.detach(),
            "loss": out.loss.detach(),
            "aux": auxiliary(out),
            "gradients": own_gradients(model),
            "tokens": model.generate(prompt(rank, seed), max_new_tokens=NEW_TOKENS[rank], **GREEDY),
            "owned": [(layer.config.num_experts, layer.local_experts) for layer in layers],
            "rows": [{parameter.shape[0] for parameter in layer.parameters()} for layer in layers],
        }
        model.save_pretrained(Path(directory, family))
        after = unparallelize(model).state_dict()
        same = list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
        results[family]["restored"] = same and close(model(x, use_cache=False).logits, out.logits)
    return results


def untouched(family: str, rank: int, seed: int) -> dict[str, Any]:
    """What the model as it is gives for one rank's tokens."""
    model = tiny_model(family, seed)
    out = model(batch(rank, seed), labels=batch(rank, seed), use_cache=False)
    out.loss.backward()
    return {
        "logits": out.logits.detach(),
        "loss": out.loss.detach(),
        "aux": auxiliary(out),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "tokens": model.generate(prompt(rank, seed), max_new_tokens=NEW_TOKENS[rank], **GREEDY),
    }


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> Iterator[str]:
    """Where one family's results of all ranks are not what they must be."""
    for rank, (mine, right) in enumerate(zip(found, expected, strict=True)):
        for what in ("logits", "loss"):
            if not close(mine[what], right[what]):
                yield f"{what} of rank {rank}"
        same = len(mine["aux"]) == len(right["aux"])
        if not same or not all(map(close, mine["aux"], right["aux"])):
            yield f"auxiliary loss or router logits of rank {rank}"
        if not torch.equal(mine["tokens"], right["tokens"]):
            yield f"generated tokens of rank {rank}"
        if mine["rows"] != [{len(ids)} for _, ids in mine["owned"]]:
            yield f"rank {rank} holds {mine['rows']} rows of experts {mine['owned']}"
        if not mine["restored"]:
            yield f"the modules that unparallelize gives back on rank {rank}"
        yield from wrong_gradients(mine["gradients"], [each["gradients"] for each in expected])
    for layer, (num_experts, _) in enumerate(found[0]["owned"]):
        owned = [expert for mine in found for expert in mine["owned"][layer][1]]
        if sorted(owned) != list(range(num_experts)):
            yield f"the ranks own the experts {owned} of {num_experts}"


def wrong_gradients(found: dict[str, Any], per_rank: list[dict[str, Tensor | None]]) -> Iterator[str]:
    """Those that are not the mean over the ranks' losses."""
    if found.keys() != per_rank[0].keys():
        yield f"gradients of {sorted(found.keys() ^ per_rank[0].keys())}"
    for name, (rows, gradient) in found.items():
        each = [gradients[name] for gradients in per_rank]
        if gradient is None or all(part is None for part in each):
            if gradient is not None or any(part is not None for part in each):
                yield f"gradient of {name}, which is or should be None"
            continue
        mean = sum(torch.zeros_like(gradient[:1]) if part is None else part for part in each) / len(each)
        if not close(gradient, mean if rows is None else mean[rows]):
            yield f"gradient of {name}"


def wrongly_saved(family: str, path: Path, seed: int) -> Iterator[str]:
    """What plain transformers finds in the saved files that is not the model."""
    expected = tiny_model(family, seed).eval()
    loaded, report = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[key]:
            yield f"{key} in the saved files: {report[key]}"
    tensors = loaded.state_dict()
    yield from (f"saved {n}" for n, tensor in expected.state_dict().items() if not torch.equal(tensors[n], tensor))
    x = batch(0, seed)
    if type(loaded) is not type(expected) or not close(loaded(x).logits, expected(x).logits):
        yield "logits of the saved model"  # not to the bit: memory elsewhere may mean another kernel


def test_every_preset_has_a_tiny_model_in_which_every_number_matters(seed):
    assert list(TINY) == FAMILIES
    corrected, biased = set(), set()
    for family in FAMILIES:
        model = tiny_model(family, seed)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, nn.Parameter) or "correction_bias" in name:
                assert (tensor != 0).all() and tensor.flatten().unique().numel() > 1, f"{family}: {name}"
            corrected |= {family} if "correction_bias" in name else set()
            biased |= {family} if "experts" in name and "bias" in name else set()
        x = batch(0, seed)
        auxiliary_of = auxiliary(model(x, labels=x, use_cache=False))
        shown = next(preset for preset in PRESETS if preset.family == family).aux_loss
        assert bool(auxiliary_of) == (shown and (RECENT or family != "Granite-MoE")), family
        assert not auxiliary_of or (auxiliary_of[0] > 0 and len(auxiliary_of) > 1), family
    assert corrected == {"DeepSeek-V3", "GLM-4 MoE", "GLM-4 MoE Lite", "MiniMax-M2", "ERNIE 4.5 MoE"}
    assert biased == {"gpt-oss"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_any_number_of_ranks_a_model_gives_what_it_gave_untouched(ranks, seed, tmp_path):
    """Logits, loss, every gradient, generated tokens though ranks finish at different times, files, and undoing it."""
    args = (seed, str(tmp_path))
    results = [exercise(0, 1, *args)] if ranks == 1 else run_ranks(exercise, ranks, args=args, timeout=150)
    wrong = []
    for family in FAMILIES:
        expected = [untouched(family, rank, seed) for rank in range(ranks)]
        wrong += [f"{family}: {what}" for what in differences([found[family] for found in results], expected)]
        wrong += [f"{family}: {what}" for what in wrongly_saved(family, tmp_path / family, seed)]
    assert not wrong, "\n".join(wrong)


def recompute_and_refuse(rank: int, ranks: int, seed: int, directory: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Gradients with recomputed activations; and what saving says that can't be."""
    ep = EPGroup(device="cpu", timeout=50)
    model = parallelize(tiny_model("Qwen3-MoE", seed), ep).train()
    model.gradient_checkpointing_enable()
    x = batch(rank, seed)
    model(x, labels=x, use_cache=False).loss.backward()
    reduce_gradients(model, ep)
    blocked = Path(directory, "blocked", "by a file")
    if rank == 0:
        blocked.parent.write_text("")
    adapted, quantized = (tiny_model("Qwen3-MoE", seed) for _ in range(2))
    for layer in routed_experts(parallelize(adapted, ep)).values():
        layer.add_lora(["french"], rank=2, alpha=1.0)
    parallelize(quantized, ep, quant=QuantConfig("fp8_block"))
    said = {}
    for name, attempt in (
        ("blocked", lambda: model.save_pretrained(blocked)),
        ("lora", lambda: adapted.save_pretrained(Path(directory, "lora"))),
        ("quantized", lambda: unparallelize(quantized)),
    ):
        try:
            attempt()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return own_gradients(model), said


def test_checkpointed_activations_give_the_same_gradients_and_what_cannot_be_saved_is_refused(seed, tmp_path):
    expected = [untouched("Qwen3-MoE", rank, seed)["gradients"] for rank in range(2)]
    for rank, (gradients, said) in enumerate(run_ranks(recompute_and_refuse, 2, args=(seed, str(tmp_path)))):
        assert not list(wrong_gradients(gradients, expected))
        assert "NotADirectoryError" in said["blocked"]
        assert ("rank 0 failed" in said["blocked"]) == (rank == 1)
        assert "has the LoRA adapters french: merge them" in said["lora"]
        assert "its weights are fp8_block" in said["quantized"]


def test_parameters_are_kept_where_all_experts_stay_as_they_are(seed):
    model = tiny_model("Qwen2-MoE", seed)
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)
    before = dict(model.named_parameters())
    parallelize(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    layer = next(iter(routed_experts(model).values()))
    assert layer.gate_up_proj.requires_grad and not layer.down_proj.requires_grad
    experts = unparallelize(model).model.layers[1].mlp.experts
    assert experts.gate_up_proj.requires_grad and not experts.down_proj.requires_grad
    assert experts.config is model.config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts=...: parallelize takes it from the model; leave it out"),
        ({"router": 3}, "router=...: parallelize takes it from the model"),
        ({"latent_size": 4}, "latent_size=...: parallelize takes it from the model"),
        ({"top_k": 4}, "top_k=...: parallelize takes it from the model"),
        ({"foo": 1}, "foo=...: parallelize has no such option; known: placement, dispatcher, experts"),
        ({"torch_dtype": torch.float32}, "torch_dtype=...: parallelize has no such option; known"),
        ({"ep": 3}, "ep=3: must be an EPGroup, or None for all experts in this process"),
        ({"presets": PRESETS[0]}, "must be Presets, such as (mine, *PRESETS)"),
        ({"model": "some/path"}, "model='some/path': must be a model of transformers; from_pretrained(path, ep) loads"),
        ({"model": 3}, "model=3: must be a model of transformers"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_arguments_that_the_model_decides_or_that_are_none_are_refused(arguments, said, seed):
    model = tiny_model("OLMoE", seed)
    with pytest.raises(ValueError, match=re.escape(said)):
        parallelize(**{"model": model, **arguments})
    with pytest.raises(ValueError, match="has no parallelized experts"):
        routed_experts(model)


# One MoE layer: no later router sees what rounding did.
@pytest.mark.parametrize("family", ["Qwen3-MoE", "DeepSeek-V3", "Llama 4", "ERNIE 4.5 MoE"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_near_as_the_untouched_model(family, autocast, seed):
    x = batch(0, seed)
    exact = tiny_model(family, seed).eval()(x).logits.detach().double()
    errors = []
    for change in (lambda model: model, parallelize):
        model = change(tiny_model(family, seed).eval().to(torch.float32 if autocast else torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(x).logits.detach()
        assert logits.dtype == torch.bfloat16
        errors.append(float((logits.double() - exact).norm() / exact.norm()))
    assert errors[1] <= max(2 * errors[0], 5e-3), errors

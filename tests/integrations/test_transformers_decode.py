"""`Decoder`: the tokens of `generate` by steps of fixed shapes, on ranks with and without rows, and as CUDA graphs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="5.17")

sys.path.insert(0, str(Path(__file__).parent))
from transformers_families import TINY, tiny_model  # noqa: E402

from epmoe import EPGroup, PeerError  # noqa: E402
from epmoe.dispatch.overflow import Overflow  # noqa: E402
from epmoe.integrations.transformers import RoutedExperts, parallelize  # noqa: E402
from epmoe.integrations.transformers.decode import Decoder  # noqa: E402
from epmoe.kernel import MoEKernel  # noqa: E402
from epmoe.testing import run_ranks  # noqa: E402

FAMILIES = [family for family in TINY if family != "Qwen3-Next"]
SIZES: dict[str, Any] = {"row_sizes": (1, 2, 4), "column_sizes": (6, 24)}


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


def alone(model: Any, prompt: list[int], new: int) -> list[int]:
    """What the model generates greedily for one prompt by itself."""
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt], device=model.device)
    return model.generate(tokens, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def decoded(decoder: Decoder, asked: list[list[int]], new: int) -> list[list[int]]:
    """All prompts together, the first two beginning a step later than the others."""
    late, got = asked[:2], [[int(decoder.fill(row, prompt).argmax())] for row, prompt in enumerate(asked[2:])]
    for step in range(new):
        ready = [tokens for tokens in got if len(tokens) < new]
        lengths = [len(prompt) + len(tokens) - 1 for prompt, tokens in zip(asked[2:] + late, got, strict=False)]
        rows = decoder.step([tokens[-1] for tokens in got], lengths) if ready else []
        for tokens, row in zip(got, rows, strict=False):
            tokens.append(int(row.argmax()))
        if step == 0:
            got += [[int(decoder.fill(len(got) + n, prompt).argmax())] for n, prompt in enumerate(late)]
    return [*got[-len(late) :], *got[: -len(late)]] if late else got


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_every_family_give_the_tokens_of_generate(family: str, seed: int) -> None:
    untouched = tiny_model(family, seed).eval()
    asked = prompts(seed, [7, 1, 3])
    expected = [alone(untouched, prompt, 8) for prompt in asked]
    decoder = Decoder(parallelize(tiny_model(family, seed).eval()), 4, 24, **SIZES)
    got = decoded(decoder, asked, 8)
    assert [tokens[:7] for tokens in got[:2]] == [tokens[:7] for tokens in expected[:2]]
    assert got[2][:8] == expected[2]


class Launches(TorchDispatchMode):
    """Names of the operators, and those whose results the host or a shape waits for."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_the_same_launches_every_time_and_asks_nothing_of_the_host(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(parallelize(tiny_model(family, seed).eval()), 4, 24, **SIZES)
    monkeypatch.setattr(RoutedExperts, "forward", lambda self, x, ids, weights: x * weights.sum())
    asked = prompts(seed, [3, 6, 2])
    newest = [int(decoder.fill(row, prompt).argmax()) for row, prompt in enumerate(asked)]
    seen = []
    for tokens, lengths in ((newest, [3, 6, 2]), ([5, 6], [8, 9])):
        decoder.step(tokens, lengths)  # the inputs are in place: now as a graph would run it
        places = [t.data_ptr() for layer in decoder.cache.layers for t in (layer.keys, layer.values)]
        with torch.inference_mode(), Launches() as launches:
            decoder._run((4, 24))
        assert not set(launches.names).intersection(Launches.WAITS)
        seen.append((launches.names, places, decoder._now.data_ptr()))
    assert seen[0] == seen[1] and len(seen[0][0]) > 100


def test_rows_of_padding_reach_no_expert_and_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(parallelize(tiny_model("Qwen3-MoE", seed).eval()), 4, 24, row_sizes=(1, 4), column_sizes=(24,))
    asked = prompts(seed, [5, 4, 7])
    newest = [int(decoder.fill(row, prompt).argmax()) for row, prompt in enumerate(asked)]
    chosen: list[torch.Tensor] = []
    call = MoEKernel.__call__

    def noted(self: Any, x: Any, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        chosen.append(ids.clone())
        return call(self, x, ids, *rest, **more)

    monkeypatch.setattr(MoEKernel, "__call__", noted)
    logits = decoder.step(newest, [5, 4, 7]).clone()
    assert logits.shape == (3, 64) and chosen
    for ids in chosen:
        assert ids.shape[0] == 4 and (ids[3] == -1).all() and (ids[:3] >= 0).all()
    # the fourth row had been in use before, with anything in it
    other = Decoder(decoder.model, 4, 24, row_sizes=(1, 4), column_sizes=(24,))
    for row, prompt in enumerate([*asked, prompts(seed, [23])[0]]):
        other.fill(row, prompt)
    assert torch.equal(other.step(newest, [5, 4, 7]), logits)


def test_a_row_moves_and_its_place_is_used_again(seed: int) -> None:
    untouched = tiny_model("DeepSeek-V3", seed).eval()
    first, second, third = prompts(seed, [9, 6, 2])
    decoder = Decoder(parallelize(tiny_model("DeepSeek-V3", seed).eval()), 4, 24, **SIZES)
    decoder.fill(0, first)
    token = int(decoder.fill(1, second).argmax())
    decoder.move(1, 0, 6)
    other = int(decoder.fill(1, third).argmax())
    rows = decoder.step([token, other], [6, 2]).argmax(-1).tolist()
    assert [[token, rows[0]], [other, rows[1]]] == [alone(untouched, prompt, 2) for prompt in (second, third)]


def on_ranks(rank: int, ranks: int, family: str, seed: int) -> list[tuple[Any, Any, list[str]]]:
    """Ranks with other numbers of rows, so with other shapes; the last one without any."""
    model, untouched = (tiny_model(family, seed).eval() for _ in range(2))
    parallelize(model, EPGroup(timeout=60))
    asked, new = prompts(seed + rank, [(5, 2, 9)[rank]] * (3, 1, 0)[rank]), 6
    expected, results = [alone(untouched, prompt, new) for prompt in asked], []
    for dispatcher in ("symmetric", "auto"):
        decoder = Decoder(model, 4, 24, dispatcher=dispatcher, **SIZES)
        got: list[list[int]] = [[] for _ in asked]
        for row in range(3):
            if row < len(asked):
                got[row].append(int(decoder.fill(row, asked[row]).argmax()))
            else:
                decoder.no_prompt()
        for step in range(new - 1):
            lengths = [len(prompt) + step for prompt in asked]
            for tokens, row in zip(got, decoder.step([tokens[-1] for tokens in got], lengths), strict=True):
                tokens.append(int(row.argmax()))
        results.append((got, expected, sorted({kernel.dispatcher.name for kernel in decoder.kernels})))
    return results


def test_ranks_with_other_numbers_of_rows_and_without_any_decode_together(seed: int) -> None:
    results = run_ranks(on_ranks, 3, args=("gpt-oss", seed))
    for by_dispatcher in results:
        for (got, expected, names), name in zip(by_dispatcher, ("symmetric", "all_to_all"), strict=True):
            assert got == expected and names == [name]
    assert [len(symmetric[0]) for symmetric, _ in results] == [3, 1, 0]


def test_why_there_are_no_graphs_is_said_and_steps_run_without_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(tiny_model("Mixtral", seed).eval())
    decoder = Decoder(model, 2, 24)
    assert decoder.capture(progress=False) == "the model is on cpu, and only CUDA has graphs"
    assert decoder.step([3], [0]).shape == (1, 64)
    decoder.device = torch.device("cuda")
    assert "experts='reference' need the host" in str(decoder.unfit())
    monkeypatch.setattr(type(decoder.kernels[0].experts), "cuda_graph", True)
    assert decoder.unfit() is None
    decoder.kernels[0].validate = True
    assert "validate=True" in str(decoder.unfit())
    local = type(decoder.kernels[0].dispatcher)
    monkeypatch.setattr(local, "capabilities", dataclasses.replace(local.capabilities, cuda_graph=False))
    assert "dispatcher='local' counts rows on the host; 'symmetric' does not" in str(decoder.unfit())


def test_what_has_no_rows_or_no_room_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="Qwen3Next.*keys and values"):
        Decoder(tiny_model("Qwen3-Next", seed), 2, 24)
    model = parallelize(tiny_model("Llama 4", seed).eval())
    with pytest.raises(ValueError, match="row_sizes=.*must ascend from 1 or more to 4 or more"):
        Decoder(model, 4, 24, row_sizes=(1, 2))
    with pytest.raises(ValueError, match="column_sizes=.*24 or more"):
        Decoder(model, 4, 24, column_sizes=(8, 4))
    with pytest.raises(ValueError, match="length=9000: must be below floor_scale=8192"):
        Decoder(model, 4, 9000)
    decoder = Decoder(model, 2, 24, column_sizes=(24,))
    with pytest.raises(ValueError, match="1 rows of up to 24 tokens: there is room for 2 of 24"):
        decoder.step([1], [24])
    with pytest.raises(ValueError, match="3 rows"):
        decoder.step([1] * 3, [1] * 3)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2'.*sdpa or eager"):
        Decoder(model, 2, 24)


# ---- on GPUs


def against_eager(model: Any, dispatcher: str, plan: list[list[int]], seed: int, rows: int) -> tuple[str | None, float]:
    """Logits of captured and of eager steps for the same rows that come and go; the largest difference, relative.
    `rows`: the most of any step and any rank, so that all ranks read equally many prompts."""
    sizes: dict[str, Any] = {"row_sizes": (1, 2, 4), "column_sizes": (64, 192)}
    captured, eager = (Decoder(model, 4, 192, dispatcher=dispatcher, **sizes) for _ in range(2))
    why = captured.capture(progress=False)
    worst, generator = 0.0, torch.Generator().manual_seed(seed)
    for lengths in plan:  # of the rows of one step; every row is read anew
        for row in range(rows):
            for decoder in (captured, eager):
                if row < len(lengths):
                    prompt = torch.randint(3, 64, (lengths[row],), generator=torch.Generator().manual_seed(seed + row))
                    decoder.fill(row, prompt.tolist())
                else:
                    decoder.no_prompt()
        for step in range(3):
            tokens = torch.randint(3, 64, (len(lengths),), generator=generator).tolist()
            now = [length + step for length in lengths]
            a, b = captured.step(tokens, now).float(), eager.step(tokens, now).float()
            assert a.isfinite().all() and a.shape == (len(lengths), 64)
            if lengths:
                worst = max(worst, float((a - b).norm() / b.norm()))
    return why, worst


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Qwen3-MoE", "DeepSeek-V3", "gpt-oss", "Llama 4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_give_what_eager_ones_give(family: str, dtype: torch.dtype, seed: int) -> None:
    model = parallelize(tiny_model(family, seed).eval().to("cuda", dtype))
    why, worst = against_eager(model, "auto", [[5, 60, 9], [100], [30, 2], [], [3, 3, 3, 62]], seed, 4)
    assert why is None and worst < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.gpu
def test_captured_steps_give_the_tokens_of_generate_on_a_gpu(seed: int) -> None:
    untouched = tiny_model("Qwen3-MoE", seed).eval().cuda()
    asked = prompts(seed, [7, 1, 3])
    expected = [alone(untouched, prompt, 8) for prompt in asked]
    decoder = Decoder(parallelize(tiny_model("Qwen3-MoE", seed).eval().cuda()), 4, 24, **SIZES)
    assert decoder.capture(progress=False) is None
    got = decoded(decoder, asked, 8)
    assert [tokens[:7] for tokens in got[:2]] == [tokens[:7] for tokens in expected[:2]]
    assert got[2][:8] == expected[2]


def captured_on_ranks(rank: int, ranks: int, seed: int) -> list[Any]:
    ep = EPGroup(timeout=60)
    model = parallelize(tiny_model("Qwen3-MoE", seed).eval().to("cuda", torch.bfloat16), ep)
    plans = ([[5, 60, 9], [], [100], [3, 3, 3, 62], []], [[], [7], [100, 4], [], []])
    out: list[Any] = [*against_eager(model, "auto", plans[rank], seed + rank, 4)]
    names = {kernel.dispatcher.name for kernel in Decoder(model, 4, 64).kernels}
    out.append((names, Decoder(model, 4, 64, dispatcher="all_to_all").capture(progress=False)))
    torch.cuda.synchronize()
    for channel in ep.channels:
        channel.check()
    return out


@pytest.mark.gpu2
def test_captured_steps_on_two_gpus_give_what_eager_ones_give_whoever_has_rows(seed: int) -> None:
    for why, worst, (names, refused) in run_ranks(captured_on_ranks, 2, args=(seed,), backend="nccl", timeout=170):
        assert why is None and worst < 2e-2 and names == {"symmetric"}
        assert "dispatcher='all_to_all' counts rows on the host" in refused


def test_a_step_says_what_an_earlier_one_found_wrong_though_a_graph_asks_nobody(seed: int) -> None:
    decoder = Decoder(parallelize(tiny_model("Mixtral", seed).eval()), 2, 24, **SIZES)
    decoder.fill(0, [3, 4])
    decoder.step([5], [2])
    late: Any = SimpleNamespace(check=lambda: (_ for _ in ()).throw(PeerError("rank 1 has not delivered")))
    kernel = decoder.kernels[0]
    kernel.dispatcher.ep = late
    with pytest.raises(PeerError, match="rank 1 has not delivered"):
        decoder.step([5], [3])
    kernel.dispatcher.ep = None
    kernel.overflow = Overflow("raise", 1, "layer '0'")
    kernel.overflow._counts = kernel.overflow._seen = torch.tensor([0, 2])  # as a replay leaves it
    with pytest.raises(RuntimeError, match="expert_capacity=1"):
        decoder.step([5], [3])

"""Generates with a `transformers` MoE model whose experts are spread over ranks, each rank with prompts of its own.

    python examples/hf_generate.py
    torchrun --nproc-per-node=2 examples/hf_generate.py --check
    torchrun --nproc-per-node=8 examples/hf_generate.py --path /models/Qwen3-30B-A3B --prompt "The moon is"

Without --path the model is a tiny Qwen3-MoE with random weights. With it, each rank reads its own experts alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from model import join_ranks, run_command
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from epmoe.integrations.transformers import from_pretrained, parallelize, routed_experts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def tiny_model(seed: int) -> Qwen3MoeForCausalLM:
    """The same random weights on every rank."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).eval()


@app.command()
def generate(
    path: Annotated[Path | None, typer.Option(help="A directory of safetensors; none: a tiny random model.")] = None,
    prompt: Annotated[str, typer.Option(help="With --path.")] = "Once upon a time",
    new_tokens: Annotated[int, typer.Option(min=1)] = 16,
    check: Annotated[bool, typer.Option(help="Compare with the untouched tiny model, in fp32.")] = False,
    seed: int = 0,
) -> None:
    """Generate greedily on every rank."""
    ep, device = join_ranks()
    rank = 0 if ep is None else ep.rank
    tokenizer: Any = None
    if path is None:
        model: Any = parallelize(tiny_model(seed).to(device), ep)
        generator = torch.Generator().manual_seed(seed + rank)
        tokens = torch.randint(256, (1, 4 + rank), generator=generator).to(device)  # another length on each rank
    else:
        model = from_pretrained(path, ep, device=device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokens = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    layers = routed_experts(model).values()
    if rank == 0:
        print(f"{type(model).__name__}: {len(layers)} MoE layers, {next(iter(layers))}", flush=True)
    out = model.generate(tokens, max_new_tokens=new_tokens, do_sample=False)
    print(f"rank {rank}: {out[0].tolist() if tokenizer is None else tokenizer.decode(out[0])}", flush=True)
    if check and path is None:
        expected = tiny_model(seed).to(device).generate(tokens, max_new_tokens=new_tokens, do_sample=False)
        if not torch.equal(out, expected):
            raise SystemExit(f"rank {rank}: the untouched model gives {expected[0].tolist()}")
        print(f"rank {rank}: the same tokens as the untouched model's", flush=True)
    if ep is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_command(app)

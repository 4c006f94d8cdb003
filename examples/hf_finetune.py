"""Fine-tunes a `transformers` MoE model with its experts spread over ranks, each rank with its own part of the batch.

    python examples/hf_finetune.py
    torchrun --nproc-per-node=2 examples/hf_finetune.py --steps 100
    torchrun --nproc-per-node=2 examples/serve.py --path runs/hf_finetune

Without --path the model is a tiny Qwen3-MoE of bytes with random weights; with it, each rank reads its own experts
alone. The text is one file, Python's own tokenizer by default. What is saved at the end is the whole model as
`transformers` writes it, and plain `transformers` reads it back here to show that.

The loss is the model's own, with its router's. How ranks share gradients: epmoe/integrations/gradients.py.
"""

from __future__ import annotations

import sys
import tokenize
from pathlib import Path
from typing import Annotated, Any

try:
    import transformers
except ModuleNotFoundError:
    sys.exit("examples/hf_finetune.py needs transformers: pip install 'epmoe[transformers]', or '.[transformers]' here")

import torch
import torch.distributed as dist
import typer
from model import join_ranks, mixed_precision, run_command, share_of
from torch import Tensor

from epmoe import EPGroup
from epmoe.integrations.gradients import clip_grad_norm_, reduce_gradients
from epmoe.integrations.transformers import from_pretrained, parallelize, routed_experts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def tiny_model(seed: int) -> Any:
    """The same random weights on every rank; tokens are bytes."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        output_router_logits=True,  # adds the model's own load-balancing loss
        router_aux_loss_coef=0.01,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def read_tokens(data: Path, path: Path | None, vocabulary: int) -> Tensor:
    """All of the text, int64: by the checkpoint's tokenizer, or as bytes."""
    if path is not None and any(path.glob("tokenizer*")):
        return transformers.AutoTokenizer.from_pretrained(path)(data.read_text(), return_tensors="pt").input_ids[0]
    if vocabulary < 256:
        raise ValueError(f"--path {path}: has no tokenizer, and its {vocabulary} tokens can't be bytes")
    return torch.tensor(list(data.read_bytes()))


def mean_over_ranks(loss: Tensor, ep: EPGroup | None) -> float:
    """Of what each rank has found."""
    loss = loss.detach().clone()
    if ep is not None:
        dist.all_reduce(loss, group=ep.process_group)
        loss /= ep.num_ranks
    return loss.item()


@app.command()
def finetune(
    path: Annotated[Path | None, typer.Option(help="A directory of safetensors; none: a tiny random model.")] = None,
    data: Annotated[Path, typer.Option(help="A text file.")] = Path(tokenize.__file__),
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = Path("runs/hf_finetune"),
    steps: Annotated[int, typer.Option(min=1)] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step, over all ranks.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 64,
    lr: Annotated[float | None, typer.Option(help="Peak; default 3e-3 for the tiny model, 1e-5 with --path.")] = None,
    check: Annotated[bool, typer.Option(help="Exit with 1 unless the loss has gone down by a fifth.")] = False,
    seed: int = 0,
) -> None:
    """Fine-tune, save, and read back."""
    transformers.utils.logging.disable_progress_bar()
    ep, device = join_ranks()
    rank, ranks = (0, 1) if ep is None else (ep.rank, ep.num_ranks)
    if batch % ranks:
        raise typer.BadParameter(f"{batch}: must be a multiple of the {ranks} ranks", param_hint="--batch")
    if path is None:
        model: Any = parallelize(tiny_model(seed).to(device), ep)
    else:
        model = from_pretrained(path, ep, device=device, dtype=torch.float32)
    model.train()
    text = read_tokens(data, path, model.config.get_text_config().vocab_size)
    if len(text) < context:
        raise typer.BadParameter(f"{data}: has {len(text)} tokens, --context {context} needs more", param_hint="--data")
    peak = lr or (3e-3 if path is None else 1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, pct_start=0.1)
    if rank == 0:
        layers = routed_experts(model).values()
        print(f"{type(model).__name__}: {len(layers)} MoE layers, {next(iter(layers))}", flush=True)

    losses: list[float] = []
    for step in range(steps):
        # Every rank draws the whole batch and takes its part: the number of ranks does not change what is seen.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(text) - context + 1, (batch,), generator=generator)[share_of(batch, ep)]
        tokens = text[starts[:, None] + torch.arange(context)].to(device)
        with mixed_precision(device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        reduce_gradients(model, ep)  # the mean of the ranks' losses, whose parts of the batch are of one size
        clip_grad_norm_(model, ep, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss, ep))
        if rank == 0 and (step % max(1, steps // 10) == 0 or step == steps - 1):
            print(f"step {step + 1}/{steps}  loss {losses[-1]:.4f}", flush=True)

    model.eval()
    model.save_pretrained(out)  # on all ranks: rank 0 gathers the experts and writes
    if path is not None and rank == 0 and any(path.glob("tokenizer*")):
        transformers.AutoTokenizer.from_pretrained(path).save_pretrained(out)
    if path is None:
        tokens = text[None, :context].to(device)
        with torch.no_grad():
            ours = model(input_ids=tokens).logits
        if rank == 0:
            plain = transformers.AutoModelForCausalLM.from_pretrained(out).to(device).eval()
            with torch.no_grad():
                theirs = plain(input_ids=tokens).logits
            error = ((ours - theirs).norm() / theirs.norm()).item()
            print(f"read back by transformers alone: logits differ by {error:.1e}", flush=True)
            if not error < 1e-4:
                sys.exit("the saved model is another one")
    if rank == 0:
        print(f"saved: {out}", flush=True)
    if ep is not None:
        dist.destroy_process_group()
    tenth = max(1, steps // 10)
    before, after = (sum(part) / len(part) for part in (losses[:tenth], losses[-tenth:]))
    if check and not after < 0.8 * before:
        sys.exit(f"--check: the loss went from {before:.4f} to {after:.4f}")


if __name__ == "__main__":
    run_command(app)

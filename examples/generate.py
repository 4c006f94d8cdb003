"""Continues a prompt with the model that train_lm.py wrote, on any number of ranks.

    python examples/generate.py --prompt "class "
    torchrun --nproc-per-node=3 examples/generate.py --num-samples 2 --temperature 0.7 --top-p 0.95

The samples are split over the ranks. A rank without one takes part all the same, with zero tokens: the others' bytes
need its experts. Sample n depends on the seed and n, not on who draws it.
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from model import ByteModel, ModelConfig, decode, join_ranks, run_command, share_of

from epmoe.integrations.checkpoint import load_checkpoint, read_extra

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Option(help="The --out of train_lm.py.")] = Path("runs/demo"),
    prompt: str = "def ",
    new_bytes: Annotated[int, typer.Option(min=1)] = 300,
    num_samples: Annotated[int, typer.Option(min=1)] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest byte.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest bytes; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only the likeliest bytes of this probability.")
    ] = 0.95,
    dispatcher: Annotated[str, typer.Option(help="auto, local, all_gather or all_to_all.")] = "auto",
    seed: int = 0,
) -> None:
    """Continue a prompt."""
    if not prompt:
        raise typer.BadParameter("must not be empty", param_hint="--prompt")
    ep, device = join_ranks()
    main = ep is None or ep.rank == 0
    model = ByteModel(ModelConfig(**{**read_extra(checkpoint)["model"], "dispatcher": dispatcher}), ep, device)
    load_checkpoint(checkpoint, model, ep)

    mine = range(num_samples)[share_of(num_samples, ep)]
    stream = codecs.getincrementaldecoder("utf-8")(errors="replace")
    live = main and num_samples == 1 and len(mine) == 1
    if live:
        print(prompt, end="", flush=True)
    written: list[list[int]] = []
    for step in decode(
        model,
        prompt.encode(),
        new_bytes,
        seeds=[seed + n for n in mine],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    ):
        written.append(step)
        if live:
            print(stream.decode(bytes(step)), end="", flush=True)
    texts = [bytes(column).decode(errors="replace") for column in zip(*written, strict=True)]

    everyone: list[list[str]] = [texts]
    if ep is not None:
        everyone = [[]] * ep.num_ranks
        dist.all_gather_object(everyone, texts, group=ep.process_group)
        dist.destroy_process_group()
    if main and not live:
        for number, text in enumerate(text for texts in everyone for text in texts):
            print(f"---- sample {number} ----\n{prompt}{text}", flush=True)
    elif live:
        print(stream.decode(b"", final=True))


if __name__ == "__main__":
    run_command(app)

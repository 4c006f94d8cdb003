"""Trains a `transformers` MoE model with its `Trainer`, the experts spread over ranks.

    python examples/hf_trainer.py
    torchrun --nproc-per-node=2 examples/hf_trainer.py --steps 100

The model and the text are those of examples/hf_finetune.py, which writes the loop out. Here `Trainer` has it: batches,
DDP around what every rank holds, optimizer, schedule, logs. `ExpertCallback` does the rest: the experts' gradients,
clipping by the norm of the whole model, checkpoints that load at any number of ranks.
"""

from __future__ import annotations

import sys
import tokenize
from pathlib import Path
from typing import Annotated, Any

try:
    import accelerate  # noqa: F401  (Trainer needs it)
    import transformers
except ModuleNotFoundError as error:
    sys.exit(f"examples/hf_trainer.py needs {error.name}: pip install 'epmoe[transformers]' accelerate")

import torch
import torch.distributed as dist
import typer
from hf_finetune import read_tokens, tiny_model
from model import run_command
from torch import Tensor

from epmoe.integrations.parallel import make_mesh
from epmoe.integrations.trainer import ExpertCallback
from epmoe.integrations.transformers import parallelize, routed_experts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of `context` tokens from random places of a text."""

    def __init__(self, text: Tensor, context: int, count: int, seed: int) -> None:
        self.text, self.context = text, context
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - context + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.text[self.starts[index] :][: self.context]
        return {"input_ids": tokens, "labels": tokens}


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="A text file.")] = Path(tokenize.__file__),
    out: Annotated[Path, typer.Option(help="Where the model and its checkpoints go.")] = Path("runs/hf_trainer"),
    steps: Annotated[int, typer.Option(min=1)] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step on each rank.")] = 4,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 64,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; none without.")] = None,
    seed: int = 0,
) -> None:
    """Train, and save the whole model."""
    arguments = transformers.TrainingArguments(  # joins the ranks that torchrun has started
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 10),
        logging_steps=max(1, steps // 10),
        max_grad_norm=0,  # these two are ExpertCallback's: Trainer knows one rank's experts only
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    if not dist.is_initialized():  # one process
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = make_mesh(ep_ranks=dist.get_world_size())
    model: Any = parallelize(tiny_model(seed).to(arguments.device), mesh.ep)
    if mesh.ep.rank == 0:
        print(next(iter(routed_experts(model).values())), flush=True)
    text = read_tokens(data, None, model.config.vocab_size)
    callback = ExpertCallback(model, mesh, max_norm=1.0, save_every=save_every)
    count = steps * batch * mesh.ep.num_ranks
    transformers.Trainer(
        model, arguments, train_dataset=Windows(text, context, count, seed), callbacks=[callback]
    ).train()
    assert callback.norm is not None
    model.eval()
    model.save_pretrained(out)  # on all ranks: rank 0 gathers the experts and writes
    if mesh.ep.rank == 0:
        print(f"the last gradient's norm: {callback.norm.item():.3f}; saved: {out}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(app)

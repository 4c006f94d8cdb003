"""Trains a byte-level MoE language model on real text, with its experts spread over all ranks.

    python examples/train_lm.py                                         one process
    torchrun --nproc-per-node=2 examples/train_lm.py                    two ranks, on GPUs or CPU
    python examples/generate.py --prompt "def " --num-samples 3         what it learned

Every rank brings its own part of the batch (data parallel) and holds its own part of the experts (expert parallel). The
loss is a sum over bytes divided by the bytes of the whole batch, so any number of ranks takes the same steps.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from model import VOCAB, ByteModel, ModelConfig, decode, join_ranks, mixed_precision, run_command, share_of
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from epmoe import EPGroup
from epmoe.integrations.checkpoint import load_checkpoint, save_checkpoint
from epmoe.integrations.gradients import clip_grad_norm_, reduce_gradients

# ---- text


def read_text(data: Path | None, context: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, uint8. About every twentieth file is held out; of a single one, its last twentieth.

    None: the standard library of the running Python, without its tests.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else data
    pattern = "*.py" if data is None else "*"
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"} if data is None else set()
    paths = [root] if root.is_file() else sorted(root.rglob(pattern))
    names = [(path, path.relative_to(root)) for path in paths if path.is_file()]
    names = [(path, name) for path, name in names if not skip & set(name.parts)]
    files = [(path.read_bytes(), zlib.crc32(name.as_posix().encode()) % 20 == 0) for path, name in names]
    train, held_out = (b"\n\n".join(text for text, held in files if held == part) for part in (False, True))
    if not train or not held_out:
        text = train + held_out
        train, held_out = text[: len(text) * 19 // 20], text[len(text) * 19 // 20 :]
    if min(len(train), len(held_out)) <= context:
        sizes = f"{len(train)} bytes to train on and {len(held_out)} held out"
        raise ValueError(f"--data {root}: {len(files)} files give {sizes}: must be more than --context {context} each")
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out))  # type: ignore


def windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes [B, T] at `starts [B]`, and the byte that follows each."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


# ---- over all ranks


def total(tensor: Tensor, ep: EPGroup | None) -> Tensor:
    """The sum over all ranks."""
    if ep is not None:
        dist.all_reduce(tensor, group=ep.process_group)
    return tensor


def balance_loss(scores: Tensor, counts: Tensor, tokens: int) -> Tensor:
    """This rank's part of E · Σ_e f_e · P_e (arXiv:2101.03961), f being shares of the whole batch, not of a rank's.

    Args:
        scores: [layers, E] router scores summed over this rank's tokens.
        counts: [layers, E] bytes per expert, of all ranks.
        tokens: of all ranks.
    """
    share = counts / counts.sum(-1, keepdim=True)
    return counts.shape[-1] * (share * scores / tokens).sum(-1).mean()


@torch.no_grad()
def evaluate(model: ByteModel, text: Tensor, num_bytes: int, unigram: Tensor) -> tuple[float, float]:
    """Bits per byte on evenly spaced windows of `text`: the model's, and by the frequencies `unigram [256]` alone."""
    context, device = model.config.context, model.embed.weight.device
    count = max(1, min(num_bytes, len(text) - 1) // context)
    starts = torch.linspace(0, len(text) - context - 1, count).long()[share_of(count, model.ep)]
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    batch = 16
    for first in range(0, math.ceil(count / (model.ep.num_ranks if model.ep else 1)), batch):  # as often on every rank
        inputs, targets = windows(text, starts[first : first + batch], context, device)
        with mixed_precision(device):
            logits = model(inputs)[0]
        sums[0] += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        sums[1] -= unigram.to(device)[targets].log().sum()
    bits = total(sums, model.ep) / (count * context * math.log(2))
    return bits[0].item(), bits[1].item()


# ---- what one sees


class Display:
    """A progress bar on a terminal, now and then a line elsewhere, nothing on ranks other than 0."""

    def __init__(self, main: bool, steps: int, done: int) -> None:
        self.console = Console(quiet=not main, highlight=False, soft_wrap=True)
        self.steps, self.printed = steps, done
        self.bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not (main and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", total=steps, completed=done)

    def show(self, step: int, bits: float, rate: float, load: Tensor) -> None:
        """`load [layers, E]`: bytes per expert. The curve is their sum over layers, 1.0x an even share."""
        relative = load / load.double().mean(-1, keepdim=True)
        curve = "".join("▁▂▃▄▅▆▇█"[min(7, int(4 * r))] for r in relative.mean(0).tolist()[:32])
        line = f"{bits:.3f} bits/byte  {rate:,.0f} bytes/s  load {curve} {relative.min():.2f}x-{relative.max():.2f}x"
        self.bar.update(self.task, completed=step, description=line)
        if not self.console.is_terminal and (step - self.printed >= self.steps / 10 or step == self.steps):
            self.printed = step
            self.console.print(f"step {step}/{self.steps}  {line}")


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress)))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    data: Annotated[Path | None, typer.Option(help="A file or a folder; default: Python's standard library.")] = None,
    out: Annotated[Path, typer.Option(help="Where checkpoints and log.jsonl go.")] = Path("runs/demo"),
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in --out, on any number of ranks.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Of the whole run; the learning rate follows it.")] = 400,
    stop_at: Annotated[int | None, typer.Option(min=1, help="Save and end after this step already.")] = None,
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences per step, over all ranks.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Bytes per sequence.")] = 256,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    balance: Annotated[float, typer.Option(help="Coefficient of the load-balancing loss.")] = 0.02,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=8)] = 128,
    experts: Annotated[int, typer.Option(min=1, help="Routed experts per layer, over all ranks.")] = 8,
    top_k: Annotated[int, typer.Option(min=1, help="Experts per byte.")] = 2,
    intermediate: Annotated[int, typer.Option(min=1, help="Width inside an expert.")] = 128,
    dispatcher: Annotated[str, typer.Option(help="auto, local, all_gather or all_to_all.")] = "auto",
    dispatch: Annotated[str | None, typer.Option(help="Send rows in eight bits: fp8_block, fp8_row, int8_row.")] = None,
    activation_checkpoint: Annotated[bool, typer.Option(help="Recompute each layer in backward.")] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    eval_bytes: Annotated[int, typer.Option(min=1, help="Held-out bytes to evaluate on.")] = 65536,
    prompt: Annotated[str, typer.Option(help="What the trained model continues at the end.")] = "def ",
    check: Annotated[bool, typer.Option(help="Exit with 1 unless held-out loss < 0.8 x unigram.")] = False,
    seed: int = 0,
) -> None:
    """Train a byte-level MoE language model."""
    ep, device = join_ranks()
    main, ranks = (ep is None or ep.rank == 0), (1 if ep is None else ep.num_ranks)
    text, held_out = read_text(data, context)
    if ep is not None:
        ep.check_same("--data", {"bytes": len(text), "crc32": zlib.crc32(text.numpy().tobytes())})
    unigram = (torch.bincount(text.long(), minlength=VOCAB) + 1).double()
    unigram /= unigram.sum()

    heads = max(1, hidden // 32)
    config = ModelConfig(layers, hidden, heads, experts, top_k, intermediate, context, dispatcher, dispatch)
    model = ByteModel(config, ep, device, seed)
    model.recompute = activation_checkpoint
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    done = load_checkpoint(out, model, ep, optimizer)["step"] if resume else 0

    last = min(steps, stop_at or steps)
    display = Display(main, steps, done)
    display.console.print(
        f"{len(text):,} bytes to train on, {len(held_out):,} held out; {ranks} rank{'s' * (ranks > 1)} on {device.type}"
        f", {config.num_experts} experts in each of {config.num_layers} layers"
        + (f", resumed at step {done}" if resume else "")
    )
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "log.jsonl").open("a" if resume else "w") if main else None
    bytes_per_step = global_batch * context
    seen_load = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64)
    shown, since = done, time.monotonic()
    with display.bar:
        for step in range(done, last):
            # every rank draws the whole batch and takes its part: neither ranks nor a resumption change what is seen
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            starts = torch.randint(len(text) - context, (global_batch,), generator=generator)
            inputs, targets = windows(text, starts[share_of(global_batch, ep)], context, device)
            with mixed_precision(device):
                logits, scores, counts = model(inputs)
            counts = total(counts, ep)
            nll = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / bytes_per_step
            (nll + balance * balance_loss(scores, counts, bytes_per_step)).backward()
            reduce_gradients(model, ep, average=False)
            norm = clip_grad_norm_(model, ep, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, lr)
            optimizer.step()
            optimizer.zero_grad()

            seen_load += counts.cpu()
            bits = total(nll.detach().clone(), ep).item() / math.log(2)
            if log is not None:
                record = {"step": step + 1, "bits_per_byte": bits, "gradient_norm": norm.item()}
                log.write(json.dumps(record) + "\n")
            if (step + 1) % 10 == 0 or step + 1 == last:
                now = time.monotonic()
                display.show(step + 1, bits, (step + 1 - shown) * bytes_per_step / (now - since), seen_load)
                shown, since, seen_load = step + 1, now, torch.zeros_like(seen_load)
            if (step + 1) % save_every == 0 or step + 1 == last:
                if log is not None:
                    log.flush()
                save_checkpoint(out, model, ep, optimizer, {"step": step + 1, "model": vars(config)})

    if log is not None:
        log.close()

    found, by_frequency = evaluate(model, held_out, eval_bytes, unigram)
    ratio = found / by_frequency
    display.console.print(
        f"held-out: {found:.3f} bits/byte; unigram frequencies alone give {by_frequency:.3f}: {ratio:.2f} of it"
        + ("" if ratio < 1 else " - the model has learned nothing that frequencies don't know")
    )
    written = bytes(b for step in decode(model, prompt.encode(), 200, seeds=[seed] if main else []) for b in step)
    display.console.print(f"a sample: {prompt + written.decode(errors='replace')!r}", markup=False)
    display.console.print(f"checkpoint: {out}")
    if ep is not None:
        dist.destroy_process_group()
    if check and not ratio < 0.8:
        display.console.print("--check: held-out loss is not below 0.8 x unigram")
        sys.exit(1)


if __name__ == "__main__":
    run_command(app)

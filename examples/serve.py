"""Serves a `transformers` MoE model whose experts are spread over ranks: completions as OpenAI's clients ask for them.

    torchrun --nproc-per-node=2 examples/serve.py --tiny
    torchrun --nproc-per-node=8 examples/serve.py --path /models/Qwen3-30B-A3B
    curl localhost:8000/v1/completions --json '{"model": "tiny", "prompt": "Once upon", "max_tokens": 8}'

Needs `pip install "epmoe[serve]"`. Rank 0 speaks HTTP and says who does what; each rank generates for its own share of
the requests, which come and go between steps, and all share the experts. On GPUs decoding replays CUDA graphs. How it
works, and its limits: docs/serving.md; the parts: examples/serving/.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

try:
    import transformers
    import uvicorn
    from hf_generate import tiny_model
    from serving.api import Served, build_app
    from serving.engine import Control, Worker, run
    from serving.scheduler import Scheduler
    from serving.text import ByteTokenizer, Tokenizer
except ModuleNotFoundError as error:
    sys.exit(f"examples/serve.py needs {error.name}: pip install 'epmoe[serve]', or '.[serve]' in a clone")

from model import join_ranks, run_command

from epmoe import EPGroup
from epmoe.dispatch import DISPATCHERS
from epmoe.integrations.transformers import from_pretrained, parallelize
from epmoe.integrations.transformers.decode import Decoder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def load_tokenizer(path: Path | None, vocabulary: int) -> Tokenizer:
    """The checkpoint's, or bytes where it has none."""
    if path is not None and any((path / name).is_file() for name in TOKENIZER_FILES):
        return transformers.AutoTokenizer.from_pretrained(path)
    if vocabulary < 256:
        raise ValueError(f"--path {path}: has no tokenizer, and its {vocabulary} tokens can't be bytes")
    return ByteTokenizer()


def load_model(path: Path | None, ep: EPGroup | None, device: torch.device, seed: int, **options: Any) -> Any:
    """Parallelized over `ep`, in eval mode."""
    if path is None:
        return parallelize(tiny_model(seed).to(device), ep, **options)
    return from_pretrained(path, ep, device=device, **options)


class Http:
    """The web server in a thread of its own, around one listening socket."""

    def __init__(self, application: Any, listening: socket.socket) -> None:
        config = uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=5, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)

    def start(self) -> None:
        """Returns once it answers."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the web server did not start; its message is above")
            time.sleep(0.01)

    def stop(self) -> None:
        """Sends what is still to be sent, then closes."""
        self._server.should_exit = True
        self._thread.join(timeout=10)


class Signals:
    """Whether SIGINT or SIGTERM has come."""

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, *_: Any) -> None:
        self.came = True


def listen(host: str, port: int) -> socket.socket:
    """Before anything slow: a port that is taken should be known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        sys.exit(f"--host {host} --port {port}: {error.strerror}; choose another with --port, or 0 for any")
    return listening


@app.command()
def serve(
    path: Annotated[Path | None, typer.Option(help="A directory of safetensors.")] = None,
    tiny: Annotated[bool, typer.Option(help="A tiny model with random weights instead.")] = False,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; else the directory's name.")] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of prompt and answer together.")] = 4096,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests at a time on each rank.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait for a place; then 429.")] = 256,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests to finish when stopped.")] = 10.0,
    dtype: Annotated[str, typer.Option(help="With --path: auto, bfloat16, float16 or float32.")] = "auto",
    dispatcher: Annotated[str, typer.Option(help="As of MoEConfig; auto: one for prompts, one to decode.")] = "auto",
    graphs: Annotated[bool, typer.Option(help="Decode in CUDA graphs, where that can be.")] = True,
    seed: Annotated[int, typer.Option(help="Of the tiny model's weights.")] = 0,
) -> None:
    """Serve completions."""
    if (path is None) != tiny:
        raise typer.BadParameter("give either --path DIR or --tiny")
    if dtype not in ("auto", *DTYPES):
        raise typer.BadParameter(f"{dtype!r}: must be auto, {', '.join(DTYPES)}", param_hint="--dtype")
    ep, device = join_ranks()
    listening = listen(host, port) if ep is None or ep.rank == 0 else None
    options: dict[str, Any] = {"dispatcher": dispatcher}
    if dispatcher in DISPATCHERS and DISPATCHERS[dispatcher].capabilities.max_tokens:
        options["max_tokens_per_rank"] = max(max_length, max_batch)
    if path is not None:
        options["dtype"] = DTYPES.get(dtype)
    model = load_model(path, ep, device, seed, **options)
    text = model.config.get_text_config()
    max_length = min(max_length, text.max_position_embeddings)
    rank = 0 if ep is None else ep.rank
    decoder = Decoder(model, max_batch, max_length, dispatcher=dispatcher)
    why = decoder.capture(progress=rank == 0) if graphs else "--no-graphs"
    how = f"in {len(decoder.shapes)} CUDA graphs" if why is None else f"without CUDA graphs: {why}"
    print(f"rank {rank} decodes {how}; keys and values take {decoder.cache.nbytes / 2**30:.2f} GiB", flush=True)
    worker, control = Worker(decoder, rank, max_batch), Control(ep)
    signals = Signals()

    if listening is None:
        run(worker, control, None, lambda: signals.came)
    else:
        end = model.generation_config.eos_token_id
        served = Served(
            name or ("tiny" if path is None else path.resolve().name),
            load_tokenizer(path, text.vocab_size),
            text.vocab_size,
            max_length,
            frozenset(end if isinstance(end, list) else [] if end is None else [end]),
        )
        scheduler = Scheduler(control.ranks, max_batch, max_waiting, grace)
        http = Http(build_app(served, scheduler), listening)
        http.start()
        place = f"[{host}]" if ":" in host else host
        print(
            f"serving {served.name!r} on http://{place}:{listening.getsockname()[1]}, {control.ranks} "
            f"rank{'s' * (control.ranks > 1)} on {device.type}, process {os.getpid()}",
            flush=True,
        )
        try:
            run(worker, control, scheduler, lambda: signals.came)
        except BaseException:
            scheduler.fail("the engine has failed; the server's log says why")
            raise
        finally:
            http.stop()
        print(f"stopped after {sum(scheduler.done)} requests", flush=True)
    if ep is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_command(app)

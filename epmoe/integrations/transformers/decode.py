"""`Decoder`: one token more for each of several rows, in steps of a few fixed shapes that CUDA graphs can hold.

    fill(row, prompt) ──► logits          the prompt is read as ever, its keys and values go to their row
    step(tokens, lengths) ──► logits      rows 0 to n - 1, run as the smallest shape [B, W] that holds them
    step([], [])                          a rank without rows: its experts, for the others' tokens

Tokens, positions, masks and the cache are tensors that stay where they are, so a step is the same launches every time:
on GPUs each shape is captured once, with experts whose dispatcher asks nothing of the host, and then replayed. Rows of
padding go to no expert. Ranks need not agree on a shape, since each has places of its own at the others.

n rows of this rank, B rows of a shape, S rows that there is room for, L positions, W of them looked at, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor
from transformers import DynamicCache

from epmoe.integrations.transformers.experts import RoutedExperts
from epmoe.integrations.transformers.slots import Sight, SlotCache

PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
FEWEST_COLUMNS = 512
ALIGN = 64  # positions; masks of attention kernels want their rows aligned

Shape = tuple[int, int]


class Decoder:
    """Decoding with room for S rows of L positions. Collective: all ranks make one alike, and call it equally often.

    Args:
        model: a causal language model of `transformers` in eval mode, parallelized or not; with its adapters and
            quantization already, since kernels are chosen here.
        rows: S, the same on all ranks.
        length: L, tokens of prompt and answer together.
        dispatcher: of the experts while decoding, as of `MoEConfig`; `auto` is `symmetric` where GPUs reach each other.
        row_sizes, column_sizes: B and W of the shapes, ascending, the same on all ranks; None: powers of two up to S,
            and powers of four from 512 up to L.

    Raises:
        ValueError: layers that keep more than keys and values (linear attention, indexers), attention that takes no
            mask, or shapes without room for S and L.

    Example::

        decoder = Decoder(model, rows=8, length=4096)
        why_not = decoder.capture()  # None on GPUs
        token = int(decoder.fill(0, prompt).argmax())
        token = int(decoder.step([token], [len(prompt)]).argmax())
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        length: int,
        *,
        dispatcher: str = "auto",
        row_sizes: Sequence[int] | None = None,
        column_sizes: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.row_sizes = tuple(row_sizes or growing(1, 2, rows))
        self.column_sizes = tuple(column_sizes or growing(FEWEST_COLUMNS, 4, -(-length // ALIGN) * ALIGN))
        for name, sizes, most in (("row_sizes", self.row_sizes, rows), ("column_sizes", self.column_sizes, length)):
            if list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] < most:
                raise ValueError(f"{name}={sizes}: must ascend from 1 or more to {most} or more")
        kept = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
        if other := kept.difference(PLAIN_LAYERS):
            raise ValueError(
                f"{type(model).__name__} keeps {', '.join(sorted(other))}: only keys and values of attention have "
                "places in rows"
            )
        self._sight = Sight(model.config.get_text_config(), length)
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self._settings: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        if "output_router_logits" in accepted:  # the loss that they are for knows no mask over cached tokens
            self._settings["output_router_logits"] = False

        layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        self.device = model.device
        self._experts = {layer: layer.manner(dispatcher, self.row_sizes[-1]) for layer in layers}
        with self._reached(None):
            self.kernels = [layer.kernel(self.device, layer.dtype) for layer in layers]
        with torch.inference_mode():
            probe = self._read([0])[0]
        self.cache = SlotCache(probe, self.row_sizes[-1], self.column_sizes[-1], self.device)
        #: tokens, positions, and 1 for rows that are none of padding
        self._now = torch.zeros(3, self.row_sizes[-1], dtype=torch.int64, device=self.device)
        self.cache.place.positions = self._now[1]
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def shapes(self) -> list[Shape]:
        """All (B, W), the largest first; (0, 0) is a rank's part without rows, where it has one."""
        sizes = [(b, w) for b in self.row_sizes for w in self.column_sizes]
        shared = any(layer.ep is not None and layer.ep.num_ranks > 1 for layer in self._experts)
        return [*sizes[::-1], *([(0, 0)] if shared else [])]

    def shape_for(self, lengths: Sequence[int]) -> Shape:
        """The smallest shape for rows that have `lengths` tokens in the cache.

        Raises:
            ValueError: more rows than S, or longer ones than L.
        """
        if not lengths:
            return 0, 0
        if len(lengths) > self.row_sizes[-1] or max(lengths) >= self.column_sizes[-1]:
            raise ValueError(
                f"{len(lengths)} rows of up to {max(lengths)} tokens: there is room for {self.row_sizes[-1]} of "
                f"{self.column_sizes[-1]} with the next one"
            )
        rows, columns = len(lengths), max(lengths) + 1
        return next(b for b in self.row_sizes if b >= rows), next(w for w in self.column_sizes if w >= columns)

    @torch.inference_mode()
    def fill(self, row: int, prompt: list[int]) -> Tensor:
        """Reads a prompt into `row`; logits `[1, V]` of its next token. Other ranks call this too, or `no_prompt`."""
        cache, logits = self._read(prompt)
        self.cache.fill(row, cache)
        return logits

    @torch.inference_mode()
    def no_prompt(self) -> None:
        """This rank's part while others read prompts: its experts, in the order that a forward meets them."""
        self._no_tokens()

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Takes the newest token of rows 0 to n - 1 in, which have `lengths` tokens so far; logits `[n, V]` of the next
        ones, valid until the next step. A rank without rows gives none of either. Raises as `check`."""
        self.check()
        shape, n = self.shape_for(lengths), len(tokens)
        if n:
            rest = [0] * (self._now.shape[1] - n)
            self._now.copy_(torch.tensor([[*tokens, *rest], [*lengths, *rest], [*[1] * n, *rest]], device="cpu"))
        if shape in self._graphs:
            graph, logits = self._graphs[shape]
            graph.replay()
        else:
            logits = self._run(shape)
        return logits[:n]

    def check(self) -> None:
        """Raises what a step has found by now that went wrong, a replayed one too; does not wait for the device.

        Raises:
            PeerError: a rank did not take part within the group's deadline.
            RuntimeError: rows found no place under `overflow="raise"`.
        """
        groups = {id(kernel.dispatcher.ep): kernel.dispatcher.ep for kernel in self.kernels}
        for group in groups.values():
            if group is not None:
                group.check()
        for kernel in self.kernels:
            kernel.overflow.poll()

    def move(self, source: int, to: int, length: int) -> None:
        """A row's first `length` keys and values to another row, which is free then to be filled."""
        with torch.inference_mode():
            self.cache.move(source, to, length)

    # ---- graphs

    def unfit(self) -> str | None:
        """Why no CUDA graph can hold a step, or None."""
        if self.device.type != "cuda":
            return f"the model is on {self.device.type}, and only CUDA has graphs"
        for kernel in self.kernels:
            if not kernel.dispatcher.capabilities.cuda_graph:
                return f"dispatcher={kernel.dispatcher.name!r} counts rows on the host; 'symmetric' does not"
            if not kernel.experts.cuda_graph:
                return f"experts={kernel.experts.name!r} need the host between their kernels; 'grouped' does not"
            if kernel.validate:
                return "validate=True reads every routing on the host"
        return None

    def capture(self, *, progress: bool = True) -> str | None:
        """Runs every shape once, then records its graph, for steps to replay. Collective; before any row is filled.

        Args:
            progress: show a bar on standard error.

        Returns:
            None, or why there are no graphs: steps run as launches then, with the same results.
        """
        if (why := self.unfit()) is not None:
            return why
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        bar = Progress(*columns, console=Console(stderr=True), disable=not progress)
        with bar, torch.inference_mode(), torch.cuda.device(self.device):
            warming = bar.add_task("compiling decode steps", total=len(self.shapes))
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # all ranks together, shape by shape
                for shape in self.shapes:
                    self._run(shape)
                    torch.cuda.synchronize()
                    bar.advance(warming)
            torch.cuda.current_stream().wait_stream(aside)
            capturing = bar.add_task("capturing decode steps", total=len(self.shapes))
            pool = torch.cuda.graph_pool_handle()
            try:
                for shape in self.shapes:
                    graph = torch.cuda.CUDAGraph()
                    # thread_local: NCCL's watchdog may ask for its events meanwhile
                    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                        logits = self._run(shape)
                    self._graphs[shape] = graph, logits
                    bar.advance(capturing)
            except (RuntimeError, ValueError) as error:
                self._graphs.clear()
                return f"capturing rows and columns {shape} failed: {str(error).splitlines()[0]}"
        return None

    # ---- one shape

    def _run(self, shape: Shape) -> Tensor:
        """What a graph holds: from the static tensors to logits `[B, V]`."""
        rows, columns = shape
        with self._reached(self._now[2, :rows] > 0):
            if not rows:
                self._no_tokens()
                return torch.empty(0, self.model.config.get_text_config().vocab_size, device=self.device)
            self.cache.place.columns = columns
            tokens, positions = self._now[0, :rows, None], self._now[1, :rows, None]
            masks = self._sight.masks(positions[:, 0], columns, self.model.dtype)
            return self._logits(tokens, positions, masks, self.cache)

    def _read(self, prompt: list[int]) -> tuple[DynamicCache, Tensor]:
        """A cache of all positions, under sliding windows too, and logits `[1, V]`."""
        cache = DynamicCache()
        tokens = torch.tensor([prompt], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        return cache, self._logits(tokens, positions, torch.ones_like(tokens), cache)

    def _logits(self, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        given = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, self._cache_name: cache}
        return self.model(**given, **self._settings).logits[:, -1]

    def _no_tokens(self) -> None:
        for layer in self._experts:
            nothing = torch.empty(0, layer.config.hidden_size, device=self.device, dtype=layer.dtype)
            ids = torch.empty(0, layer.config.top_k, device=self.device, dtype=torch.int64)
            layer(nothing, ids, ids.float())

    @contextlib.contextmanager
    def _reached(self, token_mask: Tensor | None) -> Iterator[None]:
        """The body calls experts as decoding does."""
        with contextlib.ExitStack() as stack:
            for layer, manner in self._experts.items():
                stack.enter_context(layer.reached(manner, token_mask))
            yield


def growing(first: int, factor: int, most: int) -> list[int]:
    """`first`, and each `factor` times the one before, up to `most`, which is the last."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= factor
    return [*sizes, most]

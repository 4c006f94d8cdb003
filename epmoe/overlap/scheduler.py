"""`run_microbatched`: parts of a batch take turns, so that one computes while another's rows are on their way.

    microbatch 0   attention ─ dispatch launched ┄┄┄┄┄┄┄┄┄┄┄┄ experts ─ combine launched ┄┄┄┄┄┄┄┄┄┄┄
    microbatch 1                                 attention ─ dispatch launched ┄┄┄┄┄┄┄┄ experts ─ …

`MoEKernel` yields where it would wait for a dispatch or a combine (its shared experts first); a launch that begins by
waiting for counts is put off until then, see `comm.beside`. All in one thread: an exception reaches the caller and ends
the other microbatches. In training autograd replays the mirror image, since launch and wait are nodes of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from epmoe.checks import check_bool, check_int, check_kind, require
from epmoe.comm import EPGroup
from epmoe.comm.recording import recording
from epmoe.overlap.microbatch import HAVE_GREENLET, Microbatch, ThreadState, current_microbatch
from epmoe.overlap.splitting import Splitting, split_like

Phase = Literal["prefill", "decode"]
_CLEANUP_YIELDS = 8  # how often a microbatch may yield in its cleanup


@dataclasses.dataclass(frozen=True)
class Whole:
    """An input of `run_microbatched` that goes to every part as it is, whatever its size."""

    value: Any


@dataclasses.dataclass(frozen=True)
class MinTokens:
    """Below so many tokens per rank, as a mean over ranks, a batch runs unsplit.

    Splitting doubles the launches, and the host has to keep ahead of the device with half the rows. On two H200 steps
    of 8,192 tokens per rank took twice as long in two parts: launching half a layer took the host 2.2 ms (`symmetric`)
    to 4.3 ms (`all_to_all`), computing it 1.2 ms. The defaults are where computing would last longer, by that measure;
    a faster host, or a CUDA graph, splits sooner, so measure (`epmoe bench overlap`).
    """

    prefill: int = 32768
    decode: int = 32768

    def __post_init__(self) -> None:
        for phase in get_args(Phase):
            check_int(f"MinTokens.{phase}", getattr(self, phase), 0)


def run_microbatched(
    fn: Callable[..., Any],
    *inputs: Any,
    num_microbatches: int | None = None,
    split: Sequence[int] | None = None,
    merge: Callable[[list[Any]], Any] | None = None,
    ep: EPGroup | None = None,
    phase: Phase = "prefill",
    min_tokens: MinTokens | int | Literal["auto"] | None = None,
    interleave: bool = True,
    randomness: bool | None = None,
) -> Any:
    """`fn(*inputs)`, computed in parts of the batch that overlap each other's communication.

    Args:
        fn: any callable that contains `MoELayer`s: a block, a whole model. It must treat the entries of a batch apart.
        inputs: tensors (and lists, tuples, dicts of them) are split along their first dimension, where it is as long as
            that of the first tensor, the batch; all else, and what is wrapped in `Whole`, goes to each part as it is.
        num_microbatches: how many parts; the same on all ranks. None: as many as `split` has, or 2.
        split: their sizes, summing to the batch; None: as equal as can be, the last ones may be empty.
        merge: joins the parts' results; None: tensors are concatenated along their first dimension.
        ep: agree with its ranks before running: that all split into as many parts, and whether the batch is worth it.
            One small exchange that the host waits for; skipped while a CUDA graph is captured, where all ranks count
            as having as many tokens as this one. None: the first layer inside compares the number of parts, once; with
            layers on several ranks `min_tokens` needs it.
        phase: which of `min_tokens` counts.
        min_tokens: see `MinTokens`, which "auto" stands for; a number serves both phases; None: always split.
        interleave: False runs the parts one after another: the same bits, nothing overlaps.
        randomness: give each part a random generator of its own, seeded from torch's default one, so that interleaving
            changes no dropout; None: while gradients are recorded, but not while a CUDA graph is captured, which can't
            make any.

    Under FSDP2 use `reshard_after_forward=False`: a part that ends would take away weights that another is using, which
    is an error that says so. Before torch 2.13 the same goes for backward: `set_reshard_after_backward(False)`, and
    `reshard()` after the step, see `docs/training.md`.

    Raises:
        ValueError: sizes that do not fit, a call inside another, ranks that disagree on the number of parts, or
            `min_tokens` without `ep` around layers on several ranks, or `randomness=True` while a graph is captured.
        Exception: what a part raised; the other parts are ended.
    """
    if not HAVE_GREENLET:
        raise ValueError("run_microbatched needs the package greenlet: pip install greenlet")
    if current_microbatch() is not None:
        raise ValueError("run_microbatched inside run_microbatched: split once, at the outermost call")
    if split is not None:
        require(isinstance(split, Sequence) and not isinstance(split, str), "split", split, "the sizes of the parts")
        for place, size in enumerate(split):
            check_int(f"split[{place}]", size, 0)
    if num_microbatches is None:
        num_microbatches = len(split) if split is not None else 2
    check_int("num_microbatches", num_microbatches)
    check_bool("interleave", interleave)
    check_bool("randomness", randomness, or_none=True)
    check_kind("ep", ep, (EPGroup, type(None)), "the layers' EPGroup, or None")
    require(callable(fn), "fn", fn, "a callable: run_microbatched(fn, *inputs)")
    if phase not in get_args(Phase):
        raise ValueError(f"phase={phase!r}: must be {' or '.join(get_args(Phase))}")
    leaves, spec = pytree.tree_flatten(inputs)
    first = next((leaf for leaf in leaves if _rows_of(leaf) is not None), None)
    if first is None:
        raise ValueError("no input is a tensor with a batch dimension: there is nothing to split")
    batch = first.shape[0]
    limit = _limit(min_tokens, phase)
    # before a size that is wrong here alone: other ranks wait for this one
    worth = _worth_splitting(first, num_microbatches, ep, limit)
    sizes = _sizes(batch, num_microbatches, split)
    splitting = Splitting(num_microbatches, limit) if ep is None else None
    if not worth:
        with split_like(splitting):
            return fn(*pytree.tree_unflatten([_bare(leaf) for leaf in leaves], spec))

    parts: list[list[Any]] = [[] for _ in sizes]
    for leaf in leaves:
        pieces = leaf.split(sizes) if _rows_of(leaf) == batch else [_bare(leaf)] * len(sizes)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    arguments = [pytree.tree_unflatten(part, spec) for part in parts]
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    if randomness and capturing:
        raise ValueError("randomness=True while a CUDA graph is captured, which can make no generators: leave it None")
    own_generators = torch.is_grad_enabled() and not capturing if randomness is None else randomness
    with split_like(splitting):
        results = _run(fn, arguments, first.device, interleave, own_generators)
    return (merge or concatenate)(results)


def _rows_of(value: Any) -> int | None:
    """Entries of the first dimension of a tensor that has one."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else None


def _bare(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Whole) else leaf


def concatenate(results: list[Any]) -> Any:
    """Tensors of the parts' results along their first dimension; what is no tensor must be the same in all parts.

    Raises:
        ValueError: results of other shapes than each other, or tensors without a dimension to join.
    """
    flat = [pytree.tree_flatten(result) for result in results]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise ValueError("the parts gave results of different structure: pass merge= to join them")
    joined = []
    for pieces in zip(*(leaves for leaves, _ in flat), strict=True):
        tensors = [isinstance(piece, Tensor) for piece in pieces]
        if all(tensors):
            if pieces[0].dim() == 0:
                raise ValueError(
                    "a part gave a tensor without dimensions, such as a mean over its tokens: pass merge= to say how "
                    "parts of different sizes are joined"
                )
            joined.append(torch.cat(pieces))
        elif not any(tensors) and all(piece == pieces[0] for piece in pieces):
            joined.append(pieces[0])
        else:
            raise ValueError(f"the parts gave {pieces}: pass merge= to join what is no tensor")
    return pytree.tree_unflatten(joined, spec)


def _sizes(batch: int, parts: int, split: Sequence[int] | None) -> list[int]:
    if split is None:
        share, extra = divmod(batch, parts)
        return [share + (part < extra) for part in range(parts)]
    if len(split) != parts or sum(split) != batch or min(split) < 0:
        raise ValueError(f"split={list(split)}: must be {parts} sizes >= 0 that sum to the batch, {batch}")
    return list(split)


def _limit(min_tokens: MinTokens | int | str | None, phase: Phase) -> int:
    """Tokens per rank below which a batch runs unsplit."""
    if min_tokens == "auto":
        min_tokens = MinTokens()
    if isinstance(min_tokens, MinTokens):
        min_tokens = min_tokens.prefill if phase == "prefill" else min_tokens.decode
    if isinstance(min_tokens, bool) or not isinstance(min_tokens, int | None) or (min_tokens or 0) < 0:
        raise ValueError(f"min_tokens={min_tokens!r}: must be 'auto', a MinTokens, a number of tokens, or None")
    return min_tokens or 0


def _worth_splitting(first: Tensor, parts: int, ep: EPGroup | None, limit: int) -> bool:
    """Whether all ranks split; every rank gets the same answer, or the same error."""
    tokens = first.shape[:-1].numel() if first.is_floating_point() else first.numel()
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    if ep is None or capturing:
        return parts > 1 and tokens >= limit
    operation = "agreeing on microbatches"
    with ep.beside.alone():  # the device may be far behind the host
        mine = torch.tensor([tokens, parts, limit], dtype=torch.int64, device=ep.device)
        gathered, work = ep.all_gather_async(mine)
        ep.wait(work, operation)
        numbers = ep.to_host(gathered, operation)
    ranks = [numbers[rank * 3 : rank * 3 + 3] for rank in range(ep.num_ranks)]
    for name, position in (("num_microbatches", 1), ("min_tokens", 2)):
        values = [rank[position] for rank in ranks]
        if len(set(values)) > 1:
            raise ValueError(f"{name} differs between ranks, {values} on ranks 0..{ep.num_ranks - 1}: must be the same")
    return parts > 1 and sum(rank[0] for rank in ranks) >= limit * ep.num_ranks


def _run(
    fn: Callable[..., Any], arguments: list[Any], device: torch.device, interleave: bool, randomness: bool
) -> list[Any]:
    before = ThreadState(device, randomness)
    seeds = torch.randint(2**62, (len(arguments),), device="cpu").tolist() if randomness else [0] * len(arguments)
    if randomness:
        before = ThreadState(device, randomness)  # the seeds moved the generator on
    results: list[Any] = [None] * len(arguments)

    def runner(index: int, args: Any) -> Callable[[], None]:
        def run() -> None:
            results[index] = fn(*args)

        return run

    waiting = [
        Microbatch(index, runner(index, args), before.with_seed(seed) if randomness else copy.copy(before), randomness)
        for index, (args, seed) in enumerate(zip(arguments, seeds, strict=True))
    ]
    recorder = recording()

    try:
        left: ThreadState | None = None  # as who yielded last has left the thread
        while waiting:
            for microbatch in list(waiting):
                while True:
                    if recorder is None:
                        microbatch.resume(left)
                    else:
                        with recorder.microbatch(microbatch.index):
                            microbatch.resume(left)
                    if microbatch.dead:
                        waiting.remove(microbatch)
                        left = None
                        break
                    left = microbatch.state
                    if interleave:
                        break
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise RuntimeError(
                "a part of run_microbatched met weights that FSDP2 had sharded again when another part ended: use "
                "fully_shard(..., reshard_after_forward=False)"
            ) from error
        raise
    finally:
        _end(waiting)
        before.restore()
    return results


def _end(microbatches: list[Microbatch]) -> None:
    """Ends those that have not: their cleanup runs. What that raises is a warning and does not hide the first error."""
    for microbatch in microbatches:
        for _ in range(_CLEANUP_YIELDS):
            if microbatch.dead:
                break
            microbatch.state.restore()
            try:
                microbatch.throw()
            except BaseException as error:
                warnings.warn(f"microbatch {microbatch.index} raised {error!r} while it was ended", stacklevel=2)
        if not microbatch.dead:
            warnings.warn(
                f"microbatch {microbatch.index} goes on yielding while it is ended: left behind", stacklevel=2
            )

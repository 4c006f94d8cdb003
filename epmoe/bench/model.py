"""Bench `model`: a `transformers` model of a few layers with random weights, beside other ways to run its experts.

    epmoe                      parallelize(model, ep); decoding by `Decoder`, in CUDA graphs where it can
    transformers_all_to_all    its own expert parallelism (5.23 or newer), each rank with tokens of its own
    transformers_all_reduce    the same where all ranks share one batch, as `enable_expert_parallel` makes them; only
                               decoding does so
    grouped_mm                 all experts on every GPU: nothing moves

The peers' experts are `experts_implementation="grouped_mm"`. All have the same weights and tokens, and are timed in the
same rounds. A peer that fails is named in the record with the reason, and the others are measured.

`train` is forward with loss and backward, without an optimizer and without averaging the gradients of what is
replicated, which is the same work for all. `decode` is a step of B rows behind `context` tokens each, and the likeliest
token of every row; keys and values are zeros. A step is a graph where that can be captured: `graphs` says of whom.

B rows and M tokens of a rank, R ranks, S length of a sequence, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench import problem as problems
from epmoe.bench.overlap import HEADS
from epmoe.bench.records import Record, make_record
from epmoe.bench.session import Session
from epmoe.bench.shapes import Shape, named_shape
from epmoe.bench.timing import Call
from epmoe.dispatch import DISPATCHERS

Made = TypeVar("Made")
MODES = ("train", "decode")
VOCABULARY = 151936 // 48  # a layer's share of Qwen3-30B's: a few layers with the whole would measure it alone
AGREE = {"train": (0.02, 0.1), "decode": (0.05,)}
"""Relative L2 differences, in bf16, of loss and gradient, and of the median row of logits: near-ties of the router fall
differently, and a row for which one did has other logits."""
READS_COUNTS = "transformers_all_to_all"  # on the host: nothing to capture
PEERS = {
    "train": ("transformers_all_to_all", "grouped_mm"),
    "decode": ("transformers_all_to_all", "transformers_all_reduce", "grouped_mm"),
}


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """`tokens` of a step on each rank: M of one sequence in training, B rows in decoding, each behind `context` tokens
    (0 in training). `dispatcher` is a name; `auto` chooses and is recorded by what it chose."""

    shape: str
    layers: int
    ranks: int
    mode: str
    tokens: int
    context: int = 0
    dispatcher: str = "auto"

    def __post_init__(self) -> None:
        shape = named_shape(self.shape)
        if shape.activation.name != "swiglu" or shape.num_experts % self.ranks:
            raise ValueError(
                f"shape={self.shape!r}, ranks={self.ranks}: the model knows swiglu alone, and transformers equal shares"
            )
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: must be {' or '.join(MODES)}")
        if self.dispatcher != "auto" and self.dispatcher not in DISPATCHERS:
            raise ValueError(f"dispatcher={self.dispatcher!r}: must be auto, {', '.join(DISPATCHERS)}")
        problems.check_moves(self.dispatcher, self.ranks)
        if self.layers < 1 or self.tokens < 2 - (self.mode == "decode") or self.context < (self.mode == "decode"):
            raise ValueError(f"layers={self.layers}, tokens={self.tokens}, context={self.context}: too few")
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("bench model needs transformers: pip install 'epmoe[transformers]'")


def make_model(case: ModelCase, device: torch.device) -> Any:
    """A Qwen3-MoE model of the case's shape, made on `device`, with the same random weights on every rank."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.initialization import no_init_weights

    shape = named_shape(case.shape)
    heads, kv_heads, size = HEADS.get(case.shape, (4, 2, max(16, shape.hidden_size // 4)))
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY * case.layers if device.type == "cuda" else 256,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.intermediate_size,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        max_position_embeddings=1 << 16,
    )
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device, no_init_weights():
            model = Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    # a generator of its own: the device's would not work any more after a capture that failed
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model


def measure_model(case: ModelCase, session: Session) -> Record:
    """One record; `median_us` is a step's, `tokens_per_s` of all ranks together. Floor: `floors`.

    Raises:
        RuntimeError: no peer agrees with epmoe.
    """
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for name in ("epmoe", *PEERS[case.mode]):
        # in parts: where one rank can't make the model, the others must not wait for it in what all do together
        model, why = _together(functools.partial(make_model, case, session.device), session)
        arranged = made = None
        if model is not None:
            arranged, why = _together(functools.partial(_arranged, name, model, case, session), session)
        del model
        if arranged is not None:
            begin = _training if case.mode == "train" else _decoding
            made, why = _together(functools.partial(begin, name, arranged, case, session), session)
        if made is None:
            if name == "epmoe":
                raise RuntimeError(f"epmoe: {why}")
            failed[name] = why
        else:
            steps[name] = made
    _check(case.mode, steps, failed, session)
    times = session.time({name: step.call for name, step in steps.items()})
    ours = steps["epmoe"]
    flops, weights, wire = floors(case, ours.model)
    record = make_record(
        "model",
        dataclasses.asdict(dataclasses.replace(case, dispatcher=ours.dispatcher)),
        median_us=times["epmoe"],
        floor_us=problems.floor_us(session.ceilings, flops, weights, wire),
        tflops=flops / times["epmoe"] * 1e-6,
        tokens_per_s=round(case.tokens * case.ranks / times["epmoe"] * 1e6),
        peers={name: times[name] for name in steps if name != "epmoe"},
        peers_failed=failed or None,
        graphs=[name for name, step in steps.items() if step.graph] if case.mode == "decode" else None,
        no_graph={n: s.no_graph for n, s in steps.items() if s.no_graph} or None,
        device=session.device,
    )
    del steps, ours
    gc.collect()  # modules and their hooks are circles
    session.forget()
    return record


@dataclasses.dataclass
class Step:
    """What is timed: `call`, and `outcome` for the check: logits `[rows of this rank, V]`, or a loss and gradients."""

    model: Any
    call: Call
    outcome: Callable[[], tuple[Tensor, ...]]
    dispatcher: str = ""
    graph: bool = False
    no_graph: str = ""


def _arranged(name: str, model: Any, case: ModelCase, session: Session) -> Any:
    """The model with its experts spread over the ranks as `name` says."""
    ranks, device = case.ranks, session.device
    if name == "grouped_mm":
        return model
    if name == "epmoe":
        from epmoe.integrations.transformers import parallelize

        options: dict[str, Any] = {}
        if case.mode == "train":  # while decoding the Decoder says
            options = {"dispatcher": case.dispatcher, **_most(case.dispatcher, case.tokens)}
        return parallelize(model, session.ep, **options)
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = init_device_mesh(device.type, (ranks, 1), mesh_dim_names=("ep", "alone"))
    plan: dict[str, str] = {}
    for experts in [path for path, module in model.named_modules() if type(module).__name__.endswith("Experts")]:
        plan |= {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
        plan[experts] = "ep_dispatch_experts"
    how = name.removeprefix("transformers_")
    tp_mesh = mesh["ep"] if how == "all_reduce" else mesh["alone"]
    return apply_expert_parallelism(model, mesh["ep"], tp_mesh, plan, ep_implementation=how)


def _most(dispatcher: str, tokens: int) -> dict[str, int]:
    """`max_tokens_per_rank` for dispatchers that want it."""
    known = DISPATCHERS.get(dispatcher)
    return {"max_tokens_per_rank": tokens} if known is not None and known.capabilities.max_tokens else {}


def _tokens(case: ModelCase, vocabulary: int, rank: int) -> Tensor:
    """This rank's M or B tokens, on the CPU."""
    return torch.randint(vocabulary, (case.tokens,), device="cpu", generator=torch.Generator().manual_seed(1 + rank))


def _training(name: str, model: Any, case: ModelCase, session: Session) -> Step:
    ids = _tokens(case, model.config.vocab_size, session.ep.rank).to(session.device)[None]
    model.train()

    def call() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def outcome() -> tuple[Tensor, ...]:
        loss = call()[None]
        return loss, model.model.embed_tokens.weight.grad

    return Step(model, call, outcome, _dispatcher_of(model, session))


def _decoding(name: str, model: Any, case: ModelCase, session: Session) -> Step:
    from epmoe.integrations.transformers.decode import Decoder

    ep, vocabulary = session.ep, model.config.vocab_size
    everyone = name == "transformers_all_reduce"  # all ranks decode all rows
    ranks = range(case.ranks) if everyone else (ep.rank,)
    tokens = torch.cat([_tokens(case, vocabulary, rank) for rank in ranks]).tolist()
    columns = -(-(case.context + 1) // 64) * 64
    decoder = Decoder(
        model, len(tokens), columns, dispatcher=case.dispatcher, row_sizes=(len(tokens),), column_sizes=(columns,)
    )
    why = "it counts rows on the host" if name == READS_COUNTS else decoder.capture(progress=False)
    lengths = [case.context] * len(tokens)

    def call() -> Tensor:
        return decoder.step(tokens, lengths).argmax(-1)

    def outcome() -> tuple[Tensor, ...]:
        rows = decoder.step(tokens, lengths)
        return (rows[ep.rank * case.tokens :][: case.tokens] if everyone else rows,)

    names = {kernel.dispatcher.name for kernel in decoder.kernels}
    return Step(model, call, outcome, "".join(sorted(names)), why is None, why or "")


def _dispatcher_of(model: Any, session: Session) -> str:
    from epmoe.integrations.transformers import RoutedExperts

    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    names = {layer.kernel(session.device, layer.dtype).dispatcher.name for layer in layers}
    return "".join(sorted(names))


def _together(make: Callable[[], Made], session: Session) -> tuple[Made | None, str]:
    """What `make` gives, or None and the first rank's reason on all of them; collective."""
    made, why = None, ""
    try:
        made = make()
    except Exception as error:  # whatever a peer can't do is told of it and ends nobody else
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    reasons = [why] * session.ep.num_ranks
    dist.all_gather_object(reasons, why, group=session.ep.process_group)
    why = next((reason for reason in reasons if reason), "")
    return (None, why) if why else (made, "")


def _check(mode: str, steps: dict[str, Step], failed: dict[str, str], session: Session) -> None:
    """Drops peers that fail when they run or give something else; epmoe must agree with one of them.

    Raises:
        RuntimeError: it agrees with none.
    """
    ours = [part.clone() for part in steps["epmoe"].outcome()]
    for name in [name for name in steps if name != "epmoe"]:

        def compare(name: str = name) -> Step:
            for part, other, limit in zip(ours, steps[name].outcome(), AGREE[mode], strict=True):
                pairs = zip(part, other, strict=True) if mode == "decode" else [(part, other)]
                error = statistics.median([problems.relative(*pair) for pair in pairs])
                if not error <= limit:
                    raise RuntimeError(f"its results and epmoe's differ by {error:.2e} > {limit:g} (relative L2)")
            return steps[name]

        made, why = _together(compare, session)
        if made is None:
            failed[name] = why
            del steps[name]
    if len(steps) == 1:
        raise RuntimeError(f"no peer agrees with epmoe, so nothing was timed: {failed}")


def floors(case: ModelCase, model: Any) -> tuple[float, float, float]:
    """(FLOPs, bytes of weights and cached keys and values, bytes on the wire) of one rank's step at balanced load.

    FLOPs: two per weight that a token meets and four per query head's number and position seen; three times that in
    training. Bytes: each weight once, of the experts only those that some token of any rank is expected to choose.
    Wire: bf16 rows to the ranks that own the experts and back, in training both ways again.
    """
    shape, config, train = named_shape(case.shape), model.config, case.mode == "train"
    M, E, K, R = case.tokens, shape.num_experts, shape.top_k, case.ranks
    dense = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name and "embed" not in name)
    seen = case.tokens / 2 if train else case.context + 1
    attention = 4 * config.num_attention_heads * config.head_dim * seen * case.layers
    flops = M * (2 * (dense + case.layers * K * shape.expert_parameters) + attention) * (3 if train else 1)
    hit = E / R * (1 - (1 - K / E) ** (M * R))
    cached = 0 if train else 2 * M * (case.context + 1) * config.num_key_value_heads * config.head_dim * case.layers
    weights = 2 * (dense + case.layers * hit * shape.expert_parameters + cached)
    elsewhere = 1 - _missed(shape, R)
    wire = case.layers * M * (R - 1) * elsewhere * shape.hidden_size * 2 * (4 if train else 2)
    return flops, weights, wire


def _missed(shape: Shape, ranks: int) -> float:
    """The probability that none of a token's K experts is on a given rank, all choices being equally likely."""
    share, probability = shape.num_experts // ranks, 1.0
    for k in range(shape.top_k):
        probability *= max(0, shape.num_experts - share - k) / (shape.num_experts - k)
    return probability

"""A byte-level language model whose MLPs are MoE layers: read once from top to bottom.

    bytes [B, T] ── embed ──► x [B, T, H] ── layers × (attention, MoELayer) ──► norm ── head ──► logits [B, T, 256]

Everything but the routed experts is on every rank; the ranks of the EPGroup each bring their own sequences.
B sequences of this rank (may be 0), T positions, H hidden size, E experts, K experts per byte.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import epmoe
from epmoe import EPGroup, MoEConfig, MoELayer

VOCAB = 256  # bytes


def run_command(app: Callable[[], None]) -> None:
    """A script's command: what can't work is told in one line, with exit code 2, as a wrong option is."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        sys.exit(2)


def join_ranks() -> tuple[EPGroup | None, torch.device]:
    """This process's EP group and device: alone without torchrun; one GPU per rank where there are enough, else CPU."""
    local_rank, local_ranks = (int(os.environ.get(name, d)) for name, d in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return None, device
    dist.init_process_group("nccl" if cuda else "gloo")
    return EPGroup(), device


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 products on GPUs. Parameters and residual stream stay fp32: Adam's small updates are not rounded away."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def share_of(count: int, ep: EPGroup | None) -> slice:
    """Which of `count` things this rank does: some ranks one more than others, some perhaps none."""
    rank, ranks = (0, 1) if ep is None else (ep.rank, ep.num_ranks)
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    intermediate_size: int = 128
    context: int = 256
    dispatcher: str = "auto"
    dispatch: str | None = None  # scheme of rows as they are sent

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size={self.hidden_size}: must be a multiple of 2 x num_heads={self.num_heads}")


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.context = config.num_heads, config.context
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, D]
        q, k = rotate(q, rotation), rotate(k, rotation)
        if past is not None:  # one new position, which attends to the last `context`
            assert x.shape[1] == 1
            k, v = (torch.cat([old, new], dim=2)[:, :, -self.context :] for old, new in zip(past, (k, v), strict=True))
        # a rank may have no sequence, and not all of CUDA's attention kernels take an empty batch
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None) if len(x) else q
        return self.out(y.transpose(1, 2).flatten(2)), k, v


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of x [B, heads, T, D] by angles [T, D/2]."""
    cos, sin = rotation.cos(), rotation.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, ep: EPGroup | None, name: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size)
        moe = MoEConfig(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            num_shared_experts=1,
            dispatcher=config.dispatcher,
            dispatch_scheme=config.dispatch,
        )
        self.moe = MoELayer(moe, ep, name=name)

    def forward(
        self, x: Tensor, rotation: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        attended, *present = self.attention(self.attention_norm(x), rotation, past)
        x = x + attended
        y, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + y, routing.scores.sum(0), routing.tokens_per_expert(), tuple(present)


class Cache:
    """Keys and values of every layer, and how many positions have been seen."""

    def __init__(self, num_layers: int) -> None:
        self.position = 0
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers


class ByteModel(nn.Module):
    def __init__(self, config: ModelConfig, ep: EPGroup | None, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.config, self.ep, self.recompute = config, ep, False
        torch.manual_seed(seed)  # all ranks alike: what is replicated is equal without sending it
        with device:
            self.embed = nn.Embedding(VOCAB, config.hidden_size)
            self.layers = nn.ModuleList(Block(config, ep, f"layers.{n}.moe") for n in range(config.num_layers))
            self.norm = nn.RMSNorm(config.hidden_size)
            self.head = nn.Linear(config.hidden_size, VOCAB, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, T] -> logits [B, T, 256]; router scores summed over tokens, and bytes per expert, [layers, E]."""
        start = cache.position if cache is not None else 0
        half = self.config.hidden_size // self.config.num_heads // 2
        frequency = 10_000 ** (-torch.arange(half, device=tokens.device) / half)
        rotation = torch.arange(start, start + tokens.shape[1], device=tokens.device)[:, None] * frequency

        x = self.embed(tokens)
        scores, counts = [], []
        for number, layer in enumerate(self.layers):
            past = cache.layers[number] if cache is not None else None
            if self.recompute and torch.is_grad_enabled():
                x, score, count, present = epmoe.checkpoint(layer, x, rotation)
            else:
                x, score, count, present = layer(x, rotation, past)
            if cache is not None:
                cache.layers[number] = present
            scores.append(score)
            counts.append(count)
        if cache is not None:
            cache.position += tokens.shape[1]
        return self.head(self.norm(x)), torch.stack(scores), torch.stack(counts)


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generators: list[torch.Generator]) -> Tensor:
    """One byte for each row of logits [B, 256], row b drawn with its own generator. temperature 0: the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities, order = (logits.double() / temperature).softmax(-1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    keep = (torch.arange(VOCAB) < (top_k or VOCAB)) & (before < top_p)  # the first always stays
    kept = torch.where(keep, probabilities, 0.0)
    drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(kept, generators, strict=True)]
    return order.gather(1, torch.stack(drawn))[:, 0] if drawn else order[:, 0]


@torch.inference_mode()
def decode(
    model: ByteModel,
    prompt: bytes,
    new_bytes: int,
    *,
    seeds: list[int],
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Iterator[list[int]]:
    """Yields the next byte of this rank's samples, one per seed, `new_bytes` times.

    Collective: a rank without samples iterates as well, with no sequence, since its experts serve the others'.
    """
    device = model.embed.weight.device
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    cache = Cache(model.config.num_layers)
    tokens = torch.tensor(list(prompt[-model.config.context :]), device=device).expand(len(seeds), -1)
    for _ in range(new_bytes):
        with mixed_precision(device):
            logits = model(tokens, cache)[0][:, -1]
        chosen = sample(logits.float().cpu(), temperature, top_k, top_p, generators)
        yield chosen.tolist()
        tokens = chosen[:, None].to(device)

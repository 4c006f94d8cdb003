"""LoRA adapters as parameters of a layer: what `MoELayer.add_lora` adds, which token meets which, and how they begin.

The update itself is computed where the experts are: `epmoe.experts.lora`. Adapter ids travel with their rows to every
rank that owns one of the token's experts.

L experts on this rank, A adapters, R the largest rank, H width of the routed experts, I intermediate size, M tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epmoe.checks import is_number, said
from epmoe.comm import EPGroup
from epmoe.config import MoEConfig
from epmoe.experts import select_experts_impl
from epmoe.experts.lora import ExpertLora

LORA_PARAMETERS = ("lora_gate_up_a", "lora_gate_up_b", "lora_down_a", "lora_down_b")


class Adapter(NamedTuple):
    """One adapter of a layer; its update is scaled by alpha / rank."""

    name: str
    rank: int
    alpha: float


class WithLora(nn.Module):
    """The part of `MoELayer` that knows adapters. Without `add_lora` it adds neither parameters nor work.

    Parameters after `add_lora`, experts first: `lora_gate_up_a [L, A, R, H]`, `lora_gate_up_b [L, A, 2I, R]`,
    `lora_down_a [L, A, R, I]`, `lora_down_b [L, A, H, R]`. An adapter of a smaller rank has zeros past it, which
    training leaves zeros.
    """

    config: MoEConfig
    ep: EPGroup | None
    name: str
    local_experts: tuple[int, ...]
    gate_up_proj: nn.Parameter
    _kernels: dict[Any, Any]
    lora_gate_up_a: nn.Parameter | None
    lora_gate_up_b: nn.Parameter | None
    lora_down_a: nn.Parameter | None
    lora_down_b: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.lora_adapters: tuple[Adapter, ...] = ()
        self._lora_scaling: dict[torch.device, Tensor] = {}
        for name in LORA_PARAMETERS:
            self.register_parameter(name, None)

    def add_lora(
        self,
        adapters: int | Sequence[str],
        rank: int | Sequence[int],
        alpha: float | Sequence[float],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adds low-rank adapters to the routed experts; until they are trained or loaded they change nothing.

        Freezes nothing: train `lora_parameters()` and set `requires_grad_(False)` on the rest; frozen experts cost no
        weight gradient. Tokens choose by number, `forward(x, adapter_ids=...)`, in the order given here. All ranks must
        call alike, and before FSDP or DDP wraps the layer.

        Args:
            adapters: how many, or their names.
            rank: of all adapters, or of each.
            alpha: of all adapters, or of each; the update is scaled by alpha / rank.
            dtype: of the parameters; None: the experts'. They are converted to the rows' dtype at every call.

        Raises:
            ValueError: adapters are there already, a count, rank or alpha that is none, experts that know no LoRA, or
                ranks of the group that disagree.
        """
        where = f"layer {self.name!r}: "
        if self.lora_adapters:
            there = ", ".join(adapter.name for adapter in self.lora_adapters)
            raise ValueError(f"{where}has adapters already ({there}): add all of them in one call")
        if isinstance(adapters, str | bool) or not isinstance(adapters, int | Sequence):
            raise ValueError(f"{where}{said('adapters', adapters)}: must be a number > 0, or a list of names")
        names = [str(n) for n in range(adapters)] if isinstance(adapters, int) else list(adapters)
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise ValueError(f"{where}adapters={adapters!r}: must be a number > 0, or distinct names")
        ranks = list(rank) if isinstance(rank, Sequence) and not isinstance(rank, str) else [rank] * len(names)
        if not all(isinstance(r, int) and not isinstance(r, bool) for r in ranks):
            raise ValueError(f"{where}rank={rank!r}: must be an int > 0, or one for each of {len(names)} adapters")
        alphas = list(alpha) if isinstance(alpha, Sequence) and not isinstance(alpha, str) else [alpha] * len(names)
        if not all(is_number(a) for a in alphas):
            raise ValueError(
                f"{where}{said('alpha', alpha)}: must be a number > 0, or one for each of {len(names)} adapters"
            )
        for field, values in (("rank", ranks), ("alpha", alphas)):
            if len(values) != len(names) or not all(value > 0 for value in values):
                raise ValueError(f"{where}{field}={values}: must be > 0, one for each of {len(names)} adapters")
        if self.ep is not None:
            fields = {"adapters": names, "rank": ranks, "alpha": alphas, "dtype": dtype}
            self.ep.check_same(f"add_lora of MoELayer {self.name!r}", fields)
        base = self.gate_up_proj
        rows: torch.dtype = self.dtype  # type: ignore[assignment]
        if base.device.type != "meta":
            select_experts_impl(self.config, device=base.device, dtype=rows, lora=True)  # raises where none can

        h, i, r = self.config.expert_hidden_size, self.config.intermediate_size, max(ranks)
        width = 2 * i if self.config.activation_function.gated else i
        shapes = {"gate_up_a": (r, h), "gate_up_b": (width, r), "down_a": (r, i), "down_b": (h, r)}
        lead = (len(self.local_experts), len(names))
        for name, shape in shapes.items():
            empty = torch.empty(*lead, *shape, device=base.device, dtype=dtype or rows)
            setattr(self, f"lora_{name}", nn.Parameter(empty))
        self.lora_adapters = tuple(Adapter(*parts) for parts in zip(names, ranks, map(float, alphas), strict=True))
        self._kernels.clear()  # another may be chosen now
        if base.device.type != "meta":
            self.reset_lora_parameters()

    def lora_parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters by name, empty without `add_lora`: what an optimizer of adapters alone gets."""
        named = {name: getattr(self, name) for name in LORA_PARAMETERS}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    @torch.no_grad()
    def reset_lora_parameters(self) -> None:
        """A normal with std 1/√fan-in, B zero: the update is zero.

        Each expert draws from a generator of its own, as in `MoELayer.reset_parameters`.
        """
        if not self.lora_adapters:
            return
        assert self.lora_gate_up_a is not None and self.lora_down_a is not None
        assert self.lora_gate_up_b is not None and self.lora_down_b is not None
        self.lora_gate_up_b.zero_()
        self.lora_down_b.zero_()
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator(self.lora_gate_up_a.device)
        for local, expert in enumerate(self.local_experts):
            generator.manual_seed(seed + expert)
            for weight in (self.lora_gate_up_a, self.lora_down_a):
                weight[local].normal_(std=weight.shape[-1] ** -0.5, generator=generator)
                for number, adapter in enumerate(self.lora_adapters):
                    weight[local, number, adapter.rank :] = 0

    def expert_lora(self) -> ExpertLora | None:
        """The adapters as `ExpertWeights.lora` takes them; None without `add_lora`."""
        if self.lora_gate_up_a is None or self.lora_gate_up_b is None:
            return None
        assert self.lora_down_a is not None and self.lora_down_b is not None
        device = self.lora_gate_up_a.device
        if device not in self._lora_scaling:  # from the host once, and in float32 whatever the layer is converted to
            scaling = [adapter.alpha / adapter.rank for adapter in self.lora_adapters]
            with torch.inference_mode(False):  # a training step may be the next to use it
                self._lora_scaling[device] = torch.tensor(scaling, dtype=torch.float32, device=device)
        tensors = (self.lora_gate_up_a, self.lora_gate_up_b, self.lora_down_a, self.lora_down_b)
        return ExpertLora(*tensors, self._lora_scaling[device])

    def _adapter_ids(self, adapter_ids: Tensor | int | None, x: Tensor) -> Tensor | None:
        """`[M]` int32 of the tokens in `x [..., H]`; None where the layer has no adapters.

        With adapters there always are ids, so that ranks without any for this batch send messages of the same length.
        """
        where, lead = f"layer {self.name!r}: ", x.shape[:-1]
        if not self.lora_adapters:
            if adapter_ids is not None:
                raise ValueError(f"{where}adapter_ids is given and there are no adapters: call add_lora first")
            return None
        if adapter_ids is None:
            adapter_ids = -1
        if isinstance(adapter_ids, bool) or not isinstance(adapter_ids, int | Tensor):
            names = ", ".join(f"{number} for {adapter.name!r}" for number, adapter in enumerate(self.lora_adapters))
            raise ValueError(
                f"{where}{said('adapter_ids', adapter_ids)}: must be a number ({names}, -1 for none), or int32 "
                f"{tuple(lead)} of such"
            )
        if isinstance(adapter_ids, int):
            if not -1 <= adapter_ids < len(self.lora_adapters):
                raise ValueError(f"{where}adapter_ids={adapter_ids}: must be in [-1, {len(self.lora_adapters)})")
            return torch.full((lead.numel(),), adapter_ids, dtype=torch.int32, device=x.device)
        if adapter_ids.shape != lead or adapter_ids.dtype != torch.int32 or adapter_ids.device != x.device:
            raise ValueError(
                f"{where}adapter_ids is {adapter_ids.dtype} {tuple(adapter_ids.shape)} on {adapter_ids.device}, must "
                f"be int32 {tuple(lead)} on {x.device}, or one number for all tokens"
            )
        return adapter_ids.reshape(-1)

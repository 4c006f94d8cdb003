"""What a layer computes for every token whatever its routing: shared experts, and projections to a latent width.

M tokens, H hidden size, S shared experts, I their intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epmoe.config import Activation
from epmoe.ops.activation import apply_activation


class SharedExperts(nn.Module):
    """S experts that see every token, summed; each optionally times sigmoid(x · gate).

    Parameters: `gate_up_proj [S, 2I, H]` (`[S, I, H]` not gated), `down_proj [S, H, I]`, `gate [S, H]`.
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        gate: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        width = intermediate_size * (2 if activation.gated else 1)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
        )
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype)) if gate else None

    def reset_parameters(self) -> None:
        """Normal, std 1/√fan-in."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x `[M, H]` -> `[M, H]`."""
        act = self.activation
        gate_up_proj, down_proj = self.gate_up_proj.to(x.dtype), self.down_proj.to(x.dtype)  # differ under autocast
        out = None
        for expert in range(gate_up_proj.shape[0]):
            h = apply_activation(F.linear(x, gate_up_proj[expert]), act.name, act.alpha, act.limit)
            y = F.linear(h, down_proj[expert])
            if self.gate is not None:
                y = y * torch.sigmoid(F.linear(x, self.gate[expert : expert + 1].to(x.dtype)))
            out = y if out is None else out + y
        assert out is not None
        return out


class Projection(nn.Module):
    """x `[M, in]` -> `[M, out]` by `weight [out, in]`; a module, so that FSDP can shard it over its own ranks."""

    def __init__(
        self, size_in: int, size_out: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Normal, std 1/√fan-in."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """In x's dtype."""
        return F.linear(x, self.weight.to(x.dtype))

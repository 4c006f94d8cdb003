"""Named shapes of routed MLPs: what benches take by name and records carry as `shape`.

H hidden size, I expert intermediate size, E experts, K experts per token, M tokens on a rank.
"""

from __future__ import annotations

import dataclasses

from epmoe.config import Activation


@dataclasses.dataclass(frozen=True)
class Shape:
    """The routed experts of one layer."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: Activation = Activation("swiglu")

    @property
    def gate_up_size(self) -> int:
        """Rows of one expert's w1: 2I, or I when the activation is not gated."""
        return self.intermediate_size * (2 if self.activation.gated else 1)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert: 3·H·I when gated."""
        return self.hidden_size * (self.gate_up_size + self.intermediate_size)

    def flops(self, tokens: int, mode: str) -> int:
        """Floating-point operations that the routed MLP of `tokens` tokens needs.

        Forward: M·K rows through H -> 2I and I -> H, two operations per weight: 2·M·K·3·H·I = 6·M·K·H·I (4·M·K·H·I not
        gated). Training: the gradients of rows and of weights cost a forward each, so three times that. Activation,
        weighting and sums are not counted.
        """
        forward = 2 * tokens * self.top_k * self.expert_parameters
        return forward * (3 if is_train(mode) else 1)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("deepseek-v3", 7168, 2048, 256, 8),
        # One rank of eight at balanced load: its 32 of the 256 experts get M·K rows, M being the tokens of each rank.
        Shape("deepseek-v3-ep8", 7168, 2048, 32, 8),
        Shape("mixtral", 4096, 14336, 8, 2),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4, Activation.named("swiglu_oai")),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, Activation.named("swiglu_oai")),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("tiny", 64, 32, 8, 2),  # for CPU: its figures say nothing
    )
}


def named_shape(name: str) -> Shape:
    """The shape `name`; `ValueError` for an unknown one."""
    if name not in SHAPES:
        raise ValueError(f"shape={name!r}: must be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def is_train(mode: str) -> bool:
    """Whether `mode` is `train` (forward and backward) rather than `infer` (forward without autograd)."""
    if mode not in ("infer", "train"):
        raise ValueError(f"mode={mode!r}: must be infer or train")
    return mode == "train"

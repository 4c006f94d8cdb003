"""The transformers `Trainer` around a model with `MoELayer`s: what DDP must leave alone, what each step still needs.

Not a part of `epmoe.integrations.transformers`, which replaces layers of that library's models: this trains any module.

    args = TrainingArguments(..., max_grad_norm=0, save_strategy="no")  # both are done here
    Trainer(model, args, ..., callbacks=[ExpertCallback(model, mesh, max_norm=1.0)]).train()

`Trainer` wraps the model in DDP, one process per GPU. Its own clipping would see one rank's experts, and its
checkpoints would hold them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from epmoe.integrations.dcp import save_distributed
from epmoe.integrations.gradients import clip_grad_norm_, grad_norm, reduce_expert_gradients
from epmoe.integrations.parallel import MoEMesh, ddp_ignore_experts


class ExpertCallback(TrainerCallback):
    """Reduces the experts' gradients and clips all of them before each optimizer step; saves checkpoints.

    Make it before `Trainer` wraps `model`; ranks must be seeded alike, or have loaded one checkpoint.

    Args:
        model: as given to `Trainer`.
        mesh: the one its layers were built with.
        max_norm: of the gradients of the whole model; None: not clipped. Set `TrainingArguments(max_grad_norm=0)`.
        save_every: optimizer steps between checkpoints in `output_dir/step-<n>`, for
            `epmoe.integrations.dcp.load_distributed`; None: none. Set `save_strategy="no"`.

    Attributes:
        norm: of the last step's gradients, before clipping.

    Raises:
        ValueError: while training, if `Trainer` clips or saves too.
    """

    norm: Tensor | None = None

    def __init__(
        self, model: nn.Module, mesh: MoEMesh, *, max_norm: float | None = 1.0, save_every: int | None = None
    ) -> None:
        self.model, self.mesh, self.max_norm, self.save_every = model, mesh, max_norm, save_every
        ddp_ignore_experts(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuses settings that would treat one rank's experts as the model's."""
        if args.max_grad_norm:
            raise ValueError(f"max_grad_norm={args.max_grad_norm}: must be 0, ExpertCallback(max_norm=...) clips")
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            raise ValueError(f"save_strategy={args.save_strategy}: must be 'no', ExpertCallback(save_every=...) saves")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the last backward of a step."""
        reduce_expert_gradients(self.model, self.mesh.ep, replicas=self.mesh.replicas)
        if self.max_norm is None:
            self.norm = grad_norm(self.model, self.mesh.ep)
        else:
            self.norm = clip_grad_norm_(self.model, self.mesh.ep, self.max_norm)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Saves."""
        if self.save_every and state.global_step % self.save_every == 0:
            inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
            directory = os.path.join(args.output_dir, f"step-{state.global_step}")
            save_distributed(directory, self.model, inner, {"step": state.global_step})

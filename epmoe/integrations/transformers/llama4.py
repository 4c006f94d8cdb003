"""Llama 4's MoE block, whose own forward sends every token to every expert with a weight that is mostly zero.

    h [M,H] ── router ──► scores [M,E], logits [M,E] ── the K that are not zero ──► experts(h, ids, weights) + shared(h)

M tokens, H hidden size, E experts, K experts per token. The experts multiply their input by the weight.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def llama4_block_forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """`Llama4TextMoe.forward` with the chosen experts only: `[M, H]` and the router's logits `[M, E]`."""
    hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = block.router(hidden_states)
    ids = logits.topk(block.router.top_k, dim=1).indices  # as the router chose: from the same logits
    routed = block.experts(hidden_states, ids, scores.gather(1, ids))
    return block.shared_expert(hidden_states) + routed, logits

"""Problem sizes as tensors show them, in either layout, packed and transposed."""

from __future__ import annotations

import pytest
import torch

from epmoe.experts import moe_problem_size

L, H, I, K, T, C = 4, 128, 96, 2, 7, 16  # noqa: E741


def weights(gated: bool, packed: bool, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    per_byte, dtype = (2, torch.uint8) if packed else (1, torch.bfloat16)
    w1 = torch.empty(L, (2 if gated else 1) * I, H // per_byte, dtype=dtype)
    w2 = torch.empty(L, H, I // per_byte, dtype=dtype)
    if transposed:
        w1, w2 = w1.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    return w1, w2


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_sizes_are_those_of_the_problem_however_weights_are_stored(gated, packed, transposed):
    w1, w2 = weights(gated, packed, transposed)
    flags = {"gated": gated, "packed_int4": packed, "transposed": transposed}
    ids = torch.zeros(T, K, dtype=torch.int32)
    assert moe_problem_size(torch.empty(T, H), w1, w2, ids, **flags) == (L, T, H, I, K)
    assert moe_problem_size(torch.empty(L, C, H), w1, w2, ids, **flags)._asdict() == {
        "num_local": L,
        "rows": C,
        "width": H,
        "intermediate": I,
        "top_k": K,
    }


@pytest.mark.parametrize("wrong", ["gated", "packed_int4", "transposed"])
def test_a_flag_that_is_not_true_of_the_weights_is_refused(wrong):
    w1, w2 = weights(True, False, False)
    flags = {"gated": True, "packed_int4": False, "transposed": False}
    flags[wrong] = not flags[wrong]
    with pytest.raises(ValueError, match="w[12] (has shape|is torch.bfloat16)"):
        moe_problem_size(torch.empty(T, H), w1, w2, torch.zeros(T, K), **flags)


def test_square_weights_are_told_apart_by_the_flag_alone():
    w1, w2 = torch.empty(L, 2 * H, H), torch.empty(L, H, H)
    x, ids = torch.empty(T, H), torch.zeros(T, K)
    assert moe_problem_size(x, w1, w2, ids).intermediate == H
    assert moe_problem_size(x, w1.transpose(1, 2), w2, ids, transposed=True).intermediate == H


def test_mistakes_are_named():
    w1, w2 = weights(True, False, False)
    x, ids = torch.empty(T, H), torch.zeros(T, K)
    packed = weights(True, True, False)
    for match, args, flags in (
        ("x has shape", (x[0], w1, w2, ids), {}),
        ("w1 has shape .* three dimensions", (x, w1[0], w2, ids), {}),
        ("w2 has shape .* for rows of 127", (x[:, :127], w1, w2, ids), {}),
        (r"w1 has shape .*must be \(4, 192, 128\)", (x, w1[:, :191], w2, ids), {}),
        (r"w1 has shape .*must be \(4, 192, 128\)", (x, w1[:3], w2, ids), {}),
        (r"w2 has shape .*must be \(4, 128, 48\)", (x, w1, w2[:, :127, :48], ids), {}),
        ("x has rows of 127: must be even", (x[:, :127], *packed, ids), {"packed_int4": True}),
        ("one batch per expert, 4", (torch.empty(3, C, H), w1, w2, ids), {}),
        ("topk_ids has shape", (x, w1, w2, ids[:5]), {}),
        ("topk_ids has shape", (torch.empty(L, C, H), w1, w2, ids[0]), {}),
    ):
        with pytest.raises(ValueError, match=match):
            moe_problem_size(*args, **flags)

"""Configurations near the one that a rule chose: what `epmoe tune` tries. Each differs from it in a field or two; those
that a device has no room for fail when they are tried, and are passed over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from epmoe.ops._configs import GemmConfig, WgradConfig, _has_gluon
from epmoe.ops._few_rows_configs import FewRowsConfig
from epmoe.ops._narrow_configs import NarrowConfig
from epmoe.ops._scaled_configs import ScaledConfig, runs_gluon
from epmoe.tuning.problems import Problem

SOME_ROWS = (32, 256)  # between these, either of the two kernels of unquantized rows may be the faster


def near(problem: Problem, chosen: Any, device: torch.device) -> list[Any]:
    """`chosen` first, then what else to try, the most promising first."""
    if isinstance(chosen, FewRowsConfig):
        changes, gluon = _few_rows(problem, chosen), False
    elif isinstance(chosen, GemmConfig):
        changes, gluon = _many_rows(chosen), _has_gluon(device)
    elif isinstance(chosen, ScaledConfig):
        changes, gluon = _scaled(problem, chosen), problem.scheme == "fp8_block" and runs_gluon(device)
    elif isinstance(chosen, NarrowConfig):
        changes, gluon = _narrow(problem, chosen), False
    else:
        assert isinstance(chosen, WgradConfig)
        changes, gluon = _wgrad(chosen), False
    able = [change for change in changes if gluon or not change.get("gluon")]
    tried = [chosen, *(dataclasses.replace(chosen, **change) for change in able)]
    low, high = SOME_ROWS
    if low <= problem.rows <= high and isinstance(chosen, FewRowsConfig):
        tried.insert(3, GemmConfig(128, 128, 64, 8, num_warps=8, num_stages=4))
        if _has_gluon(device):
            stages = 3 if problem.gated else 4  # more have no room where what is saved is stored too
            tried.insert(2, GemmConfig(128, 256, 64, 8, num_warps=8, num_stages=stages, flatten=True, gluon=True))
    if low <= problem.rows <= high and isinstance(chosen, GemmConfig):
        tried.insert(2, FewRowsConfig(64, 128, 64, num_warps=4, num_stages=4))
    return list(dict.fromkeys(tried))


Changes = list[dict[str, Any]]


def _few_rows(problem: Problem, chosen: FewRowsConfig) -> Changes:
    t = chosen.block_t
    tiles = [(128, 128, 3), (128, 64, 4), (64, 128, 4), (128, 64, 6)]
    changes = [{"block_w": w, "block_k": k, "num_stages": stages, "num_warps": 4} for w, k, stages in tiles]
    changes[0] = changes[0] | {"paired": problem.gated}
    return [
        *changes[:2],
        *([{"block_t": t // 2}] if t > 16 and t >= 2 * problem.rows else []),
        *([{"block_t": 2 * t}] if t < 64 and 2 * problem.rows > t else []),
        *changes[2:],
    ]


def _many_rows(chosen: GemmConfig) -> Changes:
    if chosen.gluon:
        return [{"gluon": False}, {"panel": 1}, {"panel": 16}]
    small = {"block_m": 128, "block_n": 128, "num_stages": 4, "flatten": False}
    large = {"block_m": 128, "block_n": 256, "num_stages": chosen.num_stages, "flatten": True}
    return [
        large | {"gluon": True},
        large if chosen.block_n < 256 else small,
        {"group_m": 2 * chosen.group_m},
        {"group_m": max(1, chosen.group_m // 2)},
    ]


def _scaled(problem: Problem, chosen: ScaledConfig) -> Changes:
    m, stages = chosen.block_m, chosen.num_stages
    if not chosen.swap_ab:
        few = {"block_m": 64, "num_warps": 8, "num_stages": 4, "split": problem.gated, "swap_ab": True}
        return [
            {"group_m": 2 * chosen.group_m},
            {"group_m": max(1, chosen.group_m // 2)},
            *([few | {"flatten": False}] if problem.rows <= SOME_ROWS[1] else []),
            *([{"num_stages": stages - 1}] if not chosen.gluon else []),
        ]
    return [
        {"gluon": not chosen.gluon},
        {"num_stages": stages - 1},
        *([{"num_stages": stages + 1}] if chosen.unroll == 1 else []),  # a stage holds so many steps
        *([{"block_m": m // 2}] if m > 16 and m >= 2 * problem.rows else []),
        *([{"block_m": 2 * m}] if m < 64 and 2 * problem.rows > m else []),
        {"num_warps": 12 - chosen.num_warps},
        {"programs_per_sm": 1 - chosen.programs_per_sm} if chosen.programs_per_sm <= 1 else {},
    ]


def _narrow(problem: Problem, chosen: NarrowConfig) -> Changes:
    """Whether scales multiply weights or sums stays as the rule has it: that decides how results are rounded."""
    t, stages = chosen.block_t, chosen.num_stages
    fewer, more = {"num_stages": stages - 1}, {"num_stages": stages + 1}
    if t > 64:  # instructions that widen a tile are shared by its rows: tiles are large, and stages what is left
        return [
            {"block_t": 128, "num_stages": 4} if t > 128 else {"block_t": 256, "num_stages": 3},
            fewer,
            {"num_warps": 12 - chosen.num_warps},
            {"block_t": 64},
            more,
        ]
    narrow = chosen.block_w < 128
    other = {"block_w": 128 if narrow else 64, "num_warps": 4, "num_stages": 3 if narrow else 4, "registers": 0}
    return [
        more,
        *([fewer] if stages > 2 else []),
        *([{"block_t": t // 2}] if t > 16 and t >= 2 * problem.rows else []),
        *([{"block_t": 2 * t, "registers": 0}] if t < 64 and 2 * problem.rows > t else []),
        other,
        {"registers": 0} if chosen.registers else {"registers": 128},
        {"num_warps": 12 - chosen.num_warps, "registers": 0},
    ]


def _wgrad(chosen: WgradConfig) -> Changes:
    return [
        {"group_m": 2 * chosen.group_m},
        {"group_m": max(1, chosen.group_m // 2)},
        {"block_n": 128, "programs_per_sm": 2, "num_warps": 4} if chosen.block_n > 128 else {},
        {"num_stages": chosen.num_stages - 1},
    ]

"""Mistakes around a group of ranks are named, on every rank: a test per message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from epmoe import (
    EPGroup,
    ExpertPlacement,
    MoEConfig,
    MoELayer,
    RouterConfig,
    make_dispatcher,
)
from epmoe.testing import RankFailed, run_ranks
from tests.mistakes import CONFIG, SMALL, raises


def test_an_ep_group_without_torch_distributed_says_what_to_call() -> None:
    with raises("init_process_group", "ep=None"):
        EPGroup()


def group_mistakes(rank: int, world: int) -> list[str]:
    messages = []
    for options in (
        {"timeout": 0},
        {"device": "cuda"},
        {"timeout": -1.0},
        {"timeout": "5"},
        {"timeout": None},
        {"timeout": float("inf")},
        {"device": "meta"},
        {"device": "gpu"},
        {"nodes": 3},
        {"nodes": 1.5},
        {"nodes": "01"},
        {"process_group": [0, 1]},
    ):
        with pytest.raises(ValueError) as error:
            EPGroup(**options)
        messages.append(str(error.value))
    other = [dist.new_group([r]) for r in range(world)][1 - rank]
    with pytest.raises(ValueError) as error:
        EPGroup(other)
    messages.append(str(error.value))
    ep = EPGroup()
    for make in (
        lambda: MoELayer(MoEConfig(**{**SMALL, "num_experts": 1, "top_k": 1}), ep),
        lambda: MoELayer(MoEConfig(**SMALL, dispatcher="local"), ep),
        lambda: make_dispatcher("all_to_all", ep, ExpertPlacement.contiguous(6, 3), "cpu"),
        lambda: MoELayer(MoEConfig(**SMALL, placement=((0, 1), (2, 3), (4, 5))), ep),
        lambda: MoELayer(ep, CONFIG),
    ):
        with pytest.raises(ValueError) as error:
            make()
        messages.append(str(error.value))
    return messages


def test_mistakes_around_a_group_are_named_on_every_rank() -> None:
    wanted = [
        "timeout=0",
        "gloo",
        "timeout=-1",
        "timeout='5': must be seconds, finite and > 0",
        "timeout=None: must be seconds",
        "timeout=inf: must be seconds, finite",
        "device='meta': must be cpu or cuda",
        "device='gpu': must be cpu, cuda",
        "nodes=3: must be at most the 2 ranks",
        "nodes=1.5: must be ranks per node",
        "nodes='01': must be ranks per node",
        "process_group=[0, 1]: must be a group of torch.distributed, or None; make one of some ranks by",
        "not a member",
        "num_experts=1",
        "dispatcher='local' with 2 ranks",
        "3",
        "3",
        "the first argument is the MoEConfig, the second the EPGroup",
    ]
    for messages in run_ranks(group_mistakes, 2):
        for message, part in zip(messages, wanted, strict=True):
            assert part in message, (part, message)


def build_differently(rank: int, world: int, field: str) -> None:
    ep = EPGroup(timeout=20)
    config: dict[str, Any] = dict(SMALL)
    dtype, router = torch.float32, None
    if rank == 1:
        if field == "dtype":
            dtype = torch.bfloat16
        elif field == "own router":
            router = lambda x: x  # noqa: E731
        elif field == "router.scoring":
            config["router"] = RouterConfig(scoring="sigmoid")
        elif field == "placement":
            config["placement"] = "strided"
        else:
            config[field] = config[field] + 1
    MoELayer(MoEConfig(**config), ep, dtype=dtype, router=router, name="blocks.0")


@pytest.mark.parametrize("field", ["num_experts", "top_k", "router.scoring", "placement", "dtype", "own router"])
def test_ranks_built_differently_find_out_at_construction_and_name_the_field(field: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(build_differently, 2, args=(field,), timeout=40)
    message = str(failure.value)
    assert "MoELayer 'blocks.0' differs between ranks" in message
    assert f"{field}: rank 0 has" in message and message.count(": rank 0 has") == 1, message

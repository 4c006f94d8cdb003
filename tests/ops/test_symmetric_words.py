"""What the one-sided kernels are made of: the words that travel, the epoch of every program, the room beside takers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from epmoe.comm.symmetric import CLOCKS
from epmoe.ops._triton import INTERPRET, jit, tl
from epmoe.ops.symmetric_configs import REGISTERS, THREADS, give_back_config, launch_options, send_config
from epmoe.ops.symmetric_words import FLIP, advance, escaped, flipped, never_empty, pack_words, unescaped, unpack_words

PROFILES = [(128, "latency"), (4096, "throughput")]
pytestmark = pytest.mark.skipif(not INTERPRET, reason="walks through kernels on CPU")


@jit
def _travel_kernel(w, out, N: tl.constexpr, HOW: tl.constexpr, BY: tl.constexpr, INTERPRETED: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(w + i)
    if HOW == 0:
        a, b = unpack_words(v, BY)
        v = pack_words(a, b, BY, INTERPRETED)
    elif HOW == 1:
        v = unescaped(escaped(v))
    elif HOW == 2:
        v = never_empty(v)
    elif HOW == 3:
        v = flipped(v, BY)
    else:
        v = flipped(v, BY) ^ BY
    tl.store(out + i, v)


def travelled(words: Tensor, how: int, by: int = 0) -> Tensor:
    out = torch.empty_like(words)
    _travel_kernel[(1,)](words, out, words.numel(), how, by, INTERPRET)
    return out


@pytest.mark.parametrize("dtype, kind", [(torch.float32, 0), (torch.bfloat16, 1), (torch.float16, 2)])
def test_numbers_are_taken_out_of_words_and_put_back_to_the_bit(dtype: torch.dtype, kind: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(256 // dtype.itemsize * 4, generator=g) * 3).to(dtype)
    x[:3] = torch.tensor([0.0, -0.0, float("inf")]).to(dtype)
    assert torch.equal(travelled(x.view(torch.int32), 0, kind).view(dtype), x)


def test_no_word_that_travels_is_empty_and_each_comes_back(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (64,), generator=g).int()
    words[:4] = torch.tensor([-1, 0, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert torch.equal(travelled(words, 1), words), "whole numbers as they were"
    numbers = travelled(words, 2)
    assert torch.equal(numbers[1:], words[1:]) and numbers[0] != -1
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert numbers[:1].view(dtype).float().isnan().all(), "a NaN stays one"
    small = torch.randint(-127, 128, (256,), generator=g).to(torch.int8)
    small[:4] = -128
    by = FLIP[torch.int8]
    assert not bool((travelled(small.view(torch.int32), 3, by) == -1).any())
    back = travelled(small.view(torch.int32), 4, by).view(torch.int8)
    assert torch.equal(back[4:], small[4:]) and bool((back[:4] <= -127).all())


@jit
def _advance_kernel(clock, seen, programs):
    pid = tl.program_id(0)
    epoch = tl.load(clock + pid)
    tl.store(seen + pid, epoch)
    advance(clock, epoch, pid, programs)


def test_every_program_of_every_grid_reads_the_same_epoch() -> None:
    clock = torch.ones(CLOCKS, dtype=torch.int32)
    for epoch, programs in enumerate([1, 3, 40, 7, 40, 1, 2], start=1):
        seen = torch.zeros(programs, dtype=torch.int32)
        _advance_kernel[(programs,)](clock, seen, programs)
        assert bool((seen == epoch).all()), (epoch, programs)
    assert bool((clock == 8).all())


@pytest.mark.parametrize("profile", ["latency", "throughput"])
@pytest.mark.parametrize("sms", [None, 24])
def test_senders_always_find_room_beside_the_programs_that_wait(
    profile: str, sms: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import epmoe.ops.symmetric_configs as configs

    monkeypatch.setattr(configs, "_num_sms", lambda _: 132)
    device = torch.device("cuda")
    for capacity, ranks, groups in itertools.product((1, 8, 128, 1024, 8192), (1, 2, 8), (1, 2, 3, 8)):
        waiting = []  # the largest share of the device that takers of one group hold
        for config in (
            send_config.__wrapped__(device, capacity, ranks, 3584, 1792, sms, profile, False, groups, False),
            send_config.__wrapped__(device, capacity, ranks, 3584, 1792, sms, profile, True, groups, False),
            give_back_config.__wrapped__(device, capacity, ranks, 3584, 0, sms, profile, groups, 8, False),
            give_back_config.__wrapped__(device, capacity, ranks, 3584, 8, sms, profile, groups, 8, False),
        ):
            threads = 32 * config.num_warps
            per_sm = min(REGISTERS // (threads * config.max_registers), THREADS // threads)
            places = per_sm * (sms or 132)
            assert config.senders >= 1 and 1 <= config.takers <= 2 * places // 3
            assert config.programs <= min(places, CLOCKS)
            waiting.append(config.takers / (per_sm * 132))
        assert groups * max(waiting) <= 2 / 3


def test_one_group_has_the_launches_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import epmoe.ops.symmetric_configs as configs

    monkeypatch.setattr(configs, "_num_sms", lambda _: 132)
    device = torch.device("cuda")
    sends = [send_config.__wrapped__(device, c, 2, 3584, 1792, None, p, interpret=False) for c, p in PROFILES]
    backs = [give_back_config.__wrapped__(device, c, 2, 3584, 8, None, p, interpret=False) for c, p in PROFILES]
    assert [(c.senders, c.takers, c.run, c.eager) for c in sends] == [(512, 128, 1, True), (256, 256, 4, False)]
    assert [(c.senders, c.takers, c.block, c.num_warps) for c in backs] == [(896, 896, 256, 2), (820, 1221, 256, 2)]
    assert launch_options(torch.device("cpu"), sends[0], 1) == {"DEPENDENT": False, "NEXT_EARLY": False}


def test_behind_an_operation_the_next_kernel_starts_early_only_where_one_group_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import epmoe.ops.symmetric_configs as configs

    monkeypatch.setattr(configs, "dependent_launch", lambda _: {"DEPENDENT": True, "launch_pdl": True})
    config = send_config(torch.device("cpu"), 8, 2, 32, 16, None, "latency")
    made = [launch_options(torch.device("cuda"), config, groups) for groups in (1, 2)]
    assert [(options["DEPENDENT"], options["NEXT_EARLY"]) for options in made] == [(True, True), (True, False)]

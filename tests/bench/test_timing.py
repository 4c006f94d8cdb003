"""Medians: what they are medians of, that ranks report the slowest, and that calls take turns."""

from __future__ import annotations

import time

import pytest
import torch

from epmoe import EPGroup
from epmoe.bench import timing
from epmoe.bench.timing import Ceilings, burst_us, interleaved_us, measure_ceilings, median_us, sustained_us
from epmoe.testing import run_ranks

CPU = torch.device("cpu")


class Clock:
    """Time that passes in naps alone, as on a machine that does nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(timing, "time", Clock())
    return timing.time


def test_a_median_is_of_the_repeats_and_neither_of_the_warmup_nor_of_an_outlier(clock):
    naps = iter([0.05, 0.05, 0.002, 0.05, 0.002, 0.002, 0.002])
    assert median_us(lambda: clock.sleep(next(naps)), warmup=2, repeat=5, device=CPU) == pytest.approx(2000)
    assert next(naps, None) is None


def test_calls_take_turns_and_each_round_begins_with_another():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = interleaved_us(calls, warmup=1, repeat=3, device=CPU)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert list(times) == ["a", "b", "c"] and all(value >= 0 for value in times.values())


def test_a_burst_rests_before_each_call_and_drops_its_first_ones(clock):
    order, started = [], {}

    def call(name, first, then):
        order.append(name)
        started.setdefault(name, clock.now)
        clock.sleep(first if order.count(name) == 1 else then)

    calls = {"a": lambda: call("a", 0.05, 0.002), "b": lambda: call("b", 0.05, 0.004)}
    times = burst_us(calls, idle=0.1, warmup=1, repeat=2, device=CPU)
    assert order == ["a"] * 3 + ["b"] * 3  # neither warms the chip up for the other
    assert started == pytest.approx({"a": 0.1, "b": 0.1 + 0.05 + 2 * 0.002 + 0.1})
    assert times == pytest.approx({"a": 2000, "b": 4000})


def test_under_load_calls_take_turns_for_as_long_as_was_asked_and_the_first_turn_does_not_count(clock):
    order = []

    def call(name, seconds):
        order.append(name)
        clock.sleep(0.05 if order.count(name) == 1 else seconds)

    calls = {"a": lambda: call("a", 0.002), "b": lambda: call("b", 0.005)}
    times = sustained_us(calls, {"a": 2000, "b": 5000}, seconds=0.08, device=CPU)
    assert "".join(order) == ("a" * 10 + "b" * 4) * 5
    assert times == pytest.approx({"a": 2000, "b": 5000})


def test_bursts_and_load_without_time_or_calls_are_refused():
    with pytest.raises(ValueError, match=r"idle=-1"):
        burst_us({"a": lambda: None}, idle=-1, warmup=0, repeat=1, device=CPU)
    with pytest.raises(ValueError, match=r"0 calls"):
        sustained_us({}, {}, seconds=1, device=CPU)
    with pytest.raises(ValueError, match=r"seconds=0"):
        sustained_us({"a": lambda: None}, {"a": 1.0}, seconds=0, device=CPU)


def test_a_graph_on_cpu_or_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="graph=True"):
        median_us(lambda: None, warmup=0, repeat=1, device=CPU, graph=True)
    with pytest.raises(ValueError, match="repeat=0"):
        median_us(lambda: None, warmup=0, repeat=0, device=CPU)


def test_a_floor_is_bytes_and_flops_over_ceilings():
    ceilings = Ceilings(bf16_tflops=500.0, hbm_gb_s=4000.0, link_gb_s=400.0)
    assert ceilings.compute_us(1e12) == pytest.approx(2000)  # 1 TFLOP at 500 TFLOP/s is 2 ms
    assert ceilings.memory_us(4e9) == pytest.approx(1000)
    assert ceilings.wire_us(4e8) == pytest.approx(1000)
    assert Ceilings(1.0, 1.0, None).wire_us(0) == 0


def test_fp8_has_a_ceiling_of_its_own_where_it_was_measured():
    assert Ceilings(500.0, 1.0, None, 1000.0).compute_us(1e12, "fp8_row") == pytest.approx(1000)
    assert Ceilings(500.0, 1.0, None, 1000.0).compute_us(1e12, "bf16") == pytest.approx(2000)
    assert Ceilings(500.0, 1.0, None).compute_us(1e12, "fp8_row") == pytest.approx(2000)


def sleeps_by_rank(rank, world_size):
    ep = EPGroup(timeout=30)
    ceilings = measure_ceilings(ep.device, ep)
    return median_us(lambda: time.sleep(0.02 * rank), warmup=0, repeat=3, device=CPU, ep=ep), ceilings


def test_every_rank_reports_the_slowest_rank_and_the_same_ceilings():
    (first, ceilings), (second, others) = run_ranks(sleeps_by_rank, 2)
    assert first == second and 20_000 <= first < 10_000_000  # microseconds, on a machine that may be busy
    assert ceilings == others and ceilings.link_gb_s > 0 and ceilings.hbm_gb_s > 0 and ceilings.bf16_tflops > 0

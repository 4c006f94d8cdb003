"""Leased SMs are left free by kernels that loop over tiles, as long as somebody holds the lease."""

from __future__ import annotations

import gc

import torch

from epmoe.ops._configs import most_programs, num_programs
from epmoe.ops._leases import Lease, leased_sms

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def test_programs_leave_the_largest_lease_free_until_it_ends() -> None:
    everything = num_programs(CPU, 2, 1000)
    assert everything == most_programs(CPU, 2, 1000) > 2
    small, large = Lease(CPU, 1), Lease(CPU, everything // 2 - 1)
    assert leased_sms(CPU) == everything // 2 - 1 and leased_sms(OTHER) == 0
    assert num_programs(CPU, 2, 1000) == 2 and most_programs(CPU, 2, 1000) == everything
    assert num_programs(CPU, 0, 1000) == 1000  # a program for each: nothing loops
    large.end()
    large.end()
    assert num_programs(CPU, 2, 1000) == everything - 2
    small.end()
    assert num_programs(CPU, 2, 1000) == everything


def test_more_than_all_sms_leave_one_program_and_a_forgotten_lease_ends() -> None:
    everything = num_programs(CPU, 1, 1000)
    lease = Lease(CPU, 10_000)
    assert num_programs(CPU, 1, 1000) == 1
    del lease
    gc.collect()
    assert num_programs(CPU, 1, 1000) == everything

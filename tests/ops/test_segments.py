"""Segments: the same rows in either layout, and nothing else."""

from __future__ import annotations

import pytest
import torch

from epmoe.ops._segments import batched_segments, check_segments, segment_slices, standard_segments


def test_standard_segments_are_the_offsets_seen_twice():
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    start, end = standard_segments(offsets)
    assert start.tolist() == [0, 2, 2] and end.tolist() == [2, 2, 5]
    assert start.data_ptr() == offsets.data_ptr(), "copied"
    check_segments(start, end, 3)


@pytest.mark.parametrize("counts, capacity", [([2, 0, 3], 4), ([4], 4), ([0, 0], 0), ([], 3)], ids=str)
def test_batched_segments_begin_at_each_experts_places(counts, capacity):
    start, end = batched_segments(torch.tensor(counts, dtype=torch.int32), capacity)
    rows = [[e * capacity + c for c in range(count)] for e, count in enumerate(counts)]
    assert [list(range(a, b)) for a, b in zip(start.tolist(), end.tolist(), strict=True)] == rows
    assert start.dtype == end.dtype == torch.int32
    assert segment_slices(start, end) == [(e, slice(own[0], own[-1] + 1)) for e, own in enumerate(rows) if own]

"""ExpertPlacement: a partition of the experts, and messages that name what breaks it."""

from __future__ import annotations

import pytest
import torch

from epmoe.placement import ExpertPlacement


@pytest.mark.parametrize("num_experts, num_ranks", [(1, 1), (8, 4), (10, 4), (7, 3), (13, 8), (256, 7)])
@pytest.mark.parametrize("kind", ["contiguous", "strided"])
def test_every_expert_has_one_owner_and_counts_differ_by_at_most_one(kind, num_experts, num_ranks):
    placement = ExpertPlacement.from_spec(kind, num_experts, num_ranks)
    assert sorted(e for rank in placement.ranks for e in rank) == list(range(num_experts))
    counts = [placement.num_local(r) for r in range(num_ranks)]
    assert len(counts) == placement.num_ranks == num_ranks
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    assert placement.max_local == counts[0]


def test_contiguous_and_strided_are_the_documented_examples():
    assert ExpertPlacement.contiguous(5, 2).ranks == ((0, 1, 2), (3, 4))
    assert ExpertPlacement.strided(5, 2).ranks == ((0, 2, 4), (1, 3))


def test_owner_and_expert_map_follow_the_local_order():
    placement = ExpertPlacement.explicit([[4, 0], [2], [1, 5, 3]])
    assert placement.owner() == (0, 2, 1, 2, 0, 2)
    owner = placement.owner_tensor("cpu")
    assert owner.dtype == torch.int32 and owner.tolist() == [0, 2, 1, 2, 0, 2]
    assert placement.local_experts(2) == (1, 5, 3)
    for rank in range(3):
        expert_map = placement.expert_map(rank)
        assert expert_map.dtype == torch.int32 and expert_map.shape == (6,)
        for local, expert in enumerate(placement.local_experts(rank)):
            assert expert_map[expert] == local
        assert (expert_map >= 0).sum() == placement.num_local(rank)


def test_experts_per_rank_is_a_number_only_where_experts_lie_in_order_and_evenly():
    assert ExpertPlacement.contiguous(12, 4).experts_per_rank == 3
    assert ExpertPlacement.strided(3, 3).experts_per_rank == 1
    assert ExpertPlacement.explicit([[1, 0], [3, 2]]).experts_per_rank == 2, "owners do, whatever the local order"
    for placement in (ExpertPlacement.contiguous(13, 4), ExpertPlacement.strided(8, 4)):
        assert placement.experts_per_rank == 0
    assert ExpertPlacement.explicit([[0, 1, 2], [3]]).experts_per_rank == 0


def test_from_spec_takes_lists_of_ids_and_compares_equal_to_explicit():
    spec = ((3, 1), (0, 2))
    assert ExpertPlacement.from_spec(spec, 4, 2) == ExpertPlacement.explicit([[3, 1], [0, 2]], 4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ExpertPlacement.contiguous(2, 4), r"num_experts=2 < 4 ranks: .*use fewer ranks in the EPGroup"),
        (lambda: ExpertPlacement.strided(2, 4), r"num_experts=2 < 4 ranks: .*use fewer ranks in the EPGroup"),
        (lambda: ExpertPlacement.contiguous(2, 0), r"num_ranks=0: must be an int > 0"),
        (lambda: ExpertPlacement.explicit([[0], [1], [2]], 2), r"num_experts=2 < 3 ranks"),
        (lambda: ExpertPlacement.explicit([[0, 1], [], [2]]), r"rank 1 owns no expert"),
        (lambda: ExpertPlacement.explicit([[0, 1], [1, 2]], 3), r"expert 1 is listed by rank 0 and again by rank 1"),
        (lambda: ExpertPlacement.explicit([[0, 1, 1], [2]], 3), r"expert 1 is listed by rank 0 and again by rank 0"),
        (lambda: ExpertPlacement.explicit([[0], [3]], 4), r"no rank owns expert 1 \(2 of num_experts=4"),
        (lambda: ExpertPlacement.explicit([[0], [7]], 3), r"rank 1 lists expert 7, outside \[0, num_experts=3\)"),
        (lambda: ExpertPlacement.explicit([[0], [-1]], 3), r"rank 1 lists expert -1, outside"),
        (lambda: ExpertPlacement.explicit([[0], [1.0]], 2), r"rank 1 lists 1\.0; expert ids must be ints"),
        (lambda: ExpertPlacement.from_spec(((0,), (1,)), 2, 3), r"lists 2 ranks but the EPGroup has 3"),
        (lambda: ExpertPlacement.from_spec(((0,), (1,)), 2, 1), r"lists 2 ranks but all experts are to be on 1"),
        (lambda: ExpertPlacement.from_spec(3, 2, 1), r"placement=3: must be contiguous, strided"),
        (lambda: ExpertPlacement.contiguous("6", 2), r"num_experts='6': must be an int > 0"),
        (lambda: ExpertPlacement.strided(6, 2.0), r"num_ranks=2.0: must be an int > 0"),
        (lambda: ExpertPlacement.explicit([0, 1, 2]), r"lists=\[0, 1, 2\]: must be one sequence of expert ids"),
        (lambda: ExpertPlacement.explicit("012"), r"lists='012': must be one sequence of expert ids for each rank"),
        (lambda: ExpertPlacement(3, [[0, 1, 2]]), r"ranks=\[\[0, 1, 2\]\]: must be one tuple of expert ids"),
        (lambda: ExpertPlacement.contiguous(4, 2).local_experts("0"), r"rank='0': must be in \[0, 2\)"),
        (lambda: ExpertPlacement.from_spec("round", 4, 2), r"placement='round': must be contiguous, strided"),
        (lambda: ExpertPlacement.contiguous(4, 2).expert_map(2), r"rank=2: must be in \[0, 2\)"),
        (lambda: ExpertPlacement.contiguous(4, 2).local_experts(-1), r"rank=-1: must be in \[0, 2\)"),
    ],
)
def test_a_mistake_is_a_value_error_that_names_it(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_fields_differ_exactly_where_two_placements_differ():
    a = ExpertPlacement.explicit([[0, 1], [2, 3], [4]]).fields()
    b = ExpertPlacement.explicit([[0, 1], [3, 2], [4]]).fields()
    assert all(isinstance(text, str) for text in a.values())
    assert [key for key in a if a[key] != b[key]] == ["placement.ranks[1]"]

"""Which rank owns which expert: plain data, fixed before any tensor exists.

A token's `topk_ids` are logical ids; the dispatcher asks `owner` where a row goes and the experts ask `expert_map`
which of their weights it meets. Letters: E logical experts, R ranks, L local experts of one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from epmoe.checks import check_int, check_kind, require


@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """`ranks[r]` lists the logical ids that rank r owns, in the order of its weights: position = local id.

    Counts may differ between ranks. Every expert has exactly one owner and every rank owns at least one expert;
    anything else is a ValueError naming the expert or the rank.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        lists = isinstance(self.ranks, tuple) and all(isinstance(experts, tuple) for experts in self.ranks)
        require(
            lists, "ranks", self.ranks, "one tuple of expert ids for each rank; ExpertPlacement.explicit takes lists"
        )
        _check_enough(self.num_experts, len(self.ranks))
        owner: dict[int, int] = {}
        for rank, experts in enumerate(self.ranks):
            if not experts:
                raise ValueError(f"placement: rank {rank} owns no expert; every rank must own at least one")
            for expert in experts:
                if isinstance(expert, bool) or not isinstance(expert, int):
                    raise ValueError(f"placement: rank {rank} lists {expert!r}; expert ids must be ints")
                if not 0 <= expert < self.num_experts:
                    raise ValueError(
                        f"placement: rank {rank} lists expert {expert}, outside [0, num_experts={self.num_experts})"
                    )
                if expert in owner:
                    raise ValueError(
                        f"placement: expert {expert} is listed by rank {owner[expert]} and again by rank {rank}; "
                        "it must have one owner"
                    )
                owner[expert] = rank
        missing = [expert for expert in range(self.num_experts) if expert not in owner]
        if missing:
            raise ValueError(
                f"placement: no rank owns expert {missing[0]} ({len(missing)} of num_experts={self.num_experts} "
                "have no owner)"
            )

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Consecutive runs of experts; the first E % R ranks own one more. E=5, R=2: (0, 1, 2), (3, 4)."""
        _check_enough(num_experts, num_ranks)
        share, extra = divmod(num_experts, num_ranks)
        starts = [rank * share + min(rank, extra) for rank in range(num_ranks + 1)]
        return cls(num_experts, tuple(tuple(range(starts[r], starts[r + 1])) for r in range(num_ranks)))

    @classmethod
    def strided(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Expert e on rank e % R. E=5, R=2: (0, 2, 4), (1, 3)."""
        _check_enough(num_experts, num_ranks)
        return cls(num_experts, tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)))

    @classmethod
    def explicit(cls, lists: Sequence[Sequence[int]], num_experts: int | None = None) -> ExpertPlacement:
        """One list of expert ids per rank; `num_experts` defaults to how many ids are listed."""
        right = "one sequence of expert ids for each rank"
        check_kind("lists", lists, Sequence, right)
        fits = not isinstance(lists, str) and all(
            isinstance(ids, Sequence) and not isinstance(ids, str) for ids in lists
        )
        require(fits, "lists", lists, right)
        ranks = tuple(tuple(experts) for experts in lists)
        return cls(sum(map(len, ranks)) if num_experts is None else num_experts, ranks)

    @classmethod
    def from_spec(
        cls, spec: str | Sequence[Sequence[int]] | ExpertPlacement, num_experts: int, num_ranks: int
    ) -> ExpertPlacement:
        """The placement that `MoEConfig.placement` describes, for an EP group of `num_ranks`."""
        if isinstance(spec, ExpertPlacement):
            spec = spec.ranks
        if spec == "contiguous":
            return cls.contiguous(num_experts, num_ranks)
        if spec == "strided":
            return cls.strided(num_experts, num_ranks)
        right = "contiguous, strided, or one sequence of expert ids for each rank"
        check_kind("placement", spec, Sequence, right)
        if isinstance(spec, str):
            raise ValueError(f"placement={spec!r}: must be {right}")
        if len(spec) != num_ranks:
            there = "the EPGroup has" if num_ranks > 1 else "all experts are to be on"
            raise ValueError(
                f"placement lists {len(spec)} ranks but {there} {num_ranks}: give one list per rank"
                + ("" if num_ranks > 1 else f", or an EPGroup of {len(spec)} ranks")
            )
        return cls.explicit(spec, num_experts)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.ranks)

    @property
    def max_local(self) -> int:
        """The largest L of any rank."""
        return max(map(len, self.ranks))

    def local_experts(self, rank: int) -> tuple[int, ...]:
        """Logical ids owned by `rank`, in local order."""
        if not isinstance(rank, int) or not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank={rank!r}: must be in [0, {self.num_ranks}), the ranks of this placement")
        return self.ranks[rank]

    def num_local(self, rank: int) -> int:
        """L of `rank`."""
        return len(self.local_experts(rank))

    def owner(self) -> tuple[int, ...]:
        """The rank that owns each logical expert, of length E."""
        by_expert = {expert: rank for rank, experts in enumerate(self.ranks) for expert in experts}
        return tuple(by_expert[expert] for expert in range(self.num_experts))

    @property
    def experts_per_rank(self) -> int:
        """n where expert e is on rank e // n, for all experts; 0 where they do not lie so."""
        n, rest = divmod(self.num_experts, self.num_ranks)
        return n if not rest and all(owner == e // n for e, owner in enumerate(self.owner())) else 0

    def owner_tensor(self, device: torch.device | str | None = None) -> torch.Tensor:
        """`owner()` as int32 `[E]`. On CUDA this copies from the host: make it once and keep it."""
        return torch.tensor(self.owner(), dtype=torch.int32, device=device)

    def expert_map(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Logical id -> local id on `rank`, or -1 where another rank owns it: int32 `[E]`. Make it once and keep it."""
        local = {expert: position for position, expert in enumerate(self.local_experts(rank))}
        return torch.tensor([local.get(e, -1) for e in range(self.num_experts)], dtype=torch.int32, device=device)

    def fields(self) -> dict[str, str]:
        """Every field as text, one entry per rank's list: what ranks compare to find that they disagree."""
        fields = {"placement.num_experts": str(self.num_experts)}
        return fields | {f"placement.ranks[{rank}]": str(experts) for rank, experts in enumerate(self.ranks)}


def _check_enough(num_experts: int, num_ranks: int) -> None:
    check_int("num_experts", num_experts)
    check_int("num_ranks", num_ranks)
    if num_experts < num_ranks:
        raise ValueError(
            f"num_experts={num_experts} < {num_ranks} ranks: every rank must own at least one expert; "
            "use fewer ranks in the EPGroup"
        )

"""`Nodes`: which ranks of a group share a machine, and through which of them rows enter it.

A node is what shares a host unless it is said otherwise: where links within and between differ, not what the machines
are called. Rows for a node enter it at the rank with the sender's own local index, so each rank talks to one rank of
every other node (a *rail*): with one network card per GPU, every card carries its own GPU's rows to its own like.

    ranks    0 1 2 3 | 4 5 6 7      node of each: 0 0 0 0 1 1 1 1      local index: 0 1 2 3 0 1 2 3
    rank 2 sends rows for any of 4..7 to rank 6, which passes them on
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from epmoe.comm.symmetric import host_identity

if TYPE_CHECKING:
    from epmoe.comm.group import EPGroup

VARIABLE = "EPMOE_RANKS_PER_NODE"


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Attributes: `ranks`, those of each node, ascending; nodes stand in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, labels: Sequence[object]) -> Nodes:
        """Ranks with equal labels share a node."""
        return cls(tuple(tuple(r for r, own in enumerate(labels) if own == label) for label in dict.fromkeys(labels)))

    @property
    def largest(self) -> int:
        """The most ranks on any node."""
        return max(map(len, self.ranks))

    @property
    def two_levels(self) -> bool:
        """Several nodes, and several ranks on one of them: only then is there something to gain by going by nodes."""
        return len(self.ranks) > 1 and self.largest > 1

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The node of each rank, and its local index there."""
        found = {rank: (n, i) for n, ranks in enumerate(self.ranks) for i, rank in enumerate(ranks)}
        return tuple(found[rank] for rank in range(len(found)))

    @functools.cached_property
    def entrances(self) -> tuple[tuple[int, ...], ...]:
        """By source rank and node, the rank at which the source's rows enter: of its own local index, wrapped where
        that node is smaller; the source itself on its own node."""
        return tuple(tuple(ranks[index % len(ranks)] for ranks in self.ranks) for _, index in self.places)

    def beside(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node, itself included."""
        return self.ranks[self.places[rank][0]]


def declared_labels(nodes: int | Sequence[object] | None, num_ranks: int) -> tuple[object, ...] | None:
    """The node of each rank as the caller or the environment says; None: nobody does.

    Raises:
        ValueError: neither a number of ranks per node nor one label for each rank.
    """
    name = "nodes"
    if nodes is None and (value := os.environ.get(VARIABLE)):
        name, nodes = VARIABLE, int(value) if value.isdecimal() else -1
    if nodes is None:
        return None
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if nodes < 1:
            raise ValueError(f"{name}={os.environ[VARIABLE] if name == VARIABLE else nodes!r}: must be an int > 0")
        if nodes > num_ranks and name != VARIABLE:  # the variable is for all groups, also for small ones
            raise ValueError(f"nodes={nodes}: must be at most the {num_ranks} ranks of the group, or a label for each")
        return tuple(rank // nodes for rank in range(num_ranks))
    labels = tuple(nodes) if isinstance(nodes, Sequence) and not isinstance(nodes, str) else ()
    if len(labels) != num_ranks:
        raise ValueError(f"nodes={nodes!r}: must be ranks per node, or one label for each of the {num_ranks} ranks")
    return labels


def find_nodes(ep: EPGroup, labels: tuple[object, ...] | None) -> Nodes:
    """By the declared labels, else by host; collective.

    Raises:
        ValueError: ranks declare different nodes.
    """
    gathered = ep.gather((host_identity(), labels), "which ranks share a node")
    for rank, (_, other) in enumerate(gathered):
        if other != labels:
            raise ValueError(
                f"group {ep.name!r}: rank {ep.rank} declares nodes {labels}, rank {rank} declares {other}: make nodes= "
                f"or {VARIABLE} equal on all ranks"
            )
    return Nodes.of(labels if labels is not None else [host for host, _ in gathered])

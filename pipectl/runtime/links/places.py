"""Where the ranks are, and which of them to measure between."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pipectl.errors import MismatchError
from pipectl.runtime.links.session import Pair
from pipectl.runtime.nodes import grouped, node_name


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Args:
        node: the batch system's name of the node.
        host: the machine's own name; virtual nodes share one.
        cores: which the rank may use.
        memory_bytes: of the machine.
    """

    node: str
    host: str
    cores: frozenset[int]
    memory_bytes: int

    @classmethod
    def here(cls) -> Place:
        """This rank's."""
        return cls(
            node=node_name(),
            host=socket.gethostname(),
            cores=frozenset(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )


def ranks_by_node(places: Sequence[Place]) -> list[list[int]]:
    """The ranks of every node, nodes by their first rank.

    Raises:
        MismatchError: a node's ranks do not follow each other, which no plan can describe.
    """
    found = grouped(place.node for place in places)
    for node, ranks in found.items():
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            raise MismatchError(
                f"node {node} has the ranks {ranks}: they do not follow each other",
                cure="have the launcher fill one node after the other (block distribution)",
            )
    return list(found.values())


def pairs_within(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Neighbours, and the farthest ranks, of the first node that has two."""
    for ranks in nodes:
        if len(ranks) > 1:
            return list(dict.fromkeys([(ranks[0], ranks[1]), (ranks[0], ranks[-1])]))
    return []


def pairs_between(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """The first ranks of neighbouring nodes, and of the farthest."""
    if len(nodes) < 2:
        return []
    first, second, last = nodes[0][0], nodes[1][0], nodes[-1][0]
    return list(dict.fromkeys([(first, second), (first, last)]))

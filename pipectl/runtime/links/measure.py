"""All experiments, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipectl.cluster import ASSUMED_BETWEEN, ASSUMED_WITHIN
from pipectl.link import Link
from pipectl.runtime.links import sums as summing
from pipectl.runtime.links.one_link import measure_link, with_sharing
from pipectl.runtime.links.places import Place, pairs_between, pairs_within, ranks_by_node
from pipectl.runtime.links.session import Session

Say = Callable[[str, int], None]
"""Told what is measured now, and how many percent are done."""


@dataclass(frozen=True)
class Figures:
    """What was found.

    Args:
        places: of every rank.
        nodes: ranks of every node.
        within_node, between_nodes: the assumed ones where no two ranks are so placed.
        allreduce: (ranks, bytes, seconds).
    """

    places: tuple[Place, ...]
    nodes: tuple[tuple[int, ...], ...]
    within_node: Link
    between_nodes: Link
    allreduce: tuple[tuple[int, int, float], ...]


def measure(session: Session, budget_s: float, say: Say) -> Figures:
    """Everything, in about ``budget_s`` seconds; on all ranks the same.

    Raises:
        MismatchError: the ranks are not numbered node by node.
    """
    places = session.gather(Place.here())
    nodes = ranks_by_node(places)
    within, between = pairs_within(nodes), pairs_between(nodes)
    counts = summing.rank_counts(len(places))
    share_s = budget_s / (2 * (len(within) + len(between)) + len(counts))
    within_node, between_nodes = ASSUMED_WITHIN, ASSUMED_BETWEEN
    if within:
        say("measuring links within a node", 0)
        within_node = measure_link(session, within, share_s)
    if between:
        say("measuring links between nodes", 40 if within else 0)
        link = measure_link(session, between, share_s)
        between_nodes = with_sharing(session, link, nodes)
    sums: list[tuple[int, int, float]] = []
    for index, count in enumerate(counts):
        say(f"measuring sums over {count} ranks", 80 + 20 * index // len(counts))
        sums += _sums(session, count, share_s)
    return Figures(tuple(places), tuple(map(tuple, nodes)), within_node, between_nodes, tuple(sums))


def _sums(session: Session, count: int, share_s: float) -> list[tuple[int, int, float]]:
    found = session.group(
        list(range(count)), lambda communicator: summing.times_by_size(communicator, share_s)
    )
    return [(count, size, time_s) for size, time_s in found]

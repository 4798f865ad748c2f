"""The state sequence of PipeDream and its successors: augmented antichains in topological order.

An antichain is a set of operators none of which depends on another; with the earlier operators
whose values are still needed it is *augmented*, and everything above it is a prefix of the graph.
From one antichain the next follow by letting one operator step to a successor. The states are
these prefixes, in a topological order of the steps. Source: Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1, and its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.planner.graphs.bitsets import bits, bitset
from pipectl.planner.graphs.condense import Condensed, condense
from pipectl.planner.graphs.ideals import prefix_downsets
from pipectl.planner.hybrid.states import States
from pipectl.profile import Profile

MOST_STATES = 1500
"""With more antichains, the prefixes of one topological order are taken."""


def antichain_states(profile: Profile) -> States:
    """Nothing, then every state of the sequence; the last one is everything."""
    graph = condense(profile)
    found = [0, *_sequence(graph)] if profile.edge_indices else None
    if not found or len(found) > MOST_STATES or found[-1] != graph.everything:
        found = prefix_downsets(graph, 0)
    return States.chosen(graph, found, complete=False)


def _sequence(graph: Condensed) -> list[int]:
    """Downsets in the order in which a depth-first search leaves them, reversed."""
    source = next(b for b, before in enumerate(graph.predecessors) if not before)
    start: tuple[int, ...] = (source,)
    following: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    left: list[tuple[int, ...]] = []
    path = [start]
    while path:
        antichain = path[-1]
        if antichain not in following:
            following[antichain] = _steps(graph, antichain)[::-1]
        if following[antichain]:
            after = following[antichain].pop()
            if after not in following:
                path.append(after)
        else:
            left.append(path.pop())
        if len(following) > MOST_STATES:
            return []
    return [_downset(graph, antichain) for antichain in reversed(left)]


def _downset(graph: Condensed, antichain: Sequence[int]) -> int:
    inside = bitset(antichain)
    for block in antichain:
        inside |= graph.ancestors[block]
    return inside


def _augmented(graph: Condensed, antichain: Sequence[int]) -> list[int]:
    """The antichain and every ancestor with a reader outside what one of its operators needs."""
    extra = 0
    for block in antichain:
        above = graph.ancestors[block]
        for before in bits(above & ~extra):
            if graph.successors[before] & ~(above | 1 << block):
                extra |= 1 << before
    return [*bits(extra), *(block for block in antichain if not extra >> block & 1)]


def _steps(graph: Condensed, antichain: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The antichains that follow: one operator of the augmented antichain steps on."""
    augmented = _augmented(graph, antichain)
    members = bitset(augmented)
    found = []
    for block in augmented:
        for after in bits(graph.successors[block]):
            if after not in antichain and not graph.descendants[after] & members:
                moved = {after if member == block else member for member in augmented}
                found.append(_maximal(graph, moved))
    return found


def _maximal(graph: Condensed, blocks: set[int]) -> tuple[int, ...]:
    """Without operators on which others depend."""
    inside = bitset(blocks)
    return tuple(sorted(b for b in blocks if not graph.descendants[b] & inside))

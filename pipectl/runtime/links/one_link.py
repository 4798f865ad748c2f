"""Everything about one kind of link: within a node, or between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from pipectl.link import Link, Observed, Timings, measured_link
from pipectl.runtime.links import overlap, pingpong
from pipectl.runtime.links.at_once import both_ways, one_way_s
from pipectl.runtime.links.session import Pair, Session

CONTENTION_BYTES = 4 * 2**20
"""Size of the messages that compete, if so large ones were measured."""
FULL_DUPLEX = 1.5
"""Below this ratio of times, both directions count as independent: one link would give 2."""


def measure_link(session: Session, pairs: Sequence[Pair], share_s: float) -> Link:
    """The link that some pairs have, in about ``share_s`` seconds for each pair, and once more."""
    tables = [
        session.pair(pair, lambda peer: pingpong.times_by_size(peer, share_s)) for pair in pairs
    ]
    link = measured_link(_mean(tables))
    size = _contention_bytes(link)
    ratio = session.pair(pairs[0], lambda peer: both_ways(peer, size))
    rows = [(size, *_hidden(session, pairs[0], size)) for size in _overlap_sizes(link, share_s)]
    found = Observed(both_ways=ratio, overlap=tuple(rows))
    return replace(link, duplex=ratio < FULL_DUPLEX, observed=found)


def with_sharing(session: Session, link: Link, nodes: Sequence[Sequence[int]]) -> Link:
    """The link between nodes, with whether the ranks of the first two nodes share it.

    ``n`` pairs on one link take ``n`` times as long as one, on ``n`` links as long as one; the
    border is the square root.
    """
    pairs = min(len(nodes[0]), len(nodes[1]))
    if pairs < 2 or link.observed is None:
        return link
    size = _contention_bytes(link)
    alone_s, all_s = (
        session.group(
            [*nodes[0][:count], *nodes[1][:count]],
            lambda communicator: one_way_s(communicator, size),
        )
        for count in (1, pairs)
    )
    ratio = all_s / alone_s
    observed = replace(link.observed, pairs=pairs, at_once=ratio)
    return replace(link, shared=ratio > sqrt(pairs), observed=observed)


def _hidden(session: Session, pair: Pair, size: int) -> tuple[float, float]:
    return session.pair(pair, lambda peer: overlap.hidden(peer, size))


def _mean(tables: Sequence[Sequence[tuple[int, float]]]) -> Timings:
    """Mean over pairs, of the sizes that all of them have measured."""
    return tuple(
        (rows[0][0], sum(time_s for _, time_s in rows) / len(rows))
        for rows in zip(*tables, strict=False)
    )


def _contention_bytes(link: Link) -> int:
    return min(CONTENTION_BYTES, link.timings[-1][0])


def _overlap_sizes(link: Link, share_s: float) -> list[int]:
    """The sizes there is time for; the largest measured one if that is smaller."""
    largest = link.timings[-1][0]
    sizes = [size for size in overlap.SIZES if size <= largest] or [largest]
    return [s for s in sizes if s == sizes[0] or overlap.COST * link.transfer_s(s) < share_s]

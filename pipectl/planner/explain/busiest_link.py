"""Which link of a plan carries messages longest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from pipectl.cluster import Cluster
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.schedule import Channel, channels, messages
from pipectl.simulate.network import way_between

End = int | str | None
_KINDS = {"within": "rank", "nodes": "node", "switches": "switch"}
"""What the parts of a way connect where several ranks share them."""


@dataclass(frozen=True)
class LinkLoad:
    """The busiest connection in one direction, or in both if these share it.

    Args:
        between: what it connects: ``rank``, ``node`` or ``switch``.
        source, target: numbers of ranks or nodes, or names of switches. All that leaves one has no
            target, all that enters one no source; where one link takes both, the two are the same.
        busy_s: time of a step in which it carries messages.
    """

    between: str
    source: End
    target: End
    busy_s: float
    bytes_per_step: float


def busiest_link(plan: Plan, cluster: Cluster) -> LinkLoad | None:
    """The connection that carries messages longest; None if there is no message.

    Messages take the ways that they take in the simulator.
    """
    busy: dict[Hashable, tuple[float, float]] = {}
    links: dict[Hashable, Link] = {}
    for channel in channels(plan):
        if channel.is_local:
            continue
        ends, sizes = (channel.source_rank, channel.target_rank), list(_sizes(plan, channel))
        moved = sum(number * size for size, number in sizes)
        for key, link in way_between(cluster, plan.node_of_rank, *ends):
            before_s, before = busy.get(key, (0.0, 0.0))
            time_s = sum(number * link.hold_s(size) for size, number in sizes)
            busy[key], links[key] = (before_s + time_s, before + moved), link
    if not busy:
        return None
    key = max(busy, key=busy.__getitem__)
    return LinkLoad(*_ends(key, links[key]), *busy[key])


def _sizes(plan: Plan, channel: Channel) -> Iterator[tuple[float, int]]:
    """Bytes of the messages of a channel in a step, and how many there are of each size."""
    if channel.kind is TransferKind.WEIGHT:
        yield channel.size_bytes, 1
        return
    held = messages(plan, channel, plan.micro_batches)
    if isinstance(held.start, int):
        parts = np.array(plan.micro_batch_shares)[held.micro_batches]
    else:
        parts = (held.stop - held.start) / plan.micro_batch_size
    for part, number in zip(*np.unique(parts, return_counts=True), strict=True):
        yield channel.size_bytes * float(part), int(number)


def _ends(key: Hashable, link: Link) -> tuple[str, End, End]:
    """What a part of a way lies between; see :func:`pipectl.simulate.network.way_between`."""
    assert isinstance(key, tuple)
    where, ends, *side = key
    kind = _KINDS[where]
    if side:
        return kind, None if side == ["in"] else ends, None if side == ["out"] else ends
    source, target = ends if link.duplex else sorted(ends, key=str)
    return kind if link.shared else "rank", source, target

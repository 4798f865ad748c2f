"""What moves in a step: messages, sums over replicas, and copies to the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Kind
from pipectl.schedule.channel import channels
from pipectl.simulate.network import Stream, host_way, way_between, way_latency_s
from pipectl.simulate.reduction import reduction_s
from pipectl.simulate.tables import Rows


class Numbering:
    """Numbers of all streams: channels, then the sums of every stage, then its copies.

    Copies are numbered by stage and replica, to the host and back, whether there are any or not: so
    the numbers do not depend on which stages offload.
    """

    def __init__(self, plan: Plan) -> None:
        self.connections = channels(plan)
        self._plan = plan
        self._first_copy: list[int] = []
        self.streams = len(self.connections) + len(plan.stages)
        for stage in plan.stages:
            self._first_copy.append(self.streams)
            self.streams += 2 * stage.replicas

    def of_rows(self, rank: int, actions: Actions) -> Rows:
        """The stream of every row of a rank's program; -1 for computations."""
        kind, stage = actions.column("kind"), actions.column("stage")
        found = actions.column("channel").copy()
        reduces = (kind == Kind.REDUCE_START) | (kind == Kind.REDUCE_WAIT)
        found[reduces] = len(self.connections) + stage[reduces]
        for kinds, back in (
            ((Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT), 0),
            ((Kind.FETCH_START, Kind.FETCH_WAIT), 1),
        ):
            rows = np.flatnonzero((kind == kinds[0]) | (kind == kinds[1]))
            if len(rows):
                copies = [self._copy(int(index), rank) + back for index in stage[rows]]
                found[rows] = copies
        return found

    def around(self, connections: Sequence[int], stages: Sequence[int], rank: int) -> list[int]:
        """The streams of a plan of these channels and stages, as numbered in this one.

        In that plan, stages of other ranks have their copies, too; they stand for nothing here.
        """
        found = [*connections, *(len(self.connections) + stage for stage in stages)]
        for stage in stages:
            mine = rank in self._plan.stages[stage].updating_ranks
            first = self._copy(stage, rank) if mine else -1
            found += [first, first + 1]
        return found

    def _copy(self, stage: int, rank: int) -> int:
        return self._first_copy[stage] + 2 * self._plan.stages[stage].updating_ranks.index(rank)


def streams_of(plan: Plan, cluster: Cluster, numbering: Numbering) -> list[Stream]:
    """All streams in the order of their numbers."""
    return [
        *_messages(plan, cluster, numbering),
        *_sums(plan, cluster),
        *_copies(plan, cluster),
    ]


def _messages(plan: Plan, cluster: Cluster, numbering: Numbering) -> Iterator[Stream]:
    for channel in numbering.connections:
        if channel.is_local:
            yield Stream(0, 0.0, (), 2, 0)
            continue
        way = way_between(cluster, plan.node_of_rank, channel.source_rank, channel.target_rank)
        yield Stream(channel.size_bytes, way_latency_s(way), way, 2, 1 + plan.micro_batches)


def _sums(plan: Plan, cluster: Cluster) -> Iterator[Stream]:
    """A sum starts with its last replica and takes as long as alone."""
    for stage in plan.stages:
        ranks = stage.updating_ranks
        time_s = reduction_s(cluster, plan.node_of_rank, ranks, stage.cost.accumulated_bytes)
        yield Stream(0, time_s, (), len(ranks), int(len(ranks) > 1))


def _copies(plan: Plan, cluster: Cluster) -> Iterator[Stream]:
    for stage in plan.stages:
        if not stage.offload:
            yield from (Stream(0, 0.0, (), 1, 0),) * (2 * stage.replicas)
            continue
        for rank in stage.updating_ranks:
            device = cluster.nodes[plan.node_of_rank[rank]].device
            link = device.offload_link(plan.offload_to)
            for to_host in (True, False):
                way = host_way(link, rank, to_host=to_host)
                yield Stream(stage.kept_bytes, link.latency_s, way, 1, 1 + plan.micro_batches)

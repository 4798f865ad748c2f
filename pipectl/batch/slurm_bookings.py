"""The nodes that Slurm's jobs have, or are expected to have, and when others are free.

Slurm expects a start and nodes of jobs that wait. Those are as good as taken: a later job may start
before them only where it delays none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from pipectl.batch.limits import Demand


class Node(NamedTuple):
    """A node; unknown values are None or 0.

    Args:
        partitions: those that have it.
        is_usable: whether jobs can start there.
    """

    partitions: frozenset[str]
    cores: int
    memory_bytes: int | None = None
    gpus: int = 0
    is_usable: bool = True


class Booking(NamedTuple):
    """Nodes of a job.

    Args:
        cores: on each node; None for the whole node.
        start, end: seconds since the epoch; the end is infinite without a time limit.
        partitions: those that the job names.
        waits: whether the job waits.
    """

    nodes: tuple[str, ...]
    cores: int | None
    start: float
    end: float
    partitions: tuple[str, ...]
    waits: bool = False


class Reservation(NamedTuple):
    """Nodes that a site keeps for some users or for its own work."""

    nodes: frozenset[str]
    start: float
    end: float


class Expected(NamedTuple):
    """When a job would start.

    Args:
        is_sure: whether nothing else may keep it from that, as far as known.
    """

    start: float
    is_sure: bool


@dataclass(frozen=True)
class Bookings:
    """What is known of the nodes of a cluster and of its jobs.

    Args:
        nodes: by name.
        jobs: all that run, and those that wait and have an expected start and nodes.
        tiers: of partitions: jobs of a higher one come first.
        whole: partitions whose jobs have whole nodes.
        shares_memory: whether jobs on one node also share its memory.
        preempts: whether jobs that run may make room for others.
        is_complete: whether all jobs are seen.
    """

    nodes: Mapping[str, Node]
    jobs: tuple[Booking, ...]
    tiers: Mapping[str, int]
    whole: frozenset[str]
    reservations: tuple[Reservation, ...] = ()
    shares_memory: bool = False
    preempts: bool = False
    is_complete: bool = True

    @cached_property
    def _by_node(self) -> Mapping[str, list[Booking]]:
        found: dict[str, list[Booking]] = defaultdict(list)
        for job in self.jobs:
            for name in job.nodes:
                found[name].append(job)
        return found

    def _tier(self, *partitions: str) -> float:
        return max((self.tiers.get(name, inf) for name in partitions), default=inf)

    def expect(
        self,
        partition: str,
        demand: Demand,
        now: float,
        earliest: float = 0.0,
        *,
        is_whole: bool = False,
    ) -> Expected | None:
        """Return when a new job would start after all that wait; None if the bookings do not tell.

        They do not if none of a job that waits concerns its nodes, if it may take the place of a
        job that runs, or if it can never run.

        Args:
            demand: without a walltime, the job is endless.
            now, earliest: seconds since the epoch; the job starts at the earliest at both.
            is_whole: whether the job asks for whole nodes.
        """
        tier, is_whole = self._tier(partition), is_whole or partition in self.whole
        names = [name for name, node in self.nodes.items() if partition in node.partitions]
        jobs = {name: self._rivals(name, tier) for name in names}
        taken = [job for rivals in jobs.values() for job in rivals]
        if not any(job.waits for job in taken):
            return None
        if self.preempts and any(self._tier(*job.partitions) < tier for job in taken):
            return None
        walltime_s = inf if demand.walltime_s is None else demand.walltime_s
        fitting = [name for name in names if _fits(self.nodes[name], demand)]
        times = (
            times
            for name in fitting
            for times in _free_times(self.nodes[name].cores, jobs[name], demand, is_whole, now)
        )
        start = _first_common(times, demand.nodes, walltime_s, earliest)
        if start is None:
            return None
        are_whole = is_whole or all(job.cores is None for job in taken)
        is_reserved = any(
            each.start < start + walltime_s and each.end > now and not each.nodes.isdisjoint(names)
            for each in self.reservations
        )
        is_sure = (
            self.is_complete
            and not is_reserved
            and demand.cores is not None
            and (are_whole or not (demand.gpus or self.shares_memory))
        )
        return Expected(start, is_sure)

    def _rivals(self, name: str, tier: float) -> list[Booking]:
        """The jobs of a node, without those that wait and come after a job of this tier."""
        jobs = self._by_node.get(name, [])
        return [job for job in jobs if not job.waits or self._tier(*job.partitions) >= tier]


def _fits(node: Node, demand: Demand) -> bool:
    """Whether a node has what a job asks for, as far as known."""
    memory_bytes = node.memory_bytes
    return (
        node.is_usable
        and node.cores >= (demand.cores or 1)
        and (memory_bytes is None or memory_bytes >= (demand.memory_bytes or 0))
        and node.gpus >= (demand.gpus or 0)
    )


def _free_times(
    cores: int, jobs: Iterable[Booking], demand: Demand, is_whole: bool, now: float
) -> Iterator[tuple[float, float]]:
    """Yield the starts and ends of the times in which a node has room for a job."""
    wanted = cores if is_whole else demand.cores or 1
    changes = defaultdict(int, {now: 0})
    for job in jobs:
        # One that was to start before now is late, and takes as long.
        late_s = max(0.0, now - job.start) if job.waits else 0.0
        taken = cores if job.cores is None else job.cores
        changes[max(now, job.start)] += taken
        changes[max(now, job.end + late_s)] -= taken
    used, since = 0, None
    for time in sorted(changes.keys() - {inf}):
        used += changes[time]
        has_room = used + wanted <= cores
        if has_room and since is None:
            since = time
        elif not has_room and since is not None:
            yield since, time
            since = None
    if since is not None:
        yield since, inf


def _first_common(
    times: Iterable[tuple[float, float]], nodes: int, walltime_s: float, earliest: float
) -> float | None:
    """Return when first so many nodes are free for so long from then on; None if they never are.

    Args:
        times: starts and ends of the times in which a node is free, of all nodes.
    """
    changes = []
    for since, end in times:
        start = max(since, earliest)
        if start < end and end - start >= walltime_s:
            changes.append((start, -1))  # at one time, those that become free come first
            changes += [(end - walltime_s, 1)] if end < inf else []
    free = 0
    for time, change in sorted(changes):
        free -= change
        if free >= nodes:
            return time
    return None

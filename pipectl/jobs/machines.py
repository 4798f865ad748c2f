"""The cluster a plan is made for: described by a file, or assumed from the resources."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.errors import MismatchError
from pipectl.jobs.places import LOCAL

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def cluster_of(spec: JobSpec, scheduler: str) -> Cluster:
    """The machines that ``spec`` would run on under ``scheduler``.

    Raises:
        MismatchError: the described cluster has another number of ranks than the resources.
        DataFileError: the described cluster cannot be read.
    """
    if spec.cluster_file is not None:
        return _described(spec, spec.cluster_file)
    return _this_machine(spec) if scheduler == LOCAL else _allocation(spec)


def _described(spec: JobSpec, path: Path) -> Cluster:
    cluster = Cluster.load(path)
    if cluster.ranks != spec.resources.ranks:
        raise MismatchError(
            f"{path}: describes {cluster.ranks} ranks, resources: ask for {spec.resources.ranks}",
            cure="make nodes x tasks_per_node equal to the ranks of the cluster file",
        )
    return cluster


def _this_machine(spec: JobSpec) -> Cluster:
    """All ranks here, on the cores this process may use, whatever nodes were asked for."""
    ranks = spec.resources.ranks
    usable = len(os.sched_getaffinity(0))
    cores = max(1, usable // spec.resources.cpus_per_task)
    memory = memory_of_task(spec)
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    cluster = assumed_cluster("this machine", [ranks], cores, memory)
    return replace(cluster, source=f"assumed: shared memory, {usable} usable cores")


def _allocation(spec: JobSpec) -> Cluster:
    """The nodes asked for, each with the cores of its own tasks."""
    resources = spec.resources
    per_node = [resources.tasks_per_node] * resources.nodes
    memory = memory_of_task(spec)
    return assumed_cluster("from resources:", per_node, resources.tasks_per_node, memory)


def memory_of_task(spec: JobSpec) -> int | None:
    """A rank's share of ``resources.memory_per_node``; None where that is not given."""
    memory = spec.resources.memory_per_node
    return None if memory is None else memory // spec.resources.tasks_per_node

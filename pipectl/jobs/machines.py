"""The cluster a plan is made for: described by a file, measured, or assumed from the resources."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.cluster import Cluster, Device, Node, assumed_cluster, with_assumed_links
from pipectl.errors import MismatchError
from pipectl.jobs.places import LOCAL, cluster_path
from pipectl.spec import links_key

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


@dataclass(frozen=True)
class Machines:
    """The cluster, and where it is from.

    Args:
        file: that it was read from; None for an assumed cluster.
        warning: why a file that lies there was not used; empty where all is well.
    """

    cluster: Cluster
    file: Path | None = None
    warning: str = ""


def cluster_of(spec: JobSpec, scheduler: str) -> Cluster:
    """The machines that ``spec`` would run on under ``scheduler``; see :func:`find_machines`."""
    return find_machines(spec, scheduler).cluster


def find_machines(spec: JobSpec, scheduler: str, base: Path | None = None) -> Machines:
    """The described cluster, else the measured one if it is of this job, else an assumed one.

    Args:
        base: where the measured one lies, if not in the spec's output directory.

    Raises:
        MismatchError: the described cluster has another number of ranks than the resources.
        DataFileError: a cluster description cannot be read.
    """
    if spec.cluster_file is not None:
        return Machines(_described(spec, spec.cluster_file), spec.cluster_file)
    assumed = _this_machine(spec) if scheduler == LOCAL else _allocation(spec)
    path = cluster_path(spec, base)
    if not path.exists():
        return Machines(assumed)
    measured = Cluster.load(path)
    fault = _fault(measured, assumed, measured_key(spec, scheduler))
    if not fault:
        return Machines(measured, path)
    return Machines(assumed, warning=f"{path} {fault}; it is not used")


def measured_key(spec: JobSpec, scheduler: str) -> str:
    """Names everything that measured links depend on; a local job's are those of this host."""
    host = socket.gethostname() if scheduler == LOCAL else ""
    return links_key(spec, f"{scheduler} {host}")


def _fault(found: Cluster, assumed: Cluster, key: str) -> str:
    """What keeps a measured cluster from being used; one without a key is only compared."""
    if found.key not in (None, key):
        return "was measured for other resources, launch settings or machines"
    layouts = [[node.ranks for node in cluster.nodes] for cluster in (found, assumed)]
    if found.key is None and layouts[0] != layouts[1]:
        return f"describes nodes of {layouts[0]} ranks, but resources: ask for {layouts[1]}"
    return ""


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
    memory = spec.resources.memory_per_task or memory_of_this_machine() // ranks
    cluster = assumed_cluster("this machine", [ranks], cores, memory)
    return replace(cluster, source=f"assumed: shared memory, {usable} usable cores")


def memory_of_this_machine() -> int:
    """In bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _allocation(spec: JobSpec) -> Cluster:
    """The nodes asked for, each with the cores of its own tasks."""
    resources = spec.resources
    device, tasks = Device("cpu", 1.0, resources.memory_per_task), resources.tasks_per_node
    nodes = [Node(f"node{number}", tasks, tasks, device) for number in range(resources.nodes)]
    return with_assumed_links("from resources:", nodes)

"""The profile, plan and cluster files of a job, and whether they still belong to it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import LOCAL
from pipectl.cluster import Cluster, assumed_cluster
from pipectl.errors import MismatchError
from pipectl.spec import JobSpec, links_key, load, plan_key, profile_key

if TYPE_CHECKING:  # loaded only if there are such files
    from pipectl.plan import Plan
    from pipectl.profile import Profile
    from pipectl.runs import RunDirectory

UNKNOWN_ROWS = (
    "what messages take of the ranks' own time, and the start and end of a step, is not measured, "
    "and taken as nothing"
)


def profile_path(spec: JobSpec) -> Path:
    """``runs/<name>.profile.json``."""
    return Path(spec.output.directory) / f"{spec.name}.profile.json"


def plan_path(spec: JobSpec) -> Path:
    """``runs/<name>.plan.json``."""
    return Path(spec.output.directory) / f"{spec.name}.plan.json"


def cluster_path(spec: JobSpec) -> Path:
    """``runs/<name>.cluster.json``, where measured links are."""
    return Path(spec.output.directory) / f"{spec.name}.cluster.json"


def fresh_profile(spec: JobSpec, path: Path) -> Profile | None:
    """The profile in ``path``; None if there is none or the spec or its files have changed since.

    Raises:
        DataFileError: there is one, but it cannot be read; it is for the user to remove it.
    """
    if not path.exists():
        return None
    from pipectl.profile import Profile

    profile = Profile.load(path)
    return profile if is_fresh(spec, profile) else None


def is_fresh(spec: JobSpec, profile: Profile) -> bool:
    """Whether a profile is of this spec; one without a key comes from elsewhere and is believed."""
    return profile.key is None or profile.key == profile_key(spec)


def fresh_plan(spec: JobSpec, profile: Profile, cluster: Cluster, path: Path) -> Plan | None:
    """The plan in ``path``; None if there is none or spec, profile or cluster have changed since.

    Raises:
        DataFileError: there is one, but it cannot be read.
    """
    if not path.exists():
        return None
    from pipectl.plan import Plan

    plan = Plan.load(path)
    return plan if plan.key == plan_file_key(spec, profile, cluster) else None


def plan_file_key(spec: JobSpec, profile: Profile, cluster: Cluster) -> str:
    """The key in a plan's file: a hash of the spec's plan key, the profile and the cluster."""
    parts = [plan_key(spec), profile.to_json(), cluster.to_json()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_run(run: RunDirectory) -> JobSpec:
    """The job of a run, whose output directory is the one that the run is in now."""
    return move_to(run, load(run.job))


def move_to(run: RunDirectory, spec: JobSpec) -> JobSpec:
    """A job with the directory that a run is in now as its output directory."""
    output = spec.output.model_copy(update={"directory": str(run.path.parent.absolute())})
    return spec.model_copy(update={"output": output})


@dataclass(frozen=True)
class ClusterChoice:
    """The cluster that a job is planned for.

    Args:
        file: that it was read from; None for an assumed cluster.
        warning: why a measured cluster is not used; empty if all is well.
    """

    cluster: Cluster
    file: Path | None = None
    warning: str = ""


def find_cluster(spec: JobSpec, scheduler: str) -> ClusterChoice:
    """The described cluster, else the measured one if it is of this job, else an assumed one.

    Raises:
        MismatchError: the described cluster has another number of ranks than the resources.
        DataFileError: a cluster description cannot be read.
    """
    resources, path = spec.resources, spec.cluster_file
    if path is not None:
        cluster = Cluster.load(path)
        if cluster.ranks != resources.ranks:
            raise MismatchError(
                f"{path}: describes {cluster.ranks} ranks, resources: ask for {resources.ranks}",
                cure="make nodes x tasks_per_node equal to the ranks of the cluster file",
            )
        return ClusterChoice(cluster, path)
    if scheduler == LOCAL:  # all ranks here, whatever nodes are asked for
        usable = len(os.sched_getaffinity(0))
        cores = max(1, usable // resources.cpus_per_task)
        memory = resources.memory_per_task or memory_of_this_machine() // resources.ranks
        cluster = assumed_cluster("this machine", [resources.ranks], cores, memory)
        assumed = replace(cluster, source=f"assumed: shared memory, {usable} usable cores")
    else:
        tasks = resources.tasks_per_node
        layout = [tasks] * resources.nodes
        assumed = assumed_cluster("from resources:", layout, tasks, resources.memory_per_task)
    path = cluster_path(spec)
    if not path.exists():
        return ClusterChoice(assumed)
    measured_cluster = Cluster.load(path)
    layout, expected = ([node.ranks for node in each.nodes] for each in (measured_cluster, assumed))
    if measured_cluster.key not in (None, cluster_file_key(spec, scheduler)):
        fault = "was measured for other resources, launch settings or machines"
    elif measured_cluster.key is None and layout != expected:
        fault = f"describes nodes of {layout} ranks, but resources: ask for {expected}"
    else:
        return ClusterChoice(measured_cluster, path)
    return ClusterChoice(assumed, warning=f"{path} {fault}; it is not used")


def join_rows(profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """A profile and a cluster of which the second has the times of rows, its own or the first's,
    and the first assumes nothing of them if they are known."""
    joined = cluster.with_rows(profile.rows)
    if any(node.device.rows is None for node in joined.nodes):
        return profile, joined
    others = tuple(each for each in profile.assumptions if not each.startswith(UNKNOWN_ROWS))
    return replace(profile, assumptions=others), joined


def cluster_file_key(spec: JobSpec, scheduler: str) -> str:
    """The key in the file of a measured cluster: a hash of everything that its links depend on.

    Links of a local job are those of this host.
    """
    host = socket.gethostname() if scheduler == LOCAL else ""
    return links_key(spec, f"{scheduler} {host}")


def memory_of_this_machine() -> int:
    """In bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

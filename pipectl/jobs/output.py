"""The cluster, profile and plan in a job's output directory: their files, and which are up to date.

A file is used if the key that it contains is that of the job as it is now.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl.batch import LOCAL, get_scheduler
from pipectl.cluster import Cluster, assumed_cluster
from pipectl.control_groups import memory_of_machine
from pipectl.errors import MismatchError
from pipectl.files import is_of_another
from pipectl.peaks import peak_flops_per_s
from pipectl.profile import Profile
from pipectl.runs.code import is_changed
from pipectl.spec import JobSpec, links_key, plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.plan import Plan

UNKNOWN_ROWS = (
    "the ranks' own time for messages, and for the start and end of a step, was not measured and "
    "is left out"
)
_AGAIN = "to measure again: pipectl profile JOB.yaml --links"


def profile_path(spec: JobSpec) -> Path:
    """``runs/<name>.profile.json``."""
    return _own_file(spec, "profile.json")


def plan_path(spec: JobSpec, nodes: int | None = None) -> Path:
    """``runs/<name>.plan.json``; of a range of nodes the plan for the highest number, with
    ``<name>.plan-<nodes>.json`` for others."""
    is_other = nodes is not None and nodes != spec.resources.max_nodes
    return _own_file(spec, f"plan-{nodes}.json" if is_other else "plan.json")


def save_plans(spec: JobSpec, plans: Mapping[int, Plan]) -> None:
    """Write the plans of a job by number of nodes; see :func:`plan_path`."""
    for nodes, plan in plans.items():
        plan.save(plan_path(spec, nodes))


def cluster_path(spec: JobSpec) -> Path:
    """``runs/<name>.cluster.json``, which `pipectl profile --links` writes."""
    return _own_file(spec, "cluster.json")


def _own_file(spec: JobSpec, kind: str) -> Path:
    """``runs/<name>.<kind>``, or ``runs/<name>-UID.<kind>`` if another user has the first for
    himself: users may share a directory of runs."""
    usual = Path(spec.output.directory) / f"{spec.name}.{kind}"
    if not is_of_another(usual) or os.access(usual, os.R_OK | os.W_OK):
        return usual
    return usual.with_name(f"{spec.name}-{os.geteuid()}.{kind}")


def cluster_file_key(spec: JobSpec, scheduler: str) -> str:
    """Key in the file of a measured cluster: a hash of everything that its links depend on.

    The links of a local job are those of this host.
    """
    host = socket.gethostname() if scheduler == LOCAL else ""
    return links_key(spec, get_scheduler(scheduler).system_of_nodes, host)


def plan_file_key(spec: JobSpec, profile: Profile, cluster: Cluster) -> str:
    """Key in the file of a plan: a hash of everything that it depends on."""
    parts = [plan_key(spec), profile.to_json(), cluster.to_json()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_fresh(spec: JobSpec, profile: Profile) -> bool:
    """Whether a profile is of this spec, and of its code as it is now. A profile without a key was
    imported and is believed."""
    is_of_spec = profile.key is None or profile.key == profile_key(spec)
    return is_of_spec and not any(map(is_changed, profile.code))


def is_of_model(spec: JobSpec, before: JobSpec, profile: Profile) -> bool:
    """Whether the profile of a run is of the model of a spec, whatever else of it may differ.

    Args:
        before: spec of the run.
    """
    own = {name: getattr(spec, name) for name in ("script", "model", "loss")}
    return is_fresh(before.model_copy(update=own), profile)


class ClusterChoice(NamedTuple):
    """The machines to plan for.

    Args:
        file: file of the cluster; None if the cluster is assumed.
        warning: why a measured cluster is not used, or may be out of date; else empty.
    """

    cluster: Cluster
    file: Path | None = None
    warning: str = ""


def find_cluster(spec: JobSpec, scheduler: str) -> ClusterChoice:
    """Find the described cluster, else the measured one if it is up to date, else an assumed one.

    Its ranks have no more memory than options of the batch system, or an allocation, give them.

    Raises:
        MismatchError: the described cluster has another number of ranks than the resources.
        DataFileError: a cluster description cannot be read.
    """
    choice = _find_cluster(spec, scheduler)
    if spec.resources.gpus_per_node:  # it is not what ranks compute in
        return choice
    limit = get_scheduler(scheduler).memory_of_rank(spec)
    return (
        choice
        if limit is None
        else choice._replace(cluster=choice.cluster.with_memory_limit(limit))
    )


def _find_cluster(spec: JobSpec, scheduler: str) -> ClusterChoice:
    resources = spec.resources
    if spec.cluster is not None:
        path = Path(spec.cluster)
        cluster = Cluster.load(path)
        if cluster.ranks != resources.ranks:
            raise MismatchError(
                f"{path}: describes {cluster.ranks} ranks, resources: ask for {resources.ranks}",
                hint="make nodes x tasks_per_node equal to the ranks of the cluster file",
            )
        return ClusterChoice(cluster, path)
    if scheduler == LOCAL:  # all ranks here, whatever nodes are asked for
        usable = len(os.sched_getaffinity(0))
        cores = max(1, usable // resources.cpus_per_task)
        shares_memory = resources.shares_machine_memory
        memory = memory_of_machine() // resources.ranks if shares_memory else None
        cluster = assumed_cluster("this machine", [resources.ranks], cores, memory)
        assumed = replace(cluster, source=f"assumed: shared memory, {usable} usable cores")
    else:
        tasks = resources.tasks_per_node
        layout = [tasks] * resources.max_nodes
        assumed = assumed_cluster("from resources:", layout, tasks, None)
    path = cluster_path(spec)
    if not path.exists():
        return ClusterChoice(assumed)
    measured_cluster = Cluster.load(path)
    layout, expected = ([node.ranks for node in each.nodes] for each in (measured_cluster, assumed))
    key = measured_cluster.key
    now = cluster_file_key(spec, scheduler)
    if key is not None and key.partition("-")[0] != now.partition("-")[0]:
        fault = "was measured for other nodes, ranks, launch settings or modules"
    elif measured_cluster.key is None and layout != expected:
        fault = f"describes nodes of {layout} ranks, but resources: ask for {expected}"
    else:
        warning = f"{path} was measured before environment.setup was changed; it is used; {_AGAIN}"
        return ClusterChoice(measured_cluster, path, "" if key in (None, now) else warning)
    return ClusterChoice(assumed, warning=f"{path} {fault}; it is not used; {_AGAIN}")


def read_profile(spec: JobSpec, path: Path) -> Profile | None:
    """The profile in ``path`` if it is up to date.

    Raises:
        DataFileError: the file cannot be read. It is for the user to remove it.
    """
    if not path.exists():
        return None
    profile = Profile.load(path)
    return profile if is_fresh(spec, profile) else None


def complete_cluster(spec: JobSpec, profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Complete a profile and a cluster by each other: the cluster gets the times of rows and the
    memory of the profile, and the peak of common accelerators; a profile whose times of rows are
    all known then no longer says that they are assumed.
    """
    cluster = cluster.with_rows(profile.rows).with_figures(*_figures_of_rank(spec, profile))
    if all(node.device.rows is not None for node in cluster.nodes):
        others = [each for each in profile.assumptions if not each.startswith(UNKNOWN_ROWS)]
        profile = replace(profile, assumptions=tuple(others))
    return profile, cluster


def _figures_of_rank(spec: JobSpec, profile: Profile) -> tuple[float | None, int | None]:
    """Peak FLOP/s and memory of a rank on the accelerator that was profiled, which ranks may
    share."""
    if profile.device is None or not spec.resources.gpus_per_node:
        return None, None
    training, resources, memory_bytes = spec.training, spec.resources, profile.device.memory_bytes
    matmul = training.float32_matmul_precision
    peak = peak_flops_per_s(profile.device.kind, training.precision, matmul)
    share = min(1.0, resources.gpus_per_node / resources.tasks_per_node)
    return (
        None if peak is None else peak * share,
        None if memory_bytes is None else int(memory_bytes * share),
    )


def read_plan(path: Path, spec: JobSpec, profile: Profile, cluster: Cluster) -> Plan | None:
    """The plan in ``path`` if it is up to date.

    Raises:
        DataFileError: the file cannot be read.
    """
    if not path.exists():
        return None
    from pipectl.plan import Plan

    plan = Plan.load(path)
    return plan if plan.key == plan_file_key(spec, profile, cluster) else None

"""What is to be planned: from a job file, or from a profile alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.errors import UsageError
from pipectl.jobs.machines import find_machines
from pipectl.jobs.plan import request_of
from pipectl.jobs.wishes import Technique, Wishes
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.folding import folded
from pipectl.planner.machines.other_clusters import with_bandwidth, with_ranks, with_slower_links
from pipectl.planner.pruning import prepared
from pipectl.profile import Profile

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

MICRO_BATCHES_PER_DEVICE = 4
_EQUAL = "equal devices"
_TOTALS = "total memory of nodes (memory_bytes) counts for --objective max-stage-load only"


@dataclass(frozen=True)
class Subject:
    """Everything a planner needs, and what people should know of it.

    Args:
        file: the cluster is from; None for an assumed one.
        warning: about the machines; empty where all is well.
        kept: micro-batches of the plan before, if the job leaves their number open.
    """

    profile: Profile
    cluster: Cluster
    request: PlanRequest
    file: Path | None = None
    warning: str = ""
    kept: int | None = None


def subject_of_job(
    spec: JobSpec, profile: Profile, scheduler: str, wishes: Wishes, kept: int | None = None
) -> Subject:
    """A job, on its own machines or on what the wishes make of them.

    Args:
        kept: see :func:`pipectl.jobs.plan.kept_micro_batches`.

    Raises:
        UsageError: more devices are wished for than the job has ranks.
        InvalidInputError: a cluster description is wrong or is not of this job.
    """
    machines = find_machines(spec, scheduler)
    cluster = _wished(machines.cluster, wishes, cure="--nodes 1,2,4 plans for other sizes")
    request = _allowed(request_of(spec, profile, cluster, kept), wishes)
    return Subject(profile, cluster, request, machines.file, machines.warning, kept)


def subject_of_profile(profile: Profile, wishes: Wishes) -> Subject:
    """A profile on its own.

    Raises:
        UsageError: nothing says on how many devices.
        InvalidInputError: a cluster description is wrong.
    """
    if wishes.cluster is not None:
        cluster = Cluster.load(wishes.cluster)
    else:
        cluster = equal_devices(_devices(profile, wishes))
        shipped = _shipped(profile, "bandwidth_bytes_per_s", "transfer_bytes_per_s_effective")
        cluster = cluster if shipped is None else with_bandwidth(cluster, shipped)
    cluster = _wished(cluster, wishes, cure="describe more of them in the cluster file")
    shipped_count = None if wishes.micro_batches else _shipped(profile, "microbatches_in_batch")
    count = wishes.micro_batches or shipped_count or micro_batches_for(cluster.ranks)
    batch_size = wishes.batch_size or profile.micro_batch_size * int(count)
    request = PlanRequest(
        name=profile.name,
        batch_size=batch_size,
        micro_batches=wishes.micro_batches,
        memory_limit_bytes=memory_limit_bytes(profile, wishes),
        from_job=False,
    )
    if wishes.batch_size is None and shipped_count is None:
        said = f"the batch is not given: taken as {batch_size} samples (--batch-size sets it)"
        profile = replace(profile, assumptions=(*profile.assumptions, said))
    return Subject(profile, cluster, _allowed(request, wishes), wishes.cluster)


def _allowed(request: PlanRequest, wishes: Wishes) -> PlanRequest:
    """The request with the techniques that the planner may choose."""
    allow = set(wishes.allow)
    named = {Technique.REPLICAS: Replication.WHOLE, Technique.SPLIT: Replication.SPLIT}
    shared: list[Replication | None] = [way for name, way in named.items() if name in allow]
    return replace(
        request,
        replicas=None if shared else request.replicas,
        replication=None if len(shared) > 1 else (shared or [request.replication])[0],
        recompute=None if Technique.RECOMPUTE in allow else request.recompute,
        blocks=None if Technique.RECOMPUTE in allow else request.blocks,
        offload=None if Technique.OFFLOAD in allow else request.offload,
        backward_apart=None if Technique.PIPEFB in allow else request.backward_apart,
        interleave=Technique.INTERLEAVE in allow or request.interleave,
    )


def for_steps(subject: Subject) -> Subject:
    """The subject as planners of whole steps take it.

    Nodes that no device computes are dropped, and backward operators that are nodes of their own
    stand where their forward does; other profiles stay as they are.
    """
    profile = folded(prepared(subject.profile))
    if any(operator.memory_bytes for operator in profile.operators):
        profile = replace(profile, assumptions=(*profile.assumptions, _TOTALS))
    return replace(subject, profile=profile)


def micro_batches_for(ranks: int) -> int:
    """Micro-batches of a step where nobody says how large the batch is."""
    return MICRO_BATCHES_PER_DEVICE * ranks


def memory_limit_bytes(profile: Profile, wishes: Wishes) -> int | None:
    """The limit that is wished for, else the one an imported profile ships."""
    if wishes.memory_limit_bytes is not None:
        return wishes.memory_limit_bytes
    shipped = _shipped(profile, "memory_limit_bytes")
    return None if shipped is None else int(shipped)


def accelerators(profile: Profile, wishes: Wishes) -> int | None:
    """The devices that are wished for, else those an imported profile ships."""
    if wishes.devices is not None:
        return wishes.devices
    shipped = _shipped(profile, "accelerators", "devices")
    return None if shipped is None else int(shipped)


def cpus(profile: Profile, wishes: Wishes) -> int:
    """CPUs beside the accelerators: those wished for, else those an imported profile ships."""
    return int(_shipped(profile, "cpus") or 0) if wishes.cpus is None else wishes.cpus


def equal_devices(count: int) -> Cluster:
    """So many equal devices, each a node of its own; how they are linked is assumed."""
    nodes = tuple(Node(f"device{index}", 1, 1, Device("device")) for index in range(count))
    link = ASSUMED_BETWEEN
    return Cluster(_EQUAL, f"{count} equal devices", nodes, link, link)


def _devices(profile: Profile, wishes: Wishes) -> int:
    found = accelerators(profile, wishes)
    if found is None:
        raise UsageError(
            "nothing says on how many devices to plan",
            cure="give --devices N, or describe the machines: --cluster FILE",
        )
    return found


def _wished(cluster: Cluster, wishes: Wishes, *, cure: str) -> Cluster:
    """The cluster with fewer devices and other links, where that is wished for."""
    devices, bandwidth = wishes.devices, wishes.bandwidth_bytes_per_s
    if devices is not None and devices > cluster.ranks:
        raise UsageError(
            f"--devices {devices}: the cluster {cluster.name!r} has {cluster.ranks} ranks",
            cure=cure,
        )
    if devices is not None:
        cluster = with_ranks(cluster, devices)
    if bandwidth is not None:
        cluster = with_bandwidth(cluster, bandwidth)
    if wishes.communication_scale is not None:
        cluster = with_slower_links(cluster, wishes.communication_scale)
    return cluster


def _shipped(profile: Profile, *keys: str) -> Any:
    """What an imported profile says of the devices it is meant for; None if nothing."""
    found = (profile.cluster.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int | float) and value > 0), None)

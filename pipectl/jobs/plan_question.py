"""What `pipectl plan` is asked: of a job or of a profile alone, on machines as they are or not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.errors import UsageError
from pipectl.jobs.machines import find_machines
from pipectl.jobs.places import plan_path, profile_path, scheduler_name
from pipectl.jobs.planning import coupling_warning, kept_micro_batches, request_of
from pipectl.jobs.profiles import is_fresh
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.folding import folded
from pipectl.planner.machines.other_clusters import with_bandwidth, with_ranks, with_slower_links
from pipectl.planner.pruning import prepared
from pipectl.profile import Profile
from pipectl.spec import load
from pipectl.units import parse_bytes

MICRO_BATCHES_PER_DEVICE = 4
"""Of a step, if nobody says how large the batch is."""
_TOTALS = "total memory of nodes (memory_bytes) counts for --objective max-stage-load only"


class Technique(StrEnum):
    """What the planner chooses only if it is allowed: the job has not asked for it, or results
    change (split samples)."""

    REPLICAS = "replicas"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PIPEFB = "pipefb"
    INTERLEAVE = "interleave"


@dataclass(frozen=True)
class Question:
    """What is to be planned; None leaves a choice to the job, the profile or the planner.

    Args:
        job: None plans a profile alone.
        profile: instead of the job's own.
        overrides: ``--set`` of the job; without a job, of the keys in ``_KEYS_WITHOUT_JOB``.
        cluster: description of the machines.
        devices: how many of them to use.
        nodes: numbers of nodes to compare.
        balance: whether stages are to be balanced, whatever a step takes.
        bandwidth_bytes_per_s: of every link.
        communication_scale: how many times as long every message takes.
        allow: techniques that the planner may choose.
        new_micro_batches: whether their number may differ from that of the job's last plan.
    """

    job: Path | None = None
    profile: Path | None = None
    overrides: tuple[str, ...] = ()
    scheduler: str | None = None
    cluster: Path | None = None
    devices: int | None = None
    nodes: tuple[int, ...] | None = None
    balance: bool = False
    bandwidth_bytes_per_s: float | None = None
    communication_scale: float | None = None
    allow: tuple[Technique, ...] = ()
    new_micro_batches: bool = False


@dataclass(frozen=True)
class PlanInputs:
    """Everything a planner needs, and what people should know of it.

    Args:
        cluster_file: that the cluster is from; None for an assumed one.
        plan_file: where the job's own plan belongs; None if the question is about another one.
        warnings: about the profile and the machines.
        kept: micro-batches of the job's last plan, if the job leaves their number open.
    """

    profile: Profile
    cluster: Cluster
    request: PlanRequest
    cluster_file: Path | None = None
    plan_file: Path | None = None
    warnings: tuple[str, ...] = ()
    kept: int | None = None


def gather(question: Question) -> PlanInputs:
    """What the question is about.

    Raises:
        UsageError: nothing says on how many devices to plan, or there are fewer.
        DataFileError: a file is missing or damaged.
        SpecError: the job is wrong.
        InvalidInputError: a cluster description is wrong or is not of this job.
    """
    inputs = _gather_profile(question) if question.job is None else _gather_job(question)
    if not question.balance:
        profile = folded(prepared(inputs.profile))
        if any(operator.memory_bytes for operator in profile.operators):
            profile = replace(profile, assumptions=(*profile.assumptions, _TOTALS))
        inputs = replace(inputs, profile=profile)
    return replace(inputs, request=_with_techniques(inputs.request, question.allow))


def _gather_job(question: Question) -> PlanInputs:
    assert question.job is not None
    overrides = list(question.overrides)
    if question.cluster is not None:  # quoted: names of files may mean something else in YAML
        name = json.dumps(str(question.cluster.absolute()), ensure_ascii=False)
        overrides.append(f"cluster={name}")
    spec = load(question.job, overrides)
    path = question.profile or profile_path(spec)
    profile = Profile.load(path)
    warnings = []
    if not is_fresh(spec, profile):
        changes = (word for each in overrides for word in ("--set", each))
        again = shlex.join(["pipectl", "profile", str(question.job), *changes])
        warnings.append(
            f"{path} was measured for other settings (model, data, optimizer, batch or ranks per "
            f"node); measure again with: {again}"
        )
    anew = question.new_micro_batches or question.nodes is not None
    kept = None if anew else kept_micro_batches(spec)
    machines = find_machines(spec, scheduler_name(spec, question.scheduler))
    warnings.append(machines.warning)
    if not question.balance:
        warnings.append(coupling_warning(spec, profile))
    cluster = _change_cluster(machines.cluster, question, "--nodes 1,2,4 plans for other sizes")
    changed = (question.devices, question.bandwidth_bytes_per_s, question.communication_scale)
    is_own = not question.allow and all(value is None for value in changed)
    return PlanInputs(
        profile=profile,
        cluster=cluster,
        request=request_of(spec, profile, cluster, kept),
        cluster_file=machines.file,
        plan_file=plan_path(spec) if is_own else None,
        warnings=tuple(filter(None, warnings)),
        kept=kept,
    )


def _gather_profile(question: Question) -> PlanInputs:
    """A profile alone, on a described cluster or on equal devices, each a node of its own."""
    if question.profile is None:
        raise UsageError("nothing to plan", cure="give JOB.yaml, or a profile: --profile FILE")
    profile = Profile.load(question.profile)
    settings = _settings(question.overrides)
    if question.cluster is not None:
        cluster = Cluster.load(question.cluster)
    else:
        cluster = _equal_devices(profile, question)
    cure = "describe more of them in the cluster file"
    cluster = _change_cluster(cluster, question, cure)
    micro_batches = settings.pop("micro_batches", None)
    shipped = None if micro_batches else shipped_number(profile, "microbatches_in_batch")
    count = int(micro_batches or shipped or MICRO_BATCHES_PER_DEVICE * cluster.ranks)
    batch_size = settings.pop("batch_size", None)
    if batch_size is None:
        batch_size = profile.micro_batch_size * count
        if shipped is None:
            assumed = (
                f"the batch is not given: taken as {batch_size} samples "
                "(--set training.batch_size=N sets it)"
            )
            profile = replace(profile, assumptions=(*profile.assumptions, assumed))
    limit = shipped_number(profile, "memory_limit_bytes")
    if limit is not None:
        settings.setdefault("memory_limit_bytes", int(limit))
    request = PlanRequest(
        name=profile.name,
        batch_size=batch_size,
        micro_batches=micro_batches,
        from_job=False,
        **settings,
    )
    return PlanInputs(profile, cluster, request, question.cluster)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(text)


def _size(text: str) -> int:
    size_bytes = parse_bytes(text)
    if size_bytes < 1:
        raise ValueError("must be more than 0")
    return size_bytes


_KEYS_WITHOUT_JOB: dict[str, tuple[str, Callable[[str], Any]]] = {
    "training.batch_size": ("batch_size", _count),
    "pipeline.micro_batches": ("micro_batches", _count),
    "pipeline.memory_limit": ("memory_limit_bytes", _size),
    "pipeline.stages": ("stages", _count),
    "pipeline.schedule": ("schedule", str),
}
"""Keys of a job that can be set without one: the field of the request, and how to read it."""


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    settings = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in _KEYS_WITHOUT_JOB:
            known = ", ".join(_KEYS_WITHOUT_JOB)
            raise UsageError(
                f"--set {override}: there is no job to change",
                cure=f"name a JOB.yaml; without one, these keys can be set: {known}",
            )
        field_name, read = _KEYS_WITHOUT_JOB[key]
        try:
            settings[field_name] = read(text.strip())
        except ValueError as error:
            raise UsageError(f"--set {override}: {error}") from None
    return settings


def shipped_number(profile: Profile, *keys: str) -> float | None:
    """What an imported profile says of the devices it is meant for; None if nothing."""
    values = (profile.cluster.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int | float) and value > 0), None)


def _equal_devices(profile: Profile, question: Question) -> Cluster:
    """As many as asked for, else as an imported profile ships; how they are linked is assumed."""
    count = question.devices
    if question.nodes is not None:
        count = max(question.nodes)
    elif count is None:
        shipped = shipped_number(profile, "accelerators", "devices")
        count = None if shipped is None else int(shipped)
    if count is None:
        raise UsageError(
            "nothing says on how many devices to plan",
            cure="give --devices N, or describe the machines: --cluster FILE",
        )
    nodes = tuple(Node(f"device{index}", 1, 1, Device("device")) for index in range(count))
    link = ASSUMED_BETWEEN
    cluster = Cluster("equal devices", f"{count} equal devices", nodes, link, link)
    rate = shipped_number(profile, "bandwidth_bytes_per_s", "transfer_bytes_per_s_effective")
    return cluster if rate is None else with_bandwidth(cluster, rate)


def _change_cluster(cluster: Cluster, question: Question, cure: str) -> Cluster:
    """The cluster with fewer devices and other links, if that is asked for."""
    devices = question.devices
    if devices is not None and devices > cluster.ranks:
        raise UsageError(
            f"--devices {devices}: the cluster {cluster.name!r} has {cluster.ranks} ranks",
            cure=cure,
        )
    if devices is not None:
        cluster = with_ranks(cluster, devices)
    if question.bandwidth_bytes_per_s is not None:
        cluster = with_bandwidth(cluster, question.bandwidth_bytes_per_s)
    if question.communication_scale is not None:
        cluster = with_slower_links(cluster, question.communication_scale)
    return cluster


def _with_techniques(request: PlanRequest, allow: Sequence[Technique]) -> PlanRequest:
    """The request with the techniques that the planner may choose."""
    ways = {Technique.REPLICAS: Replication.WHOLE, Technique.SPLIT: Replication.SPLIT}
    shared: list[Replication | None] = [way for name, way in ways.items() if name in allow]
    changes: dict[str, Any] = {}
    if shared:
        changes |= {"replicas": None, "replication": None if len(shared) > 1 else shared[0]}
    if Technique.RECOMPUTE in allow:
        changes |= {"recompute": None, "blocks": None}
    if Technique.OFFLOAD in allow:
        changes["offload"] = None
    if Technique.PIPEFB in allow:
        changes["backward_apart"] = None
    if Technique.INTERLEAVE in allow:
        changes["interleave"] = True
    return replace(request, **changes)

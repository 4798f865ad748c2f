"""Plans: the request to the planner, of a job or of a profile without a job, and its answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipectl.batch import LOCAL
from pipectl.cluster import (
    ASSUMED_BETWEEN,
    MAX_RANKS,
    TOO_MANY_RANKS,
    Cluster,
    Device,
    Node,
)
from pipectl.errors import (
    DataFileError,
    InfeasibleError,
    MismatchError,
    PipectlError,
    UsageError,
)
from pipectl.jobs.job import choose_scheduler, fit_to_allocation, with_count
from pipectl.jobs.output import (
    complete_cluster,
    find_cluster,
    is_fresh,
    is_of_model,
    plan_file_key,
    plan_path,
    profile_path,
)
from pipectl.jobs.warnings import warnings_of
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.graph.imported import folded, pruned_if_pipedream
from pipectl.planner.job_request import request_of_job
from pipectl.planner.request import Planner
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, find_run
from pipectl.runs.code import is_changed
from pipectl.simulate import simulate
from pipectl.spec import JobSpec, SpecFile, load
from pipectl.units import Report

_MICRO_BATCHES_PER_DEVICE = 4
"""Micro-batches of a step if the batch size is not given."""
_MAX_COUNTS = 8
"""Numbers of nodes of a range for which the queue is asked."""
_BATCH = "training.batch_size"
_JOB_OF_PROFILE = """\
model: "m:build"
loss: model
data: "m:data"
training: {{steps: 1, batch_size: 1000000000}}
pipeline: {{recompute: none, offload: none}}
resources: {{nodes: {ranks}, gpus_per_node: 1}}
"""
"""Spec for a profile without a job: every device is a node of one rank, with memory of the host to
offload to (``gpus_per_node``). What it says of the batch, the name and the memory is replaced by
what the user or the profile says."""
_TOTALS = "total memory of nodes (memory_bytes) counts for --objective max-stage-load only"


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a planner needs, and what the user should know about it.

    Args:
        cluster_file: file of the cluster; None if the cluster is assumed.
        plan_file: file for the job's own plan; None if the plan is another one.
        warnings: about the profile and the cluster.
        can_add_nodes: whether more nodes can be asked for; not for a job on this machine alone.
        spec: the job; None for a profile without one.
        batch_system: that the job goes to.
        counts: numbers of nodes that the job may have; of a long range, some.
        is_corrected: whether recorded steps of a run have corrected the profile.
        changes: fields of the request that are not as the job has them, by name.
    """

    profile: Profile
    cluster: Cluster
    request: PlanRequest
    cluster_file: Path | None = None
    plan_file: Path | None = None
    warnings: tuple[str, ...] = ()
    can_add_nodes: bool = True
    spec: JobSpec | None = None
    batch_system: str = LOCAL
    counts: tuple[int, ...] = ()
    is_corrected: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sets_micro_batches(self) -> bool:
        """Whether the user has set the number of micro-batches, not the planner."""
        if self.spec is not None:
            return self.spec.pipeline.micro_batches is not None
        return self.request.micro_batches is not None and not self.request.keeps_micro_batches

    @property
    def has_range(self) -> bool:
        """Whether there is a plan for each number of nodes of a range."""
        spec, file = self.spec, self.plan_file
        return spec is not None and file is not None and spec.resources.node_range is not None

    def fold(self) -> PlanInputs:
        """The inputs as the search for the shortest step needs them; see :func:`folded`."""
        profile = folded(pruned_if_pipedream(self.profile))
        if any(operator.memory_bytes for operator in profile.operators):
            profile = replace(profile, assumptions=(*profile.assumptions, _TOTALS))
        return replace(self, profile=profile)


def gather(
    job: Path | None,
    profile_file: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    scheduler: str | None = None,
    cluster_file: Path | None = None,
    devices: int | None = None,
    compare: Sequence[int] | None = None,
    new_micro_batches: bool = False,
    from_run: str | None = None,
) -> PlanInputs:
    """Gather the inputs of the planner.

    Args:
        job: job file; None plans a profile without a job.
        profile_file: None for that of the job.
        overrides: ``--set`` of the job; without a job, of the pipeline and the batch size.
        cluster_file: description of the machines, of which ``devices`` are used.
        compare: numbers of nodes to compare, which may all have other micro-batches.
        new_micro_batches: whether the number of micro-batches may differ from the job's last plan.
        from_run: name of a run of the job, whose recorded steps correct the profile.

    Raises:
        UsageError: the number of devices is missing or too large.
        DataFileError: a file is missing or damaged.
        SpecError: the job is wrong.
        InvalidInputError: a cluster description is wrong or not of this job.
    """
    if job is None:
        if profile_file is None:
            raise UsageError("nothing to plan", hint="give JOB.yaml, or a profile: --profile FILE")
        profile = Profile.load(profile_file)
        return _gather_profile(profile, overrides, cluster_file, devices, compare)
    if cluster_file is not None:  # quoted: names of files may mean something else in YAML
        name = json.dumps(str(cluster_file.absolute()), ensure_ascii=False)
        overrides = (*overrides, f"cluster={name}")
    spec = load(job, overrides)
    words = [word for each in overrides for word in ("--set", each)]
    words += [] if scheduler is None else ["--scheduler", scheduler]
    return gather_job(
        spec,
        choose_scheduler(spec, scheduler),
        profile_file,
        devices=devices,
        new_micro_batches=new_micro_batches or compare is not None,
        from_run=from_run,
        measure=shlex.join(["pipectl", "profile", str(job), *words]),
    )


def gather_job(
    spec: JobSpec,
    batch_system: str,
    profile_file: Path | None = None,
    *,
    devices: int | None = None,
    new_micro_batches: bool = False,
    from_run: str | None = None,
    measure: str | None = None,
) -> PlanInputs:
    """Gather the inputs of the planner for a job; see :func:`gather`.

    Args:
        batch_system: that it goes to.
        measure: command that measures it; None in Python, where a profile that was measured for
            other settings is refused instead of warned of.

    Raises:
        DataFileError: it has not been measured, or its profile is damaged.
        MismatchError: it was measured for other settings.
    """
    bounds = spec.resources.node_range
    counts = (spec.resources.max_nodes,) if bounds is None else (*bounds.spread(_MAX_COUNTS),)
    spec = fit_to_allocation(spec, batch_system)
    if batch_system == LOCAL:  # all ranks are on this machine
        counts = (spec.resources.max_nodes,)
    path, warnings = profile_file or profile_path(spec), []
    if from_run is None:
        if profile_file is None and not path.exists():
            raise DataFileError(
                f"{spec.name} has not been measured: there is no {path}",
                hint=f"measure it with: {measure or 'job.profile()'}",
            )
        profile = Profile.load(path)
    else:
        from pipectl.jobs.corrections import correct_profile

        run = find_run(Path(spec.output.directory), from_run)
        path, profile = run.profile, correct_profile(run)
        _refuse_other_model(spec, run, profile)
    is_of_spec = is_fresh(spec, profile)
    if not is_of_spec:
        changed = next((each.path for each in profile.code if is_changed(each)), None)
        fault = (
            f"{path} was measured for other settings (model, data, optimizer, batch or ranks per "
            "node)"
            if changed is None
            else f"{path} was measured before {changed} was changed"
        )
        if measure is None:
            raise MismatchError(fault, hint="measure again with: job.profile()")
        warnings.append(f"{fault}; measure again with: {measure}")
    machines = find_cluster(spec, batch_system)
    warnings += [machines.warning, *warnings_of(spec, profile)]
    profile, joined = complete_cluster(spec, profile, machines.cluster)
    used = _use_devices(joined, devices, "--compare 1,2,4 plans for other sizes")
    kept = None if new_micro_batches else previous_micro_batches(spec)
    return PlanInputs(
        profile,
        used,
        make_plan_request(with_count(spec, spec.resources.max_nodes), profile, used, kept),
        machines.file,
        plan_file=plan_path(spec) if devices is None else None,
        warnings=tuple(filter(None, warnings)),
        can_add_nodes=batch_system != LOCAL,
        spec=spec,
        batch_system=batch_system,
        counts=counts,
        is_corrected=from_run is not None and is_of_spec,
    )


def _refuse_other_model(spec: JobSpec, run: RunDirectory, profile: Profile) -> None:
    """Refuse to plan a job by the recorded steps of another model: `last` is the last run of any
    job.

    Raises:
        MismatchError: the model of the run is not that of the spec, as its code is now.
    """
    is_same = is_fresh(spec, profile)
    with suppress(PipectlError):  # the file of the run is gone, or what it names
        is_same = is_same or is_of_model(spec, load(run.job), profile)
    if not is_same:
        raise MismatchError(
            f"--from-run: the model of {run.name} is not that of {spec.name}, or its code has "
            "changed",
            hint="name a run of this job: `pipectl status` lists runs with their jobs",
        )


def _gather_profile(
    profile: Profile,
    overrides: Sequence[str],
    cluster_file: Path | None,
    devices: int | None,
    compare: Sequence[int] | None,
) -> PlanInputs:
    """Inputs for a profile alone, on a described cluster or on equal devices, one per node."""
    keys = [each.partition("=")[0].strip() for each in overrides]
    for key, override in zip(keys, overrides, strict=True):
        if key != _BATCH and not key.startswith("pipeline."):
            raise UsageError(
                f"--set {override}: there is no job to change",
                hint=f"name a JOB.yaml; without one, {_BATCH} and pipeline.* can be set",
            )
    if cluster_file is not None:
        cluster = Cluster.load(cluster_file)
    else:  # the number of devices is given, or in the imported profile
        shipped = _shipped_number(profile, "accelerators", "devices")
        count = int((devices if compare is None else max(compare)) or shipped or 0)
        if not count:
            raise UsageError(
                "the number of devices is missing",
                hint="give --devices N, or describe the machines: --cluster FILE",
            )
        if count > MAX_RANKS:
            raise UsageError(TOO_MANY_RANKS.format(count), hint="plan for fewer --devices")
        each = tuple(Node(f"device{index}", 1, 1, Device("device")) for index in range(count))
        source = f"{count} equal devices"
        cluster = Cluster("equal devices", source, each, ASSUMED_BETWEEN, ASSUMED_BETWEEN)
        rate = _shipped_number(profile, "bandwidth_bytes_per_s", "transfer_bytes_per_s_effective")
        cluster = cluster if rate is None else cluster.with_bandwidth(rate)
    text = _JOB_OF_PROFILE.format(ranks=devices or cluster.ranks)
    spec = SpecFile.read(Path("job"), overrides, (), text).spec(check_files=False)
    cluster = _use_devices(cluster, devices, "describe more of them in the cluster file")
    limit_bytes = int(_shipped_number(profile, "memory_limit_bytes") or 0)
    request = make_plan_request(spec, profile, cluster, None)
    request = replace(
        request,
        name=profile.name,
        memory_limit_bytes=request.memory_limit_bytes or limit_bytes or None,
        key=None,
        every_schedule=False,  # lab plan --allow schedules opens them
        from_job=False,
    )
    if _BATCH not in keys:
        shipped = _shipped_number(profile, "microbatches_in_batch")
        count = request.micro_batches or int(
            shipped or _MICRO_BATCHES_PER_DEVICE * spec.resources.max_nodes
        )
        batch_size = profile.micro_batch_size * count
        batches = profile.batches(batch_size, drop_last=False)
        request = replace(request, batch_size=batch_size, batches=batches)
        if request.micro_batches is not None or shipped is None:
            assumed = (
                f"the batch is not given: taken as {request.batch_size} samples "
                f"(--set {_BATCH}=N sets it)"
            )
            profile = replace(profile, assumptions=(*profile.assumptions, assumed))
    warnings = tuple(warnings_of(spec, profile))
    return PlanInputs(profile, cluster, request, cluster_file, warnings=warnings)


def _shipped_number(profile: Profile, *keys: str) -> float | None:
    """A number that an imported profile says about its devices."""
    values = (profile.cluster.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int | float) and value > 0), None)


def _use_devices(cluster: Cluster, devices: int | None, hint: str) -> Cluster:
    """``devices`` devices of a cluster; all if that is None."""
    if devices is None:
        return cluster
    if devices > cluster.ranks:
        raise UsageError(
            f"--devices {devices}: the cluster {cluster.name!r} has {cluster.ranks} ranks",
            hint=hint,
        )
    return cluster.with_ranks(devices)


def plan_job(
    spec: JobSpec,
    profile: Profile,
    cluster: Cluster,
    progress: Report | None = None,
    kept_micro_batches: int | None = None,
    planner: Planner = make_plan,
) -> Plan:
    """Make the best plan for a job.

    Args:
        kept_micro_batches: see :func:`make_plan_request`.
        planner: makes the plan.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    if progress is not None:
        progress(0, 0, "planning")
    request = make_plan_request(spec, profile, cluster, kept_micro_batches)
    with advise_other_micro_batches(profile, request):
        return planner(profile, cluster, request)


def write_plan(run: RunDirectory, plan: Plan, cluster: Cluster) -> None:
    """Write a plan and its predicted timeline into a run directory."""
    plan.save(run.plan)
    simulate(plan, cluster).timeline.save(run.predicted)


def previous_micro_batches(spec: JobSpec) -> int | None:
    """The number of micro-batches of the job's previous plan; None if it has none for this batch.

    New plans keep it: results depend on it, so a new profile should not change it.
    """
    path = plan_path(spec)
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except DataFileError:  # a new plan replaces it
        return None
    return plan.micro_batches if plan.batch_size == spec.training.batch_size else None


@contextmanager
def advise_other_micro_batches(profile: Profile, request: PlanRequest) -> Iterator[None]:
    """A context whose InfeasibleError says that the number of micro-batches was kept.

    It does not if the limit is too small for the process alone.
    """
    try:
        yield
    except InfeasibleError as error:
        limit = request.memory_limit_bytes
        alone_bytes = max(profile.process_baseline_bytes or 0, profile.capture_bytes)
        is_enough = limit is None or limit > alone_bytes
        if request.keeps_micro_batches and is_enough:
            error.hint = (
                f"{error.hint}\nor let the planner choose the number of micro-batches again (now "
                f"{request.micro_batches}, from the previous plan): "
                "pipectl plan JOB.yaml --new-micro-batches"
            )
        raise


def make_plan_request(
    spec: JobSpec,
    profile: Profile,
    cluster: Cluster,
    kept_micro_batches: int | None,
) -> PlanRequest:
    """Make the request of a job to the planner, with the key of the plan's file.

    Args:
        kept_micro_batches: see :func:`request_of_job`.
    """
    request = request_of_job(spec, profile, cluster, kept_micro_batches)
    return replace(request, key=plan_file_key(spec, profile, cluster))

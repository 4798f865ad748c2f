"""Rehearsing a plan: the real ranks, messages and schedule, with waits instead of computations."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pipectl.batch import JobRequest
from pipectl.cluster import Cluster
from pipectl.errors import UsageError
from pipectl.files import make_directory
from pipectl.jobs.launching import Settled, settle
from pipectl.jobs.machines import find_machines
from pipectl.jobs.places import LOCAL, profile_path, scheduler_name
from pipectl.jobs.plan import planned, write_plan
from pipectl.jobs.profile import Progress, fresh_profile, measure
from pipectl.jobs.request import job_request, make_tag, trial_request
from pipectl.jobs.submit import Submission, hand_over, removed_on_failure
from pipectl.jobs.template import write_private
from pipectl.plan import Plan
from pipectl.rehearsal import Rehearsal
from pipectl.runs import REHEARSAL, Record, RunDirectory, read_metrics
from pipectl.simulate.rehearsing import rehearsal_of
from pipectl.spec import dump

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

WORKER = "pipectl.runtime.rehearsal.worker"
_START_S = 300
"""Walltime beyond the steps."""
_OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Open MPI starts no more ranks than cores unless told so."""


@dataclass(frozen=True)
class RehearsalInputs:
    """What is rehearsed.

    Args:
        scheduler: where.
        launch: what ranks are started with.
        warning: why a measured cluster was not used; empty where all is well.
    """

    spec: JobSpec
    plan: Plan
    cluster: Cluster
    scheduler: str
    launch: Settled
    warning: str = ""


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal found; times are those of the plan, not stretched.

    Args:
        steps_s: of every step.
        late_s: the most by which a rank came too late, of the step that was latest.
    """

    plan: Plan
    rehearsal: Rehearsal
    steps_s: tuple[float, ...]
    late_s: float

    @property
    def step_s(self) -> float:
        """Median."""
        return median(self.steps_s)

    @property
    def ratio(self) -> float:
        """Rehearsed over predicted step time."""
        return self.step_s / self.rehearsal.predicted_s

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        predicted = self.plan.prediction
        return {
            "ranks": self.plan.ranks,
            "predicted_step_time_s": self.rehearsal.predicted_s,
            "rehearsed_step_time_s": self.step_s,
            "rehearsed_over_predicted": self.ratio,
            "planned_step_time_s": None if predicted is None else predicted.step_time_s,
            "steps_s": list(self.steps_s),
            "stretch": self.rehearsal.stretch,
            "message_share": self.rehearsal.message_share,
            "late_s": self.late_s,
        }


def gather(
    spec: JobSpec, scheduler: str | None, progress: Progress | None = None
) -> RehearsalInputs:
    """The plan that a job would run, to be rehearsed on this machine unless a scheduler is named.

    Raises:
        UsageError: a job for a batch system has no profile yet.
        PipectlError: no plan fits, or a file cannot be used.
    """
    home = scheduler_name(spec, None)
    machines = find_machines(spec, home)
    make_directory(Path(spec.output.directory))
    profile = fresh_profile(spec, profile_path(spec))
    if profile is None and home == LOCAL:
        profile = measure(spec, profile_path(spec), progress).profile
    if profile is None:
        raise UsageError(
            f"{profile_path(spec)}: no fresh profile, so there is no plan to rehearse",
            cure="measure the model first: pipectl profile --submit JOB.yaml",
        )
    where, cluster = scheduler or LOCAL, machines.cluster
    plan = planned(spec, profile, cluster)
    launch = settle(_started(trial_request(spec), spec, where))
    return RehearsalInputs(spec, plan, cluster, where, launch, machines.warning)


def submit_rehearsal(inputs: RehearsalInputs, now: float) -> Submission:
    """Start all ranks of a plan, here or where its job would run.

    Args:
        now: seconds since the epoch.

    Raises:
        SchedulerError: see :func:`pipectl.jobs.submit.submit`.
    """
    spec, plan = inputs.spec, inputs.plan
    run = RunDirectory.create(Path(spec.output.directory), f"{spec.name}-rehearsal", now)
    with removed_on_failure(run):
        rehearsal = rehearsal_of(plan, inputs.cluster, _ranks_per_core(inputs))
        request = _request(inputs, run, rehearsal)
    record = Record(
        name=request.name,
        scheduler=inputs.scheduler,
        tag=request.tag,
        submitted_at=now,
        ranks=plan.ranks,
        nodes=request.node_count,
        steps=rehearsal.steps,
        kind=REHEARSAL,
    )
    record = hand_over(run, request, record, _writer(run, inputs, rehearsal))
    return Submission(run, record, plan)


def result_of(run: RunDirectory) -> Rehearsed:
    """What a rehearsal that is over has found."""
    lines = list(read_metrics(run))
    return Rehearsed(
        plan=Plan.load(run.plan),
        rehearsal=Rehearsal.load(run.rehearsal),
        steps_s=tuple(line["step_time_s"] for line in lines),
        late_s=max(line["late_s"] for line in lines),
    )


def seconds_of(rehearsal: Rehearsal) -> float:
    """How long the steps of a rehearsal take."""
    return rehearsal.steps * rehearsal.stretch * rehearsal.predicted_s


def _ranks_per_core(inputs: RehearsalInputs) -> float:
    """Of where it runs: this machine, or a core and more for every rank."""
    if inputs.scheduler != LOCAL:
        return 1.0
    return inputs.plan.ranks / len(os.sched_getaffinity(0))


def _request(inputs: RehearsalInputs, run: RunDirectory, rehearsal: Rehearsal) -> JobRequest:
    spec = inputs.spec
    request = job_request(spec, run.path, make_tag(run.path))
    request = replace(
        request,
        name=f"{spec.name}-rehearsal",
        ranks=inputs.plan.ranks,
        command=(request.python, "-m", "mpi4py", "-m", WORKER, "--run", str(run.path)),
        walltime_s=int(min(request.walltime_s, _START_S + 2 * seconds_of(rehearsal))),
        gpus_per_node=0,
        stop=None,
    )
    return inputs.launch.of(_started(request, spec, inputs.scheduler))


def _started(request: JobRequest, spec: JobSpec, scheduler: str) -> JobRequest:
    """On this machine all ranks start, however few cores it has."""
    if scheduler != LOCAL:
        return request
    ours = scheduler_name(spec, None) == LOCAL
    return replace(
        request,
        bind="none",
        launcher="mpiexec",
        mpi="auto" if request.launcher == "srun" else request.mpi,
        launch_args=request.launch_args if ours else (),
        variables={**request.variables, **_OVERSUBSCRIBE},
    )


def _writer(run: RunDirectory, inputs: RehearsalInputs, rehearsal: Rehearsal) -> Callable[[], None]:
    def write() -> None:
        write_private(run.job, dump(inputs.spec))
        inputs.cluster.save(run.cluster)
        write_plan(run, inputs.plan, inputs.cluster)
        rehearsal.save(run.rehearsal)

    return write

"""Jobs that measure instead of training: profiles, links, and rehearsals of plans."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypedDict

from pipectl.batch import LOCAL, JobState
from pipectl.batch.findings import Finding
from pipectl.batch.launchers import belongs_to_mpi
from pipectl.batch.request import IN_JOB
from pipectl.errors import PipectlError, UsageError
from pipectl.files import is_stream, make_directory_of, read_json
from pipectl.jobs.job import (
    PERCENT,
    Job,
    Workload,
    change,
    choose_scheduler,
    fit_to_allocation,
    make_job,
)
from pipectl.jobs.output import cluster_file_key, profile_path
from pipectl.jobs.prepare import prepare
from pipectl.plan import Plan
from pipectl.rehearsal import Rehearsal
from pipectl.runs import PROFILING, REHEARSAL, RunDirectory, read_metrics
from pipectl.units import Report

if TYPE_CHECKING:
    from pipectl.jobs.state import RunStatus
    from pipectl.spec import JobSpec

LINKS_BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Approximate time to measure links, by effort."""
_LINKS_WALLTIME_S = 900
_TRIAL_WALLTIME_S = 120
REHEARSAL_WORKER = "pipectl.runtime.rehearsal"
_START_S = 300
"""Walltime in addition to that of the steps."""
_OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Makes Open MPI start more ranks than there are cores."""


def make_measuring_job(
    spec: JobSpec, scheduler: str, output: Path, effort: str, *, links: bool, again: bool
) -> Job:
    """Make a job that measures the model, or the links between the ranks.

    The model is measured on one node with all tasks that the job has there. For the links, all
    ranks are started as in the job.

    Args:
        output: file for the profile, or for the cluster description, with a picture beside it.

    Raises:
        UsageError: the job has one rank, and so no link; or the output cannot be written.
    """
    if links and spec.resources.ranks < 2:
        raise UsageError(
            "resources: a job of one rank has no links to measure",
            hint="set resources.nodes or resources.tasks_per_node to 2 or more",
        )
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is not a file that a job could write", hint="name another: -o")
    output = output.absolute()
    to_file = ("--output", str(output))
    if links:
        workload = Workload(
            suffix="-links",
            program=("-m", "mpi4py", "-m", "pipectl.runtime.links.probe", "--run"),
            arguments=(
                *(*to_file, "--key", cluster_file_key(spec, scheduler)),
                *("--budget", str(LINKS_BUDGET_S[effort])),
            ),
            resources={"walltime": min(spec.resources.walltime, _LINKS_WALLTIME_S)},
        )
    else:
        workload = Workload(
            suffix="-profile",
            program=("-m", IN_JOB),
            arguments=(*to_file, "--effort", effort, *(("--again",) if again else ())),
            single_process=True,
            resources={"nodes": 1},
        )
    workload = replace(workload, kind=PROFILING, steps=PERCENT, output=output.parent)
    return replace(make_job(spec, scheduler, workload), keeps_code=not links)


def make_trial_job(spec: JobSpec, scheduler: str) -> Job:
    """Make a job of two ranks, on two nodes if the job has as many, that says what works in it."""
    nodes = min(2, spec.resources.max_nodes) if scheduler != LOCAL else 1
    gpus = ("--ranks", "2", "--gpus", str(spec.resources.gpus_per_node))
    workload = Workload(
        PROFILING,
        suffix="-doctor",
        program=("-m", "mpi4py", "-m", "pipectl.runtime.links.trial", "--run"),
        arguments=gpus,
        steps=PERCENT,
        resources={"nodes": nodes, "tasks_per_node": 2 // nodes, "walltime": _TRIAL_WALLTIME_S},
    )
    return replace(make_job(spec, scheduler, workload), keeps_code=False)


def findings_of(status: RunStatus) -> list[Finding]:
    """What a job of :func:`make_trial_job` has found, or why it has found nothing."""
    run, job, found = status.run, status.job, list[Finding]()
    with suppress(PipectlError, TypeError):
        document = read_json(run.path / "trial.json", hint="")
        found = [Finding(**each) for each in document["findings"]]
    if job.state is not JobState.COMPLETED or not found:
        why = job.reason if status.failure is None else status.failure.what
        text = f"{run.name} is {job.state.value}{f': {why}' if why else ''}"
        found.append(Finding("job", "fail", text, job.hint or f"pipectl logs {run.name}"))
    return found


def plan_rehearsal(spec: JobSpec, scheduler: str | None, progress: Report) -> tuple[Job, Rehearsal]:
    """Make a job that rehearses a job's plan, on this machine unless a batch system is named.

    The plan is that for the named scheduler, which may be this machine, or else for the job's own.

    Raises:
        UsageError: a job for a batch system has no profile yet.
        PipectlError: no plan fits, or a file cannot be used.
    """
    batch_system = choose_scheduler(spec, scheduler)
    spec = fit_to_allocation(spec, batch_system)
    (planned,) = prepare(spec, batch_system, progress, must_run=False)
    plan, cluster = planned.plan, planned.cluster
    if plan is None or cluster is None:
        raise UsageError(
            f"{profile_path(spec)}: no up-to-date profile, so there is no plan to rehearse",
            hint="measure the model first: pipectl profile JOB.yaml --wait\n"
            "or measure, plan and rehearse for this machine: --scheduler local",
        )
    # Not earlier: the memory of this process while it measures counts as memory of a rank.
    from pipectl.simulate.rehearsing import rehearsal_of

    ranks_per_core = 1.0
    if (scheduler := scheduler or LOCAL) == LOCAL:
        ranks_per_core = plan.ranks / len(os.sched_getaffinity(0))
        launch = {
            "bind": "none",
            "launcher": "mpiexec",
            "mpi": spec.launch.mpi if belongs_to_mpi(spec.launch) else "auto",
            "args": spec.launch.args if batch_system == LOCAL else (),
        }
        variables = {**spec.environment.variables, **_OVERSUBSCRIBE}
        spec = change(spec, launch=launch, environment={"variables": variables})
    rehearsal = rehearsal_of(plan, cluster, ranks_per_core)
    limit_s = int(_START_S + 2 * rehearsal.expected_s)
    workload = Workload(
        REHEARSAL,
        suffix="-rehearsal",
        program=("-m", "mpi4py", "-m", REHEARSAL_WORKER, "--run"),
        steps=rehearsal.steps,
        resources={"walltime": min(spec.resources.walltime, limit_s), "gpus_per_node": 0},
    )
    job = make_job(spec, scheduler, workload)
    job = replace(
        job,
        cluster=cluster,
        cluster_warning=planned.cluster_warning,
        plan=plan,
        rehearsal=rehearsal,
        keeps_code=False,
    )
    return job, rehearsal


class RehearsalJson(TypedDict):
    """The result of a rehearsal. Times are those of the plan, not stretched.

    Args:
        run: name of its run.
        ranks: number of ranks.
        predicted_step_time_s: predicted step if ranks share no cores or links, as in a rehearsal.
        rehearsed_step_time_s: median step.
        rehearsed_over_predicted: their ratio.
        planned_step_time_s: the prediction of the plan; null if it has none.
        steps_s: time of each step.
        stretch: time of the rehearsal relative to that of the plan.
        message_share: bytes of messages relative to those of the plan.
        late_s: largest delay of a rank.
    """

    run: str
    ranks: int
    predicted_step_time_s: float
    rehearsed_step_time_s: float
    rehearsed_over_predicted: float
    planned_step_time_s: float | None
    steps_s: list[float]
    stretch: float
    message_share: float
    late_s: float


def result_of(run: RunDirectory) -> RehearsalJson:
    """Result of a rehearsal that is over."""
    plan, rehearsal, lines = Plan.load(run.plan), Rehearsal.load(run.rehearsal), read_metrics(run)
    steps_s = [line.step_time_s for line in lines if line.step_time_s is not None]
    return {
        "run": run.name,
        "ranks": plan.ranks,
        "predicted_step_time_s": rehearsal.predicted_s,
        "rehearsed_step_time_s": median(steps_s),
        "rehearsed_over_predicted": median(steps_s) / rehearsal.predicted_s,
        "planned_step_time_s": None if plan.prediction is None else plan.prediction.step_time_s,
        "steps_s": steps_s,
        "stretch": rehearsal.stretch,
        "message_share": rehearsal.message_share,
        "late_s": max(line.late_s or 0.0 for line in lines),
    }

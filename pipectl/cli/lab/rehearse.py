"""`pipectl lab rehearse`: a plan's ranks and messages, with waits instead of computations."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pipectl.batch import LOCAL
from pipectl.cli import options as opt
from pipectl.cli.console import note, say, say_json, short_path, warn
from pipectl.cli.follow import follow_or_exit, profiling_progress
from pipectl.cli.submission import print_notes, submission_json
from pipectl.errors import UsageError
from pipectl.jobs.job_files import profile_path
from pipectl.jobs.prepare import Job, choose_scheduler, complete, prepare, warning_of_code
from pipectl.jobs.submit import submit
from pipectl.plan import Plan
from pipectl.rehearsal import Rehearsal
from pipectl.runs import REHEARSAL, RunDirectory, as_typed, read_metrics
from pipectl.spec import load
from pipectl.units import format_time, plural

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec

WORKER, RATIO = "pipectl.runtime.rehearsal", "rehearsed_over_predicted"
_START_S = 300
"""Walltime beyond the steps."""
_OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Open MPI starts no more ranks than cores unless told so."""
_SHARED = 0.005
"""Of the step: what shared cores and links add that is worth a line."""


def command(
    job: Path = opt.JOB_FILE,
    scheduler: opt.SchedulerName | None = opt.SCHEDULER,
    wait: bool = opt.WAIT,
    as_json: bool = opt.JSON,
    overrides: list[str] | None = opt.OVERRIDES,
) -> None:
    spec = load(job, overrides or ())
    warn(warning_of_code(spec, job))
    with profiling_progress() as progress:
        planned, rehearsal = plan_rehearsal(spec, scheduler, progress)
    print_notes([planned])
    (submission,) = submit([planned], time.time())
    run, record = submission.run, submission.record
    note(
        f"rehearsing {record.ranks} ranks ({record.scheduler}): {plural(rehearsal.steps, 'step')} "
        f"in about {format_time(_seconds_of(rehearsal))}, times stretched by {rehearsal.stretch:g}"
    )
    if not wait and record.scheduler != LOCAL:
        if as_json:
            say_json(submission_json(run, record))
        else:
            say(f"see: pipectl status {as_typed(run)}")
        return
    follow_or_exit(run, as_json=as_json)
    result = result_of(run)
    if as_json:
        say_json({"run": run.name, **result})
        return
    predicted_s, planned_s = result["predicted_step_time_s"], result["planned_step_time_s"]
    rehearsed, ratio = format_time(result["rehearsed_step_time_s"]), result[RATIO]
    say(f"predicted: {format_time(predicted_s)} per step")
    say(f"rehearsed: {rehearsed} per step, {ratio:.3f} times that")
    if planned_s is not None and abs(planned_s / predicted_s - 1) > _SHARED:
        say(
            f"plan: {format_time(planned_s)} per step, with cores and links that ranks share, "
            "which a rehearsal leaves out"
        )
    if (share := result["message_share"]) < 1:
        say(f"messages: {share:.2g} of their size, their links' time in full")
    if result["late_s"] > rehearsal.late_s / rehearsal.stretch:
        say(
            f"the latest rank was {format_time(result['late_s'])} late (in the plan's time): this "
            "machine was busy, or has too few cores for so many ranks"
        )
    say(f"timelines: {short_path(run.trace)}")


def result_of(run: RunDirectory) -> dict[str, Any]:
    """What a rehearsal that is over measured, for ``--json``. Times are the plan's, not stretched:
    the median step, all steps, and the most by which a rank came too late."""
    plan, rehearsal, lines = Plan.load(run.plan), Rehearsal.load(run.rehearsal), read_metrics(run)
    steps_s = [line["step_time_s"] for line in lines]
    return {
        "ranks": plan.ranks,
        "predicted_step_time_s": rehearsal.predicted_s,
        "rehearsed_step_time_s": median(steps_s),
        RATIO: median(steps_s) / rehearsal.predicted_s,
        "planned_step_time_s": None if plan.prediction is None else plan.prediction.step_time_s,
        "steps_s": steps_s,
        "stretch": rehearsal.stretch,
        "message_share": rehearsal.message_share,
        "late_s": max(line["late_s"] for line in lines),
    }


def plan_rehearsal(
    spec: JobSpec, scheduler: str | None, progress: Progress
) -> tuple[Job, Rehearsal]:
    """All ranks of the plan that a job would run, on this machine unless a scheduler is named.

    Raises:
        UsageError: a job for a batch system has no profile yet.
        PipectlError: no plan fits, or a file cannot be used.
    """
    (planned,) = prepare(spec, None, progress, must_run=False)
    plan, cluster = planned.plan, planned.cluster
    if plan is None or cluster is None:
        raise UsageError(
            f"{profile_path(spec)}: no up-to-date profile, so there is no plan to rehearse",
            cure="measure the model first: pipectl profile --submit JOB.yaml",
        )
    from pipectl.simulate.rehearsing import rehearsal_of

    ranks_per_core = 1.0
    if (scheduler := scheduler or LOCAL) == LOCAL:
        spec = _on_this_machine(spec)
        ranks_per_core = plan.ranks / len(os.sched_getaffinity(0))
    rehearsal = rehearsal_of(plan, cluster, ranks_per_core)
    limit_s = int(_START_S + 2 * _seconds_of(rehearsal))
    job = Job(
        spec,
        scheduler,
        kind=REHEARSAL,
        suffix="-rehearsal",
        program=("-m", "mpi4py", "-m", WORKER, "--run"),
        steps=rehearsal.steps,
        rehearsal=rehearsal,
        resources={"walltime": min(spec.resources.walltime, limit_s), "gpus_per_node": 0},
    )
    job = replace(complete(job), cluster=cluster, plan=plan, warning=planned.warning)
    return job, rehearsal


def _seconds_of(rehearsal: Rehearsal) -> float:
    return rehearsal.steps * rehearsal.stretch * rehearsal.predicted_s


def _on_this_machine(spec: JobSpec) -> JobSpec:
    """The job with all ranks started here, however few cores there are."""
    launch, environment = spec.launch, spec.environment
    ours = choose_scheduler(spec) == LOCAL
    changes = {
        "bind": "none",
        "launcher": "mpiexec",
        "mpi": "auto" if launch.launcher == "srun" else launch.mpi,
        "args": launch.args if ours else (),
    }
    variables = {"variables": {**environment.variables, **_OVERSUBSCRIBE}}
    return spec.model_copy(
        update={
            "launch": launch.model_copy(update=changes),
            "environment": environment.model_copy(update=variables),
        }
    )

"""Rehearsing a plan: the real ranks, messages and schedule, with waits instead of computations."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from pipectl.batch import LOCAL
from pipectl.errors import UsageError
from pipectl.jobs.job import Job, Work, choose_scheduler, make_job
from pipectl.jobs.job_files import profile_path
from pipectl.jobs.prepare import prepare
from pipectl.plan import Plan
from pipectl.rehearsal import Rehearsal
from pipectl.runs import REHEARSAL, RunDirectory, read_metrics

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec

WORKER = "pipectl.runtime.rehearsal"
_START_S = 300
"""Walltime beyond the steps."""
_OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Open MPI starts no more ranks than cores unless told so."""


@dataclass(frozen=True)
class RehearsalResult:
    """The result of a rehearsal; times are those of the plan, not stretched.

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


def prepare_rehearsal(
    spec: JobSpec, scheduler: str | None, progress: Progress | None = None
) -> Job:
    """All ranks of the plan that a job would run, on this machine unless a scheduler is named.

    Raises:
        UsageError: a job for a batch system has no profile yet.
        PipectlError: no plan fits, or a file cannot be used.
    """
    (planned,) = prepare(spec, None, progress, must_run=False)
    plan, cluster = planned.plan, planned.cluster
    if plan is None or cluster is None:
        raise UsageError(
            f"{profile_path(spec)}: no fresh profile, so there is no plan to rehearse",
            cure="measure the model first: pipectl profile --submit JOB.yaml",
        )
    from pipectl.simulate.rehearsing import rehearsal_of

    ranks_per_core = 1.0
    if (scheduler := scheduler or LOCAL) == LOCAL:
        spec = _on_this_machine(spec)
        ranks_per_core = plan.ranks / len(os.sched_getaffinity(0))
    rehearsal = rehearsal_of(plan, cluster, ranks_per_core)
    limit_s = int(_START_S + 2 * seconds_of(rehearsal))
    work = Work(
        kind=REHEARSAL,
        suffix="-rehearsal",
        program=("-m", "mpi4py", "-m", WORKER, "--run"),
        steps=rehearsal.steps,
        rehearsal=rehearsal,
        resources={"walltime": min(spec.resources.walltime, limit_s), "gpus_per_node": 0},
    )
    job = make_job(spec, scheduler, work)
    return replace(job, cluster=cluster, plan=plan, warning=planned.warning)


def result_of(run: RunDirectory) -> RehearsalResult:
    """What a rehearsal that is over measured."""
    lines = list(read_metrics(run))
    return RehearsalResult(
        plan=Plan.load(run.plan),
        rehearsal=Rehearsal.load(run.rehearsal),
        steps_s=tuple(line["step_time_s"] for line in lines),
        late_s=max(line["late_s"] for line in lines),
    )


def seconds_of(rehearsal: Rehearsal) -> float:
    """How long the steps of a rehearsal take."""
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

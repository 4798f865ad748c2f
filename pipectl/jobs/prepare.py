"""From a job spec, or the points of a sweep, to jobs that are ready to be submitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipectl.batch import LOCAL, MpiChoice
from pipectl.errors import MismatchError, PipectlError
from pipectl.jobs.job import Job, choose_scheduler, make_job, render
from pipectl.jobs.job_files import fresh_plan, fresh_profile, join_rows, plan_path, profile_path
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.spec import Point, plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.jobs.profiles import Measurement
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec


def prepare(
    spec: JobSpec,
    scheduler: str | None,
    progress: Progress | None = None,
    *,
    points: Sequence[Point] = (),
    make_missing: bool = True,
    must_run: bool = True,
) -> list[Job]:
    """The job, or the jobs of a sweep, with cluster, launcher, profile and plan.

    Profiles and plans that are missing or stale are made, once for all points that share them. On a
    batch system, the job measures its profile itself, since times on a login node say nothing about
    compute nodes. The profile and the plan of ``spec`` itself are saved in the output directory.

    Args:
        spec: the job, without the values of its sweep.
        scheduler: name of the batch system; by default the spec's.
        points: points of the sweep; empty for a single job.
        make_missing: whether to make profiles and plans that are missing or stale, and to ask
            whether the batch system answers.
        must_run: whether to refuse imported profiles, and plans that can only be simulated.

    Raises:
        SchedulerError: there is no MPI to start the ranks with, or no batch system answers.
        InvalidInputError: a file, the model or the template cannot be used, or a value cannot be
            written into a script safely.
        MismatchError: the profile is imported, so that nothing says that it is of this model; or
            the plan asks for what cannot be run.
        InfeasibleError: no plan fits.
    """
    name = choose_scheduler(spec, scheduler, must_answer=make_missing and must_run)
    choices: dict[str, MpiChoice] = {}
    jobs = []
    for point in points or (None,):
        each, values = (spec, None) if point is None else (point.spec, point.values)
        with _name_values_in_errors(values):
            settings = f"{each.launch} {each.environment}"
            job = make_job(each, name, mpi_choice=choices.get(settings))
            choices[settings] = job.mpi_choice
            jobs.append(replace(job, values=values))

    # All profiles come first: what a process holds while it measures counts as memory of a rank,
    # and the planner is large.
    profiles: dict[str, tuple[Profile | None, Measurement | None]] = {}
    own_key = profile_key(spec) if points else ""
    for index, job in enumerate(jobs):
        with _name_values_in_errors(job.values):
            key = profile_key(job.spec) if points else ""
            if key not in profiles:
                is_own = key == own_key
                profiles[key] = _find_profile(job, progress, is_own, make_missing, must_run)
        profile, measurement = profiles[key]
        prepares, cluster = profile is None and name != LOCAL, job.cluster
        if profile is not None and cluster is not None:
            profile, cluster = join_rows(profile, cluster)
        jobs[index] = replace(
            job, profile=profile, measurement=measurement, cluster=cluster, prepares=prepares
        )
    plans: dict[str, Plan | None] = {}
    own_key = plan_key(spec) if points else ""
    for index, job in enumerate(jobs):
        with _name_values_in_errors(job.values):
            key = plan_key(job.spec) if points else ""
            if key not in plans:
                plans[key] = _find_plan(job, progress, key == own_key, make_missing, must_run)
        jobs[index] = replace(job, plan=plans[key])
    return jobs


def _find_profile(
    job: Job, progress: Progress | None, save: bool, make: bool, must_run: bool
) -> tuple[Profile | None, Measurement | None]:
    """The saved profile if that is fresh, else one that is measured now and how it was measured.

    Args:
        save: whether a new one is written to its file.
    """
    path = profile_path(job.spec)
    profile = fresh_profile(job.spec, path)
    if profile is None and make and job.scheduler == LOCAL:
        from pipectl.jobs.profiles import measure

        if must_run:
            render(job)  # an error in the script is raised before the model is measured
        measurement = measure(job.spec, path if save else None, progress)
        return measurement.profile, measurement
    if profile is not None and profile.fingerprint is None and must_run:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return profile, None


def _find_plan(
    job: Job, progress: Progress | None, save: bool, make: bool, must_run: bool
) -> Plan | None:
    """The saved plan of a job if it is fresh, else a plan made now."""
    profile, cluster, path = job.profile, job.cluster, plan_path(job.spec)
    if profile is None or cluster is None:
        return None
    plan = fresh_plan(job.spec, profile, cluster, path)
    if plan is None and make:
        if progress is not None:
            progress(0, 0, "planning")
        from pipectl.jobs.planning import find_plan

        plan = find_plan(job.spec, profile, cluster, keep=save)
        if save:
            plan.save(path)
    if plan is not None and must_run:
        from pipectl.runtime.supported import check_supported

        check_supported(plan, str(path) if save else "the plan")
    return plan


@contextmanager
def _name_values_in_errors(values: Mapping[str, Any] | None) -> Iterator[None]:
    """Begin errors with the values of a point: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if values is not None:
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            error.message = f"{words}: {error.message}"
        raise

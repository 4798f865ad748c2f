"""Everything that a submission needs, gathered from the spec of a job or of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pipectl.batch import MpiChoice
from pipectl.errors import MismatchError, PipectlError
from pipectl.jobs.places import (
    LOCAL,
    check_answering,
    fresh_plan,
    fresh_profile,
    plan_path,
    profile_path,
    scheduler_name,
)
from pipectl.jobs.profiles import measure
from pipectl.jobs.request import Job, make_job
from pipectl.jobs.rows import join_rows
from pipectl.plan import Plan
from pipectl.spec import Point, plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec

T = TypeVar("T")


def prepare(
    spec: JobSpec,
    scheduler: str | None,
    progress: Progress | None = None,
    *,
    points: Sequence[Point] = (),
    make_missing: bool = True,
    must_run: bool = True,
) -> list[Job]:
    """The job, or the jobs of a sweep, with all that a submission needs.

    Profiles and plans that are missing or stale are made. Jobs of a batch system make profiles
    themselves, since times on a login node say nothing about compute nodes. What several points
    share is made once. The profile and the plan of ``spec`` itself are saved at their usual places.

    Args:
        spec: the job without the values of its sweep.
        scheduler: its name; by default the spec's.
        points: of the sweep; none for a single job.
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
    submits = make_missing and must_run
    if submits:
        check_answering(spec, scheduler)
    name = scheduler_name(spec, scheduler)
    launches: dict[str, MpiChoice] = {}
    jobs: list[Job] = []
    for index, each in enumerate([point.spec for point in points] or [spec]):
        with _name_values_in_errors(points, index):
            settings = f"{each.launch} {each.environment}"
            jobs.append(make_job(each, name, launch=launches.get(settings), check=submits))
        launches[settings] = jobs[-1].launch

    def find_profile(job: Job, save: bool) -> Job:
        return _add_profile(job, progress, save=save, make=make_missing, must_run=must_run)

    for index, same in enumerate(_once_per_key(spec, points, profile_key, jobs, find_profile)):
        job, profile, cluster = jobs[index], same.profile, jobs[index].cluster
        if profile is not None and cluster is not None:
            profile, cluster = join_rows(profile, cluster)
        jobs[index] = replace(
            job,
            cluster=cluster,
            profile=profile,
            measurement=same.measurement,
            prepares=profile is None and name != LOCAL,
        )

    def find_plan(job: Job, save: bool) -> Plan | None:
        return _find_plan(job, progress, save=save, make=make_missing, must_run=must_run)

    plans = _once_per_key(spec, points, plan_key, jobs, find_plan)
    return [replace(job, plan=plan) for job, plan in zip(jobs, plans, strict=True)]


def _add_profile(
    job: Job, progress: Progress | None, *, save: bool, make: bool, must_run: bool
) -> Job:
    """The job with the fresh profile at its usual place, else with one that is measured now."""
    path = profile_path(job.spec)
    profile = fresh_profile(job.spec, path)
    if profile is None and make and job.scheduler == LOCAL:
        measurement = measure(job.spec, path if save else None, progress)
        return replace(job, profile=measurement.profile, measurement=measurement)
    if profile is not None and profile.fingerprint is None and must_run:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return replace(job, profile=profile)


def _find_plan(
    job: Job, progress: Progress | None, *, save: bool, make: bool, must_run: bool
) -> Plan | None:
    """The fresh plan at the usual place of a job, else one that is made now."""
    profile, cluster, path = job.profile, job.cluster, plan_path(job.spec)
    if profile is None or cluster is None:
        return None
    plan = fresh_plan(job.spec, profile, cluster, path)
    if plan is None and make:
        if progress is not None:
            progress(0, 0, "planning")
        # Not before: what the process holds while it measures counts as memory of a rank.
        from pipectl.jobs.planning import find_plan

        plan = find_plan(job.spec, profile, cluster, keep=save)
        if save:
            plan.save(path)
    if plan is not None and must_run:
        from pipectl.runtime.supported import check_supported

        check_supported(plan, str(path) if save else "the plan")
    return plan


def _once_per_key(
    spec: JobSpec,
    points: Sequence[Point],
    key_of: Callable[[JobSpec], str],
    jobs: Sequence[Job],
    make: Callable[[Job, bool], T],
) -> list[T]:
    """What ``make(job, is_of_spec)`` gives for every job, made once for all of the same key."""
    if not points:
        return [make(jobs[0], True)]
    own, made, results = key_of(spec), dict[str, T](), []
    for index, job in enumerate(jobs):
        key = key_of(job.spec)
        if key not in made:
            with _name_values_in_errors(points, index):
                made[key] = make(job, key == own)
        results.append(made[key])
    return results


@contextmanager
def _name_values_in_errors(points: Sequence[Point], index: int) -> Iterator[None]:
    """Begin errors with the values of a point: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if points:
            values = points[index].values
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            error.message = f"{words}: {error.message}"
        raise

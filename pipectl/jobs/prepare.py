"""Everything that a submission needs, gathered from the spec of a job or of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pipectl.batch import MpiChoice, get
from pipectl.errors import MismatchError, PipectlError
from pipectl.jobs.places import (
    LOCAL,
    check_answering,
    find_machines,
    plan_path,
    profile_path,
    scheduler_name,
)
from pipectl.jobs.profiles import Progress, fresh_profile, measure
from pipectl.jobs.request import Job, make_job, make_request
from pipectl.jobs.rows import join_rows
from pipectl.plan import Plan
from pipectl.spec import Point, plan_key, profile_key

if TYPE_CHECKING:
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
    if make_missing and must_run:
        check_answering(spec, scheduler)
    name = scheduler_name(spec, scheduler)
    specs = [point.spec for point in points] or [spec]
    values = [point.values for point in points] or [{}]
    jobs: list[Job] = []
    launches: dict[str, MpiChoice] = {}
    for each, named in zip(specs, values, strict=True):
        with _name_values_in_errors(named):
            settings = f"{each.launch} {each.environment}"
            machines = find_machines(each, name)
            job = make_job(each, name, machines, launches.get(settings))
            if make_missing and must_run:  # what cannot be written is refused before the work
                get(name).render(make_request(job))
        launches[settings] = job.launch
        jobs.append(job)
    # Without a sweep there is one job, whose profile and plan are saved: all keys are the same.
    own, keys = "", [""]
    if points:
        own, *keys = map(profile_key, [spec, *specs])
    profiled: dict[str, Job] = {}
    for index, (job, key) in enumerate(zip(jobs, keys, strict=True)):
        if key not in profiled:
            with _name_values_in_errors(values[index]):
                profiled[key] = _add_profile(
                    job, progress, save=key == own, make_missing=make_missing, must_run=must_run
                )
        same = profiled[key]
        known = same.profile and job.cluster and join_rows(same.profile, job.cluster)
        profile, cluster = known or (same.profile, job.cluster)
        jobs[index] = replace(job, profile=profile, cluster=cluster, measurement=same.measurement)
    if points:
        own, *keys = map(plan_key, [spec, *specs])
    plans: dict[str, Plan | None] = {}
    for index, (job, key) in enumerate(zip(jobs, keys, strict=True)):
        if key not in plans:
            with _name_values_in_errors(values[index]):
                plans[key] = _find_or_make_plan(
                    job, progress, save=key == own, make_missing=make_missing, must_run=must_run
                )
        jobs[index] = replace(job, plan=plans[key])
    return [replace(job, prepares=job.profile is None and name != LOCAL) for job in jobs]


def _add_profile(
    job: Job, progress: Progress | None, *, save: bool, make_missing: bool, must_run: bool
) -> Job:
    """The job with the fresh profile at its usual place, else with one that is measured now."""
    path = profile_path(job.spec)
    profile = fresh_profile(job.spec, path)
    if profile is None and make_missing and job.scheduler == LOCAL:
        measurement = measure(job.spec, path if save else None, progress)
        return replace(job, profile=measurement.profile, measurement=measurement)
    if profile is not None and profile.fingerprint is None and must_run:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return replace(job, profile=profile)


def _find_or_make_plan(
    job: Job, progress: Progress | None, *, save: bool, make_missing: bool, must_run: bool
) -> Plan | None:
    """The fresh plan at the usual place of a job, else one that is made now."""
    spec, profile, cluster, path = job.spec, job.profile, job.cluster, plan_path(job.spec)
    if profile is None or cluster is None:
        return None
    if make_missing and progress is not None:
        progress(0, 0, "planning")
    # Not before: memory that the process holds while it measures counts as memory of a rank.
    from pipectl.jobs.planning import find_plan, fresh_plan

    plan = fresh_plan(spec, profile, cluster, path)
    if plan is None and make_missing:
        plan = find_plan(spec, profile, cluster, keep=save)
        if save:
            plan.save(path)
    if plan is not None and must_run:
        from pipectl.runtime.supported import check_supported

        check_supported(plan, str(path) if save else "the plan")
    return plan


@contextmanager
def _name_values_in_errors(values: Mapping[str, object]) -> Iterator[None]:
    """Begin errors with the values of a point: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if values:
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            error.message = f"{words}: {error.message}"
        raise

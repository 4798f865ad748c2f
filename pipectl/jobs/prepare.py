"""Find the cluster, profile and plan of a job in its output directory, or make them.

:func:`prepare` makes what is missing; on a batch system, that is done by the job itself
(:mod:`pipectl.jobs.in_job`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipectl.batch import LOCAL
from pipectl.batch.launchers import MpiChoice
from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, PipectlError
from pipectl.jobs.job import Job, make_job, render
from pipectl.jobs.output import (
    complete_cluster,
    find_cluster,
    plan_path,
    profile_path,
    read_plan,
    read_profile,
    save_plans,
)
from pipectl.runs.code import Code
from pipectl.spec import JobSpec, Point, plan_key, profile_key
from pipectl.spec.code import Snapshot, using
from pipectl.units import Report

if TYPE_CHECKING:
    from pipectl.plan import Plan
    from pipectl.profile import Profile


def prepare(
    spec: JobSpec,
    scheduler: str,
    progress: Report | None = None,
    *,
    points: Sequence[Point] = (),
    profile: Profile | None = None,
    make_missing: bool = True,
    must_run: bool = True,
    apart: bool = False,
) -> list[Job]:
    """Find the cluster, launcher, profile and plan of a job, or of all jobs of a sweep.

    Missing and out-of-date profiles and plans are made, once for all points that share them. On a
    batch system, the job measures its profile itself, because times on a login node say nothing
    about compute nodes. The profile and plan of ``spec`` are saved in the output directory.

    Args:
        spec: the job, without the values of its sweep.
        scheduler: name of the batch system.
        points: points of the sweep; empty for a single job.
        profile: profile to plan with; by default, that in the output directory or a new one.
        make_missing: whether to make missing and out-of-date profiles and plans.
        must_run: whether to refuse imported profiles, and plans that can only be simulated.
        apart: whether to measure profiles in a process of its own.

    Raises:
        SchedulerError: there is no MPI to start the ranks with.
        InvalidInputError: a file or the model cannot be used.
        MismatchError: the profile is imported, or the plan asks for what cannot be run.
        InfeasibleError: no plan fits.
    """
    # Measuring takes minutes, in which the user may edit the code: it is read once.
    snapshot, codes = Snapshot(), list[Code]()
    for own in [spec, *(point.spec for point in points)]:
        with using(snapshot):
            codes.append(Code.of(own))
        snapshot |= codes[-1].sources
    with using(snapshot):
        jobs = _make_jobs(spec, scheduler, points, profile)
        own_codes = codes[1:] or codes
        jobs = [replace(job, code=code) for job, code in zip(jobs, own_codes, strict=True)]
        if profile is None:
            # All profiles come first: the memory of a measuring process counts as memory of a rank,
            # and the planner is large.
            own_key = profile_key(spec)
            jobs = _add_profiles(jobs, own_key, progress, make_missing, must_run, apart)
        return _add_plans(jobs, spec, progress, make_missing, must_run)


def _make_jobs(
    spec: JobSpec, scheduler: str, points: Sequence[Point], profile: Profile | None
) -> list[Job]:
    """The job, or the jobs of a sweep, with their clusters, and with this profile if there is
    one."""
    jobs: list[Job] = []
    launches: dict[str, MpiChoice] = {}
    for point in points or (None,):
        values, own = (None, spec) if point is None else (point.values, point.spec)
        settings = f"{own.launch} {own.environment}"
        with _name_values_in_errors(values):
            job = make_job(own, scheduler, values=values, mpi=launches.get(settings))
            cluster, _, warning = find_cluster(own, scheduler)
        jobs.append(replace(job, cluster=cluster, cluster_warning=warning, profile=profile))
        launches[settings] = job.mpi
    return jobs


def _add_profiles(
    jobs: Sequence[Job],
    own_key: str,
    progress: Report | None,
    make_missing: bool,
    must_run: bool,
    apart: bool,
) -> list[Job]:
    """The jobs with their up-to-date profiles; None where it may not be measured.

    Args:
        own_key: key of the profile to save in the output directory.
    """
    profiles: dict[str, tuple[Profile | None, bool]] = {}
    profiled = []
    for job in jobs:
        key, path = profile_key(job.spec), profile_path(job.spec)
        if key not in profiles:
            with _name_values_in_errors(job.values):
                if must_run and make_missing:
                    render(job)  # raise errors in the script before the model is measured
                profile, is_new = read_profile(job.spec, path), False
                if profile is None and make_missing and _measures_here(job):
                    if apart:
                        from pipectl.jobs.own_process import measure_apart as measure
                    else:
                        from pipectl.jobs.profiles import measure

                    saved_in = path if key == own_key else None
                    profile, is_new = measure(job.spec, saved_in, progress), True
                if must_run and profile is not None and profile.fingerprint is None:
                    raise MismatchError(
                        f"{path}: an imported profile can be planned, not submitted",
                        hint="remove it; the model is then measured",
                    )
            profiles[key] = profile, is_new
        profile, is_new = profiles[key]
        profiled.append(replace(job, profile=profile, has_new_profile=is_new))
    return profiled


def _measures_here(job: Job) -> bool:
    """Whether the ranks of a job will run on this machine, with this Python."""
    return job.scheduler == LOCAL and job.spec.environment.container is None


def _add_plans(
    jobs: Sequence[Job],
    spec: JobSpec,
    progress: Report | None,
    make_missing: bool,
    must_run: bool,
) -> list[Job]:
    """The jobs with their up-to-date plans; those without a profile plan in their allocation.

    Args:
        spec: the job, whose plan is saved in the output directory if it is new.
    """
    plans: dict[tuple[str, Cluster], dict[int, Plan]] = {}
    planned = list[Job]()
    own_plans: dict[int, Plan] = {}
    for job in jobs:
        assert job.cluster is not None
        if job.profile is None:
            planned.append(replace(job, plans_in_job=not _measures_here(job)))
            continue
        profile, cluster = complete_cluster(job.spec, job.profile, job.cluster)
        inputs = plan_key(job.spec), cluster
        if inputs not in plans:
            with _name_values_in_errors(job.values):
                found, are_new = _find_plans(job.spec, spec, profile, cluster), False
                if not found and make_missing:
                    found, are_new = _make_plans(job.spec, profile, cluster, progress), True
                    if inputs[0] == plan_key(spec):
                        # The links may be measured for some points with the same key only.
                        own_cluster = find_cluster(spec, job.scheduler).cluster
                        if cluster == complete_cluster(spec, profile, own_cluster)[1]:
                            own_plans = dict(found)
                for count, each in found.items() if must_run else ():
                    from pipectl.runtime.nodes import check_supported

                    name = "the new plan" if are_new else str(plan_path(spec, count))
                    check_supported(each, name, job.spec)
            plans[inputs] = found
        own = plans[inputs]
        plan = own.get(job.spec.resources.max_nodes)
        of_range = own if job.spec.resources.node_range is not None else {}
        planned.append(replace(job, cluster=cluster, profile=profile, plan=plan, plans=of_range))
    # Saved last: until then, every new plan keeps the micro-batches of the plan in this file.
    save_plans(spec, own_plans)
    return planned


def _find_plans(
    spec: JobSpec, own_spec: JobSpec, profile: Profile, cluster: Cluster
) -> dict[int, Plan]:
    """The up-to-date plans of a job by number of nodes.

    Args:
        own_spec: the job, of which ``spec`` may be a point.
    """
    if spec.resources.node_range is not None:
        from pipectl.jobs.node_range import find_plans

        return find_plans(spec, profile, cluster, partial(plan_path, own_spec))
    plan = read_plan(plan_path(own_spec), spec, profile, cluster)
    return {} if plan is None else {spec.resources.max_nodes: plan}


def _make_plans(
    spec: JobSpec, profile: Profile, cluster: Cluster, progress: Report | None
) -> dict[int, Plan]:
    from pipectl.jobs.planning import plan_job, previous_micro_batches

    kept = previous_micro_batches(spec)
    if spec.resources.node_range is None:
        return {spec.resources.max_nodes: plan_job(spec, profile, cluster, progress, kept)}
    from pipectl.jobs.node_range import plan_range

    return plan_range(spec, profile, cluster, progress, kept_micro_batches=kept)


@contextmanager
def _name_values_in_errors(values: Mapping[str, Any] | None) -> Iterator[None]:
    """Put the values of a point before errors: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if values:
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            error.message = f"{words}: {error.message}"
        raise

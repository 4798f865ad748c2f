"""From a job spec, or the points of a sweep, to jobs that are ready to be submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import LOCAL, MpiChoice
from pipectl.errors import MismatchError, PipectlError, UsageError
from pipectl.files import is_stream, make_directory_of
from pipectl.jobs.job import PERCENT, PREPARE, Job, Work, make_job, render
from pipectl.jobs.places import (
    check_answering,
    cluster_file_key,
    fresh_plan,
    fresh_profile,
    plan_path,
    profile_path,
    scheduler_name,
)
from pipectl.jobs.profiles import join_rows, measure
from pipectl.plan import Plan
from pipectl.runs import PROFILING
from pipectl.spec import Point, plan_key, profile_key

if TYPE_CHECKING:
    from pipectl.profiler.progress import Progress
    from pipectl.spec import JobSpec

LINKS_BUDGET_S = {"fast": 8.0, "normal": 30.0, "thorough": 120.0}
"""Time to measure links, about, by effort."""
_LINKS_WALLTIME_S = 900


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
    if make_missing and must_run:
        check_answering(spec, scheduler)
    name = scheduler_name(spec, scheduler)
    choices: dict[str, MpiChoice] = {}
    jobs = []
    for index, each in enumerate([point.spec for point in points] or [spec]):
        with _name_values_in_errors(points, index):
            settings = f"{each.launch} {each.environment}"
            jobs.append(make_job(each, name, mpi_choice=choices.get(settings)))
            choices[settings] = jobs[-1].mpi_choice
    own_profile, own_plan = (profile_key(spec), plan_key(spec)) if points else ("", "")
    measured: dict[str, Job] = {}
    for index, job in enumerate(jobs):
        with _name_values_in_errors(points, index):
            key = profile_key(job.spec) if points else ""
            if key not in measured:
                save = key == own_profile
                measured[key] = _add_profile(job, progress, save, make_missing, must_run)
        profile, cluster = measured[key].profile, job.cluster
        if profile is not None and cluster is not None:
            profile, cluster = join_rows(profile, cluster)
        prepares = profile is None and name != LOCAL
        measurement = measured[key].measurement
        jobs[index] = replace(
            job, cluster=cluster, profile=profile, measurement=measurement, prepares=prepares
        )
    plans: dict[str, Plan | None] = {}
    for index, job in enumerate(jobs):
        with _name_values_in_errors(points, index):
            key = plan_key(job.spec) if points else ""
            if key not in plans:
                save = key == own_plan
                plans[key] = _find_plan(job, progress, save, make_missing, must_run)
        jobs[index] = replace(job, plan=plans[key])
    return jobs


def _add_profile(
    job: Job, progress: Progress | None, save: bool, make: bool, must_run: bool
) -> Job:
    """The job with its saved profile if that is fresh, else with a profile measured now."""
    path = profile_path(job.spec)
    profile = fresh_profile(job.spec, path)
    if profile is None and make and job.scheduler == LOCAL:
        if must_run:
            render(job)  # an error in the script is raised before the model is measured
        measurement = measure(job.spec, path if save else None, progress)
        return replace(job, profile=measurement.profile, measurement=measurement)
    if profile is not None and profile.fingerprint is None and must_run:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return replace(job, profile=profile)


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
        # Not before: what the process holds while it measures counts as memory of a rank.
        from pipectl.jobs.planning import find_plan

        plan = find_plan(job.spec, profile, cluster, keep=save)
        if save:
            plan.save(path)
    if plan is not None and must_run:
        from pipectl.runtime.supported import check_supported

        check_supported(plan, str(path) if save else "the plan")
    return plan


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


def prepare_profiling(
    spec: JobSpec, scheduler: str, output: Path, effort: str, *, again: bool
) -> Job:
    """A job that measures the model, on one node with all the tasks that the job has there.

    Args:
        output: where the profile is put when it is finished.
        effort, again: see :func:`pipectl.jobs.profiles.measure`.

    Raises:
        UsageError: the output cannot be written.
    """
    work = Work(
        kind=PROFILING,
        suffix="-profile",
        program=("-m", PREPARE),
        arguments=("--effort", effort, *(["--again"] if again else [])),
        steps=PERCENT,
        alone=True,
        resources={"nodes": 1},
    )
    return _measuring_job(spec, scheduler, work, output)


def prepare_links(spec: JobSpec, scheduler: str, output: Path, effort: str) -> Job:
    """A job that starts all ranks as the job itself does, and measures the links between them.

    Args:
        output: where the cluster description is put when it is finished, and a picture beside it.
        effort: a key of ``LINKS_BUDGET_S``.

    Raises:
        UsageError: the job has one rank, and so no link; or the output cannot be written.
    """
    if spec.resources.ranks < 2:
        raise UsageError(
            "resources: a job of one rank has no links to measure",
            cure="set resources.nodes or resources.tasks_per_node to 2 or more",
        )
    budget = str(LINKS_BUDGET_S[effort])
    work = Work(
        kind=PROFILING,
        suffix="-links",
        program=("-m", "mpi4py", "-m", "pipectl.runtime.links.probe", "--run"),
        arguments=("--key", cluster_file_key(spec, scheduler), "--budget", budget),
        steps=PERCENT,
        resources={"walltime": min(spec.resources.walltime, _LINKS_WALLTIME_S)},
    )
    return _measuring_job(spec, scheduler, work, output)


def _measuring_job(spec: JobSpec, scheduler: str, work: Work, output: Path) -> Job:
    make_directory_of(output)
    if is_stream(output):
        raise UsageError(f"{output}: is no file, which a job could write", cure="name another: -o")
    output = output.absolute()
    arguments = ("--output", str(output), *work.arguments)
    return make_job(spec, scheduler, replace(work, arguments=arguments, output=output.parent))

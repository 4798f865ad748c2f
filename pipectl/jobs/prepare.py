"""Preparing a job: everything that a submission needs, from its spec.

`prepare` gathers it on the machine that submits. ``python -m pipectl.jobs.prepare RUN_DIRECTORY``
makes the profile and the plan of a run within its allocation, as the first step of its job script;
with ``--output FILE`` it only measures the model, for `pipectl profile --submit`. It writes its
progress to ``heartbeat.json``, as the ranks do later, and a failure to ``errors/prepare.json`` and
standard error.

The planner is imported only when it plans: ranks do not load it, and what the process holds while a
model is measured counts as memory of a rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.access import fault_of_owner
from pipectl.batch import MpiChoice, get
from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, PipectlError, UsageError
from pipectl.files import write_json
from pipectl.jobs.places import (
    LOCAL,
    check_answering,
    find_machines,
    plan_path,
    profile_path,
    scheduler_name,
)
from pipectl.jobs.profiles import Progress, fresh_profile, measure
from pipectl.jobs.reporting import Heartbeat, report_failure
from pipectl.jobs.request import Job, make_job, make_request
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Record, RunDirectory, last_checkpoint
from pipectl.spec import Point, load, plan_key, profile_key
from pipectl.spec.references import parse

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

PERCENT = 100
"""Steps of a run that only measures: it reports its progress in percent."""


def prepare(
    spec: JobSpec,
    scheduler: str | None,
    progress: Progress | None = None,
    *,
    points: Sequence[Point] = (),
    make: bool = True,
    trains: bool = True,
) -> list[Job]:
    """The job, or the jobs of a sweep, with all that a submission needs.

    Profiles and plans that are missing or stale are made; on a batch system, profiles are left to
    the jobs, since a login node is no place to measure on. What several points share is made once.
    Those of ``spec`` are put at their usual places.

    Args:
        spec: the job without the values of its sweep.
        scheduler: its name; by default the spec's.
        points: of the sweep; none for a single job.
        make: False takes only what lies at the usual places, and asks no batch system.
        trains: False takes also imported profiles, and plans that can only be simulated.

    Raises:
        SchedulerError: there is no MPI to start the ranks with, or no batch system answers.
        InvalidInputError: a file, the model or the template cannot be used, or a value cannot be
            written into a script safely.
        MismatchError: the profile is imported, so that nothing says that it is of this model; or
            the plan asks for what cannot be run.
        InfeasibleError: no plan fits.
    """
    if make and trains:
        check_answering(spec, scheduler)
    name = scheduler_name(spec, scheduler)
    points = points or (Point({}, spec),)
    jobs: list[Job] = []
    launches: dict[str, MpiChoice] = {}
    for point in points:
        with _name_point_in_errors(point):
            settings = f"{point.spec.launch} {point.spec.environment}"
            machines = find_machines(point.spec, name)
            job = make_job(point.spec, name, machines, launches.get(settings))
            if make and trains:  # what cannot be written is refused before the work
                get(name).render(make_request(job))
        launches[settings] = job.launch
        jobs.append(job)
    for add, key_of in ((_add_profile, profile_key), (_add_plan, plan_key)):
        jobs_by_key: dict[str, Job] = {}
        key_of_spec = key_of(spec)
        for index, (point, job) in enumerate(zip(points, jobs, strict=True)):
            key = key_of(point.spec)
            if key not in jobs_by_key:
                keep = key == key_of_spec
                with _name_point_in_errors(point):
                    jobs_by_key[key] = add(job, progress, keep=keep, make=make, trains=trains)
            same = jobs_by_key[key]
            jobs[index] = replace(
                job, profile=same.profile, measurement=same.measurement, plan=same.plan
            )
    return [replace(job, prepares=job.profile is None and name != LOCAL) for job in jobs]


def _add_profile(
    job: Job, progress: Progress | None, *, keep: bool, make: bool, trains: bool
) -> Job:
    """The job with the fresh profile at its usual place, else with one that is made (and kept)."""
    path = profile_path(job.spec)
    profile = fresh_profile(job.spec, path)
    if profile is None and make and job.scheduler == LOCAL:
        measurement = measure(job.spec, path if keep else None, progress)
        return replace(job, profile=measurement.profile, measurement=measurement)
    if profile is not None and profile.fingerprint is None and trains:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return replace(job, profile=profile)


def _add_plan(job: Job, progress: Progress | None, *, keep: bool, make: bool, trains: bool) -> Job:
    """The job with the fresh plan at its usual place, else with one that is made (and kept)."""
    spec, profile, cluster, path = job.spec, job.profile, job.cluster, plan_path(job.spec)
    if profile is None or cluster is None:
        return job
    if make and progress is not None:
        progress(0, 0, "planning")
    from pipectl.jobs.planning import find_plan, fresh_plan

    plan = fresh_plan(spec, profile, cluster, path)
    if plan is None and make:
        plan = find_plan(spec, profile, cluster, keep=keep)
        if keep:
            plan.save(path)
    if plan is not None and trains:
        from pipectl.runtime.supported import check_supported

        check_supported(plan, str(path) if keep else "the plan")
    return replace(job, plan=plan)


@contextmanager
def _name_point_in_errors(point: Point) -> Iterator[None]:
    """Begin errors with the values of a point: ``optimizer.kwargs.lr=0.001, training.seed=2``."""
    try:
        yield
    except PipectlError as error:
        if point.values:
            values = ", ".join(f"{key}={value}" for key, value in point.values.items())
            error.message = f"{values}: {error.message}"
        raise


def load_run(run: RunDirectory, overrides: Sequence[str] = ()) -> JobSpec:
    """The job of a run, whose output directory is the one that the run is in now."""
    spec = load(run.job, overrides)
    output = spec.output.model_copy(update={"directory": str(run.path.parent.absolute())})
    return spec.model_copy(update={"output": output})


def prepare_run(run: RunDirectory, clock: Callable[[], float] = time.time) -> None:
    """Write the profile and the plan of a run, unless they are there and still of its job.

    A run that goes on from a checkpoint keeps its plan: results depend on its micro-batches, and
    the ranks see for themselves whether the model is another.

    Raises:
        PipectlError: the model cannot be profiled, or no plan fits.
    """
    if run.plan.exists() and last_checkpoint(run) is not None:
        return
    spec = load_run(run)
    heartbeat = Heartbeat(run, spec.training.steps, clock)
    profile = fresh_profile(spec, run.profile)
    if profile is None:
        run.plan.unlink(missing_ok=True)  # of the model as it was
        profile = measure(spec, run.profile, heartbeat.profiling).profile
        _share(run, profile, profile_path(spec))
    if not run.plan.exists():
        from pipectl.jobs.planning import find_plan, write_plan

        heartbeat.beat("planning")
        cluster = Cluster.load(run.cluster)
        plan = find_plan(spec, profile, cluster, keep=True)
        write_plan(run, plan, cluster)
        _share(run, plan, plan_path(spec))


def _share(run: RunDirectory, result: Profile | Plan, place: Path) -> None:
    """Put a profile or plan where later commands look, unless there is one newer than this run.

    Those of a sweep may be of another model than the job's; the cache has profiles of equal models.
    """
    with suppress(PipectlError, OSError):  # the job itself does not need it there
        record = Record.load(run.record)
        newer = place.exists() and place.stat().st_mtime >= record.submitted_at
        if record.sweep is None and not newer:
            result.save(place)


def measure_run(run: RunDirectory, output: Path, effort: str, *, again: bool) -> None:
    """Measure the model of a run, and nothing else, and write its profile to ``output``, too."""
    heartbeat = Heartbeat(run, PERCENT, measuring_only=True)
    heartbeat.beat("capturing")
    measurement = measure(load_run(run), run.profile, heartbeat.profiling, effort, again=again)
    write_json(run.measurement, measurement.to_json())
    measurement.profile.save(output)
    heartbeat.beat("profiled", PERCENT)


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Raise a UsageError if somebody else could have written the code of a job, or its file."""
    if fault := _code_of_others(spec, job):
        raise UsageError(
            f"{fault}, and its code would run as you",
            cure="read what it does; then add --trust-owner",
        )


def warning_of_code(spec: JobSpec, job: Path) -> str:
    """A warning if somebody else owns the code of a job that is named for the first time."""
    fault = _code_of_others(spec, job, groups=False)
    return f"{fault}; its code runs as you" if fault else ""


def _code_of_others(spec: JobSpec, job: Path, *, groups: bool = True) -> str:
    """Which file of a job's code somebody else could have written; empty if nobody could.

    Modules count with the directories from which they import others; files of a module that do not
    exist are looked at, too.

    Args:
        groups: whether members of a group that may write it count.
    """
    files = [job]
    for _, text in spec.factories():
        reference = parse(text, spec.base)
        if reference.file is not None:
            files += [reference.file, reference.file.parent]
        elif reference.root is not None:
            inner = Path(reference.root, *str(reference.module).split("."))
            files.append(inner.with_name(f"{inner.name}.py"))
            while inner != reference.root:
                files += [inner / "__init__.py", inner]
                inner = inner.parent
            files.append(reference.root)
    if spec.template_file is not None:
        files += [spec.template_file, spec.template_file.parent]
    for path in dict.fromkeys(files):
        if fault := fault_of_owner(path, groups=groups):
            return f"{path} {fault}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Prepare or measure one run; the exit code is the one that commands have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=lambda path: RunDirectory(Path(path)))
    parser.add_argument("--output", type=Path, help="only measure, and write the profile here, too")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--again", action="store_true")
    values = parser.parse_args(arguments)
    run, output = values.run, values.output
    if output is None:
        return report_failure(run, lambda: prepare_run(run))
    return report_failure(run, lambda: measure_run(run, output, values.effort, again=values.again))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

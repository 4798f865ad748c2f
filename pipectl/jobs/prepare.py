"""Preparing a job: everything that a submission needs, from its spec.

A :class:`Job` is a spec with its batch system, machines, launcher, profile and plan. `find_job`
takes the fresh files at their usual places; `prepare` makes those that are missing, too: a profile
on this machine only, since a login node is no place to measure on.

``python -m pipectl.jobs.prepare RUN_DIRECTORY`` makes them for a run within its allocation, as the
first step of its job script; with ``--output FILE`` it only measures the model, for
`pipectl profile --submit`. It writes its progress to ``heartbeat.json``, as the ranks do later, and
a failure to ``errors/prepare.json`` and standard error.

The planner is imported only when it plans: ranks do not load it, and what the process holds while a
model is measured counts as memory of a rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.access import fault_of_owner
from pipectl.batch import JobRequest, MpiChoice, Template, choose_mpi, get
from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, PipectlError, UsageError
from pipectl.files import make_directory, write_json
from pipectl.jobs.machines import find_machines
from pipectl.jobs.places import LOCAL, check_answering, plan_path, profile_path, scheduler_name
from pipectl.jobs.profiles import Measurement, MeasureOptions, Progress, fresh_profile, measure
from pipectl.jobs.reporting import Heartbeat, report_failure
from pipectl.jobs.request import job_request, make_tag, trial_request
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Record, RunDirectory, last_checkpoint
from pipectl.spec import load
from pipectl.spec.references import Reference, parse

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

PERCENT = 100
"""Steps of a run that only measures: it reports its progress in percent."""


@dataclass(frozen=True)
class Job:
    """A job before it is submitted.

    Args:
        scheduler: name of the batch system.
        cluster: the machines; None for runs that train nothing there.
        profile, plan: None if they are yet to be made, before the job trains.
        launch: what ranks are started with; None if that has not been found out.
        template: the user's own of job scripts, as it was read.
        warning: why a measured cluster is not used; empty if all is well.
        measurement: how the profile came to be, if it was made now.
    """

    spec: JobSpec
    scheduler: str
    cluster: Cluster | None = None
    profile: Profile | None = None
    plan: Plan | None = None
    launch: MpiChoice | None = None
    template: Template | None = None
    warning: str = ""
    measurement: Measurement | None = None

    def request(
        self,
        directory: Path,
        *,
        prepare: bool | None = None,
        tag: str | None = None,
        after: tuple[str, ...] = (),
        mpiexec: str | None = None,
    ) -> JobRequest:
        """What the batch system is asked for.

        Args:
            directory: the run directory.
            prepare: whether the job measures and plans itself; by default if it has no plan.
            tag, after, mpiexec: see :class:`~pipectl.batch.JobRequest`; by default a new tag.
        """
        request = job_request(
            self.spec,
            directory,
            tag or make_tag(directory),
            prepare=self.plan is None if prepare is None else prepare,
            plan=self.plan,
            after=after,
            mpiexec=mpiexec,
            template=self.template,
        )
        return (self.launch or choose_mpi(request)).apply(request)


def find_job(spec: JobSpec, scheduler: str | None) -> Job:
    """A job with the fresh profile and plan that lie at their usual places.

    Args:
        scheduler: its name; by default the spec's.

    Raises:
        PipectlError: see :func:`add_profile` and :func:`add_plan`.
    """
    return add_plan(add_profile(make_job(spec, scheduler), make=False), make=False)


def prepare(spec: JobSpec, scheduler: str | None, progress: Progress | None = None) -> Job:
    """A job with its profile and plan, which are made if they are missing or stale.

    Args:
        scheduler: its name; by default the spec's.

    Raises:
        SchedulerError: there is no MPI to start the ranks with, or no batch system answers.
        PipectlError: see :func:`add_profile` and :func:`add_plan`.
    """
    check_answering(spec, scheduler)
    return add_plan(add_profile(make_job(spec, scheduler, check=True), progress), progress)


def make_job(
    spec: JobSpec,
    scheduler: str | None,
    *,
    base: Path | None = None,
    launch: MpiChoice | None = None,
    check: bool = False,
) -> Job:
    """A job with its machines and its launcher.

    Args:
        scheduler: its name; by default the spec's.
        base: where measured links are; by default the spec's output directory.
        launch: what ranks are started with, if that is known.
        check: whether to refuse a job that cannot be written into a script, before the work.

    Raises:
        InvalidInputError: a cluster description cannot be used, or a value not be written safely.
        SchedulerError: there is no MPI to start the ranks with.
    """
    name = scheduler_name(spec, scheduler)
    machines = find_machines(spec, name, base)
    request = trial_request(spec)
    launch = launch or choose_mpi(request)
    if check:
        get(name).render(launch.apply(request))
    template, warning = request.template, machines.warning
    return Job(spec, name, machines.cluster, launch=launch, template=template, warning=warning)


def add_profile(
    job: Job, progress: Progress | None = None, *, make: bool = True, trains: bool = True
) -> Job:
    """The job with the profile at its usual place.

    On a batch system a profile that is missing or stale is left to the job.

    Args:
        make: whether to measure on this machine if it is missing.
        trains: False to take an imported profile, too.

    Raises:
        InvalidInputError: a file or the model cannot be used.
        MismatchError: it is imported, so that nothing says that it is of this model.
    """
    path = profile_path(job.spec)
    if make:
        make_directory(path.parent)
    profile = fresh_profile(job.spec, path)
    if profile is None and make and job.scheduler == LOCAL:
        measurement = measure(job.spec, path, progress)
        return replace(job, profile=measurement.profile, measurement=measurement)
    if profile is not None and trains and profile.fingerprint is None:
        raise MismatchError(
            f"{path}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return replace(job, profile=profile)


def add_plan(
    job: Job, progress: Progress | None = None, *, make: bool = True, trains: bool = True
) -> Job:
    """The job with the plan at its usual place; without one if it has no profile.

    Args:
        make: whether to make it if it is missing or stale.
        trains: False to take also a plan that can be simulated but not trained.

    Raises:
        InfeasibleError: no plan fits.
        InvalidInputError: the file cannot be used.
        MismatchError: it asks for what cannot be run.
    """
    if job.profile is None or job.cluster is None:
        return job
    if make and progress is not None:
        progress(0, 0, "planning")
    from pipectl.jobs.planning import fresh_plan, load_or_make_plan

    path = plan_path(job.spec)
    if make:
        plan: Plan | None = load_or_make_plan(job.spec, job.profile, job.cluster)
    else:
        plan = fresh_plan(job.spec, job.profile, job.cluster, path)
    if plan is not None and trains:
        from pipectl.runtime.supported import check_supported

        check_supported(plan, str(path))
    return replace(job, plan=plan)


def prepare_run(run: RunDirectory, clock: Callable[[], float] = time.time) -> None:
    """Write the profile and the plan of a run, unless they are there and of its job still.

    A run that goes on from a checkpoint keeps its plan: results depend on its micro-batches, and
    the ranks see for themselves whether the model is another.

    Raises:
        PipectlError: the model cannot be profiled, or no plan fits.
    """
    if run.plan.exists() and last_checkpoint(run) is not None:
        return
    spec, base = load(run.job), run.path.parent
    heartbeat = Heartbeat(run, spec.training.steps, clock)
    profile = fresh_profile(spec, run.profile)
    if profile is None:
        run.plan.unlink(missing_ok=True)  # of the model as it was
        profile = measure(spec, run.profile, heartbeat.profiling, base=base).profile
        _share(run, profile, profile_path(spec, base=base))
    if not run.plan.exists():
        from pipectl.jobs.planning import find_plan, kept_micro_batches, write_plan

        heartbeat.beat("planning")
        cluster, place = Cluster.load(run.cluster), plan_path(spec, base=base)
        plan = find_plan(spec, profile, cluster, kept_micro_batches(spec, place))
        write_plan(run, plan, cluster)
        _share(run, plan, place)


def _share(run: RunDirectory, result: Profile | Plan, place: Path) -> None:
    """Put a profile or plan where later commands look, unless there is one newer than this run.

    Those of a sweep may be of another model than the job's; the cache has profiles of equal models.
    """
    with suppress(PipectlError, OSError):  # the job itself does not need it there
        record = Record.load(run.record)
        newer = place.exists() and place.stat().st_mtime >= record.submitted_at
        if record.sweep is None and not newer:
            result.save(place)


def measure_run(run: RunDirectory, output: Path, options: MeasureOptions) -> None:
    """Measure the model of a run, and nothing else, and write its profile to ``output``, too."""
    heartbeat = Heartbeat(run, PERCENT, measuring_only=True)
    heartbeat.beat("capturing")
    progress, base = heartbeat.profiling, run.path.parent
    measurement = measure(load(run.job), run.profile, progress, options, base=base)
    write_json(run.measurement, measurement.to_json())
    measurement.profile.save(output)
    heartbeat.beat("profiled", PERCENT)


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Refuse a job whose code somebody else could have written.

    Args:
        job: the file of the spec.

    Raises:
        UsageError: naming the file, and who could.
    """
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

    Args:
        groups: whether members of a group that may write it count.
    """
    template = spec.template_file
    named = [path for _, text in spec.factories() for path in _sources(parse(text, spec.base))]
    named += [template, template.parent] if template is not None else []
    for path in dict.fromkeys((job, *named)):
        if fault := fault_of_owner(path, groups=groups):
            return f"{path} {fault}"
    return ""


def _sources(reference: Reference) -> Iterator[Path]:
    """The files that a reference runs, then the directories from which those import others.

    Files of a module that do not exist are among them.
    """
    if reference.file is not None:
        yield from (reference.file, reference.file.parent)
    elif reference.root is not None:
        inner = Path(reference.root, *str(reference.module).split("."))
        yield inner.with_name(f"{inner.name}.py")
        while inner != reference.root:
            yield from (inner / "__init__.py", inner)
            inner = inner.parent
        yield reference.root


def main(arguments: Sequence[str]) -> int:
    """Prepare or measure one run; the exit code is the one that commands have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=lambda path: RunDirectory(Path(path)))
    parser.add_argument("--output", type=Path, help="only measure, and write the profile here, too")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--again", action="store_true")
    values = parser.parse_args(arguments)
    run, output, options = values.run, values.output, MeasureOptions(values.effort, values.again)
    if output is None:
        return report_failure(run, lambda: prepare_run(run))
    return report_failure(run, lambda: measure_run(run, output, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

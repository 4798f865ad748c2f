"""Submitting a job: everything it needs goes into a run directory, then to the batch system."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest, get
from pipectl.batch.process import NoAnswerError
from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, PipectlError, UsageError
from pipectl.files import make_directory
from pipectl.jobs.dependencies import jobs_of
from pipectl.jobs.launching import Settled, settle
from pipectl.jobs.machines import find_machines
from pipectl.jobs.places import LOCAL, plan_path, profile_path, scheduler_name
from pipectl.jobs.plan import planned, write_plan
from pipectl.jobs.profile import Measurement, Progress, fresh_profile, measure
from pipectl.jobs.recovery import refuse_twice
from pipectl.jobs.request import job_request, make_tag, trial_request
from pipectl.jobs.template import write_job, write_script
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Record, RunDirectory, locked

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


@dataclass(frozen=True)
class Inputs:
    """What a run starts from.

    Args:
        profile, plan: None where the job makes them itself, within its allocation.
        measurement: where the profile was not lying there: how it came to be.
        warning: why a measured cluster was not used; empty where all is well.
        launch: what ranks are started with, if that has been found out.
    """

    spec: JobSpec
    scheduler: str
    cluster: Cluster
    profile: Profile | None
    plan: Plan | None
    measurement: Measurement | None = None
    warning: str = ""
    launch: Settled | None = None


@dataclass(frozen=True)
class Submission:
    """A run that was handed over."""

    run: RunDirectory
    record: Record
    plan: Plan | None


def gather(spec: JobSpec, scheduler: str | None, progress: Progress | None = None) -> Inputs:
    """Profile and plan of a job: those that lie there, or new ones where missing or stale.

    On a batch system new ones are left to the job: a login node is no place to measure on.

    Raises:
        InfeasibleError: no plan fits.
        InvalidInputError: a file or the model cannot be used; nothing was submitted.
        MismatchError: the profile is not of this model, or the plan asks for what cannot be run.
        SchedulerError: there is no MPI to start the ranks with.
    """
    from pipectl.runtime.supported import check_supported

    name = scheduler_name(spec, scheduler)
    machines = find_machines(spec, name)
    cluster, warning = machines.cluster, machines.warning
    request = trial_request(spec)
    launch = settle(request)
    get(name).render(launch.of(request))  # fails now, not after measuring
    make_directory(Path(spec.output.directory))
    profile, measurement = trainable_profile(spec), None
    if profile is None and name == LOCAL:
        measurement = measure(spec, profile_path(spec), progress)
        profile = measurement.profile
    if profile is None:
        return Inputs(spec, name, cluster, None, None, warning=warning, launch=launch)
    if progress is not None:
        progress(0, 0, "planning")
    plan = planned(spec, profile, cluster)
    check_supported(plan, str(plan_path(spec)))
    return Inputs(spec, name, cluster, profile, plan, measurement, warning, launch)


def trainable_profile(spec: JobSpec) -> Profile | None:
    """The fresh profile of a job; None where it has to be measured.

    Raises:
        MismatchError: it comes from elsewhere, and nothing says that it is of this model.
        DataFileError: there is one, but it cannot be read.
    """
    profile = fresh_profile(spec, profile_path(spec))
    if profile is not None and profile.fingerprint is None:
        raise MismatchError(
            f"{profile_path(spec)}: an imported profile can be planned, not submitted",
            cure="remove it; the model is then measured",
        )
    return profile


def submit(inputs: Inputs, now: float, after: Sequence[RunDirectory] = ()) -> Submission:
    """Create the run directory and hand its script to the batch system.

    The record is written before the batch system is called, so that a submission which is
    interrupted can be found again by its tag; see :mod:`pipectl.jobs.recovery`.

    Args:
        now: seconds since the epoch.
        after: runs that must have completed before it starts.

    Raises:
        UsageError: an earlier submission was interrupted, but reached the queue; or it cannot
            start after such a run.
        SchedulerError: missing or rejected; the run directory is removed again, unless the batch
            system did not answer and may have taken the job.
    """
    spec = inputs.spec
    refuse_twice(Path(spec.output.directory), spec.name, now)
    before = jobs_of(after, inputs.scheduler, now)
    run = RunDirectory.create(Path(spec.output.directory), spec.name, now)
    with removed_on_failure(run):
        request = _request(inputs, run.path, before)
    record = record_of(inputs, request, now)
    record = hand_over(run, request, record, writer(run, inputs, request))
    return Submission(run, record, inputs.plan)


def hand_over(
    run: RunDirectory, request: JobRequest, record: Record, write: Callable[[], None]
) -> Record:
    """Give the script of a new run to the batch system; see :func:`submit`.

    Args:
        record: says to which.
        write: puts everything that the job reads into the run directory.

    Returns:
        The record with the job's id.
    """
    scheduler = get(record.scheduler)
    with locked(run):
        with removed_on_failure(run):
            script = scheduler.render(request)
            write()
            write_script(run, script, request)
            record.save(run.record)
        try:
            job_id = scheduler.submit(run.script, request)
        except NoAnswerError:
            raise
        except PipectlError as error:
            shutil.rmtree(run.path, ignore_errors=True)
            error.message = error.message.replace(str(run.script), "the job script")
            raise
        record = record.after(record.submitted_at, "submitted", job_id=job_id)
        with suppress(UsageError):  # it is found by its tag
            record.save(run.record)
    return record


@contextmanager
def removed_on_failure(run: RunDirectory) -> Iterator[None]:
    """Leave nothing behind of a run that no batch system has heard of."""
    try:
        yield
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def record_of(inputs: Inputs, request: JobRequest, now: float) -> Record:
    """Of a run that is about to be submitted."""
    return Record(
        name=inputs.spec.name,
        scheduler=inputs.scheduler,
        tag=request.tag,
        submitted_at=now,
        ranks=request.ranks,
        nodes=request.node_count,
        steps=inputs.spec.training.steps,
    )


def writer(
    run: RunDirectory, inputs: Inputs, request: JobRequest, alike: RunDirectory | None = None
) -> Callable[[], None]:
    """Writes everything the job reads.

    Args:
        alike: a run with the same profile and plan, whose files are copied.
    """

    def write() -> None:
        write_job(run, inputs.spec, request.template)
        inputs.cluster.save(run.cluster)
        if alike is not None:
            for file in (run.profile, run.plan, run.predicted):
                shutil.copyfile(alike.path / file.relative_to(run.path), file)
            return
        if inputs.profile is not None:
            inputs.profile.save(run.profile)
        if inputs.plan is not None:
            write_plan(run, inputs.plan, inputs.cluster)

    return write


def _request(inputs: Inputs, directory: Path, after: tuple[str, ...]) -> JobRequest:
    plan, tag = inputs.plan, make_tag(directory)
    request = job_request(inputs.spec, directory, tag, prepare=plan is None, plan=plan, after=after)
    return (inputs.launch or settle(request)).of(request)

"""Submitting a job: the one hand-over to a batch system.

Whoever submits (`submit`, sweeps, `resume`, rehearsals, runs that measure) makes a :class:`Start`
of each run and gives it to :func:`hand_over`, within a :class:`Rollback`. That writes all files of
the runs, calls the batch system, and notes the job's id. Records are written before that call, so
that a submission which is interrupted can be found again by its tag; see
:mod:`pipectl.jobs.recover`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest, JobState, Template, get, render_variables
from pipectl.batch.process import NoAnswerError
from pipectl.errors import PipectlError, UsageError
from pipectl.files import write_text
from pipectl.jobs.places import LOCAL
from pipectl.jobs.prepare import Job
from pipectl.jobs.recover import refuse_duplicate
from pipectl.jobs.request import array_request, job_request
from pipectl.jobs.state import get_statuses
from pipectl.runs import (
    TRAINING,
    Record,
    RunDirectory,
    SweepDirectory,
    as_typed,
    locked,
    stem_of,
    sweep_of,
)
from pipectl.spec import dump

if TYPE_CHECKING:
    from pipectl.rehearsal import Rehearsal
    from pipectl.spec import JobSpec, Point

_PRIVATE = 0o600
"""Mode of files that may hold keys and tokens."""


@dataclass(frozen=True)
class Start:
    """A run that the batch system has yet to be told of, and all that its job reads.

    Args:
        record: that it will have, without the job's id.
        rehearsal: None for runs that train.
    """

    run: RunDirectory
    job: Job
    request: JobRequest
    record: Record
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class Submission:
    """A run that the batch system has."""

    run: RunDirectory
    record: Record
    job: Job


@dataclass
class Rollback:
    """As a context: puts files back if a submission fails before the batch system has the job.

    Nothing is put back if the batch system was asked and did not refuse: it may have the job.

    Args:
        created: directories that were not there before.
        contents: of files that change; None for those that were not there.
        moved: from where files are moved, and where to.
        asked: whether the batch system has been called.
    """

    created: Sequence[Path] = ()
    contents: Mapping[Path, str | None] = field(default_factory=dict)
    moved: Mapping[Path, Path] = field(default_factory=dict)
    asked: bool = False

    def __enter__(self) -> Rollback:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        refused = isinstance(error, PipectlError) and not isinstance(error, NoAnswerError)
        if error is not None and (refused or not self.asked):
            self._restore()

    def _restore(self) -> None:
        """Restore each of the files, even if others cannot be written."""
        for path in self.created:
            shutil.rmtree(path, ignore_errors=True)
        for path, place in self.moved.items():
            with suppress(OSError):
                place.replace(path)
                place.parent.rmdir()  # once it is empty
        files = self.contents.items()  # on a full disk, what takes more room comes last
        for path, text in sorted(
            files, key=lambda file: (file[1] is not None, not file[0].exists())
        ):
            with suppress(UsageError, OSError):
                if text is None:
                    path.unlink(missing_ok=True)
                elif not path.exists():
                    write_text(path, text, mode=0o600)
                elif path.read_text(encoding="utf-8") != text:
                    write_text(path, text, mode=path.stat().st_mode & 0o777)


def submit(job: Job, now: float, after: Sequence[RunDirectory] = ()) -> Submission:
    """Create a run directory and hand its script to the batch system.

    Args:
        now: seconds since the epoch.
        after: runs that must have completed before it starts.

    Raises:
        UsageError: an earlier submission was interrupted, but reached the queue; or it cannot
            start after such a run.
        SchedulerError: missing or rejected; the run directory is removed again, unless the batch
            system did not answer and may have taken the job.
    """
    spec = job.spec
    refuse_duplicate(Path(spec.output.directory), spec.name, now)
    jobs = jobs_of(after, job.scheduler, now)
    with new_run(spec, spec.name, now) as (run, rollback):
        request = job.request(run.path, after=jobs)
        return hand_over([Start(run, job, request, record_of(job, request, now))], rollback)[0]


@contextmanager
def new_run(spec: JobSpec, name: str, now: float) -> Iterator[tuple[RunDirectory, Rollback]]:
    """Create a run directory and lock it; it is removed if its submission fails."""
    run = RunDirectory.create(Path(spec.output.directory), name, now)
    with locked(run), Rollback(created=[run.path]) as rollback:
        yield run, rollback


def record_of(
    job: Job, request: JobRequest, now: float, *, steps: int | None = None, kind: str = TRAINING
) -> Record:
    """The record of a run that is about to be submitted.

    Args:
        steps: by default those of the training.
    """
    return Record(
        name=request.name,
        scheduler=job.scheduler,
        tag=request.tag,
        submitted_at=now,
        ranks=request.ranks,
        nodes=request.resources.nodes,
        steps=job.spec.training.steps if steps is None else steps,
        kind=kind,
    )


def hand_over(
    starts: Sequence[Start],
    rollback: Rollback,
    array: tuple[SweepDirectory, JobRequest] | None = None,
) -> tuple[Submission, ...]:
    """Write all files of runs, and give their script to the batch system; for a caller in
    ``rollback``, who holds the locks.

    Args:
        starts: one run; or those of an array, in its order.
        array: the directory of the sweep, and what the batch system is asked for.

    Raises:
        SchedulerError: it refuses.
    """
    scheduler = get(starts[0].record.scheduler)
    written: dict[int, RunDirectory] = {}
    for start in starts:
        _write(start, written)
    script, request = starts[0].run.script, starts[0].request
    if array is not None:
        sweep, request = array
        script = sweep.script
        write_text(script, scheduler.render(request), mode=0o700)
    rollback.asked = True
    try:
        job_id = scheduler.submit(script, request)
    except PipectlError as error:
        error.message = error.message.replace(str(script), "the job script")
        raise
    submissions = []
    for index, start in enumerate(starts):
        own_id = job_id if array is None else scheduler.task_id(job_id, index)
        record = start.record.after(start.record.submitted_at, "submitted", job_id=own_id)
        with suppress(UsageError):  # it is found by its tag
            record.save(start.run.record)
        submissions.append(Submission(start.run, record, start.job))
    return tuple(submissions)


def _write(start: Start, written: dict[int, RunDirectory]) -> None:
    """Write everything that the job reads, then the record.

    Args:
        written: by plan, the first run that has its files: those of others are copied.
    """
    run, job = start.run, start.job
    script = get(start.record.scheduler).render(start.request)
    write_job(run, job.spec, start.request.template)
    if job.cluster is not None:
        job.cluster.save(run.cluster)
    first = written.setdefault(id(job.plan), run)
    if job.plan is not None and first is not run:
        for file in (run.profile, run.plan, run.predicted):
            shutil.copyfile(first.path / file.relative_to(run.path), file)
    else:
        if job.profile is not None:
            job.profile.save(run.profile)
        if job.plan is not None and job.cluster is not None:
            from pipectl.jobs.planning import write_plan

            write_plan(run, job.plan, job.cluster)
    if start.rehearsal is not None:
        start.rehearsal.save(run.rehearsal)
    write_text(run.script, script, mode=0o700)
    if start.request.environment.variables:
        write_text(run.variables, render_variables(start.request), mode=_PRIVATE)
    else:
        run.variables.unlink(missing_ok=True)
    start.record.save(run.record)


def write_job(run: RunDirectory, spec: JobSpec, template: Template | None) -> None:
    """Write ``job.yaml`` of a run, and beside it the template, by which it is resumed."""
    if template is not None:
        write_text(run.template, template.text)
        launch = spec.launch.model_copy(update={"template": str(run.template)})
        spec = spec.model_copy(update={"launch": launch})
    write_text(run.job, dump(spec), mode=_PRIVATE)


def jobs_of(runs: Sequence[RunDirectory], scheduler: str, now: float) -> tuple[str, ...]:
    """The ids of the jobs of runs, without those of runs that have completed already.

    On PBS nothing can wait for a single job of an array, so that all of its runs must be named.

    Args:
        scheduler: that the next job goes to.
        now: seconds since the epoch.

    Raises:
        UsageError: a run has failed, is on another batch system, or its job is not known.
    """
    records = []
    for status in get_statuses(runs, now):
        run, record, state = status.run, status.record, status.job.state
        if state is JobState.COMPLETED:
            continue
        if state.final:
            raise UsageError(
                f"--after {run.name}: is {state.value}, so nothing would ever start",
                cure=f"`pipectl resume {as_typed(run)}` first",
            )
        if record is None or record.job_id is None:
            raise UsageError(
                f"--after {run.name}: its job is not known",
                cure=f"see `pipectl status {as_typed(run)}`",
            )
        if record.scheduler != scheduler:
            raise UsageError(
                f"--after {run.name}: is on {record.scheduler}, and this job goes to {scheduler}",
                cure=f"wait for its end, or submit with --scheduler {record.scheduler}",
            )
        records.append((run, record))
    if scheduler != "pbs":
        return tuple(record.job_id for _, record in records if record.job_id)
    arrays: dict[str, None] = {}
    for run, record in records:
        job_id = record.job_id or ""
        array_id = get(scheduler).array_id(job_id)
        if record.sweep is not None and array_id != job_id:
            sweep = sweep_of(run, record.sweep.name)
            if not set(sweep.runs()) <= set(runs):
                raise UsageError(
                    f"--after {run.name}: PBS lets no job wait for one of an array",
                    cure=f"wait for all of it: --after {as_typed(sweep)}",
                )
        arrays[array_id] = None
    return tuple(arrays)


def render(job: Job, now: float, suffix: str = "") -> str:
    """The script of a job as it would be submitted; needs neither the batch system nor MPI.

    Args:
        suffix: of the run's name, ``-0`` if it is the first of a sweep.
    """
    directory = Path(job.spec.output.directory) / f"{stem_of(job.spec.name, now)}{suffix}"
    installed = shutil.which("mpiexec") or (Path(sys.executable).parent / "mpiexec").exists()
    mpiexec = None if installed else "mpiexec"
    prepare = job.profile is None and job.scheduler != LOCAL  # here, `submit` prepares it
    tag = f"{directory.name} dry-run"
    request = job.request(directory, prepare=prepare, tag=tag, mpiexec=mpiexec)
    return get(job.scheduler).render(request)


def render_array(points: Sequence[Point], scheduler: str, at_once: int | None, now: float) -> str:
    """The script of a sweep's job array as it would be submitted."""
    spec = points[0].spec
    stem = Path(spec.output.directory).absolute() / stem_of(spec.name, now)
    runs = [RunDirectory(stem.parent / f"{stem.name}-{index}") for index in range(len(points))]
    directory = SweepDirectory.beside(stem).path
    request = job_request(spec, directory, f"{stem.name} dry-run")
    return get(scheduler).render(array_request(request, runs, at_once))


def estimate(script: str, scheduler: str) -> str | None:
    """When a job would start, in the batch system's words; None if it has no queue.

    Raises:
        SchedulerError: the batch system would reject the job.
    """
    with tempfile.TemporaryDirectory(prefix="pipectl-") as directory:
        path = Path(directory) / "job.sh"
        write_text(path, script)
        return get(scheduler).estimate(path)


def contents_of(paths: Iterable[Path]) -> dict[Path, str | None]:
    """What files hold, for :class:`Rollback`; None for those that do not exist."""
    return {path: path.read_text(encoding="utf-8") if path.exists() else None for path in paths}

"""Submit a job, or the jobs of a sweep, to a batch system.

Every submission (`submit`, sweeps, `resume`, rehearsals, profiles) makes a :class:`Submission` for
each run and calls :func:`hand_over` within a :class:`Rollback`. `hand_over` writes all files of the
runs, calls the batch system, and records the job's id. Records are written before that call, so
:mod:`pipectl.jobs.state` can find the job of an interrupted submission by its tag.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipectl.batch import QUEUES_TIMEOUT_S, JobRequest, JobState, get_scheduler
from pipectl.batch.edited import Edited
from pipectl.batch.process import NoAnswerError
from pipectl.batch.script import render_variables
from pipectl.errors import PipectlError, UsageError
from pipectl.files import (
    MAX_BYTES,
    is_there,
    make_private_directory,
    read_limited,
    replace_file,
    write_text,
)
from pipectl.jobs.environment import describe_environment, find_repository
from pipectl.jobs.job import Job
from pipectl.jobs.recover import refuse_duplicate
from pipectl.jobs.state import get_statuses
from pipectl.runs import (
    Event,
    Record,
    RunDirectory,
    SweepDirectory,
    SweepPoint,
    locked,
    name_in_shell,
    sweep_of,
)
from pipectl.runs.code import Code, keep
from pipectl.runs.kept_code import Repository
from pipectl.spec import dump
from pipectl.units import printable

_MAX_WORDS = 500
_PRIVATE = 0o600
"""Mode of files that may contain keys and tokens."""
KeptEnvironment = tuple[Repository | None, str]
"""The repository of user code, and the text of ``environment.txt``."""


class InterruptedSubmissionError(NoAnswerError):
    """Ctrl-C, or a signal like it, came while the batch system was asked."""

    exit_code = 130


@dataclass(frozen=True)
class Submission:
    """A run, its job, and the request to the batch system.

    Args:
        record: contains the job's id once the batch system has accepted the job.
        warning: why the job may never run; may be empty.
    """

    run: RunDirectory
    job: Job
    request: JobRequest
    record: Record
    warning: str = ""

    @classmethod
    def new(
        cls,
        run: RunDirectory,
        job: Job,
        now: float,
        after: tuple[str, ...] = (),
        *,
        after_runs: Iterable[str] = (),
        name: str | None = None,
        tag: str | None = None,
        history: tuple[Event, ...] = (),
        sweep: SweepPoint | None = None,
        task: int | None = None,
        cluster: str = "",
    ) -> Submission:
        """A submission that has not reached the batch system.

        Args:
            after, cluster: see :class:`JobRequest`.
            after_runs: names of the runs of those jobs, or of the job of the array.
            name, tag: for the record; by default those of the request.
            history, sweep, task: see :class:`Record`.
        """
        request = replace(job.request_for(run.path, after=after), cluster=cluster)
        system = get_scheduler(job.scheduler)
        record = Record(
            name=name or request.name,
            scheduler=job.scheduler,
            tag=tag or request.tag,
            submitted_at=now,
            ranks=request.ranks,
            nodes=request.resources.max_nodes,
            steps=job.spec.training.steps if job.workload.steps is None else job.workload.steps,
            clusters=system.clusters_of(request),
            history=history,
            kind=job.workload.kind,
            sweep=sweep,
            task=task,
            hash_seed=request.hash_seed,
            after=tuple(after_runs),
            walltime_s=system.walltime_of(request),
            lead_time_s=request.lead_time_s if request.checkpoint else None,
            earlier_starts=request.earlier_starts,
            max_starts=request.max_starts,
            min_nodes=None if request.node_range is None else request.node_range.lowest,
        )
        return cls(run, job, request, record)


@dataclass
class Rollback:
    """A context that restores files if a submission fails before the batch system has the job.

    It restores nothing if the batch system was called and did not refuse: it may have the job.

    Args:
        created: new directories, which are removed.
        rewritten: files that get their earlier content, in their directory; new ones are removed.
        moved: new path by old path of files, which are moved back.

    Attributes:
        scheduler_called: whether the batch system was called.
    """

    created: Sequence[Path] = ()
    rewritten: Sequence[Path] = ()
    moved: Mapping[Path, Path] = field(default_factory=dict)
    scheduler_called: bool = field(default=False, init=False)

    def __enter__(self) -> Rollback:
        there = filter(is_there, self.rewritten)
        self._contents = {path: read_limited(path, MAX_BYTES) for path in there}
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        refused = isinstance(error, PipectlError) and not isinstance(error, NoAnswerError)
        if error is None or (self.scheduler_called and not refused):
            return
        for path in self.created:
            shutil.rmtree(path, ignore_errors=True)
        for path, place in self.moved.items():
            with suppress(OSError):
                place.replace(path)
                place.parent.rmdir()  # once it is empty
        contents = self._contents
        for path in set(self.rewritten) - contents.keys():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        # Files that still exist come first: on a full disk, they free the space that others need.
        for path in sorted(contents, key=lambda path: not path.exists()):
            with suppress(OSError):
                mode = path.stat().st_mode & 0o777 if path.exists() else _PRIVATE
                make_private_directory(path.parent)
                if not path.exists() or read_limited(path, MAX_BYTES) != contents[path]:
                    replace_file(path, contents[path], mode, durable=True)


def submit(
    jobs: Sequence[Job],
    now: float,
    after: Sequence[RunDirectory] = (),
    *,
    at_once: int | None = None,
    edited: Edited | None = None,
) -> tuple[Submission, ...]:
    """Make a run directory for every job, and hand their script to the batch system.

    The jobs of a sweep become one job array. The records of all its runs have the tag of the array;
    the script of each run has its own tag, because on PBS it may submit itself again.

    Args:
        jobs: one job, or the jobs of all points of a sweep.
        after: runs that must complete before the jobs start.
        at_once: maximum number of jobs of a sweep at the same time; None sets no limit.
        edited: the script of a single job, if a person has edited it.

    Raises:
        UsageError: an earlier submission was interrupted, but reached the queue; or the job cannot
            wait for a run of ``after``.
        SchedulerError: see :func:`hand_over`. The run directories are removed unless the batch
            system may have the job.
    """
    first = jobs[0]
    base, name = Path(first.spec.output.directory), first.name
    refuse_duplicate(base, name, first.scheduler, now)
    ids = ids_to_wait_for(after, first.scheduler, now)
    if first.values is None:
        run = RunDirectory.create(base, name, now)
        with locked(run), Rollback(created=[run.path]) as rollback:
            new_run = Submission.new(run, first, now, tuple(ids), after_runs=ids.values())
            return hand_over([new_run], rollback, edited=edited)
    sweep, runs = SweepDirectory.create(base, name, len(jobs), now)
    with locked(sweep), Rollback(created=[*(run.path for run in runs), sweep.path]) as rollback:
        request = first.array_request(sweep, len(runs), at_once, after=tuple(ids))
        submissions = []
        for index, (job, run) in enumerate(zip(jobs, runs, strict=True)):
            # values that JSON does not have, such as infinity, are recorded as text
            values = json.loads(json.dumps(dict(job.values or {})), parse_constant=str)
            setting = SweepPoint(sweep.name, values)
            new = partial(Submission.new, run, job, now, after_runs=ids.values())
            submissions.append(new(tag=request.tag, sweep=setting, task=index))
        return hand_over(submissions, rollback, (sweep, request))


def hand_over(
    submissions: Sequence[Submission],
    rollback: Rollback,
    array: tuple[SweepDirectory, JobRequest] | None = None,
    edited: Edited | None = None,
) -> tuple[Submission, ...]:
    """Write all files of the runs, and submit their script to the batch system.

    The caller holds the locks of the directories, and has entered ``rollback``.

    Args:
        submissions: one run, or all runs of an array in order.
        array: directory and request of the sweep; None for one run.
        edited: see :func:`submit`.

    Returns:
        The submissions with the ids of their jobs.

    Raises:
        SchedulerError: the batch system is missing or refuses the job, or the job can never run.
        NoAnswerError: the batch system did not answer and may have the job; all files stay.
    """
    scheduler = get_scheduler(submissions[0].record.scheduler)
    # A script that was edited may ask for something else.
    warning = "" if edited else limits_warning(submissions[0].request, scheduler.name)
    # By the identity of the plan. Runs without one share None, which copies nothing.
    first_runs: dict[int, RunDirectory] = {}
    environments: dict[Path | None, KeptEnvironment] = {}
    for submission in submissions:
        text = scheduler.render(submission.request)
        if edited is not None:
            text = edited.adopt(submission.request, text)
        first_run = first_runs.setdefault(id(submission.job.plan), submission.run)
        _write_files(submission, text, first_run, environments)
    script, request = submissions[0].run.script, submissions[0].request
    if array is not None:
        script, request = array[0].script, array[1]
        write_text(script, scheduler.render(request), mode=0o700)
    rollback.scheduler_called = True
    name = name_in_shell(submissions[0].run if array is None else array[0])
    try:
        job_id = scheduler.submit(script, request)
    except NoAnswerError as error:
        for submission in submissions:
            _note_doubt(submission, error.said)
        hint = f"{_hint_of_doubt(name, submissions[0])}\n{error.hint}"
        raise NoAnswerError(error.message, hint=hint) from error
    except KeyboardInterrupt as interrupt:
        raise InterruptedSubmissionError(
            "interrupted; the job may be in the queue", hint=f"see: pipectl status {name}"
        ) from interrupt
    submitted = []
    for index, submission in enumerate(submissions):
        own_id = job_id if array is None else scheduler.task_id(job_id, index)
        record = submission.record
        record = record.with_state(record.submitted_at, "submitted", job_id=own_id)
        with suppress(UsageError):  # without a record of its id, the job is found by its tag
            record.save(submission.run.record)
        submitted.append(replace(submission, record=record, warning=warning))
    return tuple(submitted)


def limits_warning(request: JobRequest, scheduler: str) -> str:
    """Return a warning if a job may never run; see :meth:`pipectl.batch.Scheduler.check`."""
    return get_scheduler(scheduler, QUEUES_TIMEOUT_S).check(request)


def _note_doubt(submission: Submission, said: str) -> None:
    """Record what the batch system said when it did not say whether it has the job."""
    record, lines = submission.record, " ".join(printable(said).split())
    detail = lines if len(lines) <= _MAX_WORDS else f"{lines[:_MAX_WORDS]}…"
    with suppress(UsageError):
        record.with_state(record.submitted_at, "unconfirmed", detail=detail).save(
            submission.run.record
        )


def _hint_of_doubt(name: str, submission: Submission) -> str:
    """What to do if it is not known whether a batch system has a job.

    Args:
        name: of the run or sweep, on a command line.
    """
    again = "repeat this command; what was accepted is not submitted twice"
    if submission.request.earlier_starts:
        again = f"`pipectl resume --force {name}`"
    return f"`pipectl status {name}` finds the job if it was accepted after all;\nif not: {again}"


def _write_files(
    submission: Submission,
    script: str,
    first_run: RunDirectory,
    environments: dict[Path | None, KeptEnvironment],
) -> None:
    """Write the files of a run, the record last.

    Args:
        first_run: first run with the same plan, whose files of the plan are copied.
        environments: repository and text of ``environment.txt`` by directory of the code, of runs
            that are submitted together.
    """
    run, job, request = submission.run, submission.job, submission.request
    make_private_directory(run.logs)  # without it, a job fails or hangs without output
    make_private_directory(run.next_start().errors)
    spec = job.spec
    write_text(run.job, dump(spec), mode=_PRIVATE)
    _write_plan_files(run, job, first_run)
    if job.rehearsal is not None:
        job.rehearsal.save(run.rehearsal)
    if job.keeps_code:
        _keep_code(submission, environments)
    write_text(run.script, script, mode=0o700)
    if request.environment.variables:
        write_text(run.variables, render_variables(request), mode=_PRIVATE)
    else:
        run.variables.unlink(missing_ok=True)
    submission.record.save(run.record)


def _write_plan_files(run: RunDirectory, job: Job, first_run: RunDirectory) -> None:
    """Write the cluster, profile and plans of a run; for the arguments see :func:`_write_files`."""
    profile, plan, cluster = job.profile, job.plan, job.cluster
    if cluster is not None:
        cluster.save(run.cluster)
    if not job.plans:
        shutil.rmtree(run.range, ignore_errors=True)
    if plan is not None and first_run is not run:
        for file in (run.profile, run.plan, run.predicted):
            shutil.copyfile(first_run.path / file.relative_to(run.path), file)
        if job.plans:
            shutil.copytree(first_run.range, run.range)
        return
    if profile is not None:
        profile.save(run.profile)
    if plan is not None and cluster is not None:
        from pipectl.jobs.planning import write_plan

        if job.plans:
            from pipectl.jobs.node_range import write_plans

            write_plans(run, job.plans, cluster)
            cluster = cluster.with_ranks(plan.ranks)  # the plan may be that of the last start
        write_plan(run, plan, cluster)


def _keep_code(submission: Submission, environments: dict[Path | None, KeptEnvironment]) -> None:
    """Write the code that a run keeps, and the environment unless it goes on with earlier code."""
    run, job = submission.run, submission.job
    code = job.code or Code.of(job.spec)
    if job.profile is not None:
        code = code.with_loaded(job.profile.code)
    directory, repository = code.directory, None
    if code.before is None:
        if directory not in environments:
            repository, why = find_repository(directory)
            environments[directory] = repository, describe_environment(repository, why)
        repository, text = environments[directory]
        write_text(run.environment, text, mode=_PRIVATE)
    keep(run, code, submission.request.earlier_starts + 1, repository)


def ids_to_wait_for(runs: Sequence[RunDirectory], scheduler: str, now: float) -> Mapping[str, str]:
    """Ids of the jobs of ``runs`` that have not completed, with the names of their runs.

    On PBS a job can wait only for a whole array, so ``runs`` must contain all runs of a sweep.

    Raises:
        UsageError: a run has failed, is not on ``scheduler``, or has no known job.
    """
    ids: dict[str, str] = {}
    for status in get_statuses(runs, now):
        run, record, state = status.run, status.record, status.job.state
        if state is JobState.COMPLETED:
            continue
        if state.final:
            raise UsageError(
                f"--after {run.name}: is {state.value}, so this job would never start",
                hint=f"`pipectl resume {name_in_shell(run)}` first",
            )
        if record is None or record.job_id is None:
            raise UsageError(
                f"--after {run.name}: its job is not known: {status.job.reason}",
                hint=f"see `pipectl status {name_in_shell(run)}`",
            )
        if record.scheduler != scheduler:
            raise UsageError(
                f"--after {run.name}: is on {record.scheduler}, and this job goes to {scheduler}",
                hint=f"wait for its end, or submit with --scheduler {record.scheduler}",
            )
        job_id = get_scheduler(scheduler).dependency_id(record.job_id)
        if record.sweep is not None and job_id != record.job_id:
            sweep = sweep_of(run, record.sweep.name)
            if not set(sweep.runs()) <= set(runs):
                raise UsageError(
                    f"--after {run.name}: a job on {scheduler} cannot wait for one job of an array",
                    hint=f"wait for the whole array: --after {name_in_shell(sweep)}",
                )
        sweep_name = record.sweep.name if record.sweep is not None else run.name
        ids[job_id] = run.name if job_id == record.job_id else sweep_name
    return ids

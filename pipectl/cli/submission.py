"""A submission as a person sees it: the plan, what was submitted, and the run to its end.

`submit`, `resume`, `profile` and `lab rehearse` print it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import typer

from pipectl.cli.console import errors, note, say, say_json, warn
from pipectl.older_python import Unpack
from pipectl.runs import PROFILING, Record, RunDirectory, name_in_shell
from pipectl.runs.phases import step_before, without_details

if TYPE_CHECKING:
    from pipectl.jobs.job import Job
    from pipectl.jobs.state import RunStatus
    from pipectl.jobs.submit import Submission
    from pipectl.profile import Profile


def print_notes(jobs: Sequence[Job]) -> None:
    """Print the warnings of jobs, and the reasons for the choice of MPI, once each."""
    from pipectl.jobs.environment import note_of_modules

    if jobs and (text := note_of_modules(jobs[0])):
        note(text)
    for choice, warning in dict.fromkeys((each.mpi, each.cluster_warning) for each in jobs):
        warn(warning)
        if choice.reason:
            note(choice.reason)
        warn(choice.warning)


def print_plan(jobs: Sequence[Job], before: str = "", tell: Callable[[str], None] = say) -> None:
    """Print the plan and prediction of a single job, or that models are measured first.

    Args:
        before: text before the name of the plan.
        tell: prints a line of the plan.
    """
    missing = sum(job.plan is None for job in jobs)
    if missing:
        of = "" if len(jobs) == 1 else f" for {missing} of {len(jobs)} runs"
        where = ", in the job's allocation" if any(job.plans_in_job for job in jobs) else ""
        note(f"no up-to-date profile{of}: the model is measured before it is trained{where}")
    elif len(jobs) == 1 and (plan := jobs[0].plan) and (cluster := jobs[0].cluster):
        lines = plan.describe_prediction(cluster)
        for line in (f"{before}{plan.name}: {plan.summary}", *lines):
            tell(line)
        if plans := jobs[0].plans:
            from pipectl.cli.views.plan import nodes_line

            tell(f"nodes: {nodes_line(plans)}")


def note_origin(profile: Profile, began: float, again: str) -> None:
    """Print a note if a profile, or a part of it, was measured before the command began.

    Args:
        again: how to measure again.
    """
    device = profile.device
    if device is None or device.measured_at is None:
        return
    if device.measured_at < began:
        when = ago(time.time() - device.measured_at)
        note(f"cached: measured {when} on {device.host} ({device.model}); {again}")
    elif device.resumed:
        note(f"{device.resumed} measurements are from an interrupted attempt")


def ago(age_s: float) -> str:
    """An age in its largest unit: ``3 h ago``."""
    for span_s, unit in ((86400, "day"), (3600, "h"), (60, "min")):
        count = int(age_s // span_s)
        if count > 0:
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"


def describe_job(record: Record) -> str:
    """``slurm job 36``."""
    return f"{record.scheduler} job {record.job_id}"


class _MoreJson(TypedDict, total=False):
    file: str
    sweep: str
    values: dict[str, Any]
    from_step: int
    planned_anew: bool
    changes: Mapping[str, tuple[Any, Any]]
    changed_files: list[str]
    has_own_code: bool


class SubmissionJson(_MoreJson):
    """A run that was submitted.

    Args:
        run, directory: its name, and the path of its directory.
        scheduler: name of the batch system, such as ``slurm``, or ``local``.
        job_id: id of the job in the batch system, with its cluster if one was named: ``7;b``.
        file: of a measurement: the profile or cluster file that it will write.
        sweep, values: of a run of a sweep: the name of the sweep, and the run's values by key.
        from_step: of a resumed run: step of the checkpoint that it starts from.
        planned_anew: of a resumed run: whether it has a new plan.
        changes: of a resumed run: keys of the job with the value so far and the new one.
        changed_files: of a resumed run: its files that have changed since it was submitted.
        has_own_code: of a resumed run: whether it goes on with the code that it was submitted with.
    """

    run: str
    directory: str
    scheduler: str
    job_id: str | None


def submission_json(submission: Submission, **more: Unpack[_MoreJson]) -> SubmissionJson:
    """The JSON of a run that was submitted; ``more`` adds keys."""
    run, record = submission.run, submission.record
    return {
        "run": run.name,
        "directory": str(run.path),
        "scheduler": record.scheduler,
        "job_id": record.job_id,
        **more,
    }


def print_submission(
    submission: Submission, *lines: str, as_json: bool, **more: Unpack[_MoreJson]
) -> None:
    """Print ``lines`` and the command for the status of a run, or its JSON with ``more`` keys."""
    warn(submission.warning)
    if as_json:
        say_json(submission_json(submission, **more))
        return
    for line in (*lines, f"see: pipectl status {name_in_shell(submission.run)}"):
        say(line)


def print_and_follow(
    submission: Submission, *lines: str, wait: bool, as_json: bool, **more: Unpack[_MoreJson]
) -> None:
    """Print a submission; with ``wait``, follow its run to its end and print that."""
    if not (wait and as_json):
        print_submission(submission, *lines, as_json=as_json, **more)
    else:
        warn(submission.warning)
    if wait:
        from pipectl.cli.views.run import print_runs

        status = follow_or_exit(submission.run, as_json=as_json)
        print_runs(submission.run, [status], as_json=as_json)


def follow_or_exit(run: RunDirectory, *, as_json: bool) -> RunStatus:
    """Follow a run until it is over. If it has failed, print it and exit with its code."""
    status = follow(run)
    if code := status.exit_code:
        from pipectl.cli.views.run import print_runs

        print_runs(run, [status], as_json=as_json)
        raise typer.Exit(code)
    return status


def follow(run: RunDirectory, statuses: Iterable[RunStatus] | None = None) -> RunStatus:
    """Wait until a run is over, or its state stays unknown; show a bar, or a line per change.

    Args:
        statuses: to show; by default those of the run to its end.
    """
    try:
        from pipectl.cli.progress import progress_bar
        from pipectl.jobs.state import poll

        with progress_bar() as progress:
            reported: tuple[str, str, int] | None = None
            reasons: set[str] = set()  # a job may wait now for this, now for that
            for status in poll(run) if statuses is None else statuses:
                job = status.job
                progress(*status.progress)
                part = 10 * status.step // (status.steps or 1)
                current = job.state.value, without_details(status.phase), part
                is_new = job.state.waits and job.reason not in reasons
                if (is_new or current != reported) and not errors().is_terminal:
                    note(describe_progress(status))
                if is_new and job.hint:
                    note(job.hint)
                reported = current
                reasons.add(job.reason)
            return status
    except KeyboardInterrupt:
        note(f"\nthe run continues; cancel it with: pipectl cancel {name_in_shell(run)}")
        raise


def describe_progress(status: RunStatus) -> str:
    """State and progress, e.g. ``RUNNING: training, step 40 of 400, loss 2.91``, or the reason why
    the job waits."""
    state = status.job.state
    if state.waits and status.job.reason:
        return f"{state.value}: {status.job.reason}"
    if not state.alive or not status.phase:
        return state.value
    progress = f", step {status.step} of {status.steps}{status.loss_text}" if status.step else ""
    if step_before(status.phase) is not None:
        progress = status.loss_text
    if status.record is not None and status.record.kind == PROFILING:
        progress = f" {status.step}%" if status.step else ""
    return f"{state.value}: {status.phase}{progress}"

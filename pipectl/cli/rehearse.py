"""`pipectl submit --rehearse`: a plan's ranks and messages, with waits instead of computations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipectl.cli.console import note, say, say_json, short
from pipectl.cli.interruption import resumable
from pipectl.cli.progress import progress_bar
from pipectl.cli.views.submission import print_launch, submission_json, wait_for
from pipectl.runs import as_typed
from pipectl.units import format_time

if TYPE_CHECKING:
    from pipectl.jobs.rehearse import RehearsalResult
    from pipectl.jobs.submit import Submission
    from pipectl.spec import JobSpec

_SHARED = 0.005
"""Of the step: what shared cores and links add that is worth a line."""


def rehearse(spec: JobSpec, scheduler: str | None, *, wait: bool, as_json: bool) -> None:
    """Rehearse the plan of a job; on this machine, to the end."""
    from pipectl.jobs.places import LOCAL
    from pipectl.jobs.rehearse import prepare_rehearsal, submit_rehearsal

    with resumable(), progress_bar("profiling") as progress:
        job = prepare_rehearsal(spec, scheduler, progress)
    print_launch(job.launch, job.warning)
    submission = submit_rehearsal(job, time.time())
    _tell(submission)
    if wait or job.scheduler == LOCAL:
        _follow(submission, as_json=as_json)
    elif as_json:
        say_json(submission_json(submission.run, submission.record))
    else:
        say(f"see: pipectl status {as_typed(submission.run)}")


def _tell(submission: Submission) -> None:
    from pipectl.jobs.rehearse import seconds_of
    from pipectl.rehearsal import Rehearsal

    rehearsal, record = Rehearsal.load(submission.run.rehearsal), submission.record
    steps = f"{rehearsal.steps} step{'s' if rehearsal.steps > 1 else ''}"
    note(
        f"rehearsing {record.ranks} ranks ({record.scheduler}): {steps} in about "
        f"{format_time(seconds_of(rehearsal))}, times stretched by {rehearsal.stretch:g}"
    )


def _follow(submission: Submission, *, as_json: bool) -> None:
    from pipectl.jobs.rehearse import result_of

    wait_for(submission.run, as_json=as_json)
    result = result_of(submission.run)
    if as_json:
        say_json({"run": submission.run.name, **result.to_json()})
        return
    for line in _lines(result):
        say(line)
    say(f"timelines: {short(submission.run.trace)}")


def _lines(found: RehearsalResult) -> Iterator[str]:
    rehearsal, planned = found.rehearsal, found.plan.prediction
    yield f"predicted: {format_time(rehearsal.predicted_s)} a step"
    yield f"rehearsed: {format_time(found.step_s)} a step, {found.ratio:.3f} times that"
    if planned is not None and abs(planned.step_time_s / rehearsal.predicted_s - 1) > _SHARED:
        yield (
            f"plan: {format_time(planned.step_time_s)} a step, with cores and links that ranks "
            "share, which a rehearsal leaves out"
        )
    if rehearsal.message_share < 1:
        yield f"messages: {rehearsal.message_share:.2g} of their size, their links' time in full"
    if found.late_s > rehearsal.late_s / rehearsal.stretch:
        yield (
            f"a rank came {format_time(found.late_s)} too late (in time of the plan): this machine "
            "was busy, or too small for so many ranks"
        )

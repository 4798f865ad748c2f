"""`pipectl lab rehearse`: a plan's ranks and messages, with waits instead of computations."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pipectl.batch import LOCAL
from pipectl.cli.console import note, say, say_json, short_path, warn
from pipectl.cli.follow import follow_or_exit
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption, Wait
from pipectl.cli.progress import profiling_progress
from pipectl.cli.views.submission import print_notes, submission_json
from pipectl.jobs.job import warning_of_code
from pipectl.jobs.rehearse import RehearsalResult, prepare_rehearsal, result_of, seconds_of
from pipectl.jobs.submit import submit
from pipectl.runs import as_typed
from pipectl.spec import load
from pipectl.units import format_time

_SHARED = 0.005
"""Of the step: what shared cores and links add that is worth a line."""


def command(
    job: JobFile,
    scheduler: SchedulerOption = None,
    wait: Wait = False,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    spec = load(job, overrides or ())
    warn(warning_of_code(spec, job))
    with profiling_progress() as progress:
        planned = prepare_rehearsal(spec, scheduler, progress)
    print_notes([planned])
    (submission,) = submit([planned], time.time())
    run, record, rehearsal = submission.run, submission.record, planned.work.rehearsal
    assert rehearsal is not None
    steps = f"{rehearsal.steps} step{'s' if rehearsal.steps > 1 else ''}"
    note(
        f"rehearsing {record.ranks} ranks ({record.scheduler}): {steps} in about "
        f"{format_time(seconds_of(rehearsal))}, times stretched by {rehearsal.stretch:g}"
    )
    if wait or record.scheduler == LOCAL:
        follow_or_exit(run, as_json=as_json)
        result = result_of(run)
        if as_json:
            say_json({"run": run.name, **result.to_json()})
            return
        for line in _lines(result):
            say(line)
        say(f"timelines: {short_path(run.trace)}")
    elif as_json:
        say_json(submission_json(run, record))
    else:
        say(f"see: pipectl status {as_typed(run)}")


def _lines(result: RehearsalResult) -> Iterator[str]:
    rehearsal, predicted = result.rehearsal, result.plan.prediction
    yield f"predicted: {format_time(rehearsal.predicted_s)} per step"
    yield f"rehearsed: {format_time(result.step_s)} per step, {result.ratio:.3f} times that"
    if predicted is not None and abs(predicted.step_time_s / rehearsal.predicted_s - 1) > _SHARED:
        yield (
            f"plan: {format_time(predicted.step_time_s)} per step, with cores and links that ranks "
            "share, which a rehearsal leaves out"
        )
    if rehearsal.message_share < 1:
        yield f"messages: {rehearsal.message_share:.2g} of their size, their links' time in full"
    if result.late_s > rehearsal.late_s / rehearsal.stretch:
        yield (
            f"the latest rank was {format_time(result.late_s)} late (in the plan's time): this "
            "machine was busy, or has too few cores for so many ranks"
        )

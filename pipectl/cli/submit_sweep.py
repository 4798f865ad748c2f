"""Submitting a sweep, and telling what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipectl.cli.console import note, say, say_json, short, warn
from pipectl.cli.interruption import resumable
from pipectl.cli.progress import progress_bar
from pipectl.cli.submit_script import tell_launch
from pipectl.cli.submitted import answer
from pipectl.runs import as_typed

if TYPE_CHECKING:
    from pipectl.jobs.submit import Submission
    from pipectl.jobs.sweep import Swept
    from pipectl.runs import SweepDirectory
    from pipectl.spec import JobSpec, Point


def submit_points(
    spec: JobSpec,
    points: Sequence[Point],
    scheduler: str | None,
    after: Sequence[str],
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit the runs of a sweep, and follow them if that is wished.

    Args:
        spec: without the values of the sweep.
        after: names of runs, or sweeps, that must have completed before.
    """
    from pipectl.jobs.sweep import submit_sweep
    from pipectl.jobs.sweep_inputs import gather_sweep
    from pipectl.runs import find_runs

    before = find_runs(Path(spec.output.directory), after)
    with resumable(), progress_bar("profiling") as progress:
        inputs = gather_sweep(spec, points, scheduler, progress)
    for warning in dict.fromkeys(item.warning for item in inputs if item.warning):
        warn(warning)
    for launch in dict.fromkeys(item.launch for item in inputs if item.launch is not None):
        tell_launch(launch)
    at_once = None if spec.sweep is None else spec.sweep.at_once
    found = submit_sweep(points, inputs, at_once, time.time(), before)
    if not as_json:
        _tell(found)
    if wait:
        _follow(found, as_json=as_json)
    elif as_json:
        say_json([_answer(found.sweep, each) for each in found.submissions])


def _tell(found: Swept) -> None:
    first = found.submissions[0].record
    unplanned = sum(submission.plan is None for submission in found.submissions)
    if unplanned:
        note(
            f"no fresh profile for {unplanned} of {len(found.submissions)} runs: their jobs "
            "measure the model first, in their allocation"
        )
    where = "" if first.scheduler == "local" else f" ({first.scheduler} job {found.job_id})"
    say(f"submitted: {len(found.submissions)} runs of {first.name}{where}")
    say(f"sweep directory: {short(found.sweep.path)}")
    say(f"see: pipectl status {as_typed(found.sweep)}")


def _answer(sweep: SweepDirectory, submission: Submission) -> dict[str, object]:
    point = submission.record.sweep
    values = {} if point is None else dict(point.values)
    return answer(submission.run, submission.record, sweep=sweep.name, values=values)


def _follow(found: Swept, *, as_json: bool) -> None:
    """Follow one run after the other to its end, and exit with the code of the first failure."""
    from pipectl.cli.follow import exit_code, follow
    from pipectl.cli.status_sweep import show_sweep

    codes = []
    for submission in found.submissions:
        note(submission.run.name)
        codes.append(exit_code(follow(submission.run)))
    show_sweep(found.sweep, as_json=as_json)
    if code := next(filter(None, codes), 0):
        raise typer.Exit(code)

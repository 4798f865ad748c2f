"""Job scripts without a submission: printed, or asked about."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipectl.cli.console import note, warn

if TYPE_CHECKING:
    from pipectl.jobs.launching import Settled
    from pipectl.jobs.script import Rendered
    from pipectl.spec import JobSpec, Point

NO_PROFILE = "no fresh profile: the job measures the model first, in its allocation"
_NO_FORECAST = "the job is valid; the scheduler forecasts no start (without a queue, it is at once)"


def print_script(spec: JobSpec, points: Sequence[Point], scheduler: str | None) -> None:
    """The script, or that of the array and that of its first run."""
    from pipectl.jobs.script import render, render_sweep

    now = time.time()
    if points:
        sys.stdout.write(render_sweep(spec, points, scheduler, now))
        note("\nEvery job of the array goes on as the script of its run; that of the first:\n")
        spec = points[0].spec
        rendered = render(spec, scheduler, now, "-0")
    else:
        rendered = render(spec, scheduler, now)
    tell_launch(rendered.launch)
    _tell_start(spec, rendered, scheduler)
    sys.stdout.write(rendered.text)


def _tell_start(spec: JobSpec, rendered: Rendered, scheduler: str | None) -> None:
    """Say what a submission would start from, or make first."""
    from pipectl.cli.plan_view import headline, prediction_lines
    from pipectl.jobs.places import LOCAL, plan_path, profile_path, scheduler_name

    warn(rendered.warning)
    if rendered.plan is not None:
        note(f"plan: {plan_path(spec)}: {headline(rendered.plan)}")
        for line in prediction_lines(rendered.plan):
            note(line)
    elif rendered.profiled:
        note(f"no fresh plan: submit makes one, of {profile_path(spec)}")
    elif scheduler_name(spec, scheduler) == LOCAL:
        note("no fresh profile: submit measures the model first, here")
    else:
        note(NO_PROFILE)


def forecast(spec: JobSpec, points: Sequence[Point], scheduler: str | None) -> str:
    """When a job, or all of its sweep, would start, in the batch system's words."""
    from pipectl.jobs.places import scheduler_name
    from pipectl.jobs.script import estimate, render, render_sweep

    now = time.time()
    if points:
        text = render_sweep(spec, points, scheduler, now)
    else:
        text = render(spec, scheduler, now).text
    return estimate(text, scheduler_name(spec, scheduler)) or _NO_FORECAST


def tell_launch(launch: Settled) -> None:
    """Say what ranks are started with, where somebody would ask."""
    if launch.said:
        note(launch.said)
    warn(launch.warning)

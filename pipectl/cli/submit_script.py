"""Job scripts without a submission: printed, or asked about."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipectl.cli.console import note

if TYPE_CHECKING:
    from pipectl.jobs.launching import Settled
    from pipectl.spec import JobSpec, Point

_NO_FORECAST = "the job is valid; the scheduler forecasts no start (without a queue, it is at once)"


def print_script(spec: JobSpec, points: Sequence[Point], scheduler: str | None) -> None:
    """The script, or that of the array and that of its first run."""
    from pipectl.jobs.script import render, render_sweep

    now = time.time()
    if points:
        sys.stdout.write(render_sweep(spec, points, scheduler, now))
        note("\nEvery job of the array goes on as the script of its run; that of the first:\n")
        rendered = render(points[0].spec, scheduler, now, "-0")
    else:
        rendered = render(spec, scheduler, now)
    tell_launch(rendered.launch)
    sys.stdout.write(rendered.text)


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
    if launch.warning:
        note(f"warning: {launch.warning}")

"""Following a run to its end, with a bar or with a line per change."""

from __future__ import annotations

import time
from collections.abc import Iterator

import typer

from pipectl.batch import JobState
from pipectl.cli.console import errors, note
from pipectl.cli.progress import progress_bar
from pipectl.cli.views.run import print_run
from pipectl.errors import UnknownRunError
from pipectl.jobs.state import Poller, RunStatus
from pipectl.runs import PROFILING, RunDirectory, as_typed
from pipectl.runs.readers import Measured

POLL_S = 0.5
_MAX_UNKNOWN_S = 300.0
"""How long to follow a job of which nobody knows the state."""


def follow_or_exit(run: RunDirectory, *, as_json: bool) -> RunStatus:
    """Follow a run until it is over. If it has failed, print it and exit with its code."""
    status = follow(run)
    if code := exit_code(status):
        print_run(status, as_json=as_json)
        raise typer.Exit(code)
    return status


def exit_code(status: RunStatus) -> int:
    """0 for a run that completed, else the exit code of the failure that came first."""
    if status.job.state is JobState.COMPLETED:
        return 0
    if status.job.state is JobState.UNKNOWN:
        return UnknownRunError.exit_code
    return status.failure.exit_code if status.failure else 1


def follow(run: RunDirectory, *, continues: bool = True) -> RunStatus:
    """Wait until a run is over, or its state stays unknown: a bar, or a line per change.

    Args:
        continues: whether the run continues after an interrupt, which then says how to cancel it.
    """
    try:
        with progress_bar() as progress:
            reported: tuple[str, int] | None = None
            unknown = 0
            for status in poll(run):
                step, steps = status.measured.step, status.steps or 0
                phase = status.phase or status.job.state.value
                progress(step, steps if step else 0, f"{phase}{_loss(status.measured)}")
                current = (phase.partition(" ")[0], 10 * step // (steps or 1))
                if current != reported and not errors().is_terminal:
                    note(_line(status))
                reported = current
                unknown = unknown + 1 if status.job.state is JobState.UNKNOWN else 0
                if unknown * POLL_S >= _MAX_UNKNOWN_S:
                    break
            return status
    except KeyboardInterrupt:
        if continues:
            note(f"\nthe run continues; cancel it with: pipectl cancel {as_typed(run)}")
        raise


def poll(run: RunDirectory) -> Iterator[RunStatus]:
    """The status of a run, twice a second until the run is over."""
    poller = Poller()
    while True:
        (status,) = poller.get_statuses([run], time.time())
        yield status
        if status.job.state.final:
            return
        time.sleep(POLL_S)


def _line(status: RunStatus) -> str:
    """What goes on, e.g. ``RUNNING: training, step 40 of 400, loss 2.91``."""
    state, now = status.job.state, status.measured
    if not state.alive or not status.phase:
        return state.value
    if status.record is not None and status.record.kind == PROFILING:
        return f"{state.value}: {status.phase}{f' {now.step}%' if now.step else ''}"
    progress = f", step {now.step} of {status.steps}{_loss(now)}" if now.step else ""
    return f"{state.value}: {status.phase}{progress}"


def _loss(now: Measured) -> str:
    return "" if now.last_loss is None else f", loss {now.last_loss:.4g}"

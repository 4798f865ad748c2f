"""Following a run to its end: a progress bar on a terminal, a line per change without one."""

from __future__ import annotations

import time

from pipectl.batch import JobState
from pipectl.cli.console import errors, note
from pipectl.cli.progress import Report, progress_bar
from pipectl.errors import UnknownRunError
from pipectl.jobs.measured import Measured
from pipectl.jobs.places import LOCAL
from pipectl.jobs.reading import figures
from pipectl.jobs.status import RunStatus, status
from pipectl.runs import PROFILING, RunDirectory, as_typed

_POLL_S = 0.5
_ASK_S = 10.0
_PATIENCE = 30  # times to ask about a job that nobody knows


def follow(run: RunDirectory) -> RunStatus:
    """Wait until a run is over, or its state cannot be told; an interrupt leaves it running."""
    try:
        return watch(run)
    except KeyboardInterrupt:
        note(f"\nthe run goes on; end it with: pipectl cancel {as_typed(run)}")
        raise


def watch(run: RunDirectory) -> RunStatus:
    """Wait until a run is over, or its state cannot be told."""
    with progress_bar() as progress:
        told: tuple[str, int] | None = None
        unknown = 0
        while True:
            found = status(run, time.time())
            told = _tell(found, told)
            unknown = unknown + 1 if found.job.state is JobState.UNKNOWN else 0
            if found.job.state.final or unknown == _PATIENCE:
                return found
            _look(found, progress)


def exit_code(found: RunStatus) -> int:
    """0 for a run that completed, else the exit code of the failure that came first."""
    if found.job.state is JobState.COMPLETED:
        return 0
    if found.job.state is JobState.UNKNOWN:
        return UnknownRunError.exit_code
    return found.culprit.exit_code if found.culprit else 1


def _look(found: RunStatus, progress: Report) -> None:
    """Move the bar by what the files say, until it is time to ask the batch system again."""
    of_earlier_start = found.job.state.waits and found.run.exit_code.exists()
    for _ in range(_polls(found)):
        time.sleep(_POLL_S)
        now = figures(found.run, found.record)
        steps = found.steps if now.step else None
        progress(now.step, steps or 0, f"{_label(found)}{_loss(now)}")
        if found.run.exit_code.exists() and not of_earlier_start:
            return


def _polls(found: RunStatus) -> int:
    """How often to look at the files before the batch system is asked again."""
    local = found.record is not None and found.record.scheduler == LOCAL
    return 2 if local else round(_ASK_S / _POLL_S)


def _label(found: RunStatus) -> str:
    return found.phase or found.job.state.value


def _loss(now: Measured) -> str:
    return "" if now.last_loss is None else f", loss {now.last_loss:.4g}"


def _tell(found: RunStatus, told: tuple[str, int] | None) -> tuple[str, int]:
    """A line whenever state or phase changes and at every tenth of the steps."""
    tenth = 10 * found.measured.step // (found.steps or 1)
    current = (found.phase.partition(" ")[0] or found.job.state.value, tenth)
    if current != told and not errors().is_terminal:
        note(_line(found))
    return current


def _line(found: RunStatus) -> str:
    """What goes on, e.g. ``RUNNING: training, step 40 of 400, loss 2.91``."""
    state, now = found.job.state, found.measured
    if not state.alive or not found.phase:
        return state.value
    if found.record is not None and found.record.kind == PROFILING:
        return f"{state.value}: {found.phase}{f' {now.step}%' if now.step else ''}"
    progress = f", step {now.step} of {found.steps}{_loss(now)}" if now.step else ""
    return f"{state.value}: {found.phase}{progress}"

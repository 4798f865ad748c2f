"""What the views of runs say alike."""

from __future__ import annotations

from rich.text import Text

from pipectl.batch import JobState
from pipectl.jobs.status import RunStatus
from pipectl.runs import PROFILING

_STYLES = {
    JobState.COMPLETED: "green",
    JobState.RUNNING: "cyan",
    JobState.QUEUED: "yellow",
    JobState.HELD: "yellow",
    JobState.UNKNOWN: "yellow",
    JobState.CANCELLED: "dim",
}


def state_text(status: RunStatus) -> Text:
    """A state in its colour."""
    state = status.job.state
    return Text(state.value, style=_STYLES.get(state, "red"))


def progress(status: RunStatus, form: str) -> str:
    """Steps made of those to make; a run that only measures has percent."""
    if status.record is not None and status.record.kind == PROFILING:
        return f"{status.measured.step}%"
    return form.format(status.measured.step, status.steps) if status.steps else ""

"""What a job does, from the batch system and the files of its run.

The sources, best first, are the queue and the accounting (``Scheduler.query``), the exit code that
our script writes, and the heartbeats of the ranks. A job is never called completed because it is no
longer listed: a state that no source knows is UNKNOWN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from pipectl.batch import CHECKPOINTED, JobState, JobStatus
from pipectl.files import is_missing
from pipectl.runs import Heartbeat, Record, StartDirectory, read_exit_code, read_requeue_error
from pipectl.units import format_time

_SUBMIT_GRACE_S = 60.0
_MIN_FRESH_S, _FRESH_STEPS = 60.0, 3
"""Largest age of a heartbeat, in seconds and in steps: one is written after each step."""
_STOPPED = "stopped at a checkpoint"
_SIGNALS = {
    134: " (SIGABRT)",
    135: " (SIGBUS: a file system or /dev/shm is full)",
    137: " (SIGKILL: often for lack of memory)",
    139: " (SIGSEGV)",
    143: " (SIGTERM)",
    152: " (SIGXCPU: its processor time was limited, see `ulimit -t`)",
    153: " (SIGXFSZ: the size of files was limited, see `ulimit -f`)",
}
"""What exit codes of a job script mean."""
_LATE_S = 60.0
"""How late a network file system may show files."""
_NO_SCRIPT = (
    "it ended without an error, but its script never began: a file that login shells read, such as "
    "~/.bash_profile, may end them (`exit`, `exec`)"
)
_NOT_STARTED = 128 + 53
"""Exit code of a job in Slurm's accounting whose script could not be started."""


class Answer(NamedTuple):
    """States of jobs by id, from a batch system; or why it could not be asked."""

    listed: Mapping[str, JobStatus]
    error: str | None = None


def find_job_status(
    start: StartDirectory,
    record: Record,
    answer: Answer,
    heartbeat: Heartbeat | None,
    step_time_s: float | None,
    now: float,
) -> JobStatus:
    """The state of a run's job, from the batch system's answer and its newest start."""
    beat_at, words = None, "no details"
    if heartbeat:
        words = f"{heartbeat.state}, step {heartbeat.step} of {heartbeat.steps}"
        with suppress(OSError):  # the clock of the file system, which all nodes share
            beat_at = start.heartbeat.stat().st_mtime
    # After the query, so that a job that ends in between does not look as if it had vanished.
    code = read_exit_code(start)
    job = decide_state(record, answer, now, code, beat_at, words, step_time_s)
    if code is None and _never_began(start, job):
        node = f"a node of {job.nodes}" if re.search(r"[\[,]", job.nodes) else job.nodes or "a node"
        why = f" ({job.reason})" if job.reason else ""
        reason = f"{node} could not start the job script{why}"
        return replace(job, reason=reason, hint=f"check that it has the directory {start.run.path}")
    if code is None and job.state is JobState.COMPLETED and job.end and is_missing(start.begun):
        return _judge_without_script(job, job.end, now)
    if job.state is JobState.PREEMPTED and (error := read_requeue_error(start)):
        return replace(job, reason=f"{job.reason}; it could not be started again: {error}")
    return job


def _never_began(start: StartDirectory, job: JobStatus) -> bool:
    """Whether Slurm could not start the script: it says the same of one that a signal has ended."""
    is_said = job.reason.startswith("JobLaunchFailure") or job.exit_code == _NOT_STARTED
    return job.state is JobState.FAILED and is_said and is_missing(start.begun)


def _judge_without_script(job: JobStatus, end: float, now: float) -> JobStatus:
    """The state of a job that has ended well, and of whose script there is no file."""
    if now - end < _LATE_S:
        reason = "it is over, and the files of its script are not there yet"
        return replace(job, state=JobState.COMPLETING, reason=reason, exit_code=None, end=None)
    hint = "`bash -l -c 'echo it runs'` prints nothing if one does"
    return replace(job, state=JobState.FAILED, reason=_NO_SCRIPT, exit_code=None, hint=hint)


def decide_state(
    record: Record,
    answer: Answer,
    now: float,
    exit_code: int | None = None,
    beat_at: float | None = None,
    words: str = "",
    step_time_s: float | None = None,
) -> JobStatus:
    """Decide a job's state, its source, and the reason if that is not obvious.

    Args:
        exit_code: exit code of the job script; None if it has written none.
        beat_at, words: time and text of the last heartbeat, e.g. ``training, step 12 of 500``.
        step_time_s: None if unknown.
    """
    listed, cancelled = answer.listed.get(record.job_id or ""), record.state == "cancelled"
    own = None if exit_code is None else _state_of_code(exit_code, cancelled=cancelled)
    if listed is not None and listed.state is not JobState.UNKNOWN:
        return _combine_states(listed, own, cancelled=cancelled)
    # The code may be of an earlier start, while the next one waits in a queue that did not answer.
    may_go_on = exit_code == CHECKPOINTED and answer.error is not None
    if own is not None and not may_go_on:
        return own
    if cancelled and answer.error is None and (listed is None or listed.source == "none"):
        reason = "cancelled, and no longer listed"
        return JobStatus(JobState.CANCELLED, reason=reason, source="record")
    reason = "not listed by the scheduler" if listed is None else listed.reason
    if answer.error is not None:
        reason = f"the scheduler could not be asked: {answer.error}"
    last = "no heartbeat"
    if beat_at is not None:
        age_s = now - beat_at
        last = f"last heartbeat {format_time(max(0.0, age_s))} ago ({words})"
        if abs(age_s) < max(_MIN_FRESH_S, _FRESH_STEPS * (step_time_s or 0.0)):
            return JobStatus(JobState.RUNNING, reason=f"{reason}; {last}", source="heartbeat")
    if now - record.submitted_at < _SUBMIT_GRACE_S and record.state != "unconfirmed":
        return JobStatus(JobState.QUEUED, reason="submitted just now", source="record")
    first = ["its submission was never confirmed"] if record.state == "submitting" else []
    if record.state == "unconfirmed":
        first = [f"its submission was not confirmed: {record.history[-1].detail}"]
    end = "no exit code in the run directory"
    if may_go_on:
        end = "stopped at a checkpoint, and may continue"
    reason, hint = "; ".join([*first, reason, end, last]), listed.hint if listed else ""
    return JobStatus(JobState.UNKNOWN, reason=reason, source="none", hint=hint)


def _state_of_code(code: int, *, cancelled: bool) -> JobStatus:
    """The state after an exit code; a cancelled job may have completed before the signal."""
    state = JobState.FAILED if code else JobState.COMPLETED
    reason = f"exit code {code}{_SIGNALS.get(code, '')}" if code else ""
    if code == CHECKPOINTED:
        state, reason = JobState.PREEMPTED, _STOPPED
    if cancelled and code:
        state = JobState.CANCELLED
    return JobStatus(state, reason=reason, exit_code=code, source="run directory")


def _combine_states(listed: JobStatus, own: JobStatus | None, *, cancelled: bool) -> JobStatus:
    """Combine the batch system's state of a job with ``own``, that of its exit code.

    Batch systems list a job that stopped at a checkpoint as failed, and some a cancelled one, too.
    """
    if cancelled and listed.state is JobState.FAILED and listed.source != "process":
        listed = replace(listed, state=JobState.CANCELLED, reason="")
    if own is None:
        is_killed = cancelled and listed.source == "process"
        is_killed &= listed.state is not JobState.RUNNING
        return replace(listed, state=JobState.CANCELLED, reason="") if is_killed else listed
    code = own.exit_code
    if listed.state is JobState.CANCELLED and code == 0:
        return replace(listed, state=JobState.COMPLETED, reason="", exit_code=0)
    if listed.state is JobState.CANCELLED and code == CHECKPOINTED:
        return replace(listed, reason=_STOPPED, exit_code=code)
    # Commands of the user at the exit of the script may end well after a failure.
    hides_failure = listed.state is JobState.COMPLETED and code != 0
    knows_code = listed.exit_code not in (None, CHECKPOINTED) and not hides_failure
    if not listed.state.final or knows_code:
        return listed
    if listed.source == "process" or code == CHECKPOINTED or hides_failure:
        return replace(own, nodes=listed.nodes, start=listed.start, end=listed.end)
    return replace(listed, exit_code=code)

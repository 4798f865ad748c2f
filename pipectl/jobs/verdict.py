"""The verdict on one job from four sources; what none of them knows stays UNKNOWN.

The sources, best first: the live queue and the accounting (both through ``Scheduler.query``), the
exit code that our own script writes, the heartbeats of the ranks. A job that is not listed is never
called completed for that reason.
"""

from __future__ import annotations

from dataclasses import replace

from pipectl.batch.protocol import CHECKPOINTED, JobState, JobStatus
from pipectl.units import format_time

_SUBMIT_GRACE_S = 60.0
_MIN_FRESH_S, _FRESH_STEPS = 60.0, 3
"""How old a heartbeat may be: one is written after each step."""
_STOPPED = "stopped at a checkpoint; `pipectl resume RUN` continues from it"


def decide_state(
    now: float,
    submitted_at: float,
    listed: JobStatus | None = None,
    *,
    query_error: str | None = None,
    exit_code: int | None = None,
    heartbeat_at: float | None = None,
    heartbeat: str = "",
    step_time_s: float | None = None,
    cancelled: bool = False,
    submitting: bool = False,
) -> JobStatus:
    """A job's state with its source, and the reason if it is not obvious.

    Args:
        now, submitted_at, heartbeat_at: in seconds since the epoch; the last heartbeat may be None.
        listed: the scheduler's answer; None if it does not know the job or was not asked.
        query_error: why the scheduler could not be asked; None if it answered.
        exit_code: from the run directory, read *after* the query so that a job which ends in
            between is not taken for one that vanished.
        heartbeat: its text, e.g. ``training, step 12 of 500``.
        step_time_s: how long a step takes; None if that is not known.
        cancelled: whether we asked for its end.
        submitting: whether the submission was never confirmed.
    """
    if listed is not None and listed.state is not JobState.UNKNOWN:
        return _complete(listed, exit_code, cancelled=cancelled)
    # The code may be of an earlier start, and the next one wait in a queue that did not answer.
    may_go_on = exit_code == CHECKPOINTED and query_error is not None
    if exit_code is not None and not may_go_on:
        return _from_exit_code(exit_code, cancelled=cancelled)
    if cancelled and query_error is None and listed is None:
        reason = "cancelled, and no longer listed"
        return JobStatus(JobState.CANCELLED, reason=reason, source="record")
    reason = "not listed by the scheduler"
    if query_error is not None:
        reason = f"the scheduler could not be asked: {query_error}"
    elif listed is not None:
        reason = listed.reason
    last = "no heartbeat"
    if heartbeat_at is not None:
        age_s = now - heartbeat_at
        last = f"last heartbeat {format_time(max(0.0, age_s))} ago ({heartbeat or 'no details'})"
        if abs(age_s) < max(_MIN_FRESH_S, _FRESH_STEPS * (step_time_s or 0.0)):
            return JobStatus(JobState.RUNNING, reason=f"{reason}; {last}", source="heartbeat")
    if now - submitted_at < _SUBMIT_GRACE_S:
        return JobStatus(JobState.QUEUED, reason="submitted just now", source="record")
    first = ["its submission was never confirmed"] if submitting else []
    end = "no exit code in the run directory"
    if may_go_on:
        end = "stopped at a checkpoint, and may continue"
    return JobStatus(JobState.UNKNOWN, reason="; ".join([*first, reason, end, last]), source="none")


def _complete(listed: JobStatus, code: int | None, *, cancelled: bool) -> JobStatus:
    """A final state that lacks the exit code takes it from the run directory.

    Batch systems list a job that stopped at a checkpoint as failed.
    """
    if cancelled and code is None and listed.source == "process":
        started = listed.state is JobState.RUNNING
        return listed if started else replace(listed, state=JobState.CANCELLED, reason="")
    if listed.state is JobState.CANCELLED and code == 0:
        return replace(listed, state=JobState.COMPLETED, reason="", exit_code=0)
    if listed.state is JobState.CANCELLED and code == CHECKPOINTED:
        return replace(listed, reason=_STOPPED, exit_code=code)
    has_code = listed.exit_code not in (None, CHECKPOINTED)
    if not listed.state.final or has_code or code is None:
        return listed
    if listed.source == "process" or code == CHECKPOINTED:
        verdict = _from_exit_code(code, cancelled=cancelled)
        return replace(verdict, nodes=listed.nodes, start=listed.start, end=listed.end)
    return replace(listed, exit_code=code)


def _from_exit_code(code: int, *, cancelled: bool) -> JobStatus:
    """A job whose end was asked for is cancelled, unless it was done before that reached it."""
    state = JobState.FAILED if code else JobState.COMPLETED
    reason = f"exit code {code}" if code else ""
    if code == CHECKPOINTED:
        state, reason = JobState.PREEMPTED, _STOPPED
    if cancelled and code:
        state = JobState.CANCELLED
    return JobStatus(state, reason=reason, exit_code=code, source="run directory")

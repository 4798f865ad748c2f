"""The verdict on one job from four sources; what none of them knows stays UNKNOWN.

The sources, best first: the live queue and the accounting (both through ``Scheduler.query``),
the exit code that our own script leaves behind, the heartbeats of the ranks. A job that is not
listed is never called completed for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipectl.batch.protocol import JobState, JobStatus
from pipectl.batch.script import CHECKPOINTED
from pipectl.units import format_time

SUBMIT_GRACE_S = 60.0
HEARTBEAT_FRESH_S = 60.0
"""At least; it is written behind steps, so that of long ones it is older."""
_STEPS = 3
_STOPPED = "stopped at a checkpoint; pipectl resume goes on"


@dataclass(frozen=True)
class Evidence:
    """What was found about one job at the time ``now`` (all times in seconds since the epoch).

    Args:
        listed: the scheduler's answer; None where it does not know the job or was not asked.
        query_error: why the scheduler could not be asked; None where it answered.
        exit_code: from the run directory, read *after* the query so that a job which ends in
            between is not taken for one that vanished.
        heartbeat_at: time of the last heartbeat.
        heartbeat: what it said, e.g. ``training, step 12 of 500``.
        step_time_s: how long a step takes; None where that is not known.
        cancelled: whether we asked for its end.
        submitting: whether the submission was never confirmed.
    """

    now: float
    submitted_at: float
    listed: JobStatus | None = None
    query_error: str | None = None
    exit_code: int | None = None
    heartbeat_at: float | None = None
    heartbeat: str = ""
    step_time_s: float | None = None
    cancelled: bool = False
    submitting: bool = False


def resolve(evidence: Evidence) -> JobStatus:
    """The job's state with the source that told it, and the reason where it is not plain."""
    listed = evidence.listed
    if listed is not None and listed.state is not JobState.UNKNOWN:
        return _completed_by_file(listed, evidence)
    if evidence.exit_code is not None and not _may_go_on(evidence):
        return _from_exit_code(evidence.exit_code, evidence.cancelled)
    if evidence.cancelled and evidence.query_error is None and listed is None:
        reason = "cancelled, and no longer listed"
        return JobStatus(JobState.CANCELLED, reason=reason, source="record")
    if _is_fresh(evidence):
        reason = f"{_silence(evidence)}; {_heartbeat(evidence)}"
        return JobStatus(JobState.RUNNING, reason=reason, source="heartbeat")
    if evidence.now - evidence.submitted_at < SUBMIT_GRACE_S:
        return JobStatus(JobState.QUEUED, reason="submitted just now", source="record")
    return JobStatus(JobState.UNKNOWN, reason=_why_unknown(evidence), source="none")


def _completed_by_file(listed: JobStatus, evidence: Evidence) -> JobStatus:
    """A final state that lacks the exit code takes it from the run directory.

    Batch systems list a job that stopped at a checkpoint as failed.
    """
    code = evidence.exit_code
    if evidence.cancelled and code is None and listed.source == "process":
        started = listed.state is JobState.RUNNING
        return listed if started else replace(listed, state=JobState.CANCELLED, reason="")
    if listed.state is JobState.CANCELLED and code == 0:
        return replace(listed, state=JobState.COMPLETED, reason="", exit_code=0)
    if listed.state is JobState.CANCELLED and code == CHECKPOINTED:
        return replace(listed, reason=_STOPPED, exit_code=code)
    known = listed.exit_code not in (None, CHECKPOINTED)
    if not listed.state.final or known or code is None:
        return listed
    if listed.source == "process" or code == CHECKPOINTED:
        verdict = _from_exit_code(code, evidence.cancelled)
        return replace(verdict, nodes=listed.nodes, start=listed.start, end=listed.end)
    return replace(listed, exit_code=code)


def _from_exit_code(code: int, cancelled: bool) -> JobStatus:
    """A job whose end was asked for is cancelled, unless it was done before that reached it."""
    state = JobState.FAILED if code else JobState.COMPLETED
    reason = f"exit code {code}" if code else ""
    if code == CHECKPOINTED:
        state, reason = JobState.PREEMPTED, _STOPPED
    if cancelled and code:
        state = JobState.CANCELLED
    return JobStatus(state, reason=reason, exit_code=code, source="run directory")


def _may_go_on(evidence: Evidence) -> bool:
    """Whether the code may be of an earlier start, and the next one waits in a queue that could
    not be asked."""
    return evidence.exit_code == CHECKPOINTED and evidence.query_error is not None


def _is_fresh(evidence: Evidence) -> bool:
    beat = evidence.heartbeat_at
    fresh_s = max(HEARTBEAT_FRESH_S, _STEPS * (evidence.step_time_s or 0.0))
    return beat is not None and abs(evidence.now - beat) < fresh_s


def _silence(evidence: Evidence) -> str:
    """Why the scheduler's word is missing."""
    if evidence.query_error is not None:
        return f"the scheduler could not be asked: {evidence.query_error}"
    if evidence.listed is not None:
        return evidence.listed.reason
    return "not listed by the scheduler"


def _why_unknown(evidence: Evidence) -> str:
    parts = [_silence(evidence)]
    if evidence.submitting:
        parts.insert(0, "its submission was never confirmed")
    if evidence.exit_code is None:
        parts.append("no exit code in the run directory")
    else:
        parts.append("stopped at a checkpoint, and may go on")
    return "; ".join([*parts, _heartbeat(evidence)])


def _heartbeat(evidence: Evidence) -> str:
    """How old the last one is, and what it said."""
    if evidence.heartbeat_at is None:
        return "no heartbeat"
    age = format_time(max(0.0, evidence.now - evidence.heartbeat_at))
    return f"last heartbeat {age} ago ({evidence.heartbeat or 'no details'})"

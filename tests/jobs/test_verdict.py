"""The verdict from four sources, as a pure function."""

from typing import Any

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.jobs.state import Answer, decide_state
from pipectl.runs import Record

NOW = 1_000_000.0
LONG_AGO = NOW - 3600


def verdict(
    listed: JobStatus | None = None,
    query_error: str | None = None,
    submitted_at: float = LONG_AGO,
    state: str = "submitted",
    **facts: Any,
) -> JobStatus:
    record = Record("demo", "slurm", "t", submitted_at, 1, 1, 5, state=state, job_id="7")
    answer = Answer({} if listed is None else {"7": listed}, query_error)
    return decide_state(record, answer, NOW, **facts)


def listed(state: str, **details: Any) -> JobStatus:
    return JobStatus(JobState(state), **details)


def test_what_the_scheduler_lists_counts():
    facts = {"exit_code": 3, "beat_at": NOW, "state": "cancelled"}
    for state in set(JobState) - {JobState.UNKNOWN}:
        assert verdict(listed=JobStatus(state), **facts).state is state


@pytest.mark.parametrize(
    ("status", "facts", "state", "code", "reason"),
    [
        # An end takes its exit code from the run directory, if the scheduler knows none.
        (listed("TIMEOUT", reason="TimeLimit"), {"exit_code": 143}, "TIMEOUT", 143, "TimeLimit"),
        (listed("FAILED", exit_code=9), {"exit_code": 3}, "FAILED", 9, ""),
        # A job may have been done before it was cancelled, or have stopped at a checkpoint.
        (listed("CANCELLED"), {"exit_code": 0, "state": "cancelled"}, "COMPLETED", 0, ""),
        (listed("FAILED"), {"exit_code": 75}, "PREEMPTED", 75, "stopped at a checkpoint"),
        (
            listed("FAILED", exit_code=75),
            {"exit_code": 75},
            "PREEMPTED",
            75,
            "stopped at a checkpoint",
        ),
        (listed("CANCELLED"), {"exit_code": 75}, "CANCELLED", 75, "stopped at a checkpoint"),
        (
            listed("CANCELLED", exit_code=0),
            {"exit_code": 75},
            "CANCELLED",
            75,
            "stopped at a checkpoint",
        ),
        (
            listed("CANCELLED", exit_code=75),
            {"exit_code": 75},
            "CANCELLED",
            75,
            "stopped at a checkpoint",
        ),
        # A process that is gone ended well if it left an exit code.
        (listed("FAILED", source="process", reason="killed?"), {}, "FAILED", None, "killed?"),
        (listed("FAILED", source="process", reason="x"), {"exit_code": 0}, "COMPLETED", 0, ""),
        (listed("FAILED", source="process"), {"exit_code": 2}, "FAILED", 2, "exit code 2"),
    ],
)
def test_a_listed_end_is_completed_by_the_exit_code(status, facts, state, code, reason):
    found = verdict(listed=status, **facts)
    assert (found.state, found.exit_code) == (JobState(state), code)
    assert reason in found.reason if reason else found.reason == ""


@pytest.mark.parametrize(
    ("facts", "state", "source", "reasons"),
    [
        ({"exit_code": 0}, "COMPLETED", "run directory", []),
        ({"exit_code": 3}, "FAILED", "run directory", ["exit code 3"]),
        ({"exit_code": 143, "state": "cancelled"}, "CANCELLED", "run directory", []),
        ({"exit_code": 0, "state": "cancelled"}, "COMPLETED", "run directory", []),
        ({"exit_code": 0, "query_error": "squeue: down"}, "COMPLETED", "run directory", []),
        ({"exit_code": 75}, "PREEMPTED", "run directory", []),
        # The next start may wait in the queue that does not answer.
        ({"exit_code": 75, "query_error": "squeue: down"}, "UNKNOWN", "none", ["and may continue"]),
        ({"beat_at": NOW - 10}, "RUNNING", "heartbeat", []),
        (
            {"beat_at": NOW - 10, "query_error": "squeue: down"},
            *("RUNNING", "heartbeat", ["squeue: down", "last heartbeat 10"]),
        ),
        # Heartbeats are as far apart as steps.
        ({"beat_at": NOW - 80, "step_time_s": 90.0}, "RUNNING", "heartbeat", []),
        ({"beat_at": NOW - 280, "step_time_s": 90.0}, "UNKNOWN", "none", []),
        ({"beat_at": NOW - 80, "step_time_s": 1.0}, "UNKNOWN", "none", []),
        ({"submitted_at": NOW - 59}, "QUEUED", "record", []),
        ({"submitted_at": NOW - 61}, "UNKNOWN", "none", ["no heartbeat", "no exit code"]),
        # Absence is never called completed.
        (
            {"beat_at": LONG_AGO, "words": "training, step 500 of 500"},
            *("UNKNOWN", "none", ["step 500 of 500", "no exit code"]),
        ),
        ({"query_error": "squeue: down"}, "UNKNOWN", "none", ["squeue: down"]),
        ({"state": "submitting"}, "UNKNOWN", "none", ["never confirmed"]),
        (
            {"listed": listed("UNKNOWN", reason="started on login2", source="process")},
            *("UNKNOWN", "none", ["started on login2"]),
        ),
        ({"state": "cancelled"}, "CANCELLED", "record", []),
        ({"state": "cancelled", "query_error": "down"}, "UNKNOWN", "none", []),
    ],
)
def test_a_job_that_is_not_listed(facts, state, source, reasons):
    status = verdict(**facts)
    assert (status.state, status.source) == (JobState(state), source)
    assert [reason for reason in reasons if reason not in status.reason] == []
    assert status.state is JobState.UNKNOWN or status.exit_code == facts.get("exit_code")

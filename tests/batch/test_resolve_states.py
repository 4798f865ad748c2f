"""The verdict from four sources, as a pure function."""

from typing import Any

import pytest

from pipectl.batch import Evidence, JobState, JobStatus, resolve

NOW = 1_000_000.0
LONG_AGO = NOW - 3600


def verdict(**facts: Any) -> JobStatus:
    return resolve(Evidence(**{"now": NOW, "submitted_at": LONG_AGO, **facts}))


def listed(state: str, **details: Any) -> JobStatus:
    return JobStatus(JobState(state), **details)


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.UNKNOWN])
def test_what_the_scheduler_lists_counts(state: JobState) -> None:
    facts = {"exit_code": 3, "heartbeat_at": NOW, "cancelled": True}
    assert verdict(listed=JobStatus(state), **facts).state is state


def test_a_listed_end_takes_its_exit_code_from_the_run_directory() -> None:
    status = verdict(listed=listed("TIMEOUT", reason="TimeLimit"), exit_code=143)
    assert (status.state, status.exit_code, status.reason) == (JobState.TIMEOUT, 143, "TimeLimit")
    status = verdict(listed=listed("FAILED", exit_code=9), exit_code=3)
    assert status.exit_code == 9


def test_a_job_that_was_done_before_it_was_cancelled_has_completed() -> None:
    status = verdict(listed=listed("CANCELLED", nodes="n1"), exit_code=0, cancelled=True)
    assert (status.state, status.exit_code, status.nodes) == (JobState.COMPLETED, 0, "n1")


@pytest.mark.parametrize("known", [None, 75])
def test_a_listed_failure_may_have_been_a_stop_at_a_checkpoint(known: int | None) -> None:
    status = verdict(listed=listed("FAILED", exit_code=known, nodes="n1"), exit_code=75)
    assert (status.state, status.nodes) == (JobState.PREEMPTED, "n1")
    assert "pipectl resume" in status.reason


@pytest.mark.parametrize("known", [None, 0, 75])
def test_a_job_that_was_cancelled_elsewhere_and_stopped_at_a_checkpoint_is_cancelled(
    known: int | None,
) -> None:
    status = verdict(listed=listed("CANCELLED", exit_code=known, nodes="n1"), exit_code=75)
    assert (status.state, status.exit_code, status.nodes) == (JobState.CANCELLED, 75, "n1")
    assert "pipectl resume" in status.reason


def test_a_vanished_process_with_an_exit_code_ended_properly() -> None:
    gone = listed("FAILED", source="process", nodes="here", reason="killed?")
    assert verdict(listed=gone) == gone
    status = verdict(listed=gone, exit_code=0)
    assert (status.state, status.nodes, status.reason) == (JobState.COMPLETED, "here", "")
    assert verdict(listed=gone, exit_code=2).reason == "exit code 2"


@pytest.mark.parametrize(
    ("code", "cancelled", "state"),
    [
        (0, False, "COMPLETED"),
        (3, False, "FAILED"),
        (143, True, "CANCELLED"),
        (0, True, "COMPLETED"),
    ],
)
def test_an_absent_job_is_judged_by_its_exit_code(code: int, cancelled: bool, state: str) -> None:
    status = verdict(exit_code=code, cancelled=cancelled)
    assert (status.state, status.exit_code) == (JobState(state), code)
    assert status.source == "run directory"


def test_the_exit_code_counts_when_the_scheduler_does_not_answer() -> None:
    assert verdict(query_error="squeue: down", exit_code=0).state is JobState.COMPLETED


def test_a_stop_at_a_checkpoint_may_be_of_an_earlier_start() -> None:
    """The next one may wait in the queue that does not answer."""
    assert verdict(exit_code=75).state is JobState.PREEMPTED
    status = verdict(exit_code=75, query_error="squeue: down")
    assert status.state is JobState.UNKNOWN
    assert "stopped at a checkpoint, and may go on" in status.reason


def test_a_fresh_heartbeat_means_running() -> None:
    status = verdict(heartbeat_at=NOW - 10)
    assert (status.state, status.source) == (JobState.RUNNING, "heartbeat")
    status = verdict(query_error="squeue: down", heartbeat_at=NOW - 10)
    assert status.state is JobState.RUNNING
    assert "squeue: down" in status.reason
    assert "last heartbeat 10" in status.reason


def test_heartbeats_are_as_far_apart_as_steps() -> None:
    assert verdict(heartbeat_at=NOW - 80, step_time_s=90.0).state is JobState.RUNNING
    assert verdict(heartbeat_at=NOW - 280, step_time_s=90.0).state is JobState.UNKNOWN
    assert verdict(heartbeat_at=NOW - 80, step_time_s=1.0).state is JobState.UNKNOWN


def test_an_absent_job_of_just_now_is_queued() -> None:
    assert verdict(submitted_at=NOW - 59).state is JobState.QUEUED
    assert verdict(submitted_at=NOW - 61).state is JobState.UNKNOWN


def test_absence_is_never_called_completed() -> None:
    status = verdict(heartbeat_at=LONG_AGO, heartbeat="training, step 500 of 500")
    assert status.state is JobState.UNKNOWN
    assert "step 500 of 500" in status.reason
    assert "no exit code" in status.reason


def test_unknown_says_why() -> None:
    assert "squeue: down" in verdict(query_error="squeue: down").reason
    assert "no heartbeat" in verdict().reason
    assert "never confirmed" in verdict(submitting=True).reason
    elsewhere = listed("UNKNOWN", reason="started on login2", source="process")
    assert "started on login2" in verdict(listed=elsewhere).reason


def test_a_cancelled_job_that_is_no_longer_listed_is_cancelled() -> None:
    assert verdict(cancelled=True).state is JobState.CANCELLED
    assert verdict(cancelled=True, query_error="down").state is JobState.UNKNOWN


def test_final_and_alive_states() -> None:
    assert not JobState.UNKNOWN.final
    assert not JobState.UNKNOWN.alive
    for state in JobState:
        assert not (state.final and state.alive)
    assert JobState.COMPLETING.alive
    assert JobState.PREEMPTED.final

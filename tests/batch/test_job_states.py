"""What the state of a job says of it, the same for every batch system."""

from pipectl.batch import JobState

WAITS = {JobState.QUEUED, JobState.HELD}
RUNS = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}


def test_a_job_waits_or_runs_or_is_over_or_nobody_knows():
    assert {state for state in JobState if state.waits} == WAITS
    assert {state for state in JobState if state.alive} == WAITS | RUNS
    assert {state for state in JobState if not state.final} == WAITS | RUNS | {JobState.UNKNOWN}

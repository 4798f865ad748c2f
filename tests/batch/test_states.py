"""What Slurm and PBS say of jobs and partitions, and what it means, in states.txt."""

from pathlib import Path

from job_requests import check_table

from pipectl.batch import JobState
from pipectl.batch.pbs import parse_qstat
from pipectl.batch.slurm import parse_sacct, parse_sinfo, parse_squeue

FILE = Path(__file__).with_name("states.txt")


def meaning(said):
    """All that is read of a command's output; fields of PBS are separated by ``|``."""
    command, _, text = said.partition(" ")
    text = text.encode().decode("unicode_escape")
    if command == "sinfo":
        return " ".join(f"{queue}".removeprefix("Queue") for queue in parse_sinfo(text))
    if command == "qstat":
        fields = "".join(f"    {field}\n" for field in text.split("|"))
        jobs = parse_qstat(f"Job Id: 7.vm\n{fields}").items()
    else:
        rows = {"squeue": parse_squeue, "sacct": parse_sacct}[command](text)
        jobs = [(row.job_id, row.status) for row in rows]
    words = []
    for job_id, job in jobs:
        words += [job_id, job.state, "" if job.exit_code is None else f"code {job.exit_code}"]
        words += [job.nodes, job.start and "started", job.end and "ended", f"({job.reason})"]
    return " ".join(word for word in words if word and word != "()")


def test_what_batch_systems_say_means_this(snapshot):
    check_table(snapshot, FILE, meaning)


WAITS = {JobState.QUEUED, JobState.HELD}
RUNS = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}


def test_a_job_waits_or_runs_or_is_over_or_nobody_knows():
    assert {state for state in JobState if state.waits} == WAITS
    assert {state for state in JobState if state.alive} == WAITS | RUNS
    assert {state for state in JobState if not state.final} == WAITS | RUNS | {JobState.UNKNOWN}

"""What is read from PBS's output, on recorded output and on what its sources say of other ends."""

from datetime import datetime
from pathlib import Path

import pytest

from pipectl.batch import JobState
from pipectl.batch.pbs_text import parse_names, parse_qstat, submitted_id
from pipectl.batch.submission import job_number

SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "pbs"


def listed(**fields: object) -> str:
    lines = (f"    {name} = {value}" for name, value in fields.items())
    return "\n".join(("Job Id: 7.vm", *lines, ""))


def test_a_job_that_waits() -> None:
    text = (SAMPLES / "qstat-f.txt").read_text()
    (status,) = parse_qstat(text).values()
    assert list(parse_qstat(text)) == ["44.vm"]
    assert (status.state, status.reason) == (JobState.QUEUED, "Not enough free nodes available")
    assert (status.start, status.end, status.exit_code, status.nodes) == (None, None, None, "")
    assert parse_names(text) == {"44.vm": "mpi_run"}


def test_a_job_that_runs_on_two_nodes() -> None:
    text = listed(
        job_state="R",
        exec_host="pbsn1/0*2+pbsn2/0*2",
        stime="Fri Nov 20 16:34:21 2026",
        comment="Job run at Fri Nov 20 at 16:34 on (pbsn1:ncpus=2)+(pbsn2:ncpus=2)",
    )
    status = parse_qstat(text)["7.vm"]
    assert (status.state, status.nodes, status.reason) == (JobState.RUNNING, "pbsn1,pbsn2", "")
    assert status.start == datetime(2026, 11, 20, 16, 34, 21).timestamp()


@pytest.mark.parametrize(
    ("fields", "state", "code", "reason"),
    [
        ({"substate": 92, "Exit_status": 0}, "COMPLETED", 0, ""),
        ({"substate": 93, "Exit_status": 3}, "FAILED", 3, "exit code 3"),
        ({"substate": 93, "Exit_status": 75}, "FAILED", 75, "exit code 75"),
        ({"substate": 93, "Exit_status": 265}, "FAILED", 137, "ended by signal 9"),
        ({"substate": 91, "Exit_status": 271}, "CANCELLED", 143, ""),
        ({"substate": 91}, "CANCELLED", None, ""),
        ({"substate": 92}, "CANCELLED", None, "never ran"),
        ({"substate": 93, "Exit_status": -29}, "TIMEOUT", None, "over its walltime"),
        ({"substate": 93, "Exit_status": -27}, "OUT_OF_MEMORY", None, "over its memory"),
        ({"substate": 93, "Exit_status": -20}, "NODE_FAIL", None, "its first node was lost"),
        ({"substate": 93, "Exit_status": -3}, "FAILED", None, "(status -3)"),
        ({"substate": 94}, "UNKNOWN", None, "another server"),
        ({}, "FAILED", None, "left no exit code"),
    ],
)
def test_ends(fields: dict[str, int], state: str, code: int | None, reason: str) -> None:
    text = listed(job_state="F", mtime="Fri Nov 20 16:34:21 2026", **fields)
    status = parse_qstat(text)["7.vm"]
    assert (status.state.value, status.exit_code) == (state, code)
    assert reason in status.reason
    assert (status.end is not None) == status.state.final


@pytest.mark.parametrize(
    ("letter", "state"),
    [
        ("Q", "QUEUED"), ("W", "QUEUED"), ("T", "QUEUED"), ("H", "HELD"), ("R", "RUNNING"),
        ("B", "RUNNING"), ("S", "SUSPENDED"), ("U", "SUSPENDED"), ("E", "COMPLETING"),
        ("M", "UNKNOWN"), ("?", "UNKNOWN"), ("", "UNKNOWN"),
    ],
)  # fmt: skip
def test_letters(letter: str, state: str) -> None:
    assert parse_qstat(listed(job_state=letter))["7.vm"].state.value == state


def test_a_held_job_says_for_what() -> None:
    held = parse_qstat(listed(job_state="H", depend="afterok:4.vm@vm"))["7.vm"]
    assert held.reason == "waits for afterok:4.vm@vm"


def test_the_environment_of_a_job_says_nothing_of_its_state() -> None:
    text = listed(job_state="R", Variable_List="A=1,") + "\tB=\n    job_state = F\n"
    assert parse_qstat(text)["7.vm"].state is JobState.RUNNING


def test_several_jobs_and_long_lines() -> None:
    text = (
        listed(job_state="R", exec_host="n1/0+") + "\tn2/0\n\nJob Id: 8[3].vm\n    job_state = Q\n"
    )
    found = parse_qstat(text)
    assert found["7.vm"].nodes == "n1,n2"
    assert found["8[3].vm"].state is JobState.QUEUED


@pytest.mark.parametrize("text", ["", "\n", "qstat: Unknown Job Id 99999.vm", "    job_state = F"])
def test_nothing_is_found_in_other_text(text: str) -> None:
    assert parse_qstat(text) == {}


@pytest.mark.parametrize(
    ("text", "job_id"),
    [
        ("4.vm\n", "4.vm"),
        ("Welcome to the cluster\n12345.pbs-1.site.org\n", "12345.pbs-1.site.org"),
        ("5[].vm", "5[].vm"),
        ("77", "77"),
        ("no id here", None),
        ("", None),
    ],
)
def test_ids(text: str, job_id: str | None) -> None:
    assert submitted_id(text) == job_id


def test_the_latest_job_has_the_largest_number() -> None:
    assert max(["9.vm", "10.vm", "x"], key=job_number) == "10.vm"

"""Parsers of Slurm's output, on recorded output."""

from pathlib import Path

import pytest

from pipectl.batch import JobState
from pipectl.batch.slurm_text import (
    parse_exit_code,
    parse_sacct,
    parse_shown,
    parse_squeue,
    parse_state,
    submitted_id,
)

SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "slurm"


def sample(name: str) -> str:
    return "\n".join((SAMPLES / name).read_text().splitlines()[1:-1])


def test_squeue_rows() -> None:
    rows = {row.job_id: row for row in parse_squeue(sample("squeue-format.txt"))}
    states = {job_id: row.status.state.value for job_id, row in rows.items()}
    assert states == {
        "2": "CANCELLED",
        "4": "COMPLETED",
        "16": "FAILED",
        "26": "FAILED",
        "35": "HELD",
        "36": "RUNNING",
        "37": "QUEUED",
        "38": "QUEUED",
        "39": "QUEUED",
    }
    running = rows["36"].status
    assert (running.nodes, running.start, running.end) == ("node[1-4]", 1795228077.0, None)
    assert (running.reason, rows["36"].comment) == ("", "tag-run")
    assert rows["37"].status.start is None
    assert rows["39"].status.reason == "PartitionNodeLimit"
    assert rows["35"].status.reason == "JobHeldUser"
    assert rows["16"].status.reason == "JobLaunchFailure"
    assert rows["2"].status.reason == "", "the reason for which it waited is stale"
    assert rows["26"].comment == "t;a%j b\\c\"d'e$HOME"


def test_sacct_rows_of_all_attempts() -> None:
    rows = list(parse_sacct(sample("sacct-format.txt")))
    seen = [(row.job_id, row.status.state.value, row.status.exit_code) for row in rows]
    assert seen == [
        ("1", "COMPLETED", 0),
        ("2", "FAILED", 3),
        ("3", "CANCELLED", None),
        ("4", "FAILED", 137),
        ("5", "QUEUED", None),
        ("6", "QUEUED", None),
        ("6", "COMPLETED", 0),
    ]
    assert rows[1].submitted_at == 1795228138.0
    assert (rows[1].status.end, rows[1].status.nodes) == (1795228139.0, "node1")
    assert (rows[4].status.start, rows[4].status.nodes) == (None, "")
    assert {row.status.source for row in rows} == {"accounting"}


def test_lines_that_are_no_rows_are_skipped() -> None:
    assert list(parse_squeue("slurm_load_jobs error: Invalid job id specified\n\n")) == []
    assert list(parse_sacct("Slurm accounting storage is disabled\n")) == []


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("COMPLETED,COMPLETING", JobState.COMPLETING),
        ("FAILED,REQUEUED", JobState.QUEUED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("DEADLINE", JobState.TIMEOUT),
        ("BOOT_FAIL", JobState.NODE_FAIL),
        ("CONFIGURING", JobState.QUEUED),
        ("STOPPED", JobState.SUSPENDED),
        ("REQUEUE_HOLD", JobState.HELD),
        ("LAUNCH_FAILED,FAILED", JobState.FAILED),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("?", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_states(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_an_unknown_state_says_what_slurm_said() -> None:
    (row,) = parse_squeue("5|NOVEL_STATE|1|N/A|N/A||tag|None")
    assert row.status.state is JobState.UNKNOWN
    assert "NOVEL_STATE" in row.status.reason


def test_booting_nodes_are_named() -> None:
    (row,) = parse_squeue("5|CONFIGURING|1|N/A|N/A||tag|None")
    assert row.status.reason == "nodes are booting"


@pytest.mark.parametrize(
    ("text", "job_id"),
    [
        ("28\n", "28"),
        ("28;cluster1\n", "28"),
        ("Welcome to 2026\n****\n29\n", "29"),
        ("no id here\n", None),
        ("", None),
    ],
)
def test_submitted_id(text: str, job_id: str | None) -> None:
    assert submitted_id(text) == job_id


def test_exit_codes_of_scontrol() -> None:
    codes = {}
    for line in (SAMPLES / "exitcodes.txt").read_text().splitlines():
        state = parse_state(line.split("JobState=")[1].split()[0])
        codes[line.split()[0]] = parse_exit_code(line, state)
    assert codes == {
        "JobId=46": 3,
        "JobId=47": None,
        "JobId=48": 128 + 11,
        "JobId=49": 0,
        "JobId=50": 137,
        "JobId=51": 128 + 15,
        "JobId=52": 127,
    }


def test_a_comment_cannot_pretend_an_exit_code() -> None:
    line = "JobId=1 JobState=FAILED Reason=x ExitCode=3:0 Comment=a ExitCode=0:0 b"
    assert parse_exit_code(line, JobState.FAILED) == 3


def test_no_exit_code_in_an_error() -> None:
    assert parse_exit_code(sample("scontrol-unknown.txt"), JobState.FAILED) is None


def test_a_job_of_several_components_is_one() -> None:
    first = "3+0|RUNNING|1|1795307186|N/A|node1|a|b|None"
    second = "3+1|RUNNING|2|1795307186|N/A|node[2-3]|a|b|None"
    (row,) = parse_squeue(f"{first}\n{second}\n")
    assert (row.job_id, row.status.state) == ("3", JobState.RUNNING)
    assert row.status.nodes == "node1,node[2-3]"


def test_the_accounting_has_a_row_for_every_component() -> None:
    row = "{}|COMPLETED|0:0|1795228138|1795228139|1795228141|{}"
    rows = parse_sacct(f"{row.format('3+0', 'node1')}\n{row.format('3+1', 'node2')}\n")
    assert [(found.job_id, found.status.nodes) for found in rows] == [("3", "node1")]


def test_waiting_jobs_of_an_array_stand_in_one_row() -> None:
    rows = parse_squeue(
        "35_[1-2,7%2]|PENDING|1|N/A|N/A||tag|Resources\n35_0|RUNNING|1|1|2|n1|tag|None"
    )
    assert [(row.job_id, row.status.state) for row in rows] == [
        *((f"35_{index}", JobState.QUEUED) for index in (1, 2, 7)),
        ("35_0", JobState.RUNNING),
    ]
    assert [row.job_id for row in parse_sacct("35_[3]|PENDING|0:0|1|Unknown|Unknown|")] == ["35_3"]


def test_what_a_long_row_leaves_out_is_left_out() -> None:
    (row,) = parse_squeue("35_[1-2,...]|PENDING|1|N/A|N/A||tag|None")
    assert row.job_id == "35_[1-2,...]"


def test_exit_codes_of_an_array_by_job() -> None:
    lines = (
        "JobId=6 ArrayJobId=1 ArrayTaskId=1 JobState=FAILED ExitCode=3:0\n"
        "JobId=1 ArrayJobId=1 ArrayTaskId=3 JobState=FAILED ExitCode=4:0\n"
        "JobId=9 JobName=x JobState=FAILED ExitCode=5:0\n"
    )
    shown = parse_shown(lines)
    codes = {job_id: parse_exit_code(line, JobState.FAILED) for job_id, line in shown.items()}
    assert codes == {"1_1": 3, "1_3": 4, "9": 5}

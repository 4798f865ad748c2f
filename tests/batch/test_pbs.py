"""PBS: directives read back by the grammar of qsub, pretended commands, recorded output."""

import re
import signal
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from grammar import directives
from job_requests import wait_until, write_script

from pipectl.batch import Array, JobRequest, JobState, Queue
from pipectl.batch.pbs import PbsScheduler, parse_blocks, parse_qstat, parse_queues
from pipectl.errors import PipectlError
from pipectl.spec.models import Checkpoint

SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "pbs"
ROW = "Job Id: {}\n    Job_Name = {}\n    job_state = R\n"
WITH_VALUE = set("aAcCeJjklmMNopPqrRSuvW")
"""Options that take a value, from qsub(1B)."""
RESOURCE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*=[^,]+")


def options(request: JobRequest) -> list[tuple[str, str]]:
    """Options and values; an option has a value if qsub(1B) says so."""
    found = directives(PbsScheduler().render(request), "pbs")
    for option, *rest in found:
        assert re.fullmatch("-[A-Za-z]", option)
        assert len(rest) == (option[1] in WITH_VALUE)
    return [(option, "".join(value)) for option, *value in found]


def resources(request: JobRequest) -> dict[str, str]:
    found = {}
    for option, value in options(request):
        if option == "-l":
            assert RESOURCE.fullmatch(value)
            name, _, what = value.partition("=")
            assert name not in found, "PBS takes the first of two"
            found[name] = what
    return found


@pytest.mark.parametrize("own", ["naccelerators=4", "model=x:gpus=2", "ngpus=4"])
def test_accelerators_are_asked_for_by_the_name_that_the_site_gives_them(make_request, own):
    asked = resources(make_request(gpus_per_node=4, pbs={"select": own}))
    assert asked["select"] == f"1:ncpus=2:mpiprocs=2:ompthreads=1:{own}"


def test_one_node_is_placed_as_the_site_likes_and_memory_is_rounded_up(make_request):
    asked = resources(make_request(memory_per_node=2**20 + 1))
    assert asked["select"] == "1:ncpus=2:mpiprocs=2:ompthreads=1:mem=2mb"
    assert "place" not in asked


@pytest.mark.parametrize("place", ["place", "Place"])
def test_a_resource_that_is_not_ours_may_be_asked_for(make_request, place):
    own = {"l": ("software=matlab", f"{place}=pack")}
    asked = resources(make_request(nodes=2, pbs={"options": own}))
    assert {"software": "matlab", place: "pack"}.items() <= asked.items()
    assert "scatter" not in asked.values()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_directory": Path("/scratch/a:b")}, r"output\.directory"),  # would name a host
        ({"array": Array((Path("/runs/a"),))}, "no array of one job"),
    ],
)
def test_what_pbs_cannot_run_is_refused(make_request, changes, words):
    with pytest.raises(PipectlError, match=words):
        PbsScheduler().render(make_request(**changes))


def script_of(request: JobRequest, rank: str) -> Path:
    """The script with bash as the launcher of a rank that is written in bash."""
    return write_script(request, "bash", "-c", rank, scheduler="pbs")


WAITS = "until [[ -e stop ]]; do sleep 0.05; done; : >stopped"


def test_it_stops_before_the_walltime_and_submits_itself_again(pbs, make_request):
    pbs.answer("qsub", "12.vm\n")
    request = make_request(walltime=1, checkpoint=Checkpoint(max_requeues=1))
    script = script_of(request, WAITS)
    for attempt in (1, 2):
        done = subprocess.run(["bash", str(script)], timeout=30, check=False)
        assert done.returncode == 75
        assert len(pbs.calls("qsub")) == 1, attempt
    assert pbs.calls("qsub") == [["-C", "#PBS", str(script)]]
    assert (request.run_directory / "resubmitted").read_text() == "12.vm\n"


def test_a_site_that_lets_jobs_submit_none(pbs, make_request):
    pbs.answer("qsub", stderr="qsub: Bad UID for job execution\n", rc=15)
    request = make_request(walltime=1, checkpoint=Checkpoint(max_requeues=1))
    done = subprocess.run(["bash", str(script_of(request, WAITS))], timeout=30, check=False)
    assert done.returncode == 75
    log = (request.run_directory / "logs" / "job.log").read_text()
    assert "qsub: Bad UID for job execution\npipectl: this job may not submit another" in log
    said = (request.run_directory / "requeue_error").read_text()
    assert said == "qsub: Bad UID for job execution\n"
    assert not (request.run_directory / "resubmitted").exists()


def test_a_job_that_is_deleted_does_not_come_back(pbs, make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    rank = "trap '' TERM; : >begun; until [[ -s stop ]]; do sleep 0.05; done; : >stopped"
    job = subprocess.Popen(["bash", str(script_of(request, rank))])
    wait_until((request.run_directory / "begun").exists)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 75
    assert pbs.calls("qsub") == []


def test_other_nodes_are_reached_by_the_task_manager(pbs, make_request):
    pbs.answer("pbs_tmrsh")
    rank = '"$HYDRA_LAUNCHER_EXEC" -x -q n2 "echo \'a  b\'" c; echo "$HYDRA_LAUNCHER"'
    request = make_request(nodes=2)
    subprocess.run(["bash", str(script_of(request, rank))], timeout=30, check=True)
    assert (request.run_directory / "logs" / "job.log").read_text() == "ssh\n"
    assert pbs.calls("pbs_tmrsh") == [["n2", "/bin/bash", "-c", "echo 'a  b' c"]]


def test_query_asks_once_for_all(pbs):
    pbs.answer("qstat", ROW.format("9.vm", "a") + ROW.format("10.vm", "b"), rc=153)
    found = PbsScheduler().query(["9.vm", "10.vm", "99999.vm"])
    assert {job_id: status.state for job_id, status in found.items()} == {
        "9.vm": JobState.RUNNING,
        "10.vm": JobState.RUNNING,
    }
    assert pbs.calls("qstat") == [["-x", "-f", "9.vm", "10.vm", "99999.vm"]]


@pytest.mark.parametrize("sample", ["qstat-unknown.txt", "qstat-finished-nox.txt"])
def test_a_job_that_the_server_has_forgotten_is_absent(pbs, sample):
    pbs.replay("qstat", sample)
    assert PbsScheduler().query(["99999.vm"]) == {}


def test_jobs_of_an_array(pbs):
    row = "Job Id: {}\n    job_state = {}\n"
    over = row.format("41[2].vm", "X") + "    substate = 92\n"
    failed = row.format("41[3].vm", "X") + "    substate = 93\n    Exit_status = 3\n"
    deleted = row.format("41[4].vm", "X") + "    substate = 91\n"
    rows = [row.format("41[].vm", "B"), row.format("41[0].vm", "R"), row.format("41[1].vm", "Q")]
    pbs.answer("qstat", "".join([*rows, over, failed, deleted]))
    scheduler = PbsScheduler()
    ids = [scheduler.task_id("41[].vm", index) for index in range(5)]
    found = scheduler.query([*ids, "7.vm"])
    assert [found[job_id].state for job_id in ids] == [
        *(JobState.RUNNING, JobState.QUEUED, JobState.UNKNOWN),
        *(JobState.FAILED, JobState.CANCELLED),
    ]
    assert pbs.calls("qstat") == [["-x", "-t", "-f", "41[].vm", "7.vm"]]
    assert scheduler.array_id("41[3].vm") == scheduler.array_id("41[].vm") == "41[].vm"
    assert scheduler.array_id("7.vm") == "7.vm"


def listed(**fields: object) -> str:
    lines = (f"    {name} = {value}" for name, value in fields.items())
    return "\n".join(("Job Id: 7.vm", *lines, ""))


def test_a_job_that_waits():
    text = (SAMPLES / "qstat-f.txt").read_text()
    (status,) = parse_qstat(text).values()
    assert list(parse_qstat(text)) == ["44.vm"]
    assert (status.state, status.reason) == (JobState.QUEUED, "Not enough free nodes available")
    assert (status.start, status.end, status.exit_code, status.nodes) == (None, None, None, "")
    assert parse_blocks(text)["44.vm"]["Job_Name"] == "mpi_run"


def test_a_job_that_runs_on_two_nodes():
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
def test_ends(fields, state, code, reason):
    text = listed(job_state="F", mtime="Fri Nov 20 16:34:21 2026", **fields)
    status = parse_qstat(text)["7.vm"]
    assert (status.state.value, status.exit_code) == (state, code)
    assert reason in status.reason
    assert (status.end is not None) == status.state.final


@pytest.mark.parametrize(
    ("letter", "state", "reason", "more"),
    [
        ("Q", "QUEUED", "", {}), ("W", "QUEUED", "", {}), ("T", "QUEUED", "", {}),
        ("H", "HELD", "waits for afterok:4.vm@vm", {"depend": "afterok:4.vm@vm"}),
        ("R", "RUNNING", "", {}), ("B", "RUNNING", "", {}), ("S", "SUSPENDED", "", {}),
        ("U", "SUSPENDED", "", {}), ("E", "COMPLETING", "", {}),
        ("M", "UNKNOWN", "moved", {}), ("?", "UNKNOWN", "'?'", {}), ("", "UNKNOWN", "''", {}),
        # The environment of a job says nothing of its state.
        ("R", "RUNNING", "", {"Variable_List": "A=1,\n\tB=\n    job_state = F"}),
    ],
)  # fmt: skip
def test_letters(letter, state, reason, more):
    status = parse_qstat(listed(job_state=letter, **more))["7.vm"]
    assert status.state.value == state
    assert reason in status.reason


def test_several_jobs_and_long_lines():
    text = (
        listed(job_state="R", exec_host="n1/0+") + "\tn2/0\n\nJob Id: 8[3].vm\n    job_state = Q\n"
    )
    found = parse_qstat(text)
    assert found["7.vm"].nodes == "n1,n2"
    assert found["8[3].vm"].state is JobState.QUEUED


@pytest.mark.parametrize("text", ["", "\n", "qstat: Unknown Job Id 99999.vm", "    job_state = F"])
def test_nothing_is_found_in_other_text(text):
    assert parse_qstat(text) == {}


def test_queues(pbs):
    for command, name in (("qstat", "qstat-Q-f.txt"), ("pbsnodes", "pbsnodes-a.txt")):
        pbs.replay(command, name)
    assert [queue.name for queue in PbsScheduler().queues()] == ["workq", "small", "closed"]
    names = ("qstat-Q-f.txt", "qstat-B-f.txt", "pbsnodes-a.txt")
    texts = ("\n".join((SAMPLES / name).read_text().splitlines()[1:-1]) for name in names)
    node = {"cores": 4, "memory_bytes": 4026532 * 1024, "gpus": 1}
    assert parse_queues(*texts) == (
        Queue("workq", True, True, 86400, nodes=2, **node),  # type: ignore[arg-type]
        Queue("small", False, True, 300, nodes=1, **node),  # type: ignore[arg-type]
        Queue("closed", False, False, None, nodes=2, **node),  # type: ignore[arg-type]
    )
    assert parse_queues("garbage", "a|b", "|||||") == ()

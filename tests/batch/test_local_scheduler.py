"""LocalScheduler with real processes."""

import os
import socket
import subprocess

import psutil
import pytest

from pipectl.batch import JobState, get_scheduler, process
from pipectl.batch.local import LocalScheduler
from pipectl.errors import SchedulerError, UsageError
from tests.batch.job_requests import wait_until, write_script

TAG = "20260101-run 1f3a"
ME = f"{os.getpid()}.{process.start_time(os.getpid())}@{socket.gethostname()}"


def submit(scheduler, request, command):
    """Submit a job of one rank, without MPI."""
    return scheduler.submit(write_script(request, "bash", "-c", command), request)


def test_a_job_has_a_session_of_its_own_is_found_by_its_tag_and_leaves_log_and_exit_code(
    make_request,
):
    """Its submission may have been interrupted before the id was written down."""
    scheduler = LocalScheduler()
    request = make_request(tag=TAG, setup=('echo "$#" arguments',))
    command = "echo to-out; echo to-err >&2; until [[ -e go ]]; do sleep 0.05; done; exit 3"
    job_id = submit(scheduler, request, command)
    pid = int(job_id.split(".")[0])
    assert os.getsid(pid) == pid
    wait_until(lambda: scheduler.find(TAG) is not None)
    assert scheduler.find(TAG) == job_id
    assert scheduler.find(TAG[:-1]) is None
    assert scheduler.query([job_id])[job_id].state is JobState.RUNNING
    (request.run_directory / "go").touch()
    wait_until((request.run_directory / "starts/1/exit_code").exists)
    assert (request.run_directory / "starts/1/exit_code").read_text() == "3\n"
    log = (request.run_directory / "logs" / "job.log").read_text()
    assert log == "0 arguments\nto-out\nto-err\n"
    wait_until(lambda: scheduler.query([job_id])[job_id].state is JobState.FAILED)
    assert scheduler.find(TAG) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users at hand")
def test_jobs_of_others_are_never_taken_for_ours():
    """Tags are no secrets."""
    command = ["bash", "-s", TAG]
    with subprocess.Popen(command, user=65534, group=65534, stdin=subprocess.PIPE) as theirs:
        wait_until(lambda: psutil.Process(theirs.pid).cmdline() == command)
        assert LocalScheduler().find(TAG) is None


def test_a_cancelled_job_leaves_its_exit_code_and_no_rank_that_ignores_the_signal(make_request):
    """Ranks may be in other sessions."""
    scheduler = LocalScheduler(grace_s=0.3)
    request = make_request()
    command = "setsid bash -c \"trap '' TERM; echo \\$\\$ >rank; sleep 50; sleep 50\""
    job_id = submit(scheduler, request, command)
    rank = request.run_directory / "rank"
    wait_until(lambda: rank.exists() and bool(rank.read_text()))
    scheduler.cancel(job_id)
    wait_until(lambda: process.start_time(int(rank.read_text())) is None)
    assert scheduler.query([job_id])[job_id].state is JobState.FAILED
    assert (request.run_directory / "starts/1/exit_code").exists()
    scheduler.cancel(job_id)


@pytest.mark.parametrize(
    ("job_id", "expected", "words"),
    [
        (ME, JobState.RUNNING, None),
        # A reused pid: cancelling it would end this very process.
        (f"{os.getpid()}.1@{socket.gethostname()}", JobState.FAILED, ""),
        ("12.34@elsewhere", JobState.UNKNOWN, "elsewhere"),
        ("12", JobState.UNKNOWN, "'12' is not the id of a local job"),
    ],
    ids=["alive", "reused", "elsewhere", "damaged"],
)
def test_jobs_by_their_ids(job_id, expected, words):
    """One that is damaged hides no other."""
    scheduler = LocalScheduler()
    found = scheduler.query([job_id, ME])
    assert (found[job_id].state, found[ME].state) == (expected, JobState.RUNNING)
    assert (words or "") in found[job_id].reason
    if words:
        with pytest.raises(SchedulerError, match=words):
            scheduler.cancel(job_id)
    elif words is not None:
        scheduler.cancel(job_id)


def test_there_is_no_queue_and_a_log_that_cannot_be_written_is_named(make_request):
    scheduler = LocalScheduler()
    assert scheduler.estimate("#!/bin/bash\n") is None
    assert (scheduler.find("tag"), scheduler.queues()) == (None, ())
    request = make_request()
    (request.run_directory / "logs" / "job.log").mkdir(parents=True)
    with pytest.raises(SchedulerError, match=r"job\.log"):
        submit(scheduler, request, "true")
    with pytest.raises(UsageError, match="did you mean 'slurm'"):
        get_scheduler("slrum")

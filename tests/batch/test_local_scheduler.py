"""LocalScheduler with real processes."""

import os
import socket
import subprocess
from contextlib import suppress

import psutil
import pytest
from job_requests import wait_until, write_script

from pipectl.batch import JobRequest, JobState, JobStatus, get_scheduler, process
from pipectl.batch.local import LocalScheduler
from pipectl.errors import SchedulerError, UsageError

TAG = "20260101-run 1f3a"
ME = f"{os.getpid()}.{process.start_time(os.getpid())}@{socket.gethostname()}"


def submit(scheduler: LocalScheduler, request: JobRequest, command: str) -> str:
    """Submit a job of one rank, without MPI."""
    return scheduler.submit(write_script(request, "bash", "-c", command), request)


def state(scheduler: LocalScheduler, job_id: str) -> JobStatus:
    return scheduler.query([job_id])[job_id]


def test_a_job_runs_in_a_session_of_its_own_and_leaves_log_and_exit_code(make_request):
    scheduler = LocalScheduler()
    request = make_request()
    command = "echo to-out; echo to-err >&2; until [[ -e go ]]; do sleep 0.05; done; exit 3"
    job_id = submit(scheduler, request, command)
    pid = int(job_id.split(".")[0])
    assert os.getsid(pid) == pid
    (request.run_directory / "go").touch()
    wait_until((request.run_directory / "exit_code").exists)
    assert (request.run_directory / "exit_code").read_text() == "3\n"
    assert (request.run_directory / "logs" / "job.log").read_text() == "to-out\nto-err\n"
    wait_until(lambda: state(scheduler, job_id).state is JobState.FAILED)


def test_a_job_is_found_by_its_tag(make_request):
    """If its submission was interrupted before the id was written down. It does not see the tag."""
    scheduler = LocalScheduler()
    request = make_request(tag=TAG, setup=('echo "$#" >arguments',))
    job_id = submit(scheduler, request, "sleep 60")
    try:
        wait_until(lambda: scheduler.find(TAG) is not None)
        assert scheduler.find(TAG) == job_id
        assert scheduler.find(TAG[:-1]) is None
        arguments = request.run_directory / "arguments"
        wait_until(lambda: arguments.exists() and arguments.read_text() == "0\n")
    finally:
        scheduler.cancel(job_id)
    assert scheduler.find(TAG) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users at hand")
def test_jobs_of_others_are_never_taken_for_ours():
    """Tags are no secrets."""
    command = ["bash", "-s", TAG]
    with subprocess.Popen(command, user=65534, group=65534, stdin=subprocess.PIPE) as theirs:
        wait_until(lambda: psutil.Process(theirs.pid).cmdline() == command)
        assert LocalScheduler().find(TAG) is None


def test_a_running_job_is_cancelled_with_its_exit_code(make_request):
    scheduler = LocalScheduler()
    request = make_request()
    command = "trap 'exit 7' TERM; touch ready; while :; do sleep 0.05; done"
    job_id = submit(scheduler, request, command)
    wait_until((request.run_directory / "ready").exists)
    assert state(scheduler, job_id).state is JobState.RUNNING
    scheduler.cancel(job_id)
    assert state(scheduler, job_id).state is JobState.FAILED
    assert (request.run_directory / "exit_code").exists()
    scheduler.cancel(job_id)


def test_ranks_in_other_sessions_that_ignore_the_signal_are_killed(make_request):
    scheduler = LocalScheduler(grace_s=0.3)
    request = make_request()
    command = "setsid bash -c \"trap '' TERM; echo \\$\\$ >rank; sleep 50; sleep 50\""
    job_id = submit(scheduler, request, command)
    rank = request.run_directory / "rank"
    wait_until(lambda: rank.exists() and bool(rank.read_text()))
    scheduler.cancel(job_id)
    wait_until(lambda: process.start_time(int(rank.read_text())) is None)
    assert state(scheduler, job_id).state is JobState.FAILED


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


def test_there_is_no_queue_to_ask(make_request):
    scheduler = LocalScheduler()
    assert scheduler.estimate("#!/bin/bash\n") is None
    assert (scheduler.find("tag"), scheduler.queues()) == (None, ())
    with pytest.raises(SchedulerError, match="cannot wait for other runs"):
        scheduler.render(make_request(after=(ME,)))


def test_a_log_that_cannot_be_written_is_named(make_request):
    request = make_request()
    (request.run_directory / "logs" / "job.log").mkdir(parents=True)
    with pytest.raises(SchedulerError, match=r"job\.log"):
        submit(LocalScheduler(), request, "true")


def test_schedulers_by_name():
    for name in ("local", "slurm", "pbs"):
        assert get_scheduler(name).name == name
    with pytest.raises(UsageError, match="did you mean 'slurm'"):
        get_scheduler("slrum")


def test_a_job_counts_its_starts_and_keeps_their_errors(make_request):
    scheduler = LocalScheduler()
    request = make_request()
    directory = request.run_directory
    (directory / "errors").mkdir(parents=True)
    for attempt in (1, 2, 3):
        with suppress(FileNotFoundError):
            (directory / "exit_code").unlink()
        submit(
            scheduler, request, 'echo "$PIPECTL_ATTEMPT"; echo {} >errors/rank-0000.json; exit 1'
        )
        wait_until((directory / "exit_code").exists)
        assert (directory / "attempt").read_text() == f"{attempt}\n"
    assert (directory / "logs" / "job.log").read_text() == "1\n2\n3\n"
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("rank-0000.json"))
    assert found == [
        "errors/attempt-1/rank-0000.json",
        "errors/attempt-2/rank-0000.json",
        "errors/rank-0000.json",
    ]

"""LocalScheduler with real processes."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from job_requests import change

from pipectl.batch import JobRequest, JobState, JobStatus, get, process
from pipectl.batch.local import LocalScheduler
from pipectl.errors import SchedulerError, UsageError
from pipectl.spec.models import Checkpoint

MakeRequest = Callable[..., JobRequest]


def submit(scheduler: LocalScheduler, request: JobRequest) -> str:
    """Submit with a launcher that drops ``-n <ranks>`` and runs the command once."""
    request.run_directory.mkdir(exist_ok=True)
    fake = request.run_directory.parent / "mpiexec"
    fake.write_text('#!/bin/bash\nshift 2\n"$@"\n')
    fake.chmod(0o755)
    script = request.run_directory / "job.sh"
    script.write_text(scheduler.render(request))
    return scheduler.submit(script, request)


def state(scheduler: LocalScheduler, job_id: str) -> JobStatus:
    return scheduler.query([job_id])[job_id]


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never happened")


@pytest.fixture
def request_of(make_request: MakeRequest, tmp_path: Path) -> Callable[[str], JobRequest]:
    def build(command: str) -> JobRequest:
        return make_request(command=("bash", "-c", command), mpiexec=str(tmp_path / "mpiexec"))

    return build


def test_a_job_runs_and_leaves_log_and_exit_code(
    request_of: Callable[[str], JobRequest],
) -> None:
    scheduler = LocalScheduler()
    request = request_of("echo to-out; echo to-err >&2; exit 3")
    job_id = submit(scheduler, request)
    wait_until(lambda: (request.run_directory / "exit_code").exists())
    assert (request.run_directory / "exit_code").read_text() == "3\n"
    log = (request.run_directory / "logs" / "job.log").read_text()
    assert log == "to-out\nto-err\n"
    wait_until(lambda: state(scheduler, job_id).state is JobState.FAILED)


def test_a_job_is_found_by_its_tag(request_of: Callable[[str], JobRequest]) -> None:
    """As where its submission was interrupted before the id was written down."""
    scheduler = LocalScheduler()
    request = change(request_of("sleep 60"), tag="20260101-run 1f3a")
    job_id = submit(scheduler, request)
    try:
        wait_until(lambda: scheduler.find("20260101-run 1f3a") is not None)
        assert scheduler.find("20260101-run 1f3a") == job_id
        assert scheduler.find("20260101-run 1f3") is None
    finally:
        scheduler.cancel(job_id)
    assert scheduler.find("20260101-run 1f3a") is None


def test_scripts_of_others_that_are_pipes_are_not_read(tmp_path: Path) -> None:
    """Reading one would take for ever."""
    pipe = tmp_path / "job.sh"
    os.mkfifo(pipe)
    with subprocess.Popen(["bash", str(pipe)]) as other:
        try:
            assert LocalScheduler().find("20260101-run 1f3a") is None
        finally:
            other.kill()


def test_only_the_begin_of_scripts_is_read(tmp_path: Path) -> None:
    """Of a file that is mostly a hole, which would not fit into memory."""
    script = tmp_path / "job.sh"
    script.write_text("# pipectl demo '20260101-run 1f3a'\nsleep 60\n")
    os.truncate(script, 2**40)
    with subprocess.Popen(["bash", str(script)], stderr=subprocess.DEVNULL) as own:
        try:
            wait_until(lambda: psutil.Process(own.pid).cmdline()[:1] == ["bash"])
            own.send_signal(signal.SIGSTOP)
            found = LocalScheduler().find("20260101-run 1f3a")
            assert found is not None
            assert found.startswith(f"{own.pid}.")
        finally:
            own.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users at hand")
def test_jobs_of_others_are_never_taken_for_ours(tmp_path: Path) -> None:
    """Tags are no secrets, and scripts of others may bear any."""
    script = tmp_path / "job.sh"
    script.write_text("# pipectl demo '20260101-run 1f3a'\nsleep 60\nsleep 60\n")
    script.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents[:-2]):  # all below /tmp
        folder.chmod(0o755)
    with subprocess.Popen(["bash", str(script)], user=65534, group=65534) as theirs:
        try:
            wait_until(lambda: psutil.Process(theirs.pid).cmdline()[:1] == ["bash"])
            assert LocalScheduler().find("20260101-run 1f3a") is None
        finally:
            theirs.kill()


def test_a_running_job_is_cancelled_with_its_exit_code(
    request_of: Callable[[str], JobRequest],
) -> None:
    scheduler = LocalScheduler()
    request = request_of("trap 'exit 7' TERM; touch ready; while :; do sleep 0.05; done")
    job_id = submit(scheduler, request)
    wait_until(lambda: (request.run_directory / "ready").exists())
    assert state(scheduler, job_id).state is JobState.RUNNING
    scheduler.cancel(job_id)
    assert state(scheduler, job_id).state is JobState.FAILED
    assert (request.run_directory / "exit_code").exists()
    scheduler.cancel(job_id)


def test_ranks_in_other_sessions_that_ignore_the_signal_are_killed(
    request_of: Callable[[str], JobRequest],
) -> None:
    scheduler = LocalScheduler(grace_s=0.3)
    request = request_of("setsid bash -c \"trap '' TERM; echo \\$\\$ >rank; sleep 50; sleep 50\"")
    job_id = submit(scheduler, request)
    rank = request.run_directory / "rank"
    wait_until(lambda: rank.exists() and bool(rank.read_text()))
    scheduler.cancel(job_id)
    wait_until(lambda: _is_gone(int(rank.read_text())))
    assert state(scheduler, job_id).state is JobState.FAILED


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_job_has_a_session_of_its_own(request_of: Callable[[str], JobRequest]) -> None:
    scheduler = LocalScheduler()
    request = request_of("while :; do sleep 0.05; done")
    job_id = submit(scheduler, request)
    pid = int(job_id.split(".")[0])
    assert os.getsid(pid) == pid
    scheduler.cancel(job_id)


def test_a_reused_pid_is_not_mistaken_for_the_job() -> None:
    scheduler = LocalScheduler()
    mine = f"{os.getpid()}.1@{socket.gethostname()}"
    assert state(scheduler, mine).state is JobState.FAILED
    scheduler.cancel(mine)  # would end this very process


def test_a_job_of_another_host_is_unknown_and_cannot_be_cancelled() -> None:
    scheduler = LocalScheduler()
    status = state(scheduler, "12.34@elsewhere")
    assert status.state is JobState.UNKNOWN
    assert "elsewhere" in status.reason
    with pytest.raises(SchedulerError, match="elsewhere"):
        scheduler.cancel("12.34@elsewhere")


def test_a_damaged_id_is_named_and_hides_no_other_job() -> None:
    mine = f"{os.getpid()}.{process.start_time(os.getpid())}@{socket.gethostname()}"
    found = LocalScheduler().query(["12", mine])
    assert found["12"].state is JobState.UNKNOWN
    assert "'12' is not the id of a local job" in found["12"].reason
    assert found[mine].state is JobState.RUNNING
    with pytest.raises(SchedulerError, match="'12'"):
        LocalScheduler().cancel("12")


def test_srun_is_refused(make_request: MakeRequest) -> None:
    with pytest.raises(SchedulerError, match="srun"):
        LocalScheduler().render(make_request(launcher="srun"))


def test_there_is_no_queue_to_ask() -> None:
    scheduler = LocalScheduler()
    assert scheduler.estimate(Path("job.sh")) is None
    assert (scheduler.find("tag"), scheduler.queues()) == (None, ())


def test_schedulers_by_name() -> None:
    assert get("local").name == "local"
    assert get("slurm").name == "slurm"
    with pytest.raises(UsageError, match="did you mean 'slurm'"):
        get("slrum")


@pytest.mark.parametrize(("saves", "code"), [(True, 75), (False, 0)])
def test_a_signal_is_passed_on_as_a_file(
    make_request: MakeRequest, tmp_path: Path, saves: bool, code: int
) -> None:
    """Not to the launcher; ranks that end early then say so, and others were done anyway."""
    scheduler = LocalScheduler()
    ending = ': >"$PIPECTL_RUN_DIRECTORY/stopped"; ' if saves else ""
    command = f'until [[ -e "$PIPECTL_RUN_DIRECTORY/stop" ]]; do sleep 0.05; done; {ending}exit 0'
    request = make_request(
        command=("bash", "-c", command),
        mpiexec=str(tmp_path / "mpiexec"),
        checkpoint=Checkpoint(max_requeues=0),
    )
    job_id = submit(scheduler, request)
    directory = request.run_directory
    wait_until(lambda: (directory / "attempt").exists())
    time.sleep(0.3)
    os.kill(int(job_id.partition(".")[0]), signal.SIGUSR1)
    wait_until(lambda: (directory / "exit_code").exists())
    assert (directory / "exit_code").read_text() == f"{code}\n"


def test_a_job_counts_its_starts_and_keeps_their_errors(
    request_of: Callable[[str], JobRequest],
) -> None:
    scheduler = LocalScheduler()
    request = request_of('echo "$PIPECTL_ATTEMPT"; echo {} >errors/rank-0000.json; exit 1')
    directory = request.run_directory
    (directory / "errors").mkdir(parents=True)
    submit(scheduler, request)
    for attempt in (1, 2, 3):
        if attempt > 1:
            (directory / "exit_code").unlink()
            scheduler.submit(directory / "job.sh", request)
        wait_until(lambda: (directory / "exit_code").exists())
        assert (directory / "attempt").read_text() == f"{attempt}\n"
    assert (directory / "logs" / "job.log").read_text() == "1\n2\n3\n"
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("rank-0000.json"))
    assert found == [
        "errors/attempt-1/rank-0000.json",
        "errors/attempt-2/rank-0000.json",
        "errors/rank-0000.json",
    ]

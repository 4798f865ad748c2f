"""`pipectl logs -f` and `pipectl submit --wait`, of runs that go on, end or are lost."""

import shutil
import signal
import socket
import time
from types import SimpleNamespace

import pytest

LISTED = "echo '12|{}|1|N/A|N/A|n1||None'"


@pytest.mark.parametrize(("state", "exit_code"), [("RUNNING", None), ("PENDING", "75\n")])
def test_a_log_is_followed_as_it_grows(cli, queued, program, monkeypatch, state, exit_code):
    """Also if the run will start again: its exit code is that of the start before."""
    (queued / "logs/job.log").write_text("started\n")
    if exit_code is not None:
        (queued / "exit_code").write_text(exit_code)
    program("squeue", LISTED.format(state))
    program("sacct", "exit 1")
    looks = iter(range(100))

    def goes_on(_seconds):
        if next(looks) == 3:
            (queued / "logs/job.log").write_text("started\nmore\n")
            (queued / "exit_code").write_text("0\n")
            program("squeue", "exit 0")

    clock = SimpleNamespace(time=time.time, sleep=goes_on)
    monkeypatch.setattr("pipectl.jobs.state.time", clock)
    assert cli("logs", "-f").out == "started\nmore\n"


@pytest.mark.parametrize("lost", ["machine", "directory", "scheduler"])
def test_a_log_is_not_followed_for_ever_if_nobody_knows_of_an_end(cli, run_of, monkeypatch, lost):
    """Of a run of another machine, one that was removed, or one whose batch system is gone."""
    slurm = {"scheduler": "slurm", "job_id": "12"}
    elsewhere = {"job_id": f"1.1@not-{socket.gethostname()}"}
    run = run_of("20250103-120000-tiny", **(slurm if lost == "scheduler" else elsewhere))
    log = run / "logs/job.log"
    log.write_text("started\n")
    now = 0.0

    def pass_by(seconds):
        nonlocal now
        now += seconds
        assert now < 1000
        if now == 50 and lost == "directory":
            shutil.rmtree(run)
        elif now == 50:
            log.write_text("started\nmore\nand ended in the mid")

    clock = SimpleNamespace(time=time.time, sleep=pass_by)
    monkeypatch.setattr("pipectl.jobs.state.time", clock)
    result = cli("logs", "-f")
    rest = "" if lost == "directory" else "more\nand ended in the mid\n"
    assert (result.code, result.out) == (6, f"started\n{rest}")
    assert result.err.startswith(
        f"error: {run.name}: the log has stopped, and it is unknown whether the run is alive: "
    )
    assert result.err.endswith(f"follow it again: pipectl logs -f {run.name}\n")
    assert 60 <= now <= 130, "as long after the last line"


LOCAL_JOB = """\
[ "$1" = --version ] && exit 1
while [ "$1" != --run ]; do shift; done
run=$2
echo '{"attempt":1,"step":1,"steps":4,"time":0,"loss":2.5,"step_time_s":0.1}' > $run/metrics.jsonl
"""


@pytest.fixture
def local_mpi(mpiexec):
    """mpiexec beside the interpreter; what it runs is up to the test."""
    return lambda text: mpiexec(LOCAL_JOB + text)


def test_wait_follows_a_local_run_to_its_end_and_tells_phase_step_and_loss(
    cli, profile, local_mpi, only_run
):
    beat = '{"version":1,"state":"training","step":1,"steps":4,"time":1,"ranks":[]}'
    local_mpi(f"echo '{beat}' > $run/heartbeat.json; sleep 2.5; exit 0")
    result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    assert result.code == 0
    assert f"{only_run().name}  COMPLETED  local job " in result.out
    assert "  loss          2.5 at first, 2.5 now\n" in result.out
    assert "RUNNING: training, step 1 of 4, loss 2.5\n" in result.err
    assert result.err.splitlines()[-1] == "COMPLETED"


def test_wait_returns_the_code_of_the_failure(cli, profile, local_mpi):
    report = '{"rank":1,"type":"MismatchError","message":"no","time":1,"exit_code":3}'
    local_mpi(f"echo '{report}' > $run/errors/rank-0001.json; exit 9")
    result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    assert result.code == 3
    assert "  FAILED  local job " in result.out
    assert "  error         rank 1\n                MismatchError: no\n" in result.out


def test_an_interrupt_ends_the_waiting_and_not_the_run(
    cli, profile, local_mpi, monkeypatch, only_run
):
    def interrupt(_seconds):
        while not (only_run() / "metrics.jsonl").exists():
            time.sleep(0.02)
        signal.raise_signal(signal.SIGHUP)

    local_mpi("exec sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.jobs.state.time", SimpleNamespace(time=time.time, sleep=interrupt))
        result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    run = only_run().name
    assert result.code == 130
    assert f"\nthe run continues; cancel it with: pipectl cancel {run}\n" in result.err
    assert "  RUNNING  local job " in cli("status", "last").out
    assert cli("cancel", "last").out == f"cancelled: {run}\n"
    assert "  CANCELLED  local job " in cli("status", "last").out

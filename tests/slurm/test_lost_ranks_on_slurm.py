"""Ranks over the nodes of a real Slurm, of which one is killed, or its node is gone."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from job_requests import make_request, wait_until

from pipectl.batch import JobState
from pipectl.batch.script import render_variables
from pipectl.batch.slurm import SlurmScheduler
from pipectl.runs import RunDirectory, read_errors, read_exit_code

pytestmark = [pytest.mark.mpi, pytest.mark.torture, pytest.mark.timeout(240)]
RING = Path(__file__).parents[1] / "runtime" / "watch" / "ranks_that_wait.py"
LAB = Path(__file__).parents[2] / "slurm" / "lab"
SLURM = SlurmScheduler()


@pytest.fixture
def submit(lab, tmp_path):
    """``submit(what)``: three ranks on three nodes, of which the second meets with something."""
    beside = Path(sys.executable).parent / "mpiexec"

    def start(what):
        run = RunDirectory(tmp_path / "run")
        for folder in (run.errors, run.logs):
            folder.mkdir(parents=True)
        request = make_request(
            run.path,
            tag=f"tag-{time.time_ns()}",
            python=sys.executable,
            nodes=3,
            tasks_per_node=1,
            walltime=300,
            command=(sys.executable, "-m", "mpi4py", str(RING), "--run", str(run.path)),
            variables={"TEST_HAPPENS": what},
            mpiexec=str(beside) if beside.exists() else shutil.which("mpiexec"),
        )
        script = SLURM.render(request).replace("tick_s=5", "tick_s=0.1")
        run.script.write_text(script)
        run.variables.write_text(render_variables(request))
        return run, SLURM.submit(run.script, request)

    return start


def processes(run: RunDirectory) -> dict[int, list[psutil.Process]]:
    """Of every rank, and the one beside it."""
    found = {}
    for path in run.path.glob("pids-*"):
        pids = [pid for pid, _ in json.loads(path.read_text())["family"]]
        found[int(path.name[5:])] = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return found


def test_a_killed_rank(submit, wait_for):
    run, job_id = submit("killed")
    wait_for(job_id)
    wait_until(lambda: read_errors(run), 20)
    (error,) = read_errors(run)
    assert (error.rank, error.step, error.host) == (1, 3, "node2")
    assert error.message.startswith("its process was killed")
    assert error.time - float((run.path / "happened").read_text()) < 10
    wait_until(lambda: not any(processes(run).values()), 20)


def processes_of_node(run: RunDirectory, lab: Path) -> list[psutil.Process]:
    """On the second: Slurm's daemon, its step, the launcher's process, the rank and its watcher."""
    rank = processes(run)[1][0]
    daemon = psutil.Process(int((lab / "slurmd.node2.pid").read_text()))
    above = [process for process in rank.parents() if "slurmstepd" in process.name()]
    steps = [process for process in above if process.pid != daemon.pid]
    assert steps
    return [daemon, *steps, *steps[0].children(recursive=True)]


def test_a_frozen_node(submit, wait_for, lab):
    """Slurm does not notice for long, and the launcher waits; the job ends and frees the others."""
    conf = lab / "slurm.conf"
    text = conf.read_text()
    conf.write_text(text.replace("SlurmdTimeout=15", "SlurmdTimeout=3000"))
    subprocess.run(["scontrol", "reconfigure"], check=True)
    run, job_id = submit("lingers")
    wait_until((run.path / "happened").exists)
    frozen = processes_of_node(run, lab)
    try:
        for process in frozen:
            process.suspend()
        wait_for(job_id, JobState.COMPLETING)
        wait_until(lambda: SLURM.query([job_id])[job_id].nodes == "node2", 30)
        assert read_exit_code(run) == 137
        (error,) = read_errors(run)
        assert (error.rank, error.host) == (1, "node2")
        assert "the launcher has not ended: it is killed" in run.job_log.read_text()
    finally:
        for process in reversed(frozen):
            with suppress(psutil.NoSuchProcess):
                process.resume()
        conf.write_text(text)
        subprocess.run(["scontrol", "reconfigure"], check=True)
    wait_for(job_id)


def test_a_lost_node(submit, wait_for, lab):
    """Everything there is killed at once: Slurm's daemon, its step, the launcher's, the rank."""
    run, job_id = submit("lingers")
    wait_until((run.path / "happened").exists)
    time.sleep(2)
    lost = processes_of_node(run, lab)
    lost_at = time.time()
    try:
        for process in lost:
            process.kill()
        wait_for(job_id)
        wait_until(lambda: read_errors(run), 30)
        wait_until(lambda: not any(processes(run).values()), 20)
    finally:
        psutil.wait_procs(lost, timeout=20)
        subprocess.run([LAB / "up"], capture_output=True, check=True, timeout=60)
    (error,) = read_errors(run)
    assert (error.rank, error.host) == (1, "node2")
    assert "the node is gone" in error.message
    assert error.time - lost_at < 30

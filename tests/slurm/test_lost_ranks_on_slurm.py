"""Ranks over the nodes of a real Slurm, of which one is killed, or its node is gone."""

import json
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
def submit(lab, mpiexec, tmp_path):
    """``submit(what)``: three ranks on three nodes, of which the second meets with something."""

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
            mpiexec=mpiexec,
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


def test_a_frozen_node(submit, wait_for, processes_on, lab):
    """Slurm does not notice for long, and the launcher waits; the job ends and frees the others."""
    conf = lab / "slurm.conf"
    text = conf.read_text()
    conf.write_text(text.replace("SlurmdTimeout=15", "SlurmdTimeout=3000"))
    subprocess.run(["scontrol", "reconfigure"], check=True)
    run, job_id = submit("lingers")
    wait_until((run.path / "happened").exists)
    frozen = processes_on("node2")
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


@pytest.mark.parametrize("lost", ["rank", "node"])
def test_what_is_lost_is_named_and_all_end(submit, wait_for, processes_on, lost):
    """With a node, everything there is killed at once: Slurm's daemon, its step, the launcher's
    process, the rank."""
    run, job_id = submit("killed" if lost == "rank" else "lingers")
    wait_until((run.path / "happened").exists)
    happened = float((run.path / "happened").read_text())
    if lost == "node":
        time.sleep(2)
        there, happened = processes_on("node2"), time.time()
        for process in there:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    wait_for(job_id)
    wait_until(lambda: read_errors(run), 30)
    wait_until(lambda: not any(processes(run).values()), 20)
    if lost == "node":
        psutil.wait_procs(there, timeout=20)
        subprocess.run([LAB / "up"], capture_output=True, check=True, timeout=60)
    (error,) = read_errors(run)
    assert (error.rank, error.host) == (1, "node2")
    assert ("killed (by SIGKILL" if lost == "rank" else "the node is gone") in error.message
    assert error.time - happened < 30

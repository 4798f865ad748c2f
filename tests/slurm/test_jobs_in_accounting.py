"""What is known of jobs that Slurm has forgotten, where it keeps accounts of them."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from job_requests import wait_until

from pipectl.batch import JobState
from pipectl.batch.slurm import SlurmScheduler

LAB = Path(__file__).parents[2] / "slurm" / "lab"
PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")


@pytest.fixture
def accounts(lab, free_ports, tmp_path, monkeypatch):
    """A lab that forgets jobs at once, but for its accounts."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if any(shutil.which(program, path=path) is None for program in PROGRAMS):
        pytest.skip("needs slurmdbd and mariadb-server")
    state = Path(f"{lab}-3")
    monkeypatch.setenv("PIPECTL_LAB", str(state))
    monkeypatch.setenv("PIPECTL_LAB_PORT", str(free_ports))
    monkeypatch.setenv("PIPECTL_LAB_ACCOUNTING", "1")
    monkeypatch.setenv("PIPECTL_LAB_REMEMBERS", "2")
    monkeypatch.setenv("SLURM_CONF", str(state / "slurm.conf"))
    try:
        said = tmp_path / "up.log"  # the database holds on to a pipe
        with said.open("w") as file:
            up = subprocess.run([LAB / "up"], stdout=file, stderr=file, timeout=180)
        assert up.returncode == 0, said.read_text()
        yield state
    finally:
        subprocess.run([LAB / "down"], check=True, timeout=180)
        shutil.rmtree(state, ignore_errors=True)


def sbatch(command: str, *options: str) -> str:
    words = ["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}"]
    return subprocess.check_output(words, text=True).strip()


def test_they_end_as_they_did(accounts):
    slurm, since = SlurmScheduler(), time.time()
    array = sbatch("exit $SLURM_ARRAY_TASK_ID", "--array=0-1")
    cancelled = sbatch("sleep 100")
    expected = {
        sbatch("true"): (JobState.COMPLETED, 0),
        sbatch("exit 3"): (JobState.FAILED, 3),
        f"{array}_0": (JobState.COMPLETED, 0),
        f"{array}_1": (JobState.FAILED, 1),
        cancelled: (JobState.CANCELLED, None),
    }
    slurm.cancel(cancelled)
    wait_until(lambda: not subprocess.check_output(["squeue", "-h", "-t", "all"]), 120, 0.3)
    found = slurm.query(list(expected), since=since)
    assert {job: (status.state, status.exit_code) for job, status in found.items()} == expected
    assert {status.source for status in found.values()} == {"accounting"}
    assert slurm.query(["9999"], since=since) == {}

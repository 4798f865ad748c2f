"""A Slurm cluster of four virtual nodes for the tests of this folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pipectl.batch import JobState
from pipectl.batch.slurm import SlurmScheduler
from pipectl.cli import main

LAB = Path(__file__).parents[2] / "slurm" / "lab"
HOW = "Slurm is not installed; slurm/README.md says how to get it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that uses the lab is marked ``slurm``."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def lab():
    """Bring the lab up with ports of its own; SLURM_CONF is set while tests use it."""
    if shutil.which("sbatch") is None:
        if os.environ.get("PIPECTL_REQUIRE_SLURM") == "1":
            pytest.fail(HOW)
        pytest.skip(HOW)
    state = Path(tempfile.mkdtemp(prefix="pipectl-lab-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPECTL_LAB", str(state))
        patch.setenv("PIPECTL_LAB_PORT", str(_five_free_ports()))
        patch.setenv("SLURM_CONF", str(state / "slurm.conf"))
        try:
            up = subprocess.run([LAB / "up"], capture_output=True, text=True, timeout=180)
            assert up.returncode == 0, up.stderr
            yield state
        finally:
            subprocess.run([LAB / "down"], check=True, timeout=180)
            shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def warm(monkeypatch, warm_commands):
    """Commands and ranks that begin sooner; other tests show how they start by themselves."""
    monkeypatch.setattr(sys, "executable", warm_commands)


@pytest.fixture
def pipectl(lab, tmp_path, monkeypatch, capsys):
    """Runs a command in this process, as on a login node, in a directory of its own.

    With ``--json``, what it says; else its standard output, or its error if it is to fail.
    """
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("SLURM") and name != "SLURM_CONF":
            monkeypatch.delenv(name)

    def run(*arguments, code=0):
        capsys.readouterr()
        found = main([*arguments])
        out, err = capsys.readouterr()
        assert found == code, err + out
        if "--json" in arguments:
            return json.loads(out)
        return err if code else out

    return run


@pytest.fixture
def wait_for(lab):
    """Poll a job until it is in one of some states; the default: until it is over."""

    def wait(job_id, *states, timeout_s=180.0):
        wanted = states or tuple(state for state in JobState if state.final)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = SlurmScheduler().query([job_id])[job_id]
            if status.state in wanted:
                return status
            time.sleep(0.1)
        raise AssertionError(f"job {job_id} is {status}, not one of {wanted}")

    return wait


@pytest.fixture
def free_ports():
    """For another lab: the first of five."""
    return _five_free_ports()


def _five_free_ports() -> int:
    """The first of five neighbouring ports that nobody listens on."""
    start = 20000 + os.getpid() % 1000 * 10
    for base in range(start, start + 20000, 10):
        if all(_is_free(port) for port in range(base, base + 5)):
            return base
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

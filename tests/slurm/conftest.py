"""A Slurm cluster of four virtual nodes for the tests of this folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from pipectl.batch import JobState
from pipectl.batch.slurm import SlurmScheduler
from pipectl.cli import main
from tests.batch.job_requests import wait_until

LAB = Path(__file__).parents[2] / "slurm" / "lab"
PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
HOW = "Slurm is not installed; slurm/README.md says how to get it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that uses the lab is marked ``slurm``."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


@contextmanager
def running_lab(state: Path, **settings: str) -> Iterator[Path]:
    """A lab with ports of its own; SLURM_CONF is set meanwhile."""
    own = {"PIPECTL_LAB": state, "PIPECTL_LAB_PORT": five_free_ports()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**own, "SLURM_CONF": state / "slurm.conf", **settings}.items():
            patch.setenv(name, str(value))
        try:
            with tempfile.TemporaryFile("w+") as said:  # the database would hold on to a pipe
                up = subprocess.run([LAB / "up"], stdout=said, stderr=said, timeout=400)
                said.seek(0)
                assert up.returncode == 0, said.read()
            yield state
        finally:
            subprocess.run([LAB / "down"], check=True, timeout=400)
            shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="session")
def lab():
    if shutil.which("sbatch") is None:
        if os.environ.get("PIPECTL_REQUIRE_SLURM") == "1":
            pytest.fail(HOW)
        pytest.skip(HOW)
    with running_lab(Path(tempfile.mkdtemp(prefix="pipectl-lab-"))) as state:
        yield state


@pytest.fixture
def accounts(lab):
    """A lab that forgets jobs at once, but for its accounts."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if any(shutil.which(program, path=path) is None for program in PROGRAMS):
        pytest.skip("needs slurmdbd and mariadb-server")
    accounted = {"PIPECTL_LAB_ACCOUNTING": "1", "PIPECTL_LAB_REMEMBERS": "2"}
    with running_lab(Path(f"{lab}-3"), **accounted) as state:
        yield state


@pytest.fixture
def warm(monkeypatch, warm_python):
    """Commands and ranks that begin sooner; other tests show how they start by themselves."""
    monkeypatch.setattr(sys, "executable", warm_python)


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

    def wait(job_id, *states, timeout_s=400.0):
        wanted = states or tuple(state for state in JobState if state.final)

        def status():
            found = SlurmScheduler().query([job_id])[job_id]
            return found if found.state in wanted else None

        return wait_until(status, timeout_s, 0.1)

    return wait


@pytest.fixture
def processes_on(lab):
    """``processes_on(node)``: Slurm's daemon there, and all that it has started."""

    def is_there(process, node):
        with suppress(psutil.Error):
            found = process.environ()
            ours = found.get("SLURM_CONF") == os.environ["SLURM_CONF"]
            return ours and found.get("SLURMD_NODENAME") == node

    def find(node):
        daemon = psutil.Process(int((lab / f"slurmd.{node}.pid").read_text()))
        found = [process for process in psutil.process_iter() if is_there(process, node)]
        steps = set[psutil.Process]()
        for process in found:
            with suppress(psutil.Error):  # it has ended meanwhile
                steps |= {each for each in process.parents() if "slurmstepd" in each.name()}
        return [*{daemon, *steps, *found}]

    return find


@pytest.fixture
def partitions_with_priorities(lab):
    """Jobs of ``low`` have half a minute to end when one of ``high`` wants their nodes."""
    of_all = ("Nodes=node[1-4]", "MaxTime=1:00:00")
    low = ("PriorityTier=1", "PreemptMode=REQUEUE", "GraceTime=30")
    create = ("scontrol", "create")
    subprocess.run([*create, "PartitionName=low", *of_all, *low], check=True)
    high = ("PriorityTier=9", "PreemptMode=OFF")
    subprocess.run([*create, "PartitionName=high", *of_all, *high], check=True)
    yield
    for name in ("low", "high"):
        subprocess.run(["scontrol", "delete", f"PartitionName={name}"], check=True)


def five_free_ports() -> int:
    """The first of five neighbouring ports that nobody listens on."""
    start = 20000 + os.getpid() % 1000 * 10
    for base in range(start, start + 20000, 10):
        with ExitStack() as probes, suppress(OSError):
            for port in range(base, base + 5):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise AssertionError("no free ports")


@pytest.fixture
def free_ports():
    """For another lab: the first of five."""
    return five_free_ports()

"""What starts the ranks: options of every mpiexec, srun, and what ``launch.mpi: auto`` comes to."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_requests import change

from pipectl.batch import JobRequest, Template
from pipectl.batch.launchers import (
    MPIEXECS,
    MpiChoice,
    choose_mpi,
    find_mpiexec,
    kind_of,
    launch_command,
)
from pipectl.errors import PipectlError, SchedulerError

Program = Callable[[str, str], None]
VERSIONS = {
    "HYDRA build details:\n    Version:                                 5.0.2": "hydra",
    "mpiexec (Open MPI) 5.0.11\n\nReport bugs to": "openmpi",
    "mpirun (Open MPI) 4.1.4": "openmpi",
    "mpiexec (OpenRTE) 4.1.4": "openmpi",
    "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)": "intel",
    "mpiexec version 1.8.0 revision 1234": "cray",
    "slurm 22.05.8": None,
    "": None,
}
"""Of launchers, upon --version."""
RANK = (
    "import os; from mpi4py import MPI; world = MPI.COMM_WORLD; "
    "os.write(1, f'{world.rank} of {world.size} on {sorted(os.sched_getaffinity(0))}\\n'.encode())"
)
LIST = "[[ $1 == --mpi=list ]] && printf 'MPI plugin types are...\\n{}' >&2"
ALL = LIST.format(
    "\\tnone\\n\\tcray_shasta\\n\\tpmi2\\n\\tpmix\\nspecific pmix versions: pmix_v5\\n"
)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a bash script on a PATH that has nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name, text):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def request_here(make_request, tmp_path, monkeypatch):
    """Of an interpreter that is none, in the folder of the programs."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    return make_request(mpiexec=None)


def chosen(request: JobRequest, **changes: Any) -> MpiChoice:
    job = change(request, **changes)
    return choose_mpi(job.launch, job.environment, job.template, alone=job.alone)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_launcher_is_known_by_its_version(program, tmp_path, version):
    program("mpiexec", f"echo '{version}'; exit 1")
    assert kind_of(str(tmp_path / "bin" / "mpiexec")) == VERSIONS[version]
    assert kind_of(str(tmp_path / "missing")) is None


def test_command_lines_of_every_launcher(make_request, snapshot):
    request = make_request(nodes=2, tasks_per_node=4, cpus_per_task=16, args=("-l",))
    mpiexecs = [("mpiexec", mpi) for mpi in ("auto", *MPIEXECS)]
    wrong = [("mpiexec", "openmp"), ("srun", "auto")]
    cases = {"pbs": mpiexecs, "local": [*mpiexecs, *wrong], "slurm": [("srun", "pmix")]}
    lines = []
    for scheduler, launchers in cases.items():
        for launcher, mpi in launchers:
            for bind in ("none", "cores", "numa"):
                job = change(request, launcher=launcher, mpi=mpi, bind=bind)
                try:
                    words = launch_command(job, scheduler)
                except PipectlError as error:
                    words = ("error:", error.message, f"({error.cure})")
                lines.append(
                    f"{scheduler}, {launcher}, mpi {mpi}, bind {bind}: {' '.join(words)}\n"
                )
    snapshot(Path(__file__).with_name("command_lines.txt"), "".join(lines))


@pytest.mark.mpi
def test_ranks_start_where_the_installed_launcher_is_told_to(make_request):
    """With as many cores as there are, one each."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    kind = kind_of(str(mpiexec)) if mpiexec.exists() else None
    if kind is None:
        pytest.skip("no mpiexec beside this interpreter")
    cores = sorted(os.sched_getaffinity(0))[:2]
    command = (sys.executable, "-c", RANK)
    request = make_request(mpiexec=str(mpiexec), command=command, tasks_per_node=len(cores))
    done = subprocess.run(
        launch_command(change(request, mpi=kind, bind="cores"), "slurm"),
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} of {len(cores)} on [{core}]" for rank, core in enumerate(cores)
    ]


def test_where_mpiexec_is_found(make_request, program, tmp_path, monkeypatch):
    """Beside the interpreter, else on PATH, which is another in a job with modules."""
    beside = tmp_path / "env" / "bin" / "mpiexec"
    beside.parent.mkdir(parents=True)
    beside.touch()
    program("mpiexec", "")
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    request = make_request(mpiexec=None)

    def found(**changes: Any) -> str:
        job = change(request, **changes)
        return find_mpiexec(job.environment, job.template)

    assert found() == launch_command(request, "pbs")[0] == str(beside)
    beside.unlink()
    assert found() == str(tmp_path / "bin" / "mpiexec")
    for own in (
        {"modules": ("openmpi",)},
        {"setup": ("a",)},
        {"variables": {"PATH": "/opt/mpi/bin"}},
        {"template": Template("site.sh", "")},
    ):
        assert found(**own) == "mpiexec"
    (tmp_path / "bin" / "mpiexec").unlink()
    with pytest.raises(SchedulerError, match="mpiexec") as caught:
        found()
    assert "pip install mpich" in (caught.value.cure or "")


def library(program: Program, text: str) -> None:
    program("python", f"[[ $* == '-m mpi4py --mpi-lib-version' ]] && echo '{text}'")


@pytest.mark.parametrize(
    ("version", "mpi"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", "pmix"),
        ("MPICH Version:      5.0.2", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", "cray_shasta"),
        ("Intel(R) MPI Library 2021.10 for Linux* OS", "pmi2"),
        ("MVAPICH2 Version      : 2.3.7", "pmi2"),
    ],
)
def test_srun_is_told_what_the_library_speaks(program, request_here, version, mpi):
    program("srun", ALL)
    library(program, version)
    choice = chosen(request_here, launcher="srun")
    assert (choice.kind, choice.warning) == (mpi, "")
    assert choice.reason.startswith(f"srun --mpi={mpi}: the ranks have ")


def test_a_library_that_this_slurm_does_not_know(program, request_here):
    library(program, "Open MPI v5.0.11, package")
    request = change(request_here, launcher="srun")
    choice = chosen(request)
    assert (choice.kind, choice.warning) == ("pmix", ""), "there is no srun here"
    program("srun", LIST.format("\\tnone\\n\\tpmi2\\n"))
    choice = chosen(request)
    assert choice.kind == "pmix"
    assert "knows no --mpi=pmix, but none, pmi2" in choice.warning


@pytest.mark.parametrize(
    "elsewhere", [{"modules": ("openmpi",)}, {"setup": ("source x",)}, {"container": "image.sif"}]
)
def test_what_the_job_brings_is_not_guessed(program, request_here, elsewhere):
    request = change(request_here, launcher="srun", **elsewhere)
    program("srun", ALL)
    library(program, "Open MPI v5.0.11, package")
    choice = chosen(request)
    assert (choice.kind, "not known here" in choice.reason) == ("pmi2", True)
    program("srun", LIST.format("\\tnone\\n\\tpmix\\n"))
    assert chosen(request).kind == "pmix"


def test_what_the_job_says_is_kept(program, request_here):
    request = change(request_here, launcher="srun")
    assert chosen(request, mpi="x") == MpiChoice("x")
    program("srun", ALL)
    for mpi, is_known in {"pmix": True, "pmix_v5": True, "none": True, "pmi1": False}.items():
        choice = chosen(request, mpi=mpi)
        assert (choice.kind, choice.warning == "") == (mpi, is_known)


def test_the_mpiexec_that_will_start_them_is_asked(program, request_here, monkeypatch):
    program("mpiexec", "[[ $1 == --version ]] && echo 'mpiexec (OpenRTE) 4.1.4'")
    assert chosen(request_here) == MpiChoice("openmpi")
    assert chosen(request_here, mpi="openmpi") == MpiChoice("openmpi")
    other = chosen(request_here, mpi="hydra")
    assert (other.kind, "is of the kind openmpi" in other.warning) == ("hydra", True)
    assert chosen(request_here, alone=True) == MpiChoice("auto")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    elsewhere = change(request_here, modules=("mpich",))
    assert chosen(elsewhere) == MpiChoice("auto")
    assert chosen(elsewhere, mpi="cray") == MpiChoice("cray")


@pytest.mark.mpi
def test_the_launcher_and_library_of_this_environment(make_request):
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("no mpiexec beside this interpreter")
    assert chosen(make_request()).kind in {"hydra", "openmpi"}
    assert "the ranks have" in chosen(make_request(), launcher="srun").reason

"""What ``launch.mpi: auto`` comes to, with pretended launchers and libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch import Container, JobRequest
from pipectl.jobs.launching import Settled, settle

Program = Callable[[str, str], None]
LIST = "[[ $1 == --mpi=list ]] && printf 'MPI plugin types are...\\n{}' >&2"
ALL = LIST.format(
    "\\tnone\\n\\tcray_shasta\\n\\tpmi2\\n\\tpmix\\nspecific pmix versions: pmix_v5\\n"
)


@pytest.fixture
def request_here(tmp_path: Path) -> JobRequest:
    """Of an interpreter that is none, in the folder of the programs."""
    return JobRequest(
        name="demo",
        tag="tag",
        run_directory=tmp_path / "run",
        python=str(tmp_path / "bin" / "python"),
        ranks=2,
        nodes=1,
        tasks_per_node=2,
        walltime_s=60,
        command=("true",),
    )


def library(program: Program, text: str) -> None:
    program("python", f"[[ $* == '-m mpi4py --mpi-lib-version' ]] && echo '{text}'")


@pytest.mark.parametrize(
    ("said", "mpi"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution", "pmix"),
        ("MPICH Version:      5.0.2", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", "cray_shasta"),
        ("Intel(R) MPI Library 2021.10 for Linux* OS", "pmi2"),
        ("MVAPICH2 Version      : 2.3.7", "pmi2"),
    ],
)
def test_srun_is_told_what_the_library_speaks(
    program: Program, request_here: JobRequest, said: str, mpi: str
) -> None:
    program("srun", ALL)
    library(program, said)
    found = settle(replace(request_here, launcher="srun"))
    assert (found.mpi, found.warning) == (mpi, "")
    assert found.said.startswith(f"srun --mpi={mpi}: the ranks have ")
    assert found.of(request_here).mpi == mpi


def test_a_library_that_this_slurm_does_not_know(
    program: Program, request_here: JobRequest
) -> None:
    program("srun", LIST.format("\\tnone\\n\\tpmi2\\n"))
    library(program, "Open MPI v5.0.11, package")
    found = settle(replace(request_here, launcher="srun"))
    assert found.mpi == "pmix"
    assert "knows no --mpi=pmix, but none, pmi2" in found.warning


@pytest.mark.parametrize(
    "elsewhere",
    [{"modules": ("openmpi",)}, {"setup": ("source x",)}, {"container": Container("image.sif")}],
)
def test_what_the_job_brings_is_not_guessed(
    program: Program, request_here: JobRequest, elsewhere: dict[str, object]
) -> None:
    program("srun", ALL)
    library(program, "Open MPI v5.0.11, package")
    found = settle(replace(request_here, launcher="srun", **elsewhere))
    assert (found.mpi, "not known here" in found.said) == ("pmi2", True)
    program("srun", LIST.format("\\tnone\\n\\tpmix\\n"))
    assert settle(replace(request_here, launcher="srun", **elsewhere)).mpi == "pmix"


@pytest.mark.parametrize(("mpi", "warned"), [("pmix", 0), ("pmix_v5", 0), ("none", 0), ("pmi1", 1)])
def test_what_is_wanted_is_kept(
    program: Program, request_here: JobRequest, mpi: str, warned: bool
) -> None:
    program("srun", ALL)
    found = settle(replace(request_here, launcher="srun", mpi=mpi))
    assert (found.mpi, bool(found.warning)) == (mpi, warned)


def test_without_an_srun_here_nothing_is_warned_of(
    program: Program, request_here: JobRequest
) -> None:
    library(program, "Open MPI v5.0.11, package")
    assert settle(replace(request_here, launcher="srun")).mpi == "pmix"
    assert settle(replace(request_here, launcher="srun", mpi="x")) == Settled("x")


def test_the_mpiexec_that_will_start_them_is_asked(
    program: Program, request_here: JobRequest
) -> None:
    program("mpiexec", "[[ $1 == --version ]] && echo 'mpiexec (OpenRTE) 4.1.4'")
    assert settle(request_here) == Settled("openmpi")
    assert settle(replace(request_here, mpi="openmpi")) == Settled("openmpi")
    other = settle(replace(request_here, mpi="pmix"))
    assert (other.mpi, "whatever launch.mpi says" in other.said) == ("openmpi", True)
    assert settle(replace(request_here, alone=True)) == Settled("auto")


def test_an_mpiexec_of_modules_is_not_known(program: Program, request_here: JobRequest) -> None:
    program("mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4'")
    elsewhere = replace(request_here, python="/nowhere/python", modules=("mpich",))
    assert settle(elsewhere) == Settled("auto")
    assert settle(replace(elsewhere, mpi="cray")) == Settled("cray")
    assert settle(replace(request_here, mpiexec="mpiexec")) == Settled("auto")


@pytest.mark.mpi
def test_the_launcher_and_library_of_this_environment(request_here: JobRequest) -> None:
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("no mpiexec beside this interpreter")
    here = replace(request_here, python=sys.executable)
    assert settle(here).mpi in {"hydra", "openmpi"}
    assert "the ranks have" in settle(replace(here, launcher="srun")).said

"""What starts the ranks: options of every mpiexec, srun, and what ``launch.mpi: auto`` comes to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job_requests import change

from pipectl.batch import (
    MPIEXECS,
    JobRequest,
    MpiChoice,
    Template,
    choose_mpi,
    find_mpiexec,
    mpiexec_command,
)
from pipectl.batch.launchers import mpi_of, mpiexec_options, srun_command
from pipectl.errors import PipectlError, SchedulerError

MakeRequest = Callable[..., JobRequest]
Program = Callable[[str, str], None]
# First lines that the launchers print upon --version.
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
WORDS = {
    ("hydra", "none"): "-n 8 -ppn 4",
    ("hydra", "cores"): "-n 8 -ppn 4 -bind-to core:16",
    ("hydra", "numa"): "-n 8 -ppn 4 -bind-to numa",
    ("openmpi", "none"): "-n 8 --map-by ppr:4:node --rank-by slot --bind-to none",
    ("openmpi", "cores"): "-n 8 --map-by ppr:4:node:PE=16 --rank-by slot --bind-to core",
    ("openmpi", "numa"): "-n 8 --map-by ppr:4:node --rank-by slot --bind-to numa",
    ("intel", "none"): "-ppn 4 -genv I_MPI_PIN off -n 8",
    ("intel", "cores"): ("-ppn 4 -genv I_MPI_PIN_CELL core -genv I_MPI_PIN_DOMAIN 16:compact -n 8"),
    ("intel", "numa"): "-ppn 4 -genv I_MPI_PIN_DOMAIN numa -n 8",
    ("cray", "none"): "-n 8 --ppn 4 --depth 16 --cpu-bind none",
    ("cray", "cores"): "-n 8 --ppn 4 --depth 16 --cpu-bind depth",
    ("cray", "numa"): "-n 8 --ppn 4 --depth 16 --cpu-bind numa",
}
RANK = (
    "import os; from mpi4py import MPI; world = MPI.COMM_WORLD; "
    "os.write(1, f'{world.rank} of {world.size} on {sorted(os.sched_getaffinity(0))}\\n'.encode())"
)


LIST = "[[ $1 == --mpi=list ]] && printf 'MPI plugin types are...\\n{}' >&2"
ALL = LIST.format(
    "\\tnone\\n\\tcray_shasta\\n\\tpmi2\\n\\tpmix\\nspecific pmix versions: pmix_v5\\n"
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Puts a bash script on a PATH that has nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def request_here(make_request: MakeRequest, tmp_path: Path) -> JobRequest:
    """Of an interpreter that is none, in the folder of the programs."""
    return make_request(python=str(tmp_path / "bin" / "python"), mpiexec=None)


@pytest.mark.parametrize("said", VERSIONS)
def test_a_launcher_is_known_by_what_it_says_of_itself(
    program: Program, tmp_path: Path, said: str
) -> None:
    program("mpiexec", f"echo '{said}'; exit 1")
    assert mpi_of(str(tmp_path / "bin" / "mpiexec")) == VERSIONS[said]
    assert mpi_of(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(("name", "bind"), WORDS)
def test_options_of(name: str, bind: str) -> None:
    assert " ".join(mpiexec_options(name, 8, 4, 16, bind)) == WORDS[name, bind]


def test_every_mpiexec_is_known() -> None:
    assert {name for name, _ in WORDS} == set(MPIEXECS)


@pytest.mark.mpi
def test_ranks_start_where_the_installed_launcher_is_told_to() -> None:
    """With as many cores as there are, one each; where only one is there, it is not tied to it."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    name = mpi_of(str(mpiexec)) if mpiexec.exists() else None
    if name is None:
        pytest.skip("no mpiexec beside this interpreter")
    cores = sorted(os.sched_getaffinity(0))[:2]
    ranks = len(cores)
    words = mpiexec_options(name, ranks, ranks, 1, "cores")
    done = subprocess.run(
        [mpiexec, *words, sys.executable, "-c", RANK],
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} of {ranks} on [{core}]" for rank, core in enumerate(cores)
    ]


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_where_mpiexec_is_found(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the interpreter, else on PATH, which is another in a job with modules."""
    beside = executable(tmp_path / "env" / "bin" / "mpiexec")
    on_path = executable(tmp_path / "site" / "mpiexec")
    monkeypatch.setenv("PATH", str(on_path.parent))
    request = make_request(python=str(tmp_path / "env" / "bin" / "python"), mpiexec=None)
    assert find_mpiexec(request) == str(beside)
    beside.unlink()
    assert find_mpiexec(request) == str(on_path)
    own = [{"modules": ("openmpi",)}, {"setup": ("a",)}, {"variables": {"PATH": "/opt/mpi/bin"}}]
    for changes in (*own, {"template": Template("site.sh", "")}):
        assert find_mpiexec(change(request, **changes)) == "mpiexec"  # type: ignore[arg-type]
    on_path.unlink()
    with pytest.raises(SchedulerError, match="mpiexec") as caught:
        find_mpiexec(request)
    assert "pip install mpich" in (caught.value.cure or "")


def test_what_mpiexec_is_told(make_request: MakeRequest) -> None:
    """The ranks alone if it is of no known kind."""
    request = make_request(args=("-l",))
    program = "/opt/env/bin/mpiexec"
    assert mpiexec_command(request) == (program, "-n", "2", "-l", "true")
    hydra = change(request, mpi="hydra")
    assert mpiexec_command(hydra) == (program, "-n", "2", "-ppn", "2", "-l", "true")
    assert mpiexec_command(hydra, here=True) == (program, "-n", "2", "-l", "true")


@pytest.mark.parametrize(
    ("changes", "words", "cure"),
    [
        ({"bind": "cores"}, r"launch\.bind", "launch.mpi"),
        ({"mpi": "openmp"}, "'openmp'; did you mean 'openmpi'", "launch.launcher: srun"),
    ],
)
def test_what_mpiexec_cannot_be_told_is_refused(
    make_request: MakeRequest,
    changes: dict[str, str],
    words: str,
    cure: str,
) -> None:
    with pytest.raises(PipectlError, match=words) as caught:
        mpiexec_command(make_request(**changes))
    assert cure in (caught.value.cure or "")


def test_srun_repeats_the_cpus_and_kills_on_a_bad_exit(make_request: MakeRequest) -> None:
    words = srun_command(make_request(cpus_per_task=4, args=("--label",)))
    assert {"--cpus-per-task=4", "--kill-on-bad-exit=1", "--mpi=pmi2", "--ntasks=2"} <= set(words)
    assert words[-2:] == ("--label", "true")
    assert not any("bind" in word for word in words)
    assert "--cpu-bind=cores" in srun_command(make_request(bind="cores"))
    assert "--cpu-bind=ldoms" in srun_command(make_request(bind="numa"))
    assert "--mpi=pmix" in srun_command(make_request(mpi="pmix"))


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
    found = choose_mpi(change(request_here, launcher="srun"))
    assert (found.mpi, found.warning) == (mpi, "")
    assert found.reason.startswith(f"srun --mpi={mpi}: the ranks have ")
    assert found.apply(request_here).launch.mpi == mpi


def test_a_library_that_this_slurm_does_not_know(
    program: Program, request_here: JobRequest
) -> None:
    program("srun", LIST.format("\\tnone\\n\\tpmi2\\n"))
    library(program, "Open MPI v5.0.11, package")
    found = choose_mpi(change(request_here, launcher="srun"))
    assert found.mpi == "pmix"
    assert "knows no --mpi=pmix, but none, pmi2" in found.warning


@pytest.mark.parametrize(
    "elsewhere",
    [{"modules": ("openmpi",)}, {"setup": ("source x",)}, {"container": "image.sif"}],
)
def test_what_the_job_brings_is_not_guessed(
    program: Program, request_here: JobRequest, elsewhere: dict[str, object]
) -> None:
    program("srun", ALL)
    library(program, "Open MPI v5.0.11, package")
    found = choose_mpi(change(request_here, launcher="srun", **elsewhere))
    assert (found.mpi, "not known here" in found.reason) == ("pmi2", True)
    program("srun", LIST.format("\\tnone\\n\\tpmix\\n"))
    assert choose_mpi(change(request_here, launcher="srun", **elsewhere)).mpi == "pmix"


@pytest.mark.parametrize(("mpi", "warned"), [("pmix", 0), ("pmix_v5", 0), ("none", 0), ("pmi1", 1)])
def test_what_is_wanted_is_kept(
    program: Program, request_here: JobRequest, mpi: str, warned: bool
) -> None:
    program("srun", ALL)
    found = choose_mpi(change(request_here, launcher="srun", mpi=mpi))
    assert (found.mpi, bool(found.warning)) == (mpi, warned)


def test_without_an_srun_here_nothing_is_warned_of(
    program: Program, request_here: JobRequest
) -> None:
    library(program, "Open MPI v5.0.11, package")
    assert choose_mpi(change(request_here, launcher="srun")).mpi == "pmix"
    assert choose_mpi(change(request_here, launcher="srun", mpi="x")) == MpiChoice("x")


def test_the_mpiexec_that_will_start_them_is_asked(
    program: Program, request_here: JobRequest
) -> None:
    program("mpiexec", "[[ $1 == --version ]] && echo 'mpiexec (OpenRTE) 4.1.4'")
    assert choose_mpi(request_here) == MpiChoice("openmpi")
    assert choose_mpi(change(request_here, mpi="openmpi")) == MpiChoice("openmpi")
    other = choose_mpi(change(request_here, mpi="hydra"))
    assert (other.mpi, "is of the kind openmpi" in other.warning) == ("hydra", True)
    assert choose_mpi(change(request_here, alone=True)) == MpiChoice("auto")


def test_an_mpiexec_of_modules_is_not_known(program: Program, request_here: JobRequest) -> None:
    program("mpiexec", "echo 'mpiexec (OpenRTE) 4.1.4'")
    elsewhere = change(request_here, python="/nowhere/python", modules=("mpich",))
    assert choose_mpi(elsewhere) == MpiChoice("auto")
    assert choose_mpi(change(elsewhere, mpi="cray")) == MpiChoice("cray")
    assert choose_mpi(change(request_here, mpiexec="mpiexec")) == MpiChoice("auto")


@pytest.mark.mpi
def test_the_launcher_and_library_of_this_environment(request_here: JobRequest) -> None:
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("no mpiexec beside this interpreter")
    here = change(request_here, python=sys.executable)
    assert choose_mpi(here).mpi in {"hydra", "openmpi"}
    assert "the ranks have" in choose_mpi(change(here, launcher="srun")).reason

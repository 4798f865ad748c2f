"""What every mpiexec is told; where it is installed, by starting real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipectl.batch.dialects import NAMES, Layout, launch_words, recognized
from pipectl.batch.launchers import dialect_of

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


@pytest.mark.parametrize("said", VERSIONS)
def test_a_launcher_is_known_by_what_it_says_of_itself(said: str) -> None:
    assert recognized(said) == VERSIONS[said]


@pytest.mark.parametrize(("name", "bind"), WORDS)
def test_words_of(name: str, bind: str) -> None:
    assert " ".join(launch_words(name, Layout(8, 4, 16, bind))) == WORDS[name, bind]


def test_every_dialect_is_known() -> None:
    assert {name for name, _ in WORDS} == set(NAMES)


def test_what_says_nothing_or_is_not_there_is_of_no_kind(tmp_path: Path) -> None:
    silent = tmp_path / "mpiexec"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    assert dialect_of(str(silent)) is None
    assert dialect_of(str(tmp_path / "missing")) is None


@pytest.mark.mpi
def test_ranks_start_where_the_installed_launcher_is_told_to() -> None:
    """With as many cores as there are, one each; where only one is there, it is not tied to it."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    name = dialect_of(str(mpiexec)) if mpiexec.exists() else None
    if name is None:
        pytest.skip("no mpiexec beside this interpreter")
    cores = sorted(os.sched_getaffinity(0))[:2]
    ranks = len(cores)
    words = launch_words(name, Layout(ranks, ranks, 1, "cores"))
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

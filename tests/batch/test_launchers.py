"""What starts the ranks: options of every mpiexec, srun, and what ``launch.mpi: auto`` comes to."""

import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from pipectl.batch.containers import RUNTIMES, choose_runtime
from pipectl.batch.launchers import (
    MpiChoice,
    choose_mpi,
    find_mpiexec,
    kind_of,
    launch_command,
)
from pipectl.errors import PipectlError, SchedulerError
from pipectl.spec.launch import Container
from tests.batch.job_requests import change, check_table, fields

RANK = (
    "import os; from mpi4py import MPI; world = MPI.COMM_WORLD; "
    "os.write(1, f'{world.rank} of {world.size} on {sorted(os.sched_getaffinity(0))}\\n'.encode())"
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
    """Of an interpreter in a folder of its own."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    return make_request(mpiexec=None)


def chosen(request, **changes):
    job = change(request, **changes)
    return choose_mpi(job.launch, job.environment, single_process=job.single_process)


def test_a_launcher_is_known_by_its_version(program, tmp_path):
    for version, kind in {
        "HYDRA build details:\n    Version:                                 5.0.2": "hydra",
        "mpiexec (Open MPI) 5.0.11\n\nReport bugs to": "openmpi",
        "mpiexec (OpenRTE) 4.1.4": "openmpi",
        "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e1)": "intel",
        "mpiexec version 1.8.0 revision 1234": "cray",
        "slurm 22.05.8": None,
    }.items():
        program("mpiexec", f"echo '{version}'; exit 1")
        assert kind_of(str(tmp_path / "bin" / "mpiexec")) == kind
    assert kind_of(str(tmp_path / "missing")) is None


def test_command_lines_of_every_launcher(make_request, snapshot):
    request = make_request(nodes=2, tasks_per_node=4, cpus_per_task=16, args=("-l",))

    def command_line(given):
        scheduler, launcher, mpi, bind = (part.split()[-1] for part in given.split(","))
        try:
            job = change(request, launcher=launcher, mpi=mpi, bind=bind)
            return " ".join(launch_command(job, scheduler))
        except PipectlError as error:
            return f"error: {error.message} ({error.hint})"

    check_table(snapshot, Path(__file__).with_name("command_lines.txt"), command_line)


@pytest.mark.mpi
def test_the_installed_launcher_is_known_and_starts_ranks_where_it_is_told_to(make_request):
    """With as many cores as there are, one each."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this interpreter")
    kind = chosen(make_request()).kind
    assert kind == kind_of(str(mpiexec))
    assert kind in {"hydra", "openmpi"}
    assert "the ranks have" in chosen(make_request(), launcher="srun").reason
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


def test_mpiexec_is_found_beside_the_interpreter_else_on_the_path_of_the_job_and_asked(
    program, request_here, tmp_path
):
    beside, on_path = tmp_path / "env" / "mpiexec", tmp_path / "bin" / "mpiexec"

    def found(**changes):
        job = change(request_here, **changes)
        return find_mpiexec(job.environment)

    program("mpiexec", "[[ $1 == --version ]] && echo 'mpiexec (OpenRTE) 4.1.4'")
    assert found() == launch_command(request_here, "pbs")[0] == str(on_path)
    assert chosen(request_here) == MpiChoice("openmpi")
    assert chosen(request_here, mpi="openmpi") == MpiChoice("openmpi")
    other = chosen(request_here, mpi="hydra")
    assert (other.kind, "is of the kind openmpi" in other.warning) == ("hydra", True)
    assert chosen(request_here, single_process=True) == MpiChoice("auto")
    for own in (
        {"modules": ("openmpi",)},
        {"setup": ("a",)},
        {"variables": {"PATH": "/opt/mpi/bin"}},
    ):
        assert found(**own) == "mpiexec"
        assert chosen(request_here, **own) == MpiChoice("auto")
    assert chosen(request_here, modules=("mpich",), mpi="cray") == MpiChoice("cray")
    on_path.unlink()
    with pytest.raises(SchedulerError, match="mpiexec") as caught:
        found()
    assert "pip install mpich" in (caught.value.hint or "")
    beside.parent.mkdir()
    beside.touch()
    assert found() == str(beside)


def test_the_runtime_of_a_container_follows_from_its_image_and_from_what_is_installed(program):
    """Of several that may be meant, none is chosen."""
    pyxis = "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'"

    def chosen_of(*images):
        return [choose_runtime(Container(image=image)).runtime for image in images]

    assert chosen_of("/x.sif", "docker://a/b", "/x.toml", "/x.sqsh", "nvcr.io#a/b", "a/b:1") == [
        "apptainer", "apptainer", "cscs", "pyxis", "pyxis", "auto"
    ]  # fmt: skip
    program("singularity", "true")
    program("srun", "exit 1")
    assert chosen_of("/x.sif", "a/b:1") == ["singularity", "auto"]
    program("shifter", "true")
    assert chosen_of("a/b:1") == ["shifter"]
    program("podman-hpc", "true")
    assert chosen_of("a/b:1") == ["auto"]
    for name in ("podman-hpc", "shifter"):
        (Path(os.environ["PATH"]) / name).unlink()
    program("srun", pyxis)
    assert chosen_of("a/b:1", "/x.sif") == ["pyxis", "singularity"]
    own = Container(image="/x.sif", runtime="shifter")
    assert choose_runtime(own) == own
    names = typing.get_args(Container.model_fields["runtime"].annotation)
    assert names == ("auto", *RUNTIMES)


def test_srun_is_told_what_the_library_speaks_if_that_is_known(
    program, request_here, monkeypatch, snapshot
):
    monkeypatch.setattr(sys, "executable", "python")

    def choice(given):
        library, kinds, job = given.split(" | ")
        program("python", f"[[ $* == '-m mpi4py --mpi-lib-version' ]] && echo '{library}'")
        if kinds != "no srun":
            listed = "\\n\\t".join(["MPI plugin types are...", *kinds.split()])
            text = f"{listed}\\nspecific pmix versions: pmix_v5\\n"
            program("srun", f"[[ $1 == --mpi=list ]] && printf '{text}' >&2")
        found = chosen(request_here, launcher="srun", **fields(yaml.safe_load(job)))
        return "; ".join(filter(None, found))

    check_table(snapshot, Path(__file__).with_name("pmis.txt"), choice)

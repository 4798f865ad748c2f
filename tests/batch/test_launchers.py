from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.batch import JobRequest, MoreNodes
from pipectl.batch.launchers import find_mpiexec, mpiexec_command, srun_command
from pipectl.errors import InvalidInputError, SchedulerError

MakeRequest = Callable[..., JobRequest]


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_mpiexec_beside_the_interpreter_comes_first(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = executable(tmp_path / "env" / "bin" / "mpiexec")
    on_path = executable(tmp_path / "site" / "mpiexec")
    monkeypatch.setenv("PATH", str(on_path.parent))
    python = str(tmp_path / "env" / "bin" / "python")
    request = make_request(python=python, mpiexec=None)
    assert find_mpiexec(request) == str(embedded)
    embedded.unlink()
    assert find_mpiexec(request) == str(on_path)


def test_with_modules_the_job_finds_mpiexec(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mpiexec(make_request(mpiexec=None, modules=("openmpi",))) == "mpiexec"


def test_no_mpiexec_says_how_to_get_one(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="mpiexec") as caught:
        find_mpiexec(make_request(mpiexec=None))
    assert "pip install mpich" in (caught.value.cure or "")


def test_mpiexec_of_no_known_kind_is_told_the_ranks_alone(make_request: MakeRequest) -> None:
    request = make_request(launch_args=("-l",))
    assert mpiexec_command(request) == ("/opt/env/bin/mpiexec", "-n", "2", "-l", "true")
    with pytest.raises(InvalidInputError, match=r"launch\.bind") as caught:
        mpiexec_command(make_request(bind="cores"))
    assert "launch.mpi" in (caught.value.cure or "")


def test_a_kind_of_srun_is_none_of_mpiexec(make_request: MakeRequest) -> None:
    with pytest.raises(InvalidInputError, match="'openmp'; did you mean 'openmpi'") as caught:
        mpiexec_command(make_request(mpi="openmp"))
    assert "launch.launcher: srun" in (caught.value.cure or "")


def test_nodes_of_several_kinds_are_named_to_an_mpiexec_of_mpich(make_request: MakeRequest) -> None:
    more = (MoreNodes(1, 1),)
    words = mpiexec_command(make_request(mpi="hydra", more=more), ("-f", "hosts"))
    assert words[1:] == ("-n", "2", "-f", "hosts", "true")
    with pytest.raises(SchedulerError, match=r"resources\.more") as caught:
        mpiexec_command(make_request(mpi="openmpi", more=more), ("-f", "hosts"))
    assert caught.value.cure == "set launch.launcher: srun"


def test_ranks_per_node_are_said_where_there_are_several(make_request: MakeRequest) -> None:
    request = make_request(mpi="hydra", launch_args=("-l",))
    there = ("/opt/env/bin/mpiexec", "-n", "2", "-ppn", "2", "-l", "true")
    assert mpiexec_command(request) == there
    assert "-ppn" not in mpiexec_command(request, here=True)


def test_srun_repeats_the_cpus_and_kills_on_a_bad_exit(make_request: MakeRequest) -> None:
    words = srun_command(make_request(cpus_per_task=4, launch_args=("--label",)))
    assert {"--cpus-per-task=4", "--kill-on-bad-exit=1", "--mpi=pmi2", "--ntasks=2"} <= set(words)
    assert words[-2:] == ("--label", "true")
    assert not any("bind" in word for word in words)
    assert "--cpu-bind=cores" in srun_command(make_request(bind="cores"))
    assert "--cpu-bind=ldoms" in srun_command(make_request(bind="numa"))
    assert "--mpi=pmix" in srun_command(make_request(mpi="pmix"))

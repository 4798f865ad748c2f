from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.batch import JobRequest
from pipectl.batch.launchers import find_mpiexec, mpiexec_command, srun_command
from pipectl.errors import SchedulerError

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
    assert "pipectl[mpich]" in (caught.value.cure or "")


def test_mpiexec_binds_only_when_asked(make_request: MakeRequest) -> None:
    plain = ("/opt/env/bin/mpiexec", "-n", "2")
    assert mpiexec_command(make_request()) == (*plain, "true")
    bound = make_request(bind="cores", cpus_per_task=4, launch_args=("-l",))
    assert mpiexec_command(bound) == (*plain, "-bind-to", "core:4", "-l", "true")


def test_srun_repeats_the_cpus_and_kills_on_a_bad_exit(make_request: MakeRequest) -> None:
    words = srun_command(make_request(cpus_per_task=4, launch_args=("--label",)))
    assert {"--cpus-per-task=4", "--kill-on-bad-exit=1", "--mpi=pmi2", "--ntasks=2"} <= set(words)
    assert words[-2:] == ("--label", "true")
    assert not any("bind" in word for word in words)
    assert "--cpu-bind=cores" in srun_command(make_request(bind="cores"))
    assert "--mpi=pmix" in srun_command(make_request(mpi="pmix"))

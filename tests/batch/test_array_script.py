"""Scripts of job arrays go on as those of their runs, whatever the directories are called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.batch import Array, JobRequest, Template, get

MakeRequest = Callable[..., JobRequest]
INDEX = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX"}
TEMPLATE = "#!/bin/bash -f\n#SBATCH --switches=1\n#pipectl directives\ntouch PWNED\n#pipectl body\n"


def body(request: JobRequest, scheduler: str) -> str:
    lines = get(scheduler).render(request).splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("scheduler", INDEX)
def test_hostile_directories_arrive(
    make_request: MakeRequest, tmp_path: Path, nasty: list[str], scheduler: str
) -> None:
    runs = tuple(Path("/x") / text for text in nasty if text.isprintable() and "\0" not in text)
    script = body(make_request(array=Array(runs)), scheduler).partition("run=")[0]
    script += 'printf "%s\\0" "${runs[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [str(run) for run in runs]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", [None, Template("site.sh", TEMPLATE)])
@pytest.mark.parametrize("scheduler", INDEX)
def test_the_run_takes_over(
    make_request: MakeRequest, tmp_path: Path, scheduler: str, template: Template | None
) -> None:
    """In the same process, with the output in its log; a template is the run's own matter."""
    runs = tuple(tmp_path / f"a b'{index}" for index in range(2))
    for run in runs:
        (run / "logs").mkdir(parents=True)
        (run / "job.sh").write_text('echo "$$ $- $0"; exit 3\n')
    script = tmp_path / "array.sh"
    script.write_text(get(scheduler).render(make_request(array=Array(runs), template=template)))
    environment = {**os.environ, INDEX[scheduler]: "1"}
    with subprocess.Popen(["bash", str(script)], env=environment, cwd=tmp_path) as process:
        assert process.wait() == 3
    said = (runs[1] / "logs/job.log").read_text().split(maxsplit=2)
    assert said[0] == str(process.pid)
    assert ("f" in said[1]) == (template is not None), "the options of the template's own bash"
    assert said[2] == f"{runs[1]}/job.sh\n"
    assert not (runs[0] / "logs/job.log").exists()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("scheduler", INDEX)
def test_an_index_beyond_the_runs_starts_nothing(
    make_request: MakeRequest, tmp_path: Path, scheduler: str
) -> None:
    script = get(scheduler).render(make_request(array=Array((tmp_path, tmp_path))))
    for environment in ({}, {INDEX[scheduler]: "7"}):
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True)
        assert done.returncode != 0
        assert b"unbound variable" in done.stderr

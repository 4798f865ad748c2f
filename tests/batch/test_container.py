"""Commands within a container, with an Apptainer that runs them outside of any."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.batch import Container, JobRequest
from pipectl.batch.script import render_body
from pipectl.errors import InvalidInputError
from pipectl.jobs.request import job_request, trial_request
from pipectl.spec import load

MakeRequest = Callable[..., JobRequest]
FAKE = """#!/bin/bash
[[ $1 == exec ]] || exit 99
shift
while [[ $1 == -* ]]; do echo "option $1"; shift; done
echo "image $1"
shift
[[ $1 == python3 ]] || exit 98
exec {python} "${{@:2}}"
"""
JOB = """\
version: 1
name: tiny
model: {factory: "./code/model.py:build"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "./model data.py:data"}
training: {steps: 4, batch_size: 8}
resources: {gpus_per_node: 1}
site_defaults: false
environment: {container: IMAGE}
"""


def test_python_of_the_container_runs_with_the_same_words(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "apptainer"
    fake.parent.mkdir()
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    code = "import sys; print(sys.argv[1:])"
    own = (sys.executable, "-c", code, "it's", "a b")
    request = make_request(
        python=sys.executable,
        container=Container("my image.sif", (tmp_path, Path("/my dir"))),
        prepare=(own,),
        command=own,
    )
    request.run_directory.mkdir()
    script = request.run_directory / "job.sh"
    script.write_text("#!/bin/bash\n" + render_body(request, request.within(request.command)))
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    once = f"option --bind={tmp_path}\noption --bind=/my dir\nimage my image.sif\n"
    assert (done.returncode, done.stdout) == (0, 2 * f"{once}[\"it's\", 'a b']\n"), done.stderr


@pytest.mark.parametrize(
    ("written", "image"),
    [("./torch.sif", "{}/torch.sif"), ("docker://a/b:1", "docker://a/b:1"), ("/x.sif", "/x.sif")],
)
def test_what_the_job_names_and_writes_is_bound(tmp_path: Path, written: str, image: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("IMAGE", written))
    container = job_request(load(path, check_files=False), Path("/runs/x"), "t").container
    assert container is not None
    trial = trial_request(load(path, check_files=False)).container
    assert trial is not None
    assert trial.binds[0] == Path("runs").absolute()
    assert container.image == image.format(tmp_path)
    assert container.binds == (Path("/runs"), tmp_path, tmp_path / "code")
    assert container.accelerators


def test_packages_beside_the_job_are_bound(tmp_path: Path) -> None:
    (tmp_path / "netmod.py").touch()
    text = JOB.replace("./code/model.py", "netmod").replace("./model data.py", "/else/pk.data")
    (tmp_path / "job.yaml").write_text(text.replace("IMAGE", "./torch.sif"))
    spec = load(tmp_path / "job.yaml", check_files=False)
    container = job_request(spec, Path("/runs/x"), "t").container
    assert container is not None
    assert container.binds == (Path("/runs"), *sorted([Path("/else"), tmp_path]))


def test_no_container(make_request: MakeRequest) -> None:
    assert make_request().within(("a", "b")) == ("a", "b")


@pytest.mark.parametrize("name", ["/a,b", "/a:b"])
def test_directories_that_apptainer_would_cut(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"environment\.container"):
        Container("x.sif", (Path(name),)).around(("python",), "python")

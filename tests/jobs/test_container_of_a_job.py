"""What the container of a job sees: the runs, and the directories of what the job names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.jobs.request import make_job, make_request
from pipectl.spec import load

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


@pytest.mark.parametrize(
    ("written", "image"),
    [("./torch.sif", "{}/torch.sif"), ("docker://a/b:1", "docker://a/b:1"), ("/x.sif", "/x.sif")],
)
def test_what_the_job_names_and_writes_is_bound(tmp_path: Path, written: str, image: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("IMAGE", written))
    spec = load(path, check_files=False)
    job = make_job(spec, "local")
    assert make_request(job).binds[0] == Path("runs").absolute()
    request = make_request(job, Path("/runs/x"))
    assert request.binds == (Path("/runs"), tmp_path, tmp_path / "code")
    assert request.in_container(("a",)) == (
        *("apptainer", "exec", "--nv"),
        *(f"--bind={path}" for path in request.binds),
        image.format(tmp_path),
        "a",
    )


def test_packages_beside_the_job_are_bound(tmp_path: Path) -> None:
    (tmp_path / "netmod.py").touch()
    text = JOB.replace("./code/model.py", "netmod").replace("./model data.py", "/else/pk.data")
    (tmp_path / "job.yaml").write_text(text.replace("IMAGE", "./torch.sif"))
    spec = load(tmp_path / "job.yaml", check_files=False)
    binds = make_request(make_job(spec, "local"), Path("/runs/x")).binds
    assert binds == (Path("/runs"), *sorted([Path("/else"), tmp_path]))

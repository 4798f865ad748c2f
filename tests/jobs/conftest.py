"""The job that most tests are about."""

import pytest

JOB = """\
version: 1
name: tiny
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 8}
site_defaults: false
"""


@pytest.fixture
def write_job(tmp_path):
    """``write_job("resources: {nodes: 2}")`` writes ``job.yaml`` with these further lines."""

    def write(*lines, folder=tmp_path):
        path = folder / "job.yaml"
        path.write_text(JOB + "".join(f"{line}\n" for line in lines))
        return path

    return write

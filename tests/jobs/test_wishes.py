"""What the command line asks besides the job file, as overrides of that file."""

from pathlib import Path

import pytest

from pipectl.jobs.wishes import Wishes
from pipectl.spec import load

JOB = """\
version: 1
name: tiny
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 8}
site_defaults: false
"""


@pytest.mark.parametrize("name", ["c.json", "two #2: {c}.json", "1e5", "'\"\\.json", "é😀.json"])
def test_a_cluster_is_looked_up_where_the_command_runs(tmp_path, monkeypatch, name):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text(JOB)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    spec = load(Path("jobs/job.yaml"), Wishes(cluster=Path(name)).in_job())
    assert spec.cluster_file == tmp_path / name

"""What `pipectl plan` finds out about the job that it is asked of."""

from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.jobs.plan_question import Question, gather
from pipectl.profile import Operator, Profile

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
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/job.yaml").write_text(JOB)
    assumed_cluster("mine", [1], 1, None).save(Path(name))
    Profile("tiny", "test", 1, (Operator("a", "a", 0.1, 0.2, 0, 0, 0),), (), None).save(
        Path("p.json")
    )
    inputs = gather(Question(Path("jobs/job.yaml"), Path("p.json"), cluster=Path(name)))
    assert (inputs.cluster.name, inputs.cluster_file) == ("mine", tmp_path / name)

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from pipectl.errors import SpecError
from pipectl.spec import load, plan_key, settled

JOB = """\
version: 1
name: tiny
model: {factory: "torch.nn:Identity"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "torch.nn:Identity"}
training: {steps: 4, batch_size: 8}
resources: {nodes: 2}
site_defaults: false
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def loaded(job, name, *more):
    return load(job, [f"pipeline.schedule={name}", *more])


def test_a_file_is_looked_for_beside_the_spec(job):
    with pytest.raises(SpecError, match=r"no such file: .*mine\.csv"):
        loaded(job, "./mine.csv")
    (job.parent / "mine.csv").write_text("0F0,0B0")
    spec = loaded(job, "./mine.csv")
    assert spec.schedule_file == job.parent / "./mine.csv"
    assert settled(spec).pipeline.schedule == str(job.parent / "mine.csv")


def test_the_contents_of_the_file_are_part_of_the_key(job):
    (job.parent / "mine.csv").write_text("0F0,0B0")
    before = plan_key(loaded(job, "./mine.csv"))
    (job.parent / "mine.csv").write_text("0F0,0F1,0B0,0B1")
    assert plan_key(loaded(job, "./mine.csv")) != before


def test_names_that_no_package_offers_are_refused(job, monkeypatch):
    with pytest.raises(SpecError, match=r"a schedule that a package offers, not 'zigzag'"):
        loaded(job, "zigzag")
    offered = EntryPoints([EntryPoint("zigzag", "x:y", "pipectl.schedules")])
    monkeypatch.setattr("pipectl.spec.schedules.entry_points", lambda group: offered)
    assert loaded(job, "zigzag").pipeline.schedule == "zigzag"
    assert loaded(job, "auto").pipeline.schedule is None


def test_its_stages_may_be_more_than_ranks_and_it_has_a_warm_up_of_its_own(job):
    (job.parent / "mine.csv").write_text("0F0,0B0")
    assert loaded(job, "./mine.csv", "pipeline.stages=8").pipeline.stages == 8
    with pytest.raises(SpecError, match="warm_up"):
        loaded(job, "./mine.csv", "pipeline.warm_up=[1, 1]", "pipeline.stages=2")

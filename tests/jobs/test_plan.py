"""What `pipectl plan` finds out about the job that it is asked of, and when it ends."""

from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.jobs.planning import Deadline, gather
from pipectl.profile import Operator, Profile


@pytest.mark.parametrize("name", ["c.json", "two #2: {c}.json", "1e5", "'\"\\.json", "é😀.json"])
def test_a_cluster_is_looked_up_where_the_command_runs(tmp_path, monkeypatch, name, write_job):
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    write_job(folder=Path("jobs"))
    assumed_cluster("mine", [1], 1, None).save(Path(name))
    Profile("tiny", "test", 1, (Operator("a", "a", 0.1, 0.2, 0, 0, 0),), (), None).save(
        Path("p.json")
    )
    inputs = gather(Path("jobs/job.yaml"), Path("p.json"), cluster=Path(name))
    assert (inputs.cluster.name, inputs.cluster_file) == ("mine", tmp_path / name)


def test_without_a_budget_there_is_no_end():
    now = [0.0]
    deadline = Deadline(None, lambda: now[0])
    now[0] = 1e9
    assert not deadline()
    assert not deadline.cut_short


def test_the_budget_is_of_each_plan():
    now = [0.0]
    deadline = Deadline(10, lambda: now[0])
    now[0] = 9.9
    assert not deadline()
    deadline.restart()
    now[0] = 19.5
    assert not deadline()
    now[0] = 20.0
    assert deadline()
    deadline.restart()
    assert not deadline()
    assert deadline.cut_short


def test_an_interrupt_holds_for_all_plans():
    deadline = Deadline(None, lambda: 0.0)
    deadline.interrupt()
    deadline.restart()
    assert deadline()
    assert deadline.interrupted


def test_a_planner_that_never_asked_was_not_cut_short():
    deadline = Deadline(None, lambda: 0.0)
    deadline.interrupt()
    assert not deadline.cut_short

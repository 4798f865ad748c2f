from importlib.metadata import EntryPoint, EntryPoints
from itertools import pairwise

import pytest
from validator import validate

from pipectl.cluster import assumed_cluster
from pipectl.errors import InfeasibleError, UsageError
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.schedule import lower
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import make_listed, read_listed

BACK_TO_FRONT = "0F0,0F1,3F0,3F1,3B1,3B0,0B1,0B0\n1F0,1F1,2F0,2F1,2B1,2B0,1B1,1B0\n"


def fold(ranks, stages, micro_batches):
    """All forwards, then all backwards, on one rank each."""
    return [
        [*(f"{r}F{m}" for m in range(micro_batches)), *(f"{r}B{m}" for m in range(micro_batches))]
        for r in range(ranks)
    ]


def profile():
    costs = {"forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": 100, "output_bytes": 1000}
    names = [f"op{index}" for index in range(8)]
    nodes = [{"id": name, "saved": [[name, 1000]], **costs} for name in names]
    edges = list(map(list, pairwise(names)))
    return Profile.from_json({"name": "chain", "nodes": nodes, "edges": edges})


def plan_for(text, batch_size, ranks=2, **changes):
    request = PlanRequest("x", batch_size, listed=Listed.read(text, "my.csv"), **changes)
    return make_plan(profile(), assumed_cluster("c", [ranks], ranks, None), request)


def test_a_plan_has_the_stages_and_ranks_of_the_lists():
    plan = plan_for(BACK_TO_FRONT, 4)
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (1,), (0,)]
    assert [len(stage.nodes) for stage in plan.stages] == [2, 2, 2, 2]
    assert (plan.schedule, plan.micro_batches, plan.micro_batch_size) == ("my.csv", 2, 2)
    assert "gradients of stage 0 and 3 more in another order" in plan.assumptions[-1]
    validate(plan, [lower(plan, rank) for rank in range(2)])
    assert plan.prediction is not None


def test_what_does_not_fit_is_said():
    with pytest.raises(InfeasibleError, match="has 2 micro-batches, into which a batch of 1"):
        plan_for(BACK_TO_FRONT, 1)
    with pytest.raises(InfeasibleError, match=r"my\.csv has 2 ranks, but there are 1"):
        plan_for(BACK_TO_FRONT, 4, ranks=1)
    with pytest.raises(InfeasibleError, match=r"my\.csv needs .* more than the memory limit"):
        plan_for(BACK_TO_FRONT, 4, memory_limit_bytes=1000)


def test_a_package_offers_one_by_name(monkeypatch):
    entry = EntryPoint("fold", f"{__name__}:fold", "pipectl.schedules")
    monkeypatch.setattr(EntryPoint, "load", lambda self: fold)
    monkeypatch.setattr(
        "pipectl.schedule.registry.entry_points",
        lambda group, name="": EntryPoints([entry]).select(name=name) if name else [entry],
    )
    listed = make_listed("fold", 2, 2, 3)
    assert (listed.stages, listed.micro_batches, listed.warm_up) == (2, 3, (3, 3))
    with pytest.raises(UsageError, match="its function fails: TypeError"):
        make_listed("fold", "two", 2, 3)


def test_files_of_spreadsheets_begin_with_a_mark(tmp_path):
    (tmp_path / "x.csv").write_text(BACK_TO_FRONT, encoding="utf-8-sig")
    assert read_listed(tmp_path / "x.csv", "x.csv") == Listed.read(BACK_TO_FRONT, "x.csv")


def test_names_and_files_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match="there is no schedule 'fold'"):
        make_listed("fold", 2, 2, 3)
    with pytest.raises(UsageError, match="'1f1c'; did you mean '1f1b'"):
        make_listed("1f1c", 2, 2, 3)
    with pytest.raises(UsageError, match="cannot be read"):
        read_listed(tmp_path / "x.csv", "x.csv")

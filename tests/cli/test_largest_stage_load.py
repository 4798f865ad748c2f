"""The stages with the smallest largest load."""

import json
import os
from pathlib import Path

import pytest

from pipectl.cli.commands.plan import PlanSearch, gather
from pipectl.cli.lab.plan import Balanced, plan_balance, with_links
from pipectl.errors import InfeasibleError, PipectlError

WORKLOADS = os.environ.get("PIPECTL_WORKLOADS")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def balanced(
    *settings: str,
    devices: int | None = None,
    links: tuple[float | None, float | None] = (None, None),
    search: PlanSearch | None = None,
    changes: dict[str, object] | None = None,
) -> Balanced:
    """Of a chain of three operators of 1, 2 and 3 s.

    Args:
        changes: of the profile.
    """
    nodes = [
        {
            "id": f"n{index}",
            "forward_s": 0.4 * index,
            "backward_s": 0.6 * index,
            "parameter_bytes": 0,
            "memory_bytes": 100,
            "output_bytes": 10**6,
        }
        for index in (1, 2, 3)
    ]
    document = {"version": 1, "name": "chain", "micro_batch_size": 2, "nodes": nodes}
    document |= {"edges": [["n1", "n2"], ["n2", "n3"]], **(changes or {})}
    Path("p.json").write_text(json.dumps(document))
    inputs = with_links(gather(None, Path("p.json"), settings, devices=devices), *links)
    return plan_balance(inputs, search or PlanSearch(), *links)


def test_the_best_cut_of_a_chain():
    found = balanced("training.batch_size=8", devices=2)
    assert found.balance.value_s == pytest.approx(3.0)
    assert [stage.nodes for stage in found.balance.stages] == [("n1", "n2"), ("n3",)]
    assert found.plan.prediction is not None
    assert (found.plan.micro_batches, found.plan.micro_batch_size) == (4, 2)
    assert found.plan.prediction.step_time_s == pytest.approx(15.0, rel=0.01)


def test_links_count_once_they_are_known():
    assert balanced(devices=2).request.bandwidth_bytes_per_s is None
    found = balanced(devices=2, links=(1e6, 2.0))
    assert found.request.bandwidth_bytes_per_s == pytest.approx(5e5)
    assert found.balance.value_s == pytest.approx(6.0)  # a cut would cost 4 s on either side


def test_backward_operators_send_against_the_stages():
    nodes = [
        {"id": f"{phase[0]}{index}", "phase": phase, "colocate": index, "forward_s": 1.0 * ahead}
        | {"backward_s": 2.0 * (1 - ahead), "parameter_bytes": 0, "output_bytes": 1000}
        for phase, ahead in (("forward", 1), ("backward", 0))
        for index in ((0, 1) if ahead else (1, 0))
    ]
    edges = [["f0", "f1"], ["f1", "b1"], ["b1", "b0"], ["f0", "b0"]]
    found = balanced("training.batch_size=2", devices=2, changes={"nodes": nodes, "edges": edges})
    kinds = [(item.kind.value, item.source, item.target) for item in found.plan.transfers]
    assert kinds == [("activation", 0, 1), ("gradient", 1, 0)]
    assert found.plan.prediction is not None
    assert found.plan.prediction.step_time_s == pytest.approx(6.0, rel=0.01)


def test_no_partition_fits():
    with pytest.raises(InfeasibleError, match="no partition fits on 2 devices of 50 B each"):
        balanced("pipeline.memory_limit=50", devices=2)


def test_no_time_at_all():
    search = PlanSearch()
    search.interrupted = True
    try:
        found = balanced(devices=2, search=search)
    except PipectlError as error:
        assert "before any plan was found" in error.message  # noqa: PT017 - either is an answer
    else:
        assert found.balance.lower_bound_s <= found.balance.value_s


def test_the_documented_keys():
    found = json.loads(json.dumps(balanced(devices=2).to_json()))
    assert found["objective"] == "max-stage-load"
    assert found["exact"] is True
    assert found["value_s"] == pytest.approx(found["lower_bound_s"])
    assert found["stages"][0] == {
        "nodes": ["n1", "n2"],
        "replicas": 1,
        "devices": [0],
        "device": "acc",
        "load_s": pytest.approx(3.0),
    }
    assert {"step_time_s", "bubble", "peak_memory_bytes"} <= set(found["predicted"])


@pytest.mark.skipif(WORKLOADS is None, reason="PIPECTL_WORKLOADS is not set")
def test_a_known_optimum_as_the_file_ships_it():
    path = Path(str(WORKLOADS)) / "dnnpart-throughput-layer-bert24_training.json"
    known = json.loads(path.read_text())["best_known"][0]["value"]
    found = plan_balance(gather(None, path.absolute()), PlanSearch())
    assert found.balance.value_s == pytest.approx(known, rel=1e-9)

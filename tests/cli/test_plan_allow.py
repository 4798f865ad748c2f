"""`pipectl plan --allow`: techniques that the planner chooses only where it may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command


@pytest.fixture
def heavy(place: Path, profile_document: Callable[..., dict[str, Any]]) -> None:
    """A profile whose first operator has nearly all of the time."""
    document = profile_document()
    first = document["nodes"][0]
    first["forward_s"], first["backward_s"] = 0.1, 0.2
    first.pop("timings", None)
    Path("p.json").write_text(json.dumps(document))


def planned(cli: Command, *more: str) -> dict[str, Any]:
    sizes = ("--devices", "4", "--batch-size", "64", "--bandwidth", "100GB/s")
    result = cli("plan", "--profile", "p.json", *sizes, "--json", *more)
    assert result.code == 0, result.err
    answer: dict[str, Any] = json.loads(result.out)
    return answer


def test_replicas_come_only_where_they_are_allowed(cli: Command, heavy: None) -> None:
    without, several = planned(cli), planned(cli, "--allow", "replicas")
    assert {stage["replicas"] for stage in without["stages"]} == {1}
    assert max(stage["replicas"] for stage in several["stages"]) > 1
    assert (several["replication"], several["cannot_run"]) == ("whole", [])
    assert several["value_s"] < without["value_s"]
    assert planned(cli, "--allow", "split")["replication"] == "split"


def test_what_is_allowed_never_makes_a_step_longer(cli: Command, heavy: None) -> None:
    everything = "replicas,split,recompute,offload,pipefb,interleave"
    assert planned(cli, "--allow", everything)["value_s"] <= planned(cli)["value_s"] * 1.001


def test_unknown_names_and_other_planners(cli: Command, heavy: None) -> None:
    common = ("plan", "--profile", "p.json", "--devices", "2", "--allow")
    wrong = cli(*common, "replica")
    assert wrong.code == 2
    assert "there is no technique 'replica'; did you mean 'replicas'?" in wrong.err
    other = cli(*common, "replicas", "--planner", "dapple")
    assert (other.code, "--allow: dapple chooses by its own rules" in other.err) == (2, True)

"""Proven optima of published profiles, where a directory of them is at hand.

``PIPECTL_WORKLOADS`` names it. Each file lists the best known largest stage loads. What takes
longest is left to ``tests/benchmarks/planner_optimality.py``, which has it all.
"""

import json
import os
from pathlib import Path

import pytest

from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import BalanceRequest
from pipectl.planner.graph.imported import prepared
from pipectl.profile import Profile

DIRECTORY = os.environ.get("PIPECTL_WORKLOADS")
SLOW = "dnnpart-throughput-layer-inceptionv3_inference"

pytestmark = pytest.mark.skipif(
    DIRECTORY is None, reason="PIPECTL_WORKLOADS names no directory of published profiles"
)


def proven(document):
    return [
        entry
        for entry in document["best_known"]
        if entry["objective"].startswith("max stage load")
        and entry.get("proven_optimal")
        and not entry.get("cpus")
    ]


def request_of(entry):
    return BalanceRequest(
        devices=entry["devices"],
        memory_limit_bytes=entry.get("memory_limit_bytes"),
        bandwidth_bytes_per_s=entry.get("bandwidth_bytes_per_s"),
        communication_scale=entry.get("comm_scale", 1.0),
    )


FILES = sorted(Path(DIRECTORY).glob("*.json")) if DIRECTORY else []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_proven_optima_are_found(file) -> None:
    profile = prepared(Profile.load(file))
    for entry in proven(json.loads(file.read_text())):
        if file.stem == SLOW and entry.get("comm_scale", 1) > 1 and entry["devices"] == 4:
            continue
        found = balance(profile, request_of(entry))
        assert found.value_s == pytest.approx(entry["value"], rel=1e-9), entry["devices"]
        assert found.exact


@pytest.mark.parametrize("name", ["pipedream-inception_v3", "pipedream-nasnetamobile"])
@pytest.mark.parametrize(("devices", "gap"), [(2, 0.05), (4, 0.05), (8, 0.08)])
def test_gap_is_small_where_there_are_too_many_downsets(name, devices, gap) -> None:
    profile = prepared(Profile.load(Path(DIRECTORY) / f"{name}.json"))
    found = balance(profile, BalanceRequest(devices), max_downsets=10_000)
    assert found.gap <= gap

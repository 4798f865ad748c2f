"""Published profiles: proven optima and published plans, if a directory of them is at hand.

``PIPECTL_WORKLOADS`` names it; its README has the rules of the simulated values. Each file lists
what is known. Many small micro-batches are left to ``tests/benchmarks/claims.py``.
"""

import json
import os
from pathlib import Path

import pytest

from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import BalanceRequest
from pipectl.planner.evaluator import TIE
from pipectl.planner.graph.imported import pruned_if_pipedream
from pipectl.profile import Profile
from pipectl.simulate import simulate
from tests.benchmarks.literature import dapple
from tests.benchmarks.literature.pipedream import solved
from tests.benchmarks.literature.policy import Work
from tests.planner.gate.published import DappleRules, cluster_of, half_and_half, plans_of

GIVEN = "PIPECTL_WORKLOADS" in os.environ
DIRECTORY = Path(os.environ.get("PIPECTL_WORKLOADS", "."))
MACHINES = {"A_2x8": [8, 8], "flat_16x1": [1] * 16}
SYNCHRONOUS = "synchronous 1F1B iteration latency, event-simulated, full-duplex links"
DAPPLE = (
    *("dapple-vgg-19-pbs-32", "dapple-amoeba-18-pbs-8", "dapple-bert-24-pbs-6"),
    *("dapple-gnmt-32-pbs-64-simplified", "dapple-xlnet-24-pbs-1"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not GIVEN, reason="PIPECTL_WORKLOADS names no directory of published profiles"
    ),
]


def known(name, objective=SYNCHRONOUS):
    entries = json.loads((DIRECTORY / f"{name}.json").read_text())["best_known"]
    return [e for e in entries if e["objective"] == objective and e["value"] is not None]


@pytest.mark.parametrize("name", DAPPLE)
def test_no_listed_plan_is_better(name):
    """DAPPLE's, PipeDream's and others', simulated on links like those of DAPPLE's evaluation."""
    profile = half_and_half(DIRECTORY / f"{name}.json")
    rows = {}
    for entry in known(name):
        if entry["rule"].startswith("per-device"):
            key = entry["layout"], entry["global_batch"], entry["profile_micro_batch"]
            rows.setdefault(key, []).append(entry)
    largest = max(own for _, _, own in rows)
    for (layout, batch, own), entries in rows.items():
        if own < largest:  # many small micro-batches
            continue
        cluster = cluster_of(MACHINES[layout])
        listed_s = min(
            simulate(plan, cluster).step_time_s
            for entry in entries
            for plan in plans_of(profile, entry, cluster)
        )
        request = PlanRequest(name, batch, replicas=None, replication=Replication.SPLIT)
        assert make_plan(profile, cluster, request).predicted_step_s <= listed_s * (1 + TIE)


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet50", "gnmt"])
def test_pipedream_objective_equals_what_its_planner_found(name):
    profile = pruned_if_pipedream(Profile.load(DIRECTORY / f"pipedream-{name}.json"))
    for entry in known(f"pipedream-{name}", "PipeDream time per stage"):
        bandwidths = entry["bandwidth_bytes_per_s"]
        counts = [entry["devices"]] if len(bandwidths) == 1 else [8, 2]
        straight = "straight" in entry["found_by"]
        size = profile.micro_batch_size
        found = solved(profile, Work(size, size), counts, bandwidths, straight=straight)
        if (name, straight) == ("resnet50", True):  # it counts values that no later stage reads
            assert found.value_s <= entry["value"]
        else:
            assert found.value_s == pytest.approx(entry["value"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "own"), [("dapple-vgg-19-pbs-32", 32), ("dapple-amoeba-18-pbs-8", 1)]
)
def test_dapple_finds_no_worse_plan_than_its_planner(name, own):
    entry = next(
        e
        for e in known(name)
        if e["layout"] == "flat_16x1"
        and e["profile_micro_batch"] == own
        and "planner_formula_latency" in e
    )
    found = dapple.plan(
        half_and_half(DIRECTORY / f"{name}.json"),
        DappleRules(16),
        Work(entry["global_batch"], own),
    )
    assert found.value_s <= entry["planner_formula_latency"] + 2e-6


def request_of(entry):
    return BalanceRequest(
        devices=entry["devices"],
        memory_limit_bytes=entry.get("memory_limit_bytes"),
        bandwidth_bytes_per_s=entry.get("bandwidth_bytes_per_s"),
        communication_scale=entry.get("comm_scale", 1.0),
    )


FILES = sorted(DIRECTORY.glob("*.json")) if GIVEN else []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_proven_optima_are_found(file) -> None:
    profile = pruned_if_pipedream(Profile.load(file))
    for entry in json.loads(file.read_text())["best_known"]:
        proven = entry["objective"].startswith("max stage load") and entry.get("proven_optimal")
        if not proven or entry.get("cpus"):
            continue
        found = balance(profile, request_of(entry))
        assert found.value_s == pytest.approx(entry["value"], rel=1e-9), entry["devices"]
        assert found.exact

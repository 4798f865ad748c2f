"""Stages with replicas against DAPPLE's and PipeDream's plans on DAPPLE's profiles and constants.

Needs PIPECTL_WORKLOADS. Prints a section of Markdown.
"""

from __future__ import annotations

import json
import os
import sys
from math import exp, log
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "planner" / "gate"))
from published import cluster_of, half_and_half, plans_of

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.simulate import simulate

SYNCHRONOUS = "synchronous 1F1B iteration latency, event-simulated, full-duplex links"
AT_LEAST = "per-device micro-batch >= profile micro-batch"
BUDGET_S = 1.8
Row = tuple[str, int, int]


def listed(
    document: dict[str, Any], profile: Profile, clusters: dict[str, Cluster]
) -> dict[Row, dict[str, float]]:
    """Simulated steps of the plans of each row by who found them (first word)."""
    rows: dict[Row, dict[str, float]] = {}
    for entry in document["best_known"]:
        if entry["objective"] == SYNCHRONOUS and entry["rule"] == AT_LEAST:
            key = tuple(entry[k] for k in ("layout", "global_batch", "profile_micro_batch"))
            cluster = clusters[entry["layout"]]
            plans = plans_of(profile, entry, cluster)
            step_s = min(simulate(plan, cluster).step_time_s for plan in plans)
            rows.setdefault(key, {})[entry["found_by"].split()[0]] = step_s
    return rows


def planned(
    profile: Profile, cluster: Cluster, batch: int, budget_s: float = BUDGET_S
) -> tuple[Plan, float]:
    """Our plan and the seconds it took, reading the file excluded."""
    started_s = perf_counter()
    request = PlanRequest("dapple", batch, replicas=None, replication=Replication.SPLIT)
    plan = make_plan(profile, cluster, request, lambda: perf_counter() - started_s > budget_s)
    return plan, perf_counter() - started_s


HEADER = """## Stages with replicas, against DAPPLE and PipeDream

`python tests/benchmarks/planner_dapple.py`; simulated seconds of one iteration on DAPPLE's profiles
and links, 16 devices numbered machine by machine. Replicas split micro-batches.
"""
COLUMNS = (
    *("profile (batch, micro-batch)", "layout", "DAPPLE", "PipeDream", "best listed"),
    *("pipectl", "of best", "replicas", "planning s"),
)


def cells(path: Path, row: Row, values: dict[str, float], plan: Plan, took_s: float) -> str:
    """A row of the table."""
    best_s = min(values.values())
    found = (
        f"{path.stem.removeprefix('dapple-')} ({row[1]}, {row[2]})",
        row[0],
        f"{values['DAPPLE']:.3f}",
        f"{values['PipeDream']:.3f}" if "PipeDream" in values else "",
        f"{best_s:.3f}",
        f"{plan.predicted_step_s:.3f}",
        f"{plan.predicted_step_s / best_s:.3f}",
        " ".join(str(stage.replicas) for stage in plan.stages),
        f"{took_s:.2f}",
    )
    return f"| {' | '.join(found)} |"


def main() -> None:
    """Print the table and the means."""
    directory = Path(os.environ["PIPECTL_WORKLOADS"])
    print(HEADER)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    ratios: dict[str, list[float]] = {"DAPPLE": [], "PipeDream": []}
    paths = sorted(directory.glob("dapple-*.json"))
    planned(half_and_half(paths[0]), cluster_of([1, 1]), 16)  # compile
    for path in paths:
        document, profile = json.loads(path.read_text()), half_and_half(path)
        layouts = document["cluster"]["layouts"]
        clusters = {name: cluster_of(machines) for name, machines in layouts.items()}
        for row, values in listed(document, profile, clusters).items():
            plan, seconds = planned(profile, clusters[row[0]], row[1])
            for name, found in ratios.items():
                if name in values:
                    found.append(plan.predicted_step_s / values[name])
            print(cells(path, row, values, plan, seconds), flush=True)
    print()
    for name, found in ratios.items():
        mean = exp(sum(map(log, found)) / len(found))
        print(f"Geometric mean over {len(found)} rows: {mean:.3f} of {name}'s.")


if __name__ == "__main__":
    main()

"""Stages with replicas, against DAPPLE and PipeDream

    PIPECTL_WORKLOADS=DIRECTORY python tests/benchmarks/planner_dapple.py

Simulated seconds of one iteration on DAPPLE's profiles and links, 16 devices numbered machine by
machine. Replicas split micro-batches.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from math import exp, log
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "planner" / "gate"))
from published import cluster_of, half_and_half, plans_of
from tables import print_table

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


COLUMNS = (
    *("profile (batch, micro-batch)", "layout", "DAPPLE", "PipeDream", "best listed"),
    *("pipectl", "of best", "replicas", "planning s"),
)


def cells(
    path: Path, row: Row, values: dict[str, float], plan: Plan, took_s: float
) -> tuple[str, ...]:
    """A row of the table."""
    best_s = min(values.values())
    return (
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


def problems(
    budget_s: float = BUDGET_S,
) -> Iterator[tuple[Path, Row, dict[str, float], Plan, float]]:
    """Of all files: the steps of listed plans, our plan, and the seconds that it took."""
    for path in sorted(Path(os.environ["PIPECTL_WORKLOADS"]).glob("dapple-*.json")):
        document, profile = json.loads(path.read_text()), half_and_half(path)
        layouts = document["cluster"]["layouts"]
        clusters = {name: cluster_of(machines) for name, machines in layouts.items()}
        for row, values in listed(document, profile, clusters).items():
            yield path, row, values, *planned(profile, clusters[row[0]], row[1], budget_s)


def main() -> None:
    """Print the table and the means."""
    next(problems())  # which compiles
    found = []

    def rows() -> Iterator[tuple[str, ...]]:
        for problem in problems():
            found.append(problem)
            yield cells(*problem)

    print_table(COLUMNS, rows())
    print()
    for name in ("DAPPLE", "PipeDream"):
        ratios = [
            plan.predicted_step_s / steps_s[name]
            for _, _, steps_s, plan, _ in found
            if name in steps_s
        ]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"Geometric mean over {len(ratios)} rows: {mean:.3f} of {name}'s.")


if __name__ == "__main__":
    main()

"""Hybrid plans against DAPPLE's and PipeDream's on DAPPLE's profiles and constants.

Needs PIPECTL_WORKLOADS. Prints a section of Markdown.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import exp, log
from pathlib import Path
from time import perf_counter
from typing import Any

from pipectl.planner.baselines.dapple_rules import DappleRules
from pipectl.planner.graph.imported import prepared
from pipectl.planner.hybrid import HybridPlan, HybridRequest, States, hybrid_plans
from pipectl.profile import Profile

SYNCHRONOUS = "synchronous 1F1B iteration latency, event-simulated, full-duplex links"
AT_LEAST = "per-device micro-batch >= profile micro-batch"
BUDGET_S = 1.8
Row = tuple[str, int, int, str]


def half_and_half(path: Path) -> Profile:
    """Forward and backward take half of the time each; gradients are as large as activations."""
    profile = prepared(Profile.load(path))
    operators = []
    for operator in profile.operators:
        half_s = (operator.forward_s + operator.backward_s) / 2
        changed = replace(operator, forward_s=half_s, backward_s=half_s)
        operators.append(replace(changed, gradient_bytes=operator.output_bytes))
    return replace(profile, operators=tuple(operators))


def listed(document: dict[str, Any]) -> dict[Row, dict[str, float]]:
    """Values of each row by who found them (first word)."""
    rows: dict[Row, dict[str, float]] = {}
    for entry in document["best_known"]:
        if entry["objective"] == SYNCHRONOUS:
            key = tuple(entry[k] for k in ("layout", "global_batch", "profile_micro_batch", "rule"))
            rows.setdefault(key, {})[entry["found_by"].split()[0]] = entry["value"]
    return rows


def planned(path: Path, machines: list[int], row: Row) -> tuple[HybridPlan, float]:
    """Our plan and the seconds it took, reading the file excluded."""
    profile = half_and_half(path)
    _, batch, own, rule = row
    started_s = perf_counter()
    request = HybridRequest(
        batch,
        tuple(own * k for k in range(1, batch // own + 1) if batch // own % k == 0),
        least_samples=own if rule == AT_LEAST else 0,
        fractions=True,
        scatter=False,
    )
    found = hybrid_plans(
        profile,
        States.of(profile),
        DappleRules(machines),
        request,
        lambda: perf_counter() - started_s > BUDGET_S,
    )
    return found[0], perf_counter() - started_s


HEADER = """## Stages with replicas, against DAPPLE and PipeDream

`python tests/benchmarks/planner_dapple.py`; simulated seconds of one iteration on
DAPPLE's profiles, links and devices, 16 devices numbered machine by machine. The rule
*at least* gives every device at least the profile's micro-batch, *split* does not.
"""
COLUMNS = (
    *("profile (batch, micro-batch)", "layout", "rule", "DAPPLE", "PipeDream", "best listed"),
    *("pipectl", "of best", "replicas", "planning s"),
)


def cells(path: Path, row: Row, values: dict[str, float], plan: HybridPlan, took_s: float) -> str:
    """A row of the table."""
    best_s = min(values.values())
    found = (
        f"{path.stem.removeprefix('dapple-')} ({row[1]}, {row[2]})",
        row[0],
        "at least" if row[3] == AT_LEAST else "split",
        f"{values['DAPPLE']:.3f}",
        f"{values['PipeDream']:.3f}" if "PipeDream" in values else "",
        f"{best_s:.3f}",
        f"{plan.step_time_s:.3f}",
        f"{plan.step_time_s / best_s:.3f}",
        " ".join(map(str, plan.replicas)),
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
    planned(paths[0], [1, 1], ("", 16, 8, ""))  # compile
    for path in paths:
        document = json.loads(path.read_text())
        layouts = document["cluster"]["layouts"]
        for row, values in listed(document).items():
            plan, seconds = planned(path, layouts[row[0]], row)
            for name, found in ratios.items():
                if row[3] == AT_LEAST and "PipeDream" in values:
                    found.append(plan.step_time_s / values[name])
            print(cells(path, row, values, plan, seconds), flush=True)
    print()
    for name, found in ratios.items():
        mean = exp(sum(map(log, found)) / len(found))
        print(
            f"Geometric mean over the {len(found)} rows of the rule *at least* that list both: "
            f"{mean:.3f} of {name}'s."
        )


if __name__ == "__main__":
    main()

"""Throughput plans of Piper's bert32 beside Piper's own, as a markdown section.

Piper's values and seconds are those in the workload file (its own program, one core). Ours are
medians of three, with the profile read and the kernels compiled beforehand.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pipectl.planner.throughput import ThroughputPlan, ThroughputRequest, plan_throughput
from pipectl.profile import Profile

REPEATS = 3


def measured(profile: Profile, request: ThroughputRequest) -> tuple[ThroughputPlan, float]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plan = plan_throughput(profile, request)
        seconds.append(time.perf_counter() - start)
    return plan, statistics.median(seconds)


def row(profile: Profile, entry: dict[str, Any], micro_batches: int) -> str:
    request = ThroughputRequest(
        devices=entry["devices"],
        memory_limit_bytes=entry["memory_limit_bytes"],
        bandwidth_bytes_per_s=entry["bandwidth_bytes_per_s"],
        micro_batches=micro_batches,
    )
    plan, seconds = measured(profile, request)
    theirs = f"{entry['value'] * 1e3:.6g}" if entry.get("value") else "none in 150 s"
    their_s = f"{entry['seconds']:.3g}" if "seconds" in entry else "-"
    return (
        f"| {request.devices} | {entry['memory_limit_bytes'] >> 30} | {theirs} | {their_s} "
        f"| {plan.value_s * 1e3:.6g} | {seconds:.3g} | {'yes' if plan.exact else 'no'} "
        f"| {len(plan.stages)} | {plan.devices} |"
    )


def main() -> None:
    directory = os.environ.get("PIPECTL_WORKLOADS")
    if directory is None:
        sys.exit("PIPECTL_WORKLOADS names no directory of published profiles")
    path = Path(directory) / "piper-bert32a100.json"
    profile = Profile.load(path)
    known = json.loads(path.read_text())["best_known"]
    solved = [entry for entry in known if "stages" in entry or entry["value"] is None]
    micro_batches = solved[0]["microbatches_in_batch"]
    solved.sort(key=lambda entry: (entry["memory_limit_bytes"], entry["devices"]))
    plan_throughput(profile, ThroughputRequest(2, None, 1e9, 2))  # compiles
    print("## Piper's bert32: time per sample in the steady state\n")
    print("Command: `PIPECTL_WORKLOADS=DIR python tests/benchmarks/planner_piper.py`\n")
    rate = solved[0]["bandwidth_bytes_per_s"] / 2**30
    print(f"{micro_batches} micro-batches a step, {rate:g} GiB/s; median of {REPEATS} runs.\n")
    print(
        "| devices | GiB each | Piper ms | Piper s | pipectl ms | pipectl s | proven least "
        "| stages | devices used |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for entry in solved:
        print(row(profile, entry, micro_batches), flush=True)


if __name__ == "__main__":
    main()

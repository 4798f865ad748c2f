"""Gains of published schedules: predicted, and rehearsed over real ranks.

*Zero-bubble* (Qi et al., 2024): ZB-H1 and ZB-V against 1F1B with F = I = W and free messages. GPTs
on 8 accelerators are on [the page of claims](claims.md).

    python tests/benchmarks/rehearsal.py [--rounds COUNT]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_turns import ratio, run_worker, spread
from tables import print_table

from pipectl.cluster import Cluster, Device, Node
from pipectl.jobs.measuring import REHEARSAL_WORKER, result_of
from pipectl.link import Link
from pipectl.plan import Plan, StageCost
from pipectl.runs import RunDirectory
from pipectl.schedule.equal_stages import plan_equal_stages
from pipectl.simulate import simulate
from pipectl.simulate.rehearsing import rehearsal_of

RANKS, MICRO_BATCHES, FORWARD_S = 8, 32, 0.04
ROUNDS = 5
PUBLISHED, AT_LEAST = "1.23x", 0.97
FREE = Link(0.0, 1e15)
COLUMNS = (
    *("schedule", "predicted step s", "rehearsed step s", "predicted gain", "rehearsed gain"),
    *("of the predicted gain", "latest rank s", "published"),
)


def chain(schedule: str) -> Plan:
    """Even stages, one a rank or two halves, in which a backward's halves take as a forward."""
    parts = 2 if schedule == "zb-v" else 1
    part_s = FORWARD_S / parts
    cost = StageCost(part_s, 2 * part_s, 0.0, 0, 0, 0, weight_s=part_s)
    numbers = {"stages": parts * RANKS, "micro-batches": MICRO_BATCHES, "ranks": None}
    plan = plan_equal_stages(schedule, None, numbers, cost)
    sent = (replace(transfer, size_bytes=8) for transfer in plan.transfers)
    return replace(plan, transfers=tuple(sent))


def rehearsed(plan: Plan, cluster: Cluster, folder: Path) -> dict[str, Any]:
    """A rehearsal on this machine, as ``pipectl lab rehearse`` runs it."""
    run = RunDirectory.create(folder, "rehearsal", 0.0)
    plan.save(run.plan)
    rehearsal_of(plan, cluster, plan.ranks / len(os.sched_getaffinity(0))).save(run.rehearsal)
    run_worker(REHEARSAL_WORKER, run, plan.ranks)
    return result_of(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    plans = [chain(schedule) for schedule in ("1f1b", "zb-h1", "zb-v")]
    cluster = Cluster("free", "given", (Node("n", RANKS, RANKS, Device("cpu")),), FREE, FREE)
    ideal_s = [simulate(plan, cluster).step_time_s for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        turns = [[rehearsed(plan, cluster, Path(folder)) for plan in plans] for _ in range(rounds)]
    found = list(zip(*turns, strict=True))
    steps_s = [[item["rehearsed_step_time_s"] for item in items] for items in found]
    print(f"### Zero-bubble: {RANKS} ranks, {MICRO_BATCHES} micro-batches, F = I = W, {rounds} "
          f"rounds\n")  # fmt: skip

    def row(index: int) -> tuple[str, ...]:
        gain, real = ideal_s[0] / ideal_s[index] - 1, ratio(steps_s[0], steps_s[index]) - 1
        late_s = max(item["late_s"] for item in found[index])
        gains = ("", "", "")
        if index:
            low = "" if real >= AT_LEAST * gain else f" (below {AT_LEAST})"
            gains = f"{gain:.1%}", f"{real:.1%}", f"{real / gain:.3f}{low}"
        times = f"{ideal_s[index]:.3f}", spread(steps_s[index])
        return plans[index].schedule, *times, *gains, f"{late_s:.3f}", PUBLISHED if index else ""

    print_table(COLUMNS, map(row, range(len(plans))))


if __name__ == "__main__":
    main()

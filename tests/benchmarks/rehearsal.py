"""Gains of published schedules: predicted, rehearsed over real ranks, and trained.

*Zero-bubble* (Qi et al., 2024): ZB-H1 and ZB-V against 1F1B with F = I = W and free messages.
*DAPPLE* (Fan et al., 2021): 1F1B against GPipe at an equal memory limit, 5% above what 1F1B needs.
GPipe takes as many micro-batches of the same size as fit, with and without recomputation, or the
same batch in the way that the planner finds best. A small GPT is trained on two ranks of this
machine; GPTs on 8 accelerators are on [the page of claims](claims.md).

    python tests/benchmarks/rehearsal.py [--rounds COUNT]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_turns import cluster_of, gpt, peak_of, profiled, ratio, run_worker, spread
from offload import Way, comparison
from tables import print_table

from pipectl.cluster import Cluster, Device, Node
from pipectl.jobs.measuring import REHEARSAL_WORKER, result_of
from pipectl.link import Link
from pipectl.plan import Plan, StageCost
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.schedule.equal_stages import plan_equal_stages
from pipectl.simulate import simulate
from pipectl.simulate.rehearsing import rehearsal_of

RANKS, MICRO_BATCHES, FORWARD_S = 8, 32, 0.04
ROUNDS = 5
PUBLISHED, AT_LEAST = "1.23x", 0.97
SAMPLES, TRAINED, TRAINED_RANKS = 256, 16, 2
"""Of the trained GPT: samples, micro-batches and ranks."""
ROOM = 1.05
"""Of the limit, over what 1F1B needs."""
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


def zero_bubble(rounds: int) -> None:
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


def gpipe(one: Plan, count: int, cluster: Cluster, profile: Profile, *, recompute: bool) -> Plan:
    """GPipe with the stages of a plan and so many of its micro-batches."""
    plan = replace(
        one,
        schedule="gpipe",
        warm_up=(count,) * len(one.stages),
        micro_batches=count,
        batch_size=count * one.micro_batch_size,
        stages=tuple(replace(stage, recompute=recompute) for stage in one.stages),
    )
    found = simulate(plan, cluster, process_baseline_bytes=profile.process_baseline_bytes or 0)
    return replace(plan, prediction=found.prediction)


def at_equal_memory(profile: Profile, cluster: Cluster, request: PlanRequest) -> dict[str, Plan]:
    """1F1B with as little in flight as it can, and what GPipe can do within its memory."""
    least = tuple(range(cluster.ranks, 0, -1))
    one = make_plan(profile, cluster, replace(request, schedule="1f1b", warm_up=least))
    limit, plans = round(ROOM * peak_of(one)), {"1F1B": one}
    for name, recompute in (("GPipe", False), ("GPipe, recomputing", True)):
        for count in range(one.micro_batches, 0, -1):
            plan = gpipe(one, count, cluster, profile, recompute=recompute)
            if peak_of(plan) <= limit:
                plans[name] = plan
                break
    limited = replace(request, schedule="gpipe", memory_limit_bytes=limit, recompute=None)
    plans["GPipe, the same batch"] = make_plan(profile, cluster, limited)
    return plans


def dapple(rounds: int) -> None:
    request = PlanRequest("dapple", SAMPLES, micro_batches=TRAINED, stages=TRAINED_RANKS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        gpt(layers=4, batch=SAMPLES).write(folder, TRAINED_RANKS)
        profile = profiled(folder, TRAINED)
        plans = at_equal_memory(profile, cluster_of(TRAINED_RANKS), request)
        ways = {
            f"{name}: {plan.micro_batches} micro-batches of {plan.micro_batch_size}": Way(plan)
            for name, plan in plans.items()
        }
        for _ in range(rounds):
            for way in ways.values():
                way.train(profile, folder, "dapple")
    print(f"\n### 1F1B and GPipe at equal memory, trained: a GPT on {TRAINED_RANKS} ranks, "
          f"{rounds} rounds\n")  # fmt: skip
    print_table(*comparison(ways))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    zero_bubble(rounds)
    dapple(rounds)


if __name__ == "__main__":
    main()

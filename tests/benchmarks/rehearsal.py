"""Gains of published schedules: predicted, rehearsed over real ranks, and trained.

*Zero-bubble* (Qi et al., 2024): ZB-H1 and ZB-V against 1F1B with F = I = W and free messages.
*DAPPLE* (Fan et al., 2021): 1F1B against GPipe at an equal memory limit, 5% above what 1F1B needs.
GPipe takes as many micro-batches of the same size as fit, with and without recomputation, or the
same batch in the way that the planner finds best. A small GPT is trained on two ranks of this
machine; GPTs on 8 accelerators are on [the page of claims](claims.md).

    python tests/benchmarks/rehearsal.py [--short] [zero-bubble] [dapple]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_turns import (
    cluster_of,
    gpt,
    peak_of,
    profiled,
    rates,
    ratio,
    run_ranks,
    spread,
    train_in_turns,
)
from tables import print_table

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.jobs.measuring import REHEARSAL_WORKER, result_of
from pipectl.link import Link
from pipectl.plan import Plan, StageCost
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.schedule.equal_stages import plan_equal_stages
from pipectl.simulate import simulate
from pipectl.simulate.rehearsing import rehearsal_of
from pipectl.units import format_bytes

RANKS, MICRO_BATCHES, FORWARD_S = 8, 32, 0.04
PUBLISHED_ZERO_BUBBLE, PUBLISHED_DAPPLE = "1.23x", "1.6x, 12% less memory"
AT_LEAST = 0.97
ROUNDS = 5
SAMPLES, TRAINED_MICRO_BATCHES, TRAINED_RANKS = 256, 16, 2
"""Of the trained GPT."""
ROOM = 1.05
"""Of the limit, over what 1F1B needs."""


def chain(schedule: str) -> Plan:
    """Even stages, one a rank or two halves, in which a backward's halves take as a forward."""
    parts = 2 if schedule == "zb-v" else 1
    stages = parts * RANKS
    part_s = FORWARD_S / parts
    cost = StageCost(part_s, 2 * part_s, 0.0, 0, 0, 0, weight_s=part_s)
    numbers = {"stages": stages, "micro-batches": MICRO_BATCHES, "ranks": None}
    plan = plan_equal_stages(schedule, None, numbers, cost)
    sent = (replace(transfer, size_bytes=8) for transfer in plan.transfers)
    return replace(plan, transfers=tuple(sent))


def free_links(ranks: int) -> Cluster:
    """A cluster whose messages take no time."""
    link = Link(0.0, 1e15)
    return Cluster("free", "given", (Node("n", ranks, ranks, Device("cpu")),), link, link)


def rehearsed(plan: Plan, cluster: Cluster, folder: Path) -> dict[str, Any]:
    """A rehearsal on this machine, as ``pipectl lab rehearse`` runs it."""
    run = RunDirectory.create(folder, "rehearsal", 0.0)
    plan.save(run.plan)
    rehearsal_of(plan, cluster, plan.ranks / len(os.sched_getaffinity(0))).save(run.rehearsal)
    run_ranks(REHEARSAL_WORKER, run, plan.ranks)
    return result_of(run)


def rehearsed_in_turns(
    plans: Sequence[Plan], cluster: Cluster, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Rehearsals of every plan by its name, round after round."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for plan in plans:
                found.setdefault(plan.name, []).append(rehearsed(plan, cluster, Path(folder)))
    return found


def zero_bubble(rounds: int) -> None:
    plans = [chain(schedule) for schedule in ("1f1b", "zb-h1", "zb-v")]
    cluster = free_links(RANKS)
    ideal_s = [simulate(plan, cluster).step_time_s for plan in plans]
    found = rehearsed_in_turns(plans, cluster, rounds)
    steps_s = [[item["rehearsed_step_time_s"] for item in found[plan.name]] for plan in plans]
    print(f"\n### Zero-bubble: {RANKS} ranks, {MICRO_BATCHES} micro-batches, F = I = W, {rounds} "
          f"rounds\n")  # fmt: skip
    columns = (
        *("schedule", "predicted step s", "rehearsed step s", "predicted gain", "rehearsed gain"),
        *("of the predicted gain", "latest rank s", "published"),
    )

    def row(plan: Plan, ideal: float, times: list[float]) -> tuple[str, ...]:
        gain, real = ideal_s[0] / ideal - 1, ratio(steps_s[0], times) - 1
        late_s = max(item["late_s"] for item in found[plan.name])
        gains = (f"{gain:.1%}", f"{real:.1%}", _share(real, gain)) if gain else ("", "", "")
        published = PUBLISHED_ZERO_BUBBLE if gain else ""
        return plan.schedule, f"{ideal:.3f}", spread(times), *gains, f"{late_s:.3f}", published

    print_table(columns, map(row, plans, ideal_s, steps_s))


def _share(found: float, ideal: float) -> str:
    return f"{found / ideal:.3f}{'' if found >= AT_LEAST * ideal else f' (below {AT_LEAST})'}"


def first_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    """1F1B with as little in flight as it can."""
    least = tuple(range(cluster.ranks, 0, -1))
    return make_plan(profile, cluster, replace(request, schedule="1f1b", warm_up=least))


def at_equal_memory(
    profile: Profile, cluster: Cluster, request: PlanRequest, one: Plan
) -> dict[str, Plan]:
    """A plan of 1F1B, and what GPipe can do within its memory; the first two with its stages."""
    limit, baseline = round(ROOM * peak_of(one)), profile.process_baseline_bytes or 0
    found = {"1F1B": one}
    for name, again in (("GPipe", False), ("GPipe, recomputing", True)):
        many = range(one.micro_batches, 0, -1)
        plans = (gpipe(one, count, cluster, baseline, recompute=again) for count in many)
        fitting = next((plan for plan in plans if peak_of(plan) <= limit), None)
        if fitting is not None:
            found[name] = fitting
    limited = replace(request, schedule="gpipe", memory_limit_bytes=limit, recompute=None)
    with suppress(InfeasibleError):
        asked = (replace(limited, micro_batches=count) for count in (None, one.micro_batches))
        best = min((make_plan(profile, cluster, item) for item in asked), key=_step_s)
        found["GPipe, the same batch"] = best
    return found


def gpipe(one: Plan, count: int, cluster: Cluster, baseline: int, *, recompute: bool) -> Plan:
    """GPipe with the stages of a plan and so many of its micro-batches."""
    plan = replace(
        one,
        schedule="gpipe",
        warm_up=(count,) * len(one.stages),
        micro_batches=count,
        batch_size=count * one.micro_batch_size,
        stages=tuple(replace(stage, recompute=recompute) for stage in one.stages),
    )
    found = simulate(plan, cluster, process_baseline_bytes=baseline)
    return replace(plan, prediction=found.prediction)


def described(name: str, plan: Plan) -> str:
    """What tells the plans apart."""
    again = sum(stage.recompute for stage in plan.stages)
    more = f", {again} of {len(plan.stages)} stages recompute" if again else ""
    return f"{name}: {plan.micro_batches} micro-batches of {plan.micro_batch_size}{more}"


def _step_s(plan: Plan) -> float:
    return plan.predicted_step_s


def show_dapple(
    plans: dict[str, Plan], seconds: dict[str, list[float]], peaks: dict[str, int]
) -> None:
    """A table of samples a second and peaks."""
    columns = (
        *("plan", "predicted samples/s", "measured samples/s", "1F1B is faster, predicted"),
        *("measured", "largest peak, predicted", "measured", "1F1B holds", "published"),
    )
    first = plans["1F1B"]
    found = {name: rates(plan, seconds[name]) for name, plan in plans.items()}

    def row(name: str, plan: Plan) -> tuple[str, ...]:
        (expected,) = rates(plan, [plan.predicted_step_s])
        faster = rates(first, [first.predicted_step_s])[0] / expected
        return (
            *(described(name, plan), f"{expected:.3f}", spread(found[name]), f"{faster:.2f}x"),
            f"{ratio(found['1F1B'], found[name]):.2f}x",
            *(format_bytes(peak_of(plan)), format_bytes(peaks[name])),
            f"{peaks['1F1B'] / peaks[name] - 1:+.0%}",
            PUBLISHED_DAPPLE if name == "GPipe" else "",
        )

    print_table(columns, (row(*item) for item in plans.items()))


def dapple_trained(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpt(layers=4, batch=SAMPLES).write(folder, TRAINED_RANKS)
        profile, cluster = profiled(folder, TRAINED_MICRO_BATCHES), cluster_of(TRAINED_RANKS)
        request = PlanRequest(
            "dapple", SAMPLES, micro_batches=TRAINED_MICRO_BATCHES, stages=TRAINED_RANKS
        )
        plans = at_equal_memory(profile, cluster, request, first_plan(profile, cluster, request))
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        contenders = {key: {"plan": f"{key}.json"} for key in plans}
        case = {"contenders": contenders, "rounds": rounds, "steps": 1}
        seconds = train_in_turns(folder, case, TRAINED_RANKS)[0]["seconds"]
        peaks = {key: _peak(folder, key, entry) for key, entry in contenders.items()}
    print(f"\n### 1F1B and GPipe at equal memory, trained: a GPT on {TRAINED_RANKS} ranks, "
          f"{rounds} rounds\n")  # fmt: skip
    show_dapple(plans, seconds, peaks)


def _peak(folder: Path, name: str, entry: dict[str, str]) -> int:
    """Resident, in processes of its own."""
    alone = {"contenders": {name: entry}, "rounds": 1, "steps": 2}
    return max(rank["peak_bytes"] for rank in train_in_turns(folder, alone, TRAINED_RANKS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("parts", nargs="*", help="zero-bubble, dapple; both by default")
    given = parser.parse_args()
    rounds, parts = 1 if given.short else ROUNDS, given.parts or ["zero-bubble", "dapple"]
    print("## Published schedules: predicted, rehearsed, trained")
    if "zero-bubble" in parts:
        zero_bubble(rounds)
    if "dapple" in parts:
        dapple_trained(rounds)


if __name__ == "__main__":
    main()

"""How near the engine comes to what its schedule allows, with two ranks on two cores.

*Steps*: the measured step against the simulator's with messages that take no time; each round
profiles anew, with two neighbours. *Actions*: what the engine takes for a row of its program where
stages compute next to nothing, sends included; a whole step also waits for the other rank.
*Speed-up* over one rank, against the p m / (m + p - 1) of even stages. One rank computes with one
thread as well; *beside a neighbour* says how fast it is while the other core is as busy as in the
pipeline: cores share memory and clock, and what they lose to each other no pipeline gets back.

    python tests/benchmarks/ideal.py [--short] [steps] [actions] [speed-up]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from in_turns import (
    MODELS,
    Job,
    cluster_of,
    even_cnn,
    gpt,
    profiled,
    ratio,
    spread,
    train_in_turns,
)

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.plans.given_stages import plan_of_stages
from pipectl.profile import Profile
from pipectl.simulate import simulate

RANKS, MICRO_BATCHES = 2, 8
ROUNDS, STEPS = 7, 3
MANY = 500
"""Micro-batches of stages that compute nothing."""
GOAL_STEP, GOAL_ACTION_US, GOAL_SPEED_UP = 1.03, 50, 0.95
JOBS = {
    "gpt": gpt(),
    "gpt, narrow": gpt(layers=12, width=192),
    "even CNN": even_cnn(),
}


def free(cluster: Cluster) -> Cluster:
    """With messages that take no time."""
    link = Link(0.0, 1e15)
    return replace(cluster, within_node=link, between_nodes=link)


def plan_for(job: Job, profile: Profile, ranks: int, micro_batches: int) -> Plan:
    request = PlanRequest(
        "ideal", job.batch, micro_batches=micro_batches, stages=ranks, schedule="1f1b"
    )
    return make_plan(profile, cluster_of(ranks), request)


def steps(rounds: int) -> None:
    print(f"\n### Measured steps over the simulator's without communication ({rounds} rounds, "
          f"goal {GOAL_STEP})\n")  # fmt: skip
    print("| model | simulated step s | measured step s | ratio | bubble |")
    print("|---|---|---|---|---|")
    for name, job in JOBS.items():
        simulated, measured, bubbles = [], [], []
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            job.write(folder, RANKS)
            for _ in range(rounds):
                profile = profiled(folder, MICRO_BATCHES, again=True)
                plan = plan_for(job, profile, RANKS, MICRO_BATCHES)
                plan.save(folder / "plan.json")
                found = simulate(plan, free(cluster_of(RANKS)))
                simulated.append(found.step_time_s)
                bubbles.append(found.bubble)
                case = {"contenders": {name: {"plan": "plan.json"}}, "rounds": 3, "steps": STEPS}
                times = train_in_turns(folder, case, RANKS)[0]["seconds"][name]
                measured.append(statistics.median(times))
        ratios = [real / ideal for real, ideal in zip(measured, simulated, strict=True)]
        print(f"| {name} | {spread(simulated)} | {spread(measured)} | {spread(ratios)} "
              f"| {statistics.median(bubbles):.3f} |", flush=True)  # fmt: skip


def additions(micro_batches: int) -> Job:
    """Two stages that add a vector of four numbers."""
    data = {"factory": f"{MODELS}/even.py:Vectors", "kwargs": {"samples": micro_batches}}
    return Job({"factory": f"{MODELS}/even.py:additions"}, "torch.nn:MSELoss", data, micro_batches)


def halved(profile: Profile, micro_batches: int) -> Plan:
    """One addition a stage; the loss goes with the second."""
    ids = [operator.id for operator in profile.operators]
    request = PlanRequest("actions", micro_batches, micro_batches=micro_batches)
    return plan_of_stages(profile, cluster_of(RANKS), request, [ids[:1], ids[1:]], (None, None))


def actions(rounds: int) -> None:
    job = additions(MANY)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job.write(folder, RANKS)
        profile = profiled(folder, MANY)
        halved(profile, MANY).save(folder / "plan.json")
        case = {
            "contenders": {"1F1B": {"plan": "plan.json"}},
            "rounds": rounds,
            "steps": 1,
            "by_kind": True,
        }
        found = train_in_turns(folder, case, RANKS)
    print(f"\n### What an action of an empty stage takes ({MANY} micro-batches, {rounds} steps, "
          f"goal {GOAL_ACTION_US} us)\n")  # fmt: skip
    print("| rank | rows a step | step, us a row | median row, us | medians by kind, us |")
    print("|---|---|---|---|---|")
    for rank, mine in enumerate(found):
        rows = mine["rows"]["1F1B"]
        each = [1e6 * seconds / rows for seconds in mine["seconds"]["1F1B"]]
        kinds = {kind: 1e6 * median_s for kind, median_s in mine["kinds"]["1F1B"].items()}
        every = kinds.pop("all")
        shown = ", ".join(f"{kind.lower()} {us:.0f}" for kind, us in sorted(kinds.items()))
        print(f"| {rank} | {rows} | {spread(each, '.1f')} | {every:.1f} | {shown} |", flush=True)


def speed_up(rounds: int) -> None:
    ideal = RANKS * MICRO_BATCHES / (MICRO_BATCHES + RANKS - 1)
    print(f"\n### Speed-up over one rank ({rounds} rounds, ideal {ideal:.2f}x, "
          f"goal {GOAL_SPEED_UP:.0%} of it)\n")  # fmt: skip
    print("| model | pipeline step s | one rank s | speed-up | of the ideal | predicted | "
          "beside a neighbour s | speed-up | of the ideal |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for name, job in JOBS.items():
        plans, seconds = trained_alone_and_together(job, rounds)
        pipeline, one, beside = (seconds[key] for key in ("pipeline", "one", "beside"))
        predicted = plans["one"].predicted_step_s / plans["pipeline"].predicted_step_s
        print(f"| {name} | {spread(pipeline)} | {spread(one)} | {in_rounds(one, pipeline)} "
              f"| {ratio(one, pipeline) / ideal:.1%} | {predicted:.2f} | {spread(beside)} "
              f"| {in_rounds(beside, pipeline)} | {ratio(beside, pipeline) / ideal:.1%} |",
              flush=True)  # fmt: skip


def in_rounds(ones: Sequence[float], others: Sequence[float]) -> str:
    """The ratio of the medians, and the ratios of the rounds from lowest to highest."""
    each = [one / other for one, other in zip(ones, others, strict=True)]
    return f"{ratio(ones, others):.2f} ({min(each):.2f} to {max(each):.2f})"


def trained_alone_and_together(
    job: Job, rounds: int
) -> tuple[dict[str, Plan], dict[str, list[float]]]:
    """Seconds a step of the pipeline, of one rank alone, and of one beside another."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job.write(folder, RANKS)
        profile = profiled(folder, MICRO_BATCHES)
        plans = {
            "pipeline": plan_for(job, profile, RANKS, MICRO_BATCHES),
            "one": plan_for(job, profile, 1, MICRO_BATCHES),
        }
        for name, plan in plans.items():
            plan.save(folder / f"{name}.json")
        contenders: dict[str, Any] = {
            "pipeline": {"plan": "pipeline.json"},
            "one": {"plan": "one.json", "on": "first"},
            "beside": {"plan": "one.json", "on": "each"},
        }
        case = {"contenders": contenders, "rounds": rounds, "steps": STEPS}
        return plans, train_in_turns(folder, case, RANKS)[0]["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("parts", nargs="*", help="steps, actions, speed-up; all by default")
    given = parser.parse_args()
    parts = {"steps": steps, "actions": actions, "speed-up": speed_up}
    print(f"## Two ranks on two cores against the ideal ({RANKS} ranks, {MICRO_BATCHES} "
          "micro-batches, one thread each)")  # fmt: skip
    for name in given.parts or parts:
        parts[name](1 if given.short else ROUNDS)


if __name__ == "__main__":
    main()

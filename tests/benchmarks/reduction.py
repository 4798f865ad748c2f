"""Sums of gradients during the last backward, against sums after the schedule.

Two replicas of a GPT train in turns with both, in shared memory and over links between two network
namespaces (needs root, ``ip`` and ``tc``); with four cores, also two stages of two replicas each.

    python tests/benchmarks/reduction.py [--short] [MEGABITS_PER_SECOND ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from in_turns import cluster_of, gpt, may_shape, profiled, ratio, spread, train_in_turns
from tables import print_table

from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.units import format_bytes

MEGABITS = (0, 2000, 1000)
BATCH, MICRO_BATCHES, REPLICAS = 32, 8, 2
ROUNDS, STEPS = 7, 2
COLUMNS = (
    *("stages x replicas", "link", "gradients", "on the wire s"),
    *("sums after the schedule, step s", "sums during the backward, step s"),
    *("faster", "hidden", "predicted s"),
)


def replicated(profile: Profile, stages: int, megabits: int) -> Plan:
    """Every stage twice; ranks of a stage are neighbours."""
    ranks = REPLICAS * stages
    between = Link(1e-4, megabits * 1e6 / 8) if megabits else None
    request = PlanRequest(
        "reduction",
        BATCH,
        micro_batches=MICRO_BATCHES,
        stages=stages,
        replicas=REPLICAS,
        schedule="1f1b",
    )
    return replace(make_plan(profile, cluster_of(ranks, between), request), name="sums")


def compare(
    profile: Profile, folder: Path, stages: int, megabits: int, rounds: int
) -> tuple[str, ...]:
    """A row of the table."""
    plan = replicated(profile, stages, megabits)
    plan.save(folder / "plan.json")
    contenders = {
        "early": {"plan": "plan.json"},
        "late": {"plan": "plan.json", "sums": "late"},
    }
    case = {"contenders": contenders, "rounds": rounds, "steps": STEPS}
    seconds = train_in_turns(folder, case, plan.ranks, megabits)[0]["seconds"]
    early, late = seconds["early"], seconds["late"]
    size = sum(stage.cost.accumulated_bytes for stage in plan.stages)
    # A replica sends 2 (r - 1) / r of its gradients, which is all of them with two replicas.
    wire_s = 8e-6 * size / stages / megabits if megabits else 0.0
    saved_s = statistics.median(late) - statistics.median(early)
    where = f"{megabits} Mbit/s" if megabits else "shared memory"
    hidden = f"{saved_s / wire_s:.0%}" if wire_s else ""
    return (
        *(f"{stages} x {REPLICAS}", where, format_bytes(size), f"{wire_s:.3f}", spread(late)),
        *(spread(early), f"{ratio(late, early):.2f}x", hidden, f"{plan.predicted_step_s:.3f}"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("megabits", nargs="*", type=int, default=MEGABITS)
    given = parser.parse_args()
    rounds = 1 if given.short else ROUNDS
    print(f"## Sums of gradients beside the computation ({rounds} rounds)\n")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        gpt(batch=BATCH).write(folder, REPLICAS)
        profile = profiled(folder, MICRO_BATCHES)
        cases = [(1, each) for each in given.megabits if not each or may_shape()]
        if len(os.sched_getaffinity(0)) >= 2 * REPLICAS:
            cases.append((2, 0))
        print_table(COLUMNS, (compare(profile, folder, *case, rounds) for case in cases))


if __name__ == "__main__":
    main()

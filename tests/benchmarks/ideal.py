"""Engine overhead: two ranks on two cores.

- *Computations* compares the measured step with a simulated one that has the durations of the
  computations that were measured in this step, and nothing else: no messages, and no time between
  actions.
- *Actions* is the engine's time per row of a program, with stages that compute next to nothing: all
  of a row, from its begin to that of the next, next to what the operators of a forward and a
  backward take as PyTorch runs them.
- *Speed-up* compares the pipeline with one rank with one thread. The ideal for p equal stages and m
  micro-batches is p m / (m + p - 1). *Beside a neighbour* compares with the same rank while another
  process keeps the other core busy.

    python tests/benchmarks/ideal.py [--short] [computations] [actions] [speed-up]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from tables import print_table

from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.judge import plan_of_stages
from pipectl.profile import Profile
from pipectl.schedule import Kind

RANKS, MICRO_BATCHES = 2, 8
ROUNDS, STEPS = 5, 3
MANY = 500
"""Micro-batches of stages that compute nothing."""
JOBS = {
    "gpt": gpt(),
    "gpt, narrow": gpt(layers=12, width=192),
    "even CNN": even_cnn(),
}


def plan_for(job: Job, profile: Profile, ranks: int, micro_batches: int) -> Plan:
    request = PlanRequest(
        "ideal", job.batch, micro_batches=micro_batches, stages=ranks, schedule="1f1b"
    )
    return make_plan(profile, cluster_of(ranks), request)


class Computation(NamedTuple):
    """A row of a recorded step in which a rank computed."""

    kind: Kind
    stage: int
    micro_batch: int
    seconds: float

    def needs(self) -> tuple[Kind, int, int]:
        """Kind, stage and micro-batch of what another stage computes before it."""
        neighbour = -1 if self.kind is Kind.FORWARD else 1
        return self.kind, self.stage + neighbour, self.micro_batch


def computations(rounds: int) -> None:
    count = rounds * STEPS
    print(f"\n### Measured steps over their own computations ({count} steps)\n")
    columns = ("model", "computations alone s", "measured step s", "ratio")
    print_table(columns, (computations_row(name, job, count) for name, job in JOBS.items()))


def computations_row(name: str, job: Job, count: int) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job.write(folder, RANKS)
        plan = plan_for(job, profiled(folder, MICRO_BATCHES), RANKS, MICRO_BATCHES)
        plan.save(folder / "plan.json")
        contenders = {name: {"plan": "plan.json"}}
        case = {"contenders": contenders, "rounds": 1, "steps": STEPS, "recorded": count}
        records = [rank["records"][name] for rank in train_in_turns(folder, case, RANKS)]
    measured = [step["seconds"] for step in records[0]]
    alone = [
        without_waits([list(computed(mine["table"])) for mine in step])
        for step in zip(*records, strict=True)
    ]
    ratios = [real / ideal for real, ideal in zip(measured, alone, strict=True)]
    return name, spread(alone), spread(measured), spread(ratios)


def computed(table: Sequence[Sequence[float]]) -> Iterator[Computation]:
    """What a rank computed in a recorded step, in its order."""
    for start_s, end_s, event, stage, micro_batch, _ in table:
        if event < len(Kind) and Kind(event).is_compute:
            yield Computation(Kind(event), int(stage), int(micro_batch), end_s - start_s)


def without_waits(ranks: Sequence[Sequence[Computation]]) -> float:
    """Seconds until every rank has done its computations, if nothing else takes time.

    A forward needs that of the stage before, a backward that of the stage behind, and updates need
    all of them, since ranks meet before.
    """
    updates = [each.seconds for mine in ranks for each in mine if each.kind is Kind.UPDATE]
    left = [deque(each for each in mine if each.kind is not Kind.UPDATE) for mine in ranks]
    waited_for = {each[:3] for mine in left for each in mine}
    ends: dict[tuple[Kind, int, int], float] = {}
    free_s = [0.0] * len(ranks)
    while any(left):
        for rank, mine in enumerate(left):
            while mine and (needs := mine[0].needs()) not in waited_for:
                done = mine.popleft()
                free_s[rank] = max(free_s[rank], ends.get(needs, 0.0)) + done.seconds
                ends[done[:3]] = free_s[rank]
                waited_for.remove(done[:3])
    return max(free_s) + max(updates)


def additions(micro_batches: int) -> Job:
    """Two stages that add a vector of four numbers."""
    data = {"factory": f"{MODELS}/even.py:Vectors", "kwargs": {"samples": micro_batches}}
    return Job({"factory": f"{MODELS}/even.py:additions"}, "torch.nn:MSELoss", data, micro_batches)


def halved(profile: Profile, micro_batches: int) -> Plan:
    """One addition a stage; the loss goes with the second."""
    ids = [operator.id for operator in profile.operators]
    request = PlanRequest("actions", micro_batches, micro_batches=micro_batches)
    return plan_of_stages(profile, cluster_of(RANKS), request, [ids[:1], ids[1:]])


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
    print(f"\n### Time of an action of an empty stage ({MANY} micro-batches, {rounds} steps)\n")
    columns = ("rank", "rows per step", "step, us per row", "median row, us", "medians by kind, us")
    print_table((*columns, "operators alone, us"), map(actions_row, range(RANKS), found))


def actions_row(rank: int, mine: dict[str, Any]) -> tuple[object, ...]:
    rows = mine["rows"]["1F1B"]
    each = [1e6 * seconds / rows for seconds in mine["seconds"]["1F1B"]]
    kinds = {kind: 1e6 * median_s for kind, median_s in mine["kinds"]["1F1B"].items()}
    every = kinds.pop("all")
    shown = ", ".join(f"{kind} {us:.0f}" for kind, us in sorted(kinds.items()))
    alone = mine["operators"]["1F1B"].items()
    operators = ", ".join(f"{kind} {1e6 * seconds:.0f}" for kind, seconds in alone)
    return rank, rows, spread(each, ".1f"), f"{every:.1f}", shown, operators


def speed_up(rounds: int) -> None:
    ideal = RANKS * MICRO_BATCHES / (MICRO_BATCHES + RANKS - 1)
    print(f"\n### Speed-up over one rank ({rounds} rounds, ideal {ideal:.2f}x)\n")
    columns = (
        *("model", "pipeline step s", "one rank s", "speed-up", "of the ideal", "predicted"),
        *("beside a neighbour s", "speed-up", "of the ideal"),
    )
    print_table(columns, (speed_up_row(name, job, rounds, ideal) for name, job in JOBS.items()))


def speed_up_row(name: str, job: Job, rounds: int, ideal: float) -> tuple[str, ...]:
    plans, seconds = trained_alone_and_together(job, rounds)
    pipeline, one, beside = (seconds[key] for key in ("pipeline", "one", "beside"))
    predicted = plans["one"].predicted_step_s / plans["pipeline"].predicted_step_s
    shares = [f"{ratio(alone, pipeline) / ideal:.1%}" for alone in (one, beside)]
    return (
        *(name, spread(pipeline), spread(one), in_rounds(one, pipeline), shares[0]),
        *(f"{predicted:.2f}", spread(beside), in_rounds(beside, pipeline), shares[1]),
    )


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
    parser.add_argument("parts", nargs="*", help="by default all")
    given = parser.parse_args()
    parts = {
        "computations": computations,
        "actions": actions,
        "speed-up": speed_up,
    }
    print(f"## Two ranks on two cores against the ideal ({RANKS} ranks, {MICRO_BATCHES} "
          "micro-batches, one thread each)")  # fmt: skip
    for name in given.parts or parts:
        parts[name](1 if given.short else ROUNDS)


if __name__ == "__main__":
    main()

"""Short of memory: early backwards, recomputation, offload.

Jobs train a GPT on two ranks in turns. GPipe holds all micro-batches of a step until their
backwards; 1F1B, which DAPPLE (Fan et al., 2021) compares with it, at most two. *Two micro-batches*
are what GPipe can keep in the memory of 1F1B. Offload is hidden if ``saved bytes / bandwidth <=
forward time``. Accelerators, PipeDream and PipeFB are on
[the page of claims](claims.md#offload-and-pipefb).

    python tests/benchmarks/memory.py [ROUNDS]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipectl.cluster import OffloadTarget
from pipectl.jobs.planning import plan_job
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_metrics
from pipectl.spec import JobSpec, dump, load
from pipectl.units import format_bytes
from tests.benchmarks.jobs import (
    cluster_of,
    gpt,
    peak_of,
    print_table,
    profiled,
    run_ranks,
    write_job,
)

RANKS, MICRO_BATCHES, SAMPLES = 2, 16, 4
"""Of the trained job; samples of a micro-batch."""
STEPS, ROUNDS = 6, 3
"""Of the first way; others train as many samples."""
GPIPE = PlanRequest(
    "gpt",
    MICRO_BATCHES * SAMPLES,
    micro_batches=MICRO_BATCHES,
    stages=RANKS,
    schedule="gpipe",
    offload_to=OffloadTarget.DISK,
)
WAYS = {
    "GPipe": GPIPE,
    "GPipe, recomputing": replace(GPIPE, recompute=True),
    "GPipe, offloading to disk": replace(GPIPE, offload=True),
    "GPipe, two micro-batches": replace(GPIPE, batch_size=2 * SAMPLES, micro_batches=2),
    "1F1B": replace(GPIPE, schedule="1f1b", warm_up=(2, 1)),
}
SMALL = PlanRequest("gpt", 32, micro_batches=8, stages=4, offload_to=OffloadTarget.DISK)
"""Of the jobs of the thesis."""
Runs = Mapping[str, Sequence[tuple[int, float]]]
"""Peak of the fullest rank and median step of every job, by its way to save memory."""


def train(
    parts: Mapping[str, Any], requests: Mapping[str, PlanRequest], rounds: int
) -> tuple[dict[str, Plan], Runs]:
    """Plans with as many ranks and micro-batches as the first, trained by jobs in turns."""
    first = next(iter(requests.values()))
    assert first.stages is not None
    assert first.micro_batches is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder, parts, first.batch_size, first.stages)
        profile, cluster = profiled(folder, first.micro_batches), cluster_of(first.stages)
        specs = {way: load(folder / "job.yaml", asked(each)) for way, each in requests.items()}
        plans = {way: plan_job(spec, profile, cluster) for way, spec in specs.items()}
        turns = [
            {way: train_plan(folder, specs[way], profile, plan) for way, plan in plans.items()}
            for _ in range(rounds)
        ]
    return plans, {way: [turn[way] for turn in turns] for way in plans}


def asked(request: PlanRequest) -> list[str]:
    """What a job sets to ask the planner for the same."""
    settings = {
        "training.batch_size": request.batch_size,
        "pipeline.micro_batches": request.micro_batches,
        "pipeline.stages": request.stages,
        "pipeline.schedule": request.schedule,
        "pipeline.warm_up": None if request.warm_up is None else [*request.warm_up],
        "pipeline.recompute": "all" if request.recompute else "none",
        "pipeline.offload": request.offload_to.value if request.offload else "none",
        "pipeline.backward": "apart" if request.backward_apart else "together",
    }
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


def train_plan(folder: Path, spec: JobSpec, profile: Profile, plan: Plan) -> tuple[int, float]:
    """Peak and step of a job with its plan."""
    run = RunDirectory.create(folder / "runs", plan.schedule, 0.0)
    steps = STEPS * load(folder / "job.yaml").training.batch_size // plan.batch_size
    training = spec.training.model_copy(update={"steps": steps})
    run.job.write_text(dump(spec.model_copy(update={"training": training})))
    profile.save(run.profile)
    plan.save(run.plan)
    run_ranks("pipectl.runtime.worker", run, plan.ranks)
    ranks = json.loads(run.start.heartbeat.read_text())["ranks"]
    steps_s = [line.step_time_s for line in read_metrics(run) if line.step_time_s is not None]
    return max(rank["peak_bytes"] for rank in ranks), statistics.median(steps_s)


def comparison(
    plans: Mapping[str, Plan], runs: Runs | None = None
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Columns and rows of a table: peaks and throughput of all plans against the first."""

    def measured(way: str) -> tuple[float, float]:
        assert runs is not None
        peaks, steps_s = zip(*runs[way], strict=True)
        return statistics.median(peaks), plans[way].batch_size / statistics.median(steps_s)

    def predicted(way: str) -> tuple[float, float]:
        return peak_of(plans[way]), plans[way].batch_size / plans[way].predicted_step_s

    kinds = {"predicted": predicted} | ({"measured": measured} if runs else {})
    heads = [f"{kind} {figure}" for kind in kinds for figure in ("peak", "samples/s")]
    first = next(iter(plans))
    rows = []
    for way, plan in plans.items():
        cells = [way, str(plan.ranks)]
        for find in kinds.values():
            (peak, rate), (first_peak, first_rate) = find(way), find(first)
            cells += [format_bytes(round(peak)), f"{peak / first_peak - 1:+.1%}"]
            cells += [f"{rate:.4g}", f"{rate / first_rate - 1:+.1%}"]
        rows.append(cells)
    return ["", "ranks", *(text for head in heads for text in (head, ""))], rows


def thesis(request: PlanRequest) -> dict[str, PlanRequest]:
    """1F1B and PipeDream on so many stages, PipeFB with PipeDream's schedule on half of them.

    A step of PipeDream is one micro-batch, of the same size as for 1F1B.
    """
    assert request.stages is not None
    assert request.micro_batches is not None
    size = request.batch_size // request.micro_batches
    pipedream = replace(request, schedule="pipedream", batch_size=size, micro_batches=1)
    apart = replace(pipedream, stages=request.stages // 2, backward_apart=True)
    return {
        "1F1B": replace(request, schedule="1f1b"),
        "PipeDream": pipedream,
        "PipeDream, offloaded": replace(pipedream, offload=True),
        "PipeFB": apart,
        "PipeFB, offloaded": replace(apart, offload=True),
    }


def thesis_jobs() -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """A small GPT trained on four ranks in the ways of the thesis."""
    return comparison(*train(gpt(layers=4), thesis(SMALL), 1))


def main(rounds: int) -> None:
    plans, runs = train(gpt(layers=4, width=768), WAYS, rounds)
    costs = [stage.cost for stage in plans["GPipe"].stages]
    saved = max(cost.saved_bytes for cost in costs)
    enough = max(cost.saved_bytes / cost.forward_s for cost in costs)
    print(f"{RANKS} ranks, {MICRO_BATCHES} micro-batches of {SAMPLES} samples, {rounds} rounds. A "
          f"forward saves {format_bytes(saved)}: offload is hidden from {enough / 1e9:.2f} GB/s "
          f"on.\n")  # fmt: skip
    print_table(*comparison(plans, runs))


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else ROUNDS)

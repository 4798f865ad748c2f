"""Staleness: accuracy on held-out digits with and without overlapping steps.

Trains configs/digits-cnn.yaml, by default in two stages, and evaluates at the end only. Schedules
whose steps overlap are also trained with backwards on other ranks (PipeFB). Shown are the mean over
the seeds, the lowest and the highest. One digit is 0.28 points.

    python tests/benchmarks/staleness.py [STEPS [STAGES]]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from in_turns import WORKER, run_worker

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runs import RunDirectory, read_metrics
from pipectl.spec import dump, load

JOB = Path(__file__).parents[2] / "configs" / "digits-cnn.yaml"


class Way(NamedTuple):
    """A schedule, its micro-batches, and whether backwards have ranks of their own."""

    schedule: str
    micro_batches: int
    apart: bool = False


WAYS = {
    "1f1b": Way("1f1b", 4),
    "pipedream": Way("pipedream", 1),
    "pipedream-2bw": Way("pipedream-2bw", 4),
    "pipedream, PipeFB": Way("pipedream", 1, apart=True),
    "pipedream-2bw, PipeFB": Way("pipedream-2bw", 4, apart=True),
}
RATES = {0.1: 1, 0.05: 1, 0.0125: 2}
"""Learning rates, and for how often the job's steps: its own, which is near what momentum bears
without any staleness, half of it, and one low enough for gradients that are four updates old."""
SEEDS = 3


def accuracy(way: Way, stages: int, more: list[str], profile: Profile, base: Path) -> float:
    """Of the last weights on the held-out digits."""
    schedule, parts, apart = way
    ranks = 2 * stages if apart else stages
    pipeline = f"pipeline={{schedule: {schedule}, micro_batches: {parts}}}"
    placed = f"resources.tasks_per_node={ranks}"
    spec = load(JOB, [*more, pipeline, placed, "data.drop_last=true"])
    run = RunDirectory.create(base, schedule, float(apart))
    run.job.write_text(dump(spec))
    profile.save(run.profile)
    request = PlanRequest(
        spec.name,
        spec.training.batch_size,
        schedule=schedule,
        micro_batches=parts,
        stages=stages,
        backward_apart=apart,
    )
    make_plan(profile, assumed_cluster("here", [ranks], ranks, None), request).save(run.plan)
    run_worker(WORKER, run, ranks)
    found = [line.evaluation for line in read_metrics(run) if line.evaluation is not None]
    return float(found[-1]["accuracy"])


def main(steps: int | None, stages: int) -> None:
    more = ["site_defaults=false", "evaluation.every=null"]
    steps = steps or load(JOB).training.steps
    with TemporaryDirectory() as directory:
        profile = profile_job(load(JOB, more), effort=Effort.FAST)
        print(f"{stages} stages, {SEEDS} seeds")
        print(f"{'rate':<6} {'schedule':<22} accuracy (lowest to highest)  against 1f1b")
        for rate, times in RATES.items():
            given = [
                *more,
                f"optimizer.kwargs.lr={rate}",
                f"training.steps={times * steps}",
                f"lr_scheduler.kwargs.T_max={times * steps}",
            ]
            found: dict[str, list[float]] = {name: [] for name in WAYS}
            for seed in range(SEEDS):
                base = Path(directory) / f"{rate}-{seed}"
                base.mkdir()
                seeded = [*given, f"training.seed={seed}"]
                for name, way in WAYS.items():
                    found[name].append(accuracy(way, stages, seeded, profile, base))
            show(rate, found)


def show(rate: float, found: dict[str, list[float]]) -> None:
    """A line a schedule: accuracies over the seeds, and the mean against the flushed one's."""
    for name, shares in found.items():
        mean = statistics.mean(shares)
        points = 100 * (mean - statistics.mean(found["1f1b"]))
        spread = f"({min(shares):.2%} to {max(shares):.2%})"
        print(f"{rate:<6} {name:<22} {mean:8.2%} {spread:<18} {points:+9.2f} points", flush=True)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:3]]
    main(numbers[0] if numbers else None, numbers[1] if len(numbers) > 1 else 2)

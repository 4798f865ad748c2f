"""Staleness: accuracy on held-out digits with and without overlapping steps.

Trains configs/digits-cnn.yaml, by default in two stages, and evaluates at the end only. Schedules
whose steps overlap are also trained with backwards on other ranks (PipeFB). Shown are the mean over
the seeds, the lowest and the highest. One digit is 0.28 points.

    python tests/benchmarks/staleness.py [STEPS [STAGES]]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.jobs import CONFIGS, print_table, trained

STEPS, STAGES, SEEDS = 150, 2, 3
WAYS = {
    "1f1b": ("1f1b", 4, "together"),
    "pipedream": ("pipedream", 1, "together"),
    "pipedream-2bw": ("pipedream-2bw", 4, "together"),
    "pipedream, PipeFB": ("pipedream", 1, "apart"),
    "pipedream-2bw, PipeFB": ("pipedream-2bw", 4, "apart"),
}
"""Schedules, their micro-batches, and where backwards run."""
RATES = {0.1: 1, 0.05: 1, 0.0125: 2}
"""Learning rates, and for how often the steps: the job's own, which is near what momentum bears
without any staleness, half of it, and one low enough for gradients that are four updates old."""


def accuracy(folder: Path, way: str, rate: float, steps: int, stages: int, seed: int) -> float:
    """Of the last weights on the held-out digits."""
    schedule, micro_batches, backward = WAYS[way]
    settings = {
        "pipeline.schedule": schedule,
        "pipeline.micro_batches": micro_batches,
        "pipeline.backward": backward,
        "pipeline.stages": stages,
        "resources.tasks_per_node": 2 * stages if backward == "apart" else stages,
        "optimizer.kwargs.lr": rate,
        "training.steps": steps,
        "lr_scheduler.kwargs.T_max": steps,
        "training.seed": seed,
        "evaluation.every": None,
        "data.drop_last": True,
    }
    found = trained(folder, CONFIGS / "digits-cnn.yaml", settings)
    return float(found["evaluation"]["accuracy"])


def rows(steps: int, stages: int) -> Iterator[tuple[object, ...]]:
    """By learning rate and schedule; jobs of one schedule share their profile."""
    with TemporaryDirectory() as place:
        for rate, times in RATES.items():
            flushed = 0.0
            for way in WAYS:
                folder = Path(place) / way
                folder.mkdir(exist_ok=True)
                shares = [
                    accuracy(folder, way, rate, times * steps, stages, seed)
                    for seed in range(SEEDS)
                ]
                mean = statistics.mean(shares)
                flushed = flushed or mean
                ends = f"({min(shares):.2%} to {max(shares):.2%})"
                points = f"{100 * (mean - flushed):+.2f} points"
                yield rate, way, f"{mean:.2%} {ends}", points


def main(steps: int = STEPS, stages: int = STAGES) -> None:
    print(f"{stages} stages, {SEEDS} seeds\n")
    columns = ("rate", "schedule", "accuracy (lowest to highest)", "against 1f1b")
    print_table(columns, rows(steps, stages))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))

"""Delay: a GPT trained with gradients that are one update old

Trains configs/gpt-stdlib.yaml, with 4 blocks of width 64 and without clipping, on 4 ranks, which
share the cores of this machine. The learning rates are the same for all schedules: 0.003 of AdamW,
0.02 of Muon. The loss is the mean of the last 50 steps; the perplexity is that of held-out text
after the last step. Steps per second are those between the 20th step and the last.

    python tests/benchmarks/delay.py [STEPS]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipectl.runs import RunDirectory, read_metrics
from tests.benchmarks.jobs import CONFIGS, print_table, trained

STEPS, LAST, FIRST = 2000, 50, 20
MUON = {
    "optimizer.factory": f"{CONFIGS}/models/muon.py:Muon",
    "optimizer.kwargs": {"lr": 0.02, "adam_lr": 0.003},
    "optimizer.groups": [
        {"match": "*embedding*", "muon": False},
        {"match": "head*", "muon": False},
    ],
}
DELAYED = {"pipeline.schedule": "pipedream-2bw"}
WAYS: dict[tuple[str, str], dict[str, Any]] = {
    ("1f1b", "AdamW"): {"pipeline.schedule": "1f1b"},
    ("pipedream-2bw", "AdamW"): DELAYED,
    ("pipedream-2bw, corrected", "AdamW"): {**DELAYED, "training.correct_delay": True},
    ("1f1b", "Muon"): {"pipeline.schedule": "1f1b", **MUON},
    ("pipedream-2bw", "Muon"): {**DELAYED, **MUON},
    ("pipedream-2bw, corrected", "Muon"): {**DELAYED, **MUON, "training.correct_delay": True},
}


def rows(steps: int) -> Iterator[tuple[object, ...]]:
    """By schedule and optimizer; all share one profile."""
    common = {
        "model.kwargs.layers": 4,
        "model.kwargs.width": 64,
        "training.steps": steps,
        "training.clip_grad_norm": None,
        "lr_scheduler.kwargs.T_max": steps,
        "evaluation.every": None,
        "checkpoint.every": None,
        "data.drop_last": True,
        "pipeline.stages": 4,
        "resources.tasks_per_node": 4,
    }
    with TemporaryDirectory() as place:
        for (schedule, optimizer), settings in WAYS.items():
            found = trained(Path(place), CONFIGS / "gpt-stdlib.yaml", common | settings)
            lines = read_metrics(RunDirectory(Path(found["directory"])))
            by_step = {line.step: line for line in lines if line.is_step}
            loss = statistics.mean(by_step[steps - i].loss or 0.0 for i in range(LAST))
            took_s = (by_step[steps].time or 0.0) - (by_step[FIRST].time or 0.0)
            perplexity = found["evaluation"]["perplexity"]
            speed = f"{(steps - FIRST) / took_s:.1f}"
            yield schedule, optimizer, f"{loss:.3f}", f"{perplexity:.2f}", speed


def main(steps: int = STEPS) -> None:
    print(f"{steps} steps of 32 samples in 8 micro-batches\n")
    print_table(("schedule", "optimizer", "loss", "perplexity", "steps/s"), rows(steps))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

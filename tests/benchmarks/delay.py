"""Delayed updates: the loss of a GPT with `pipedream-2bw`, and what makes it smaller

Trains configs/gpt-stdlib.yaml on four ranks of one node, with and without gradients that are one
update old: with AdamW, with Muon, and with updates that are corrected (`training.correct_delay`).
Shown are the mean loss of the last 50 steps, the perplexity of held-out text, and the steps per
second of the second half.

    python tests/benchmarks/delay.py [STEPS]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pipectl.runs import RunDirectory, read_metrics
from tests.benchmarks.jobs import CONFIGS, print_table, trained

STEPS, LAST = 2000, 50
ADAMW = {"factory": "torch.optim:AdamW", "kwargs": {"lr": 3e-3, "betas": [0.9, 0.95]}}
MUON = {
    "factory": f"{CONFIGS}/models/muon.py:Muon",
    "kwargs": {"lr": 0.02, "adam_lr": 3e-3},
    "groups": [{"match": "*embedding*", "muon": False}, {"match": "head*", "muon": False}],
}
WAYS = {
    ("AdamW", "1f1b"): (ADAMW, False),
    ("AdamW", "pipedream-2bw"): (ADAMW, False),
    ("AdamW", "pipedream-2bw, corrected"): (ADAMW, True),
    ("Muon", "1f1b"): (MUON, False),
    ("Muon", "pipedream-2bw"): (MUON, False),
    ("Muon", "pipedream-2bw, corrected"): (MUON, True),
}


def rows(steps: int) -> Iterator[tuple[object, ...]]:
    """By optimizer and schedule."""
    for (optimizer, way), (settings, corrects) in WAYS.items():
        with TemporaryDirectory() as folder:
            found = trained(
                Path(folder),
                CONFIGS / "gpt-stdlib.yaml",
                {
                    "optimizer": settings,
                    "training.correct_delay": corrects,
                    "training.steps": steps,
                    "lr_scheduler.kwargs.T_max": steps,
                    "pipeline.schedule": way.partition(",")[0],
                    "pipeline.stages": 4,
                    "resources.tasks_per_node": 4,
                    "data.drop_last": True,
                    "checkpoint.every": steps,
                    "evaluation.every": None,
                },
            )
            run = RunDirectory(found["directory"])
            lines = [line for line in read_metrics(run) if line.is_step]
        loss = statistics.mean(line.loss for line in lines[-LAST:])
        speed = 1 / statistics.median(line.step_time_s for line in lines[steps // 2 :])
        perplexity = found["evaluation"]["perplexity"]
        yield optimizer, way, f"{loss:.3f}", f"{perplexity:.2f}", f"{speed:.1f}"


def main(steps: int = STEPS) -> None:
    print(f"{steps} steps\n")
    columns = ("optimizer", "schedule", "loss", "held-out perplexity", "steps per second")
    print_table(columns, rows(steps))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

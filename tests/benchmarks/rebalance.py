"""Rebalancing: a rank that becomes slower while a job trains

Trains a model that sleeps on four ranks. From about step 50 on, one rank takes some times as long.
Shown are the median times of a step before, until work is moved, after it, and under a plan that is
made for these speeds; the step of the move; and whether weights and losses are those of an
undisturbed run, to the bit. Last, undisturbed runs, in which nothing should move.

    python tests/benchmarks/rebalance.py [UNDISTURBED]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml

from pipectl.runs import MetricsLine, RunDirectory, read_metrics
from pipectl.runtime import checkpoint
from tests.benchmarks import sleeper
from tests.benchmarks.jobs import pipectl, print_table

UNDISTURBED, SLOW_FROM, STEPS, FEW_STEPS = 20, 50, 300, 120
CASES = ((2, 2.0), (0, 2.0), (3, 1.5), (1, 3.0))
"""Ranks that become slower, and by which factor."""
JOB = sleeper.job(
    training={"steps": STEPS, "batch_size": 32},
    pipeline={"micro_batches": 8, "stages": 4, "schedule": "1f1b"},
    resources={"nodes": 1, "tasks_per_node": 4, "cpus_per_task": 1, "walltime": "00:30:00"},
    checkpoint={"every": 150},
)


def steps_of(run: RunDirectory) -> dict[int, MetricsLine]:
    """Lines of steps."""
    return {line.step: line for line in read_metrics(run) if line.is_step}


def moves_of(run: RunDirectory) -> list[int]:
    """Steps before which work was moved."""
    return [line.step for line in read_metrics(run) if line.rebalanced is not None]


def seconds(run: RunDirectory, first: int, end: int) -> float:
    """Median time of steps."""
    found = steps_of(run)
    return statistics.median(found[step].step_time_s for step in range(first, end))


def slow_down(factors: Path, rank: int, factor: float) -> None:
    """From its next operator on; the rank never sees half a file."""
    if not (factors / str(rank)).exists():
        (factors / "new").write_text(str(factor))
        (factors / "new").rename(factors / str(rank))


def train(folder: Path, factors: Path, rank: int, factor: float, *settings: str) -> RunDirectory:
    """A run in which a rank becomes slower at ``SLOW_FROM``."""
    before = {*folder.glob("runs/2*")}
    sets = [f"--set={setting}" for setting in settings]
    command = (sys.executable, "-m", "pipectl", "submit", "job.yaml", "--wait", "--scheduler=local")
    with subprocess.Popen([*command, *sets], cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(0.01)
            for run in map(RunDirectory, {*folder.glob("runs/2*")} - before):
                if len(steps_of(run)) >= SLOW_FROM:
                    slow_down(factors, rank, factor)
    (factors / str(rank)).unlink(missing_ok=True)
    if process.returncode:
        sys.exit(process.returncode)
    (path,) = {*folder.glob("runs/2*")} - before
    return RunDirectory(path)


def fresh_s(folder: Path, factors: Path, run: RunDirectory, rank: int, factor: float) -> float:
    """The time of a step under a plan that knows how slow the rank is."""
    cluster = json.loads(run.cluster.read_text())
    for node in cluster["nodes"]:
        node["shares"] = [1 / factor if each == rank else 1.0 for each in range(4)]
    measured = folder / "runs/sleeper.cluster.json"
    measured.write_text(json.dumps(cluster))
    slow_down(factors, rank, factor)
    off = ("training.rebalance=false", f"training.steps={FEW_STEPS}")
    found = train(folder, factors, rank, factor, *off)
    for path in (measured, *folder.glob("runs/sleeper.plan*.json")):
        path.unlink()
    return seconds(found, 20, FEW_STEPS)


def is_same(run: RunDirectory, other: RunDirectory) -> bool:
    """Weights and losses."""
    one, two = (checkpoint.load(max(each.checkpoints.glob("step-*"))) for each in (run, other))
    first, second = steps_of(run), steps_of(other)
    return (
        one.keys() == two.keys()
        and all(torch.equal(one[name], two[name]) for name in one)
        and all(first[step].loss == second[step].loss for step in range(1, STEPS + 1))
    )


def rows(folder: Path, factors: Path) -> Iterator[tuple[object, ...]]:
    """By case."""
    plain = train(folder, factors, 0, 1.0)
    for rank, factor in CASES:
        run = train(folder, factors, rank, factor)
        moves, found = moves_of(run), steps_of(run)
        usual = seconds(run, 20, SLOW_FROM)
        slow_at = next(step for step in found if found[step].step_time_s > 1.2 * usual)
        moved = moves[-1] if moves else STEPS
        after = seconds(run, min(moved + 3, STEPS - 9), STEPS)
        fresh = fresh_s(folder, factors, run, rank, factor)
        until = seconds(run, slow_at, moves[0] if moves else STEPS)
        times = (f"{each:.3f}" for each in (usual, until, after, fresh))
        where = ", ".join(map(str, moves)) or "none"
        same = "equal" if is_same(run, plain) else "different"
        yield (f"{rank}, {factor:g}x", slow_at, where, *times, f"{fresh / after:.0%}", same)


def main(undisturbed: int = UNDISTURBED) -> None:
    with TemporaryDirectory() as place:
        folder, factors = Path(place) / "job", Path(place) / "factors"
        folder.mkdir()
        factors.mkdir()
        os.environ["SLEEPER_FACTORS"] = str(factors)
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
        pipectl(folder, "profile", "job.yaml", "--scheduler", "local")
        columns = (
            "slow rank", "slow from step", "moves", "before (s)", "slow (s)", "after (s)",
            "plan for these speeds (s)", "of its speed", "weights and losses",
        )  # fmt: skip
        print_table(columns, rows(folder, factors))
        few = f"training.steps={FEW_STEPS}"
        quiet = [moves_of(train(folder, factors, 0, 1.0, few)) for _ in range(undisturbed)]
        print(
            f"\n{undisturbed} undisturbed runs of {FEW_STEPS} steps: {sum(map(len, quiet))} moves"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

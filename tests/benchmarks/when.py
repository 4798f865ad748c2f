"""Ends of jobs: those that `plan --when` expects, and those that come

Runs a job on the Slurm lab (`slurm/lab`) whose model sleeps, among jobs that sleep. A second
partition has two of the four nodes and allows two minutes, after which the job is put back into the
queue. In every trial, other jobs are submitted first; `submit --soonest` then takes a partition and
a number of nodes. Shown are the times from the question to the start and to the end, expected and
measured.

    python tests/benchmarks/when.py [TRIALS]
"""

from __future__ import annotations

import getpass
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from pipectl.runs import RunDirectory, read_metrics
from tests.benchmarks.jobs import pipectl, print_table
from tests.benchmarks.sleeper import job
from tests.slurm.conftest import running_lab

TRIALS = 10
NODES = ("--compare", "1,2,4")
JOB = job(
    training={"steps": 250, "batch_size": 32},
    pipeline={"micro_batches": 8, "schedule": "1f1b"},
    resources={"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "walltime": "00:10:00"},
    checkpoint={"every": 25, "lead_time": "20s", "max_requeues": 9},
    launch={"scheduler": "slurm"},
)


def slurm(*command: str) -> str:
    """What a command of Slurm prints."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def take_nodes(draw: random.Random) -> None:
    """Submit one to three jobs that sleep for as long as they ask for."""
    for _ in range(draw.randint(1, 3)):
        nodes, minutes = draw.randint(1, 4), draw.randint(1, 2)
        sleeps = f"sleep {60 * minutes - 1}"
        options = (f"-N{nodes}", f"-t{minutes}", "--exclusive", "-o", "/dev/null")
        slurm("sbatch", *options, "--wrap", sleeps)


def finished(folder: Path, run: str) -> float:
    """Wait for a run; when it ended."""
    while (found := pipectl(folder, "status", run))["state"] != "COMPLETED":
        if found["state"] not in ("QUEUED", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED"):
            sys.exit(f"{run}: {found['state']} {found['error']}")
        if found["state"] == "PREEMPTED" and not slurm("squeue", "-h", "-n", "sleeper"):
            sys.exit(f"{run}: it is not requeued any more")
        time.sleep(1)
    return time.time()


def rows(trials: int) -> Iterator[tuple[object, ...]]:
    """By trial."""
    lab = Path(tempfile.mkdtemp(prefix="pipectl-lab-"))
    with running_lab(lab), tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
        limits = ("PartitionName=short", "Nodes=node[3-4]", "MaxTime=2")
        slurm("scontrol", "create", *limits)
        pipectl(folder, "profile", "job.yaml", "--effort", "fast", "--scheduler", "local")
        submit = ("submit", "job.yaml")
        finished(folder, Path(pipectl(folder, *submit)["directory"]).name)  # shows its pauses
        draw = random.Random(0)
        for trial in range(1, trials + 1):
            take_nodes(draw)
            time.sleep(draw.uniform(0, 30))
            found = pipectl(folder, "plan", "job.yaml", "--when", *NODES)
            (row,) = (row for row in found["rows"] if row["soonest"])
            run = Path(pipectl(folder, *submit, "--soonest", *NODES)["directory"])
            asked = found["asked_at"]
            ended = finished(folder, run.name) - asked
            first = next(line for line in read_metrics(RunDirectory(run)) if line.is_step)
            expected = row["done_at"] - asked
            where = f"{row['queue']}, {row['nodes']}"
            starts = f"{row['starts_at'] - asked:.0f}", f"{first.time - asked:.0f}"
            ends = f"{expected:.1f}", f"{ended:.1f}", f"{ended / expected:.2f}x"
            yield (trial, where, row["requeues"], *starts, *ends)
            slurm("scancel", f"--user={getpass.getuser()}")


def main(trials: int = TRIALS) -> None:
    columns = (
        "trial", "partition, nodes", "requeues", "start (s)", "first step (s)", "end (s)",
        "measured (s)", "ratio",
    )  # fmt: skip
    print_table(columns, rows(trials))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

"""`pipectl status` for thousands of runs.

Runs of four ranks and 400 steps, all completed, of the local scheduler.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipectl.runs import Record, RunDirectory

RANKS, STEPS = 4, 400
LISTINGS = {
    "the newest 20": [],
    "all, for the first time": ["--limit", "100000"],
    "all": ["--limit", "100000"],
    "all, as JSON": ["--limit", "100000", "--json"],
}


def stage(rank: int) -> dict:
    """A stage of 30 operators."""
    cost = {
        "forward_s": 0.005, "backward_s": 0.008, "update_s": 0.001, "parameter_bytes": 1 << 20,
        "optimizer_bytes": 1 << 21, "saved_bytes": 1 << 22,
    }  # fmt: skip
    return {"nodes": [f"stage{rank}.node{n}" for n in range(30)], "ranks": [rank], "cost": cost}


def documents() -> dict[str, str]:
    """The files that all runs have alike, by name."""
    ranks = [
        {"rank": rank, "host": "n1", "node": "n1", "pid": 1, "stages": [rank], "busy_s": 0.2,
         "waiting": 0.1, "rss_bytes": 1 << 28, "peak_bytes": 1 << 28}
        for rank in range(RANKS)
    ]  # fmt: skip
    beat = {"attempt": 1, "state": "done", "step": STEPS, "steps": STEPS, "ranks": ranks}
    plan = {
        "version": 1, "name": "demo", "schedule": "1f1b", "warm_up": [4, 3, 2, 1],
        "batch_size": 32, "micro_batch_size": 8, "micro_batches": 4,
        "stages": [stage(rank) for rank in range(RANKS)], "transfers": [],
        "node_of_rank": [0] * RANKS,
        "prediction": {"step_time_s": 0.15, "bubble": 0.4, "utilisation": [0.6] * RANKS,
                       "peak_memory_bytes": [1 << 28] * RANKS},
    }  # fmt: skip
    line = {"attempt": 1, "steps": STEPS, "time": 1.8e9, "loss": 2.5, "step_time_s": 0.2,
            "samples_per_s": 160.0, "learning_rate": 3e-3, "gradient_norm": 1.5}  # fmt: skip
    metrics = "".join(json.dumps({**line, "step": n + 1}) + "\n" for n in range(STEPS))
    return {
        "heartbeat.json": json.dumps(beat),
        "plan.json": json.dumps(plan),
        "metrics.jsonl": metrics,
        "exit_code": "0\n",
    }


def make_runs(base: Path, count: int) -> None:
    """Runs that ended some time ago."""
    files, then = documents(), time.time() - 1e6
    for number in range(count):
        run = RunDirectory.create(base, "demo", then + number)
        record = Record("demo", "local", f"demo {number}", then, ranks=4, nodes=1, steps=STEPS)
        document = record.after(then, "submitted", job_id=f"{10**7 + number}.1@elsewhere")
        document.save(run.record)
        for name, text in files.items():
            (run.path / name).write_text(text)
            os.utime(run.path / name, (then, then))
        for path in (run.record, run.errors):
            os.utime(path, (then, then))


def seconds(directory: str, options: list[str]) -> float:
    """Wall time of one command."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pipectl", "status", *options]
    subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Print one line per listing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        make_runs(Path(directory) / "runs", count)
        print(f"{count} runs of {RANKS} ranks and {STEPS} steps")
        for name, options in LISTINGS.items():
            print(f"{seconds(directory, options):7.2f} s  {name}", flush=True)


if __name__ == "__main__":
    main()

"""Cost of recording steps.

Two ranks train a small GPT in turns with every step recorded, with none, and with none once more;
the ratio of the latter two is the error of the method. Also measured: the time to record one
action, and to write the file of one step, which a thread of rank 0 does.

    python tests/benchmarks/trace_overhead.py [ROUNDS] [STEPS]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runtime.tracing import WIDTH, Recording, timeline_of
from pipectl.schedule import Action, Kind

HERE = Path(__file__).resolve().parent
RANK = HERE / "ranks" / "trace_overhead.py"
CONFIGS = HERE.parents[1] / "configs" / "models"
RANKS, BATCH, MICRO_BATCHES = 2, 16, 8
ROUNDS, STEPS = 180, 2
ACTIONS, FILES, REPEATS = 20_000, 20, 15
PAUSE_S = 0.05


def job() -> dict[str, Any]:
    kwargs = {"layers": 4, "width": 128, "heads": 4, "dropout": 0.0, "vocabulary": 98}
    return {
        "version": 1,
        "name": "trace-overhead",
        "site_defaults": False,
        "model": {"factory": f"{CONFIGS}/gpt.py:build", "kwargs": kwargs},
        "loss": {"factory": f"{CONFIGS}/gpt.py:loss"},
        "data": {
            "factory": f"{CONFIGS}/text.py:training",
            "kwargs": {"length": 64, "megabytes": 0.5},
        },
        "training": {"steps": 1, "batch_size": BATCH},
        "pipeline": {"micro_batches": MICRO_BATCHES, "stages": RANKS},
        "resources": {"nodes": 1, "tasks_per_node": RANKS, "cpus_per_task": 1},
    }


def prepare(folder: Path, rounds: int, steps: int) -> None:
    """Job, profile, plan, and how often."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job()))
    command = [sys.executable, "-m", "pipectl", "profile", "job.yaml", "-o", "profile.json"]
    subprocess.run(
        [*command, "--scheduler", "local", "--effort", "fast"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    request = PlanRequest("trace", batch_size=BATCH, micro_batches=MICRO_BATCHES, stages=RANKS)
    cluster = assumed_cluster("here", [RANKS], RANKS, None)
    make_plan(Profile.load(folder / "profile.json"), cluster, request).save(folder / "plan.json")
    (folder / "case.json").write_text(json.dumps({"rounds": rounds, "steps": steps}))


def measure(folder: Path) -> dict[str, Any]:
    """Step times of rank 0, by round."""
    command = ["mpiexec", "-n", str(RANKS), sys.executable, "-m", "mpi4py", RANK, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*map(str, command)], env=environment, check=True, timeout=1800)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def show(found: dict[str, Any], record_s: float) -> None:
    none, again, every = (found[name] for name in ("none", "again", "every"))
    step_s, rows = statistics.median([*none, *again]), found["rows"]
    print(f"a step, nothing recorded:  {step_s * 1e3:.2f} ms (median)")
    print(f"a step, every one recorded: {statistics.median(every) * 1e3:.2f} ms")
    base = [(n + a) / 2 for n, a in zip(none, again, strict=True)]
    show_ratio("ratio", every, base)
    show_ratio("nothing recorded, against itself", again, none)
    share = rows * record_s / step_s
    print(f"actions a step and rank: {rows}, which take {share:.3%} of a step to record")


def show_ratio(name: str, ours: list[float], theirs: list[float]) -> None:
    """By round; the error is that of a median, from the spread of the middle half."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    error = 0.93 * (high - low) / len(ratios) ** 0.5
    print(
        f"{name}: {statistics.median(ratios):.4f} +- {error:.4f} (median of {len(ratios)} rounds; "
        f"half of them {low:.4f} to {high:.4f}, all {ratios[0]:.4f} to {ratios[-1]:.4f})"
    )


def record() -> float:
    """Seconds that recording one action takes; median of some repeats."""
    rows = np.zeros((ACTIONS, len(Action._fields)), dtype=np.int32)
    times = []
    for _ in range(REPEATS):
        recording = Recording()
        recording.expect(rows)
        start = time.perf_counter()
        for _ in range(ACTIONS):
            recording.add(1.0, 2.0)
        times.append((time.perf_counter() - start) / ACTIONS)
    return statistics.median(times)


def write(folder: Path, rows: int) -> float:
    """Seconds that a step's file takes, of so many actions a rank; median of some repeats."""
    table = np.zeros((rows + 1, WIDTH))
    table[1:, 2] = int(Kind.FORWARD)
    times = []
    for _ in range(FILES):
        time.sleep(PAUSE_S)  # what is written again at once is in the caches, and faster
        start = time.perf_counter()
        timeline_of(dict.fromkeys(range(RANKS), table), RANKS).save(folder / "step.json")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(rounds: int = ROUNDS, steps: int = STEPS) -> None:
    record_s = record()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), rounds, steps)
        found = measure(Path(folder))
        write_s = write(Path(folder), found["rows"])
    show(found, record_s)
    print(f"recording one action: {record_s * 1e6:.3f} us")
    print(f"writing a step's file: {write_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Predicted and measured step time, and the speed-up over one rank, of both example jobs.

Every repeat profiles, plans and trains again; the repeats of all cases take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
JOBS = {"gpt-stdlib": ("micro_batches=8", 30), "digits-cnn": ("micro_batches=4", 60)}
RANKS = (1, 2, 4)
REPEATS = 5


def train(job: str, ranks: int, folder: Path) -> dict[str, float]:
    micro_batches, steps = JOBS[job]
    settings = [
        f"training.steps={steps}",
        f"pipeline.{micro_batches}",
        f"pipeline.stages={ranks}",
        "resources.nodes=1",
        f"resources.tasks_per_node={ranks}",
    ]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "pipectl"]
    submit = [*command, "submit", str(CONFIGS / f"{job}.yaml"), "--scheduler", "local", "--wait"]
    subprocess.run([*submit, *sets], cwd=folder, check=True, capture_output=True)
    status = [*command, "status", "last", "--json"]
    done = subprocess.run(status, cwd=folder, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def main() -> None:
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for repeat in range(REPEATS):
        for job in JOBS:
            for ranks in RANKS:
                with tempfile.TemporaryDirectory() as folder:
                    status = train(job, ranks, Path(folder))
                found.setdefault((job, ranks), []).append(status)
                sys.stderr.write(f"repeat {repeat + 1} of {REPEATS}: {job} on {ranks}\n")
    print(f"{os.cpu_count()} cores; medians of {REPEATS} (lowest to highest)")
    print("job          ranks  predicted  measured             measured/predicted   speed-up")
    for (job, ranks), runs in found.items():
        measured = [run["step_time_s"] * 1e3 for run in runs]
        ratio = [run["measured_over_predicted"] for run in runs]
        predicted = statistics.median(run["predicted_step_time_s"] * 1e3 for run in runs)
        one = statistics.median(run["step_time_s"] * 1e3 for run in found[job, 1])
        middle = statistics.median(measured)
        print(
            f"{job:12} {ranks:5}  {predicted:6.1f} ms  "
            f"{middle:6.1f} ms ({min(measured):.1f} to {max(measured):.1f})  "
            f"{statistics.median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})  "
            f"{one / middle:.2f}x"
        )
    errors = [abs(run["measured_over_predicted"] - 1) for runs in found.values() for run in runs]
    near = sum(error <= 0.1 for error in errors) / len(errors)
    print(
        f"all {len(errors)} runs: median error {statistics.median(errors):.1%}, {near:.0%} within "
        f"10%, worst {max(errors):.1%}"
    )


if __name__ == "__main__":
    main()

"""What staleness costs: accuracy on held-out digits, flushed and not, over real ranks.

Started as ``python tests/benchmarks/staleness.py [STEPS [RANKS]]``; by default the job of
configs/digits-cnn.yaml as it is, on two ranks. Weights that are evaluated more often are stale less
often, so all schedules are evaluated at the end only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runs import RunDirectory, read_metrics
from pipectl.spec import dump, load

JOB = Path(__file__).parents[2] / "configs" / "digits-cnn.yaml"
SCHEDULES = {"1f1b": 4, "pipedream": 1, "pipedream-2bw": 4}
"""Micro-batches of each."""
RATES = (0.1, 0.05)
"""Learning rates: the job's own, which is near what momentum bears, and half of it."""


def accuracy(schedule: str, ranks: int, more: list[str], profile: Profile, base: Path) -> float:
    """Of the last weights on the held-out digits."""
    parts = SCHEDULES[schedule]
    pipeline = f"pipeline={{schedule: {schedule}, micro_batches: {parts}}}"
    spec = load(JOB, [*more, pipeline, "data.drop_last=true"])
    run = RunDirectory.create(base, schedule, 0.0)
    run.job.write_text(dump(spec))
    profile.save(run.profile)
    request = PlanRequest(
        spec.name, spec.training.batch_size, schedule=schedule, micro_batches=parts, stages=ranks
    )
    make_plan(profile, assumed_cluster("here", [ranks], ranks, None), request).save(run.plan)
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
    worker = ["-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run", str(run.path)]
    subprocess.run(
        [mpiexec, "-n", str(ranks), sys.executable, *worker],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
    )
    found = [line["evaluation"] for line in read_metrics(run) if "evaluation" in line]
    return float(found[-1]["accuracy"])


def main(steps: int | None, ranks: int) -> None:
    more = [
        "site_defaults=false",
        "evaluation.every=null",
        f"resources.tasks_per_node={ranks}",
        *([] if steps is None else [f"training.steps={steps}"]),
    ]
    with TemporaryDirectory() as directory:
        profile = profile_job(load(JOB, more), effort=Effort.FAST)
        print(f"{'rate':<6} {'schedule':<14} accuracy   against 1f1b   ({ranks} ranks)")
        for rate in RATES:
            given = [*more, f"optimizer.kwargs.lr={rate}"]
            base = Path(directory) / str(rate)
            base.mkdir()
            found = {name: accuracy(name, ranks, given, profile, base) for name in SCHEDULES}
            for name, share in found.items():
                points = 100 * (share - found["1f1b"])
                print(f"{rate:<6} {name:<14} {share:8.2%} {points:+9.2f} points", flush=True)


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:3]]
    main(numbers[0] if numbers else None, numbers[1] if len(numbers) > 1 else 2)

"""A rank of ``trace_overhead.py``: two trainers in one process, one of which records every step."""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.failure import Doing
from pipectl.runtime.process import settle_process
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.transport import choose_progress
from pipectl.schedule import lower
from pipectl.spec import load

WARM_UP = 3


class Training:
    """Steps of a trainer, as ``Trainer.train`` makes them."""

    def __init__(self, folder: Path, name: str, progress: Any, trace: str, steps: int) -> None:
        spec = load(folder / "job.yaml", overrides=[f"training.steps={steps}", f"trace={trace}"])
        run = folder / name
        if MPI.COMM_WORLD.rank == 0:
            (run / "trace").mkdir(parents=True)
        MPI.COMM_WORLD.Barrier()
        plan = Plan.load(folder / "plan.json")
        setup = Setup(MPI.COMM_WORLD, CapturedJob(spec), plan, CpuDevice(), Doing(), progress)
        self.trainer = Trainer(setup, RunDirectory(run), 1)
        self.trainer._telemetry.state("measuring")
        self.trainer.learn_layouts()
        batches = iter(setup.batches)
        self._planned = [next(batches) for _ in range(steps)]
        self._loaded = self.trainer._load(self._planned)
        self._number = count(1)

    def run(self, steps: int) -> float:
        """Seconds a step, behind a meeting of all ranks."""
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(steps):
            number = next(self._number)
            self.trainer._step(number, len(self._planned[number - 1][1]), self._loaded)
        MPI.COMM_WORLD.Barrier()
        return (time.perf_counter() - start) / steps

    def finish(self) -> None:
        self.trainer._tracing.finish()
        self.trainer._telemetry.finish()


def main(folder: Path) -> None:
    settle_process(1)
    case = json.loads((folder / "case.json").read_text())
    total = WARM_UP + case["rounds"] * case["steps"]
    choice = choose_progress(MPI.COMM_WORLD.Dup(), "auto")
    with choice.progress(staged=False) as progress:
        trainings = {
            "none": Training(folder, "none", progress, "{steps: []}", total),
            "every": Training(folder, "every", progress, "{every: 1}", total),
        }
        found: dict[str, Any] = {name: [] for name in trainings}
        for training in trainings.values():
            training.run(WARM_UP)
        for number in range(case["rounds"]):
            order = list(trainings) if number % 2 else list(trainings)[::-1]
            for name in order:
                found[name].append(trainings[name].run(case["steps"]))
        for training in trainings.values():
            training.finish()
    if MPI.COMM_WORLD.rank == 0:
        found["rows"] = len(lower(Plan.load(folder / "plan.json"), 0).body)
        (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
